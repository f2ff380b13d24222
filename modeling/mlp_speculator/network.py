"""The layers of the MLP speculator, and one step through them.

Boundary: single stages on tensors of any leading shape [..]. Loops over heads and argument checks
are the model's (`modeling_mlp_speculator`, which states the maths).

Attribute names are the keys of the published checkpoints: ``emb``, ``proj``, ``head`` and ``ln``,
one entry a head. With ``tie_weights`` the entries of a list hold the same parameters.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configuration_mlp_speculator import MLPSpeculatorConfig
from .target_tables import TargetTables

_EPS = 1e-6


def rms_normalize(x: Tensor) -> Tensor:
    """Divide [.., D] by the root of its mean square, in its dtype as the checkpoints expect."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + _EPS)


class SpeculatorNorm(nn.Module):
    """RMS normalisation with a learned scale and shift.

    Neither ``nn.LayerNorm``, which subtracts the mean, nor ``nn.RMSNorm``, which has no shift.
    """

    def __init__(self, size: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, device=device))
        self.bias = nn.Parameter(torch.zeros(size, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [.., D]."""
        return self.weight * rms_normalize(x) + self.bias


class MLPSpeculatorNetwork(nn.Module):
    """Weights and single stages of the speculator.

    Args:
        config: see [`MLPSpeculatorConfig`].
    """

    draft_token_ids: Tensor | None

    def __init__(self, config: MLPSpeculatorConfig) -> None:
        super().__init__()
        n, d, inner = config.n_predict, config.emb_dim, config.inner_size
        self.config = config
        self.emb_scale = config.emb_weight / config.state_weight
        # No parameters and not in the state dict: see bind_target.
        self.target_tables: TargetTables | None = None

        if config.share_target_weights:
            self.emb_proj = self._stack([_linear(d, inner, self._follows(i)) for i in range(n)])
            self.head_proj = self._stack([_linear(inner, d, self._follows(i)) for i in range(n)])
        else:
            self.emb = self._stack(
                [_table(config.vocab_size, inner, self._follows(i)) for i in range(n)]
            )
            self.head = self._stack(
                [_linear(inner, config.head_size, self._follows(i)) for i in range(n)]
            )
        # Projection 0 reads the target's state and is never shared with the others.
        later = [_linear(inner, inner, self._follows(i)) for i in range(n - 1)]
        self.proj = nn.ModuleList([_linear(d, inner), *self._stack(later)])
        self.ln = self._stack(
            [SpeculatorNorm(inner, device="meta" if self._follows(i) else None) for i in range(n)]
        )
        ids = torch.arange(config.draft_vocab_size) if config.draft_vocab_size else None
        self.register_buffer("draft_token_ids", ids)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the borrowed tables out of pickles and copies, which must be bound anew."""
        return {**self.__dict__, "target_tables": None}

    def _follows(self, position: int) -> bool:
        """Whether the entry at this position only refers to the first entry's parameters."""
        return self.config.tie_weights and position > 0

    def _stack(self, modules: list) -> nn.ModuleList:
        if self.config.tie_weights:
            for follower in modules[1:]:
                for name, parameter in modules[0].named_parameters():
                    setattr(follower, name, parameter)
        return nn.ModuleList(modules)

    @property
    def reference(self) -> Tensor:
        """A weight that is never quantised: its dtype and device are the network's."""
        return cast(Tensor, self.ln[0].weight)

    def initial_state(self, hidden_states: Tensor) -> Tensor:
        """State for the first stage, in this network's dtype, from the target's [.., d]."""
        state = hidden_states.to(self.reference.dtype)
        return rms_normalize(state) / 2**0.5 if self.config.scale_input else state

    def stage(self, index: int, state: Tensor, token_ids: Tensor) -> Tensor:
        """State [.., D] of head ``index`` from the state before, [.., d or D], and tokens [..]."""
        embedded = self._embed(index, token_ids)
        state = self.proj[index](state)
        if torch.compiler.is_compiling():
            # torch 2.13's inductor makes one addmm of a matmul and an add, and loses alpha there.
            state = state + self.emb_scale * embedded
        else:
            state = torch.add(state, embedded, alpha=self.emb_scale)
        return F.gelu(self.ln[index](state))

    def head_logits(self, index: int, state: Tensor) -> Tensor:
        """Logits [.., V or Vd] of head ``index`` for its state [.., D]."""
        if not self.config.share_target_weights:
            return self.head[index](state)
        return F.linear(self.head_proj[index](state), self._tables().head)

    def draft_ids(self, index: Tensor) -> Tensor:
        """Translate positions in the logits to target ids, both int64 of any shape."""
        return index if self.draft_token_ids is None else self.draft_token_ids[index]

    def draft_labels(self, labels: Tensor, ignore_index: int) -> Tensor:
        """Translate target ids to positions in the logits; not covered is ``ignore_index``."""
        if self.draft_token_ids is None:
            return labels
        position = labels.new_full((self.config.vocab_size,), ignore_index)
        position[self.draft_token_ids] = torch.arange(
            len(self.draft_token_ids), device=labels.device
        )
        return torch.where(labels == ignore_index, ignore_index, position[labels.clamp(min=0)])

    def _embed(self, index: int, token_ids: Tensor) -> Tensor:
        if not self.config.share_target_weights:
            return self.emb[index](token_ids)
        return self.emb_proj[index](F.embedding(token_ids, self._tables().embeddings))

    def _tables(self) -> TargetTables:
        if self.target_tables is None:
            raise RuntimeError(
                "this speculator has share_target_weights=True and no target's weights yet; call "
                "bind_target(target.get_input_embeddings().weight, "
                "target.get_output_embeddings().weight) first"
            )
        self.target_tables.check_usable(like=self.reference)
        return self.target_tables


def _linear(inputs: int, outputs: int, follower: bool = False) -> nn.Linear:
    """A linear layer without bias; a follower has no storage, as its weight is replaced at once."""
    return nn.Linear(inputs, outputs, bias=False, device="meta" if follower else None)


def _table(rows: int, columns: int, follower: bool = False) -> nn.Embedding:
    return nn.Embedding(rows, columns, device="meta" if follower else None)
