"""Configuration of the MLP speculator.

Boundary: reads and checks what a checkpoint's ``config.json`` says; builds no tensor.

The format is the one of IBM's published accelerators (``ibm-ai-platform/llama3-8b-accelerator`` and
others) with two extensions that are off, and absent from the written file, unless asked for.
Variants found in the wild are read too: ``architectures`` given as a string, the key
``top_k_tokesns_per_head`` (a misspelling that ArcticTraining writes), a missing top-k list, and
keys this class does not know, which are kept.
"""

import math
from typing import Any

from transformers import PreTrainedConfig

from hf_specdec.modeling.checkpoint_headers import shown
from hf_specdec.modeling.config_fields import check_other_fields

# Keys left out of a written config while they hold this value, so that a config in IBM's format
# stays in it.
_ABSENT_WHEN: dict[str, Any] = {
    "share_target_weights": False,
    "draft_vocab_size": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MISSPELT_TOP_K = "top_k_tokesns_per_head"
# Far beyond every model there is, and small enough that sizes can be reckoned with.
_LARGEST = {
    "vocab_size": 2**24,
    "draft_vocab_size": 2**24,
    "emb_dim": 2**17,
    "inner_dim": 2**17,
    "n_predict": 64,
    "n_candidates": 2**12,
}
# Chains that all entries of top_k_tokens_per_head together make.
_MOST_CHAINS = 2**16


class MLPSpeculatorConfig(PreTrainedConfig):
    """Configuration of [`MLPSpeculatorPreTrainedModel`].

    There is no attention in this model, so the config has no ``num_attention_heads`` and asking for
    it is an ``AttributeError``.

    Args:
        vocab_size: size V of the target's vocabulary.
        emb_dim: hidden size d of the target. Also readable as ``hidden_size``.
        inner_dim: width D of the speculator's state; 0 means ``emb_dim``.
        n_predict: number n of heads, which is the most tokens one draft can have.
        top_k_tokens_per_head: branches kept per head by ``propose_candidates``, one entry per head.
            ``None`` takes IBM's usual list for ``n_predict`` heads, for example ``[4, 3, 2, 2]``
            for four.
        n_candidates: candidates kept by ``propose_candidates``.
        tie_weights: all heads share one set of weights (the first projection excepted). Needs
            ``n_predict`` > 1.
        scale_input: normalise the target's state before the first head.
        share_target_weights: no token tables of its own. The target's input embedding and
            ``lm_head`` weights are used through small trained projections (not in IBM's format).
        draft_vocab_size: the heads cover only this many ids, named by the saved buffer
            ``speculator.draft_token_ids``; 0 covers all (not in IBM's format).
        base_model_name_or_path: the target this speculator was trained for, if known.
        bos_token_id: kept for transformers' pipelines, which read it from every model's config.
        eos_token_id: see ``bos_token_id``.
        pad_token_id: see ``bos_token_id``.

    Raises:
        ValueError: for a value outside its range, lists of the wrong length, contradicting options,
            or a config of the LSTM speculator, which has the same model type but different maths.
    """

    model_type = "mlp_speculator"
    attribute_map = {"hidden_size": "emb_dim"}

    def __init__(
        self,
        vocab_size: int = 32000,
        emb_dim: int = 4096,
        inner_dim: int = 0,
        n_predict: int = 3,
        top_k_tokens_per_head: list[int] | None = None,
        n_candidates: int = 5,
        tie_weights: bool = False,
        scale_input: bool = False,
        share_target_weights: bool = False,
        draft_vocab_size: int = 0,
        base_model_name_or_path: str | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        misspelt_top_k = kwargs.pop(_MISSPELT_TOP_K, None)
        if top_k_tokens_per_head is None:
            top_k_tokens_per_head = misspelt_top_k
        if isinstance(architectures := kwargs.get("architectures"), str):
            kwargs["architectures"] = [architectures]
        check_other_fields(type(self), kwargs)
        _refuse_lstm(kwargs.get("architectures"), inner_dim)
        if "hidden_size" in kwargs:
            emb_dim = kwargs.pop("hidden_size")

        self.vocab_size = vocab_size
        self.emb_dim = emb_dim
        self.inner_dim = inner_dim
        self.n_predict = n_predict
        self.n_candidates = n_candidates
        self.tie_weights = tie_weights
        self.scale_input = scale_input
        self.share_target_weights = share_target_weights
        self.draft_vocab_size = draft_vocab_size
        if base_model_name_or_path is not None:
            self.base_model_name_or_path = base_model_name_or_path
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        self._check_sizes()
        if top_k_tokens_per_head is None:
            top_k_tokens_per_head = _default_top_k(n_predict)
        self.top_k_tokens_per_head = _checked_top_k(top_k_tokens_per_head, n_predict)
        try:
            super().__init__(**kwargs)
        except ValueError:
            raise
        except Exception as error:  # transformers checks few of its fields
            raise ValueError(
                f"one of the fields {shown(sorted(kwargs))} has a value that transformers can't "
                f"take: {error}"
            ) from error

    @property
    def inner_size(self) -> int:
        """Width D of the speculator's state: ``inner_dim``, or ``emb_dim`` where that is 0."""
        return self.inner_dim or self.emb_dim

    @property
    def head_size(self) -> int:
        """Number of logits per head: ``draft_vocab_size``, or ``vocab_size`` where that is 0."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def state_weight(self) -> float:
        """Weight ``0.5 ** (0.5 / n)`` of the state: n heads leave half of its squared magnitude."""
        return 0.5 ** (0.5 / self.n_predict)

    @property
    def emb_weight(self) -> float:
        """Weight ``sqrt((1 - state_weight**2) * D / 2)`` of a token embedding."""
        return math.sqrt((1 - self.state_weight**2) * self.inner_size / 2)

    def to_dict(self) -> dict[str, Any]:
        """Serialise; the extensions and the special token ids appear only where they are set."""
        return {
            key: value
            for key, value in super().to_dict().items()
            if key not in _ABSENT_WHEN or value != _ABSENT_WHEN[key]
        }

    def _check_sizes(self) -> None:
        for name, largest in _LARGEST.items():
            smallest = 0 if name in ("inner_dim", "draft_vocab_size") else 1
            _check_int(name, getattr(self, name), smallest, largest)
        for name in ("tie_weights", "scale_input", "share_target_weights"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {shown(value)}")
        if self.tie_weights and self.n_predict < 2:
            raise ValueError(
                f"tie_weights=True shares weights between heads and needs n_predict of at least 2, "
                f"got n_predict={self.n_predict}; set tie_weights=False"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size} is larger than "
                f"vocab_size={self.vocab_size}; give at most that, or 0 for the whole vocabulary"
            )


def _check_int(name: str, value: Any, smallest: int, largest: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise ValueError(f"{name} must be an integer of at least {smallest}, got {shown(value)}")
    if largest is not None and value > largest:
        raise ValueError(
            f"{name} must be an integer from {smallest} to {largest}, got {shown(value)}"
        )


def _default_top_k(n_predict: int) -> list[int]:
    """IBM's published lists: ``[5, 4, 3]`` up to three heads, ``[4, 3, 2, 2, ...]`` beyond.

    Ones follow where the chains would be too many.
    """
    beyond = [4, 3] + [2] * min(n_predict - 2, 12) + [1] * (n_predict - 14)
    return [5, 4, 3][:n_predict] if n_predict <= 3 else beyond


def _checked_top_k(top_k: Any, n_predict: int) -> list[int]:
    if not isinstance(top_k, (list, tuple)):
        raise ValueError(
            f"top_k_tokens_per_head must be a list of {n_predict} integers, got {shown(top_k)}"
        )
    if len(top_k) != n_predict:
        raise ValueError(
            f"top_k_tokens_per_head must have one entry per head: n_predict={n_predict}, "
            f"got {len(top_k)} entries {shown(list(top_k))}"
        )
    for head, entry in enumerate(top_k):
        _check_int(f"top_k_tokens_per_head[{head}]", entry, smallest=1)
    if math.prod(top_k) > _MOST_CHAINS:
        raise ValueError(
            f"top_k_tokens_per_head={shown(list(top_k))} makes more than {_MOST_CHAINS} chains, "
            "the product of its entries; give smaller ones"
        )
    return list(top_k)


def _refuse_lstm(architectures: list[str] | None, inner_dim: Any) -> None:
    lstm = [name for name in architectures or () if "LSTM" in name]
    if lstm or isinstance(inner_dim, (list, tuple)):
        found = f"architectures={lstm}" if lstm else f"inner_dim={inner_dim!r}"
        raise ValueError(
            "this is a config of the LSTM speculator (ArcticLSTMSpeculatorPreTrainedModel; "
            f"{found}). It carries the model type mlp_speculator but computes something else and "
            "is not supported; use a checkpoint of MLPSpeculatorPreTrainedModel, whose inner_dim "
            "is one integer"
        )
