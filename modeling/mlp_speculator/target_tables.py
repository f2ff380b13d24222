"""The target's token tables, borrowed by a speculator that has none of its own.

Boundary: holds references; registers nothing. The tensors are no parameters of the speculator, so
they are neither saved with it, nor moved with it, nor counted twice.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .configuration_mlp_speculator import MLPSpeculatorConfig


class _Origin:
    """A tensor as it was when it was read: the object, its place in memory, and its writes."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.state = tensor, _state(tensor)

    def is_still(self, tensor: Tensor) -> bool:
        """Whether this is the same tensor, neither moved nor written to since."""
        return self.tensor is tensor and self.state == _state(tensor)


@dataclass(frozen=True)
class TargetTables:
    """Borrowed tables in the speculator's dtype.

    Attributes:
        embeddings: the target's input embedding [>=V, d].
        head: the rows of the target's ``lm_head`` the speculator can draft, [V, d] or, gathered,
            [Vd, d].
        origins: what they were made of, to tell whether a second bind has anything to do.
    """

    embeddings: Tensor
    head: Tensor
    origins: tuple[_Origin, ...]

    def check_usable(self, like: Tensor) -> None:
        """Raise a ``RuntimeError`` if the speculator changed device or dtype after the bind."""
        if self.embeddings.dtype != like.dtype or self.embeddings.device != like.device:
            raise RuntimeError(
                f"the target's weights were bound as {self.embeddings.dtype} on "
                f"{self.embeddings.device}, but the speculator is now {like.dtype} on "
                f"{like.device}; call bind_target(...) again with the target's weights there"
            )


def borrow(
    config: MLPSpeculatorConfig,
    input_embeddings_weight: Tensor,
    lm_head_weight: Tensor,
    draft_token_ids: Tensor | None,
    like: Tensor,
    current: TargetTables | None,
) -> TargetTables:
    """Take the target's tables, casting and gathering each at most once.

    Args:
        config: gives V and d.
        input_embeddings_weight: the target's input embedding [>=V, d].
        lm_head_weight: the target's output weight [>=V, d].
        draft_token_ids: target ids [Vd] int64 the heads cover, or ``None`` for all V.
        like: a weight of the speculator; gives dtype and device.
        current: what is bound now; returned as it is when it came from the same, unchanged tensors.

    Raises:
        ValueError: for a table that is quantized, of the wrong shape, without data, or on another
            device.
    """
    _check_table("input_embeddings_weight", input_embeddings_weight, config, like)
    _check_table("lm_head_weight", lm_head_weight, config, like)
    sources = [input_embeddings_weight, lm_head_weight]
    if draft_token_ids is not None:
        sources.append(draft_token_ids)
    if current is not None and current.embeddings.dtype == like.dtype:
        pairs = zip(current.origins, sources, strict=True)
        if all(origin.is_still(source) for origin, source in pairs):
            return current
    # Tables made inside inference_mode could never be trained with afterwards.
    with torch.inference_mode(False), torch.no_grad():
        head = lm_head_weight.detach()
        if draft_token_ids is None:
            head = head[: config.vocab_size]
        else:
            head = head.index_select(0, draft_token_ids)
        return TargetTables(
            embeddings=input_embeddings_weight.detach().to(like.dtype),
            head=head.to(like.dtype),
            origins=tuple(_Origin(source) for source in sources),
        )


def _check_table(name: str, table: Tensor, config: MLPSpeculatorConfig, like: Tensor) -> None:
    # A subclass that stands for floating point would be unpacked, whole, when it is cast.
    wraps = is_traceable_wrapper_subclass(table)
    if wraps or not table.is_floating_point() or table.element_size() == 1:
        stored = type(table).__name__ if wraps else table.dtype
        raise ValueError(
            f"{name} is quantized, {stored}; share_target_weights needs the target's token tables "
            "in floating point, so keep both out of the quantization"
        )
    if table.dim() != 2 or table.shape[1] != config.emb_dim or table.shape[0] < config.vocab_size:
        raise ValueError(
            f"{name} must be [at least vocab_size={config.vocab_size}, "
            f"emb_dim={config.emb_dim}], got {list(table.shape)}; this speculator belongs to "
            "another target"
        )
    if table.device != like.device:
        raise ValueError(
            f"{name} is on {table.device}, the speculator on {like.device}; move the speculator "
            f"to {table.device}"
        )


def _state(tensor: Tensor) -> tuple[object, ...]:
    version = 0 if tensor.is_inference() else tensor._version
    address = 0 if tensor.device.type == "meta" else tensor.data_ptr()
    return address, tensor.device, tensor.dtype, version
