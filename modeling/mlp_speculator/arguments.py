"""Checks of what callers pass to the MLP speculator: shapes and counts.

Boundary: while drafting only shapes are read, as a check of token values would make the host wait
for the device.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .configuration_mlp_speculator import MLPSpeculatorConfig


def checked_heads(config: MLPSpeculatorConfig, name: str, heads: int | None) -> int:
    """Number of heads to run, all of them if ``None``; ``ValueError`` outside 1 .. n."""
    if heads is None:
        return config.n_predict
    if isinstance(heads, bool) or not isinstance(heads, int) or not 1 <= heads <= config.n_predict:
        raise ValueError(
            f"{name}={heads!r}: this speculator has n_predict={config.n_predict} heads, "
            f"so it must be 1 to {config.n_predict}, or None for all"
        )
    return heads


def check_teacher_forced(
    config: MLPSpeculatorConfig,
    hidden_states: Tensor,
    input_ids: Tensor,
    labels: Tensor | None,
    heads: int,
) -> None:
    """States [B, N, d], input_ids [B, >= N+heads-1], labels [B, >= N+heads]; or ``ValueError``."""
    _check_states(config, hidden_states, "[B, N, {}]", dims=3)
    batch, length = hidden_states.shape[:2]
    _check_columns(
        "input_ids",
        input_ids,
        batch,
        length + heads - 1,
        f"N + heads - 1 with N={length}, heads={heads}",
    )
    if labels is not None:
        _check_columns(
            "labels", labels, batch, length + heads, f"N + heads with N={length}, heads={heads}"
        )


def check_last_position(
    config: MLPSpeculatorConfig, hidden_states: Tensor, input_ids: Tensor
) -> None:
    """States [B, d] and input_ids [B]; or ``ValueError``."""
    _check_states(config, hidden_states, "[B, {}]", dims=2)
    _check_ids("input_ids", input_ids)
    if input_ids.shape != hidden_states.shape[:1]:
        raise ValueError(
            f"input_ids must be [B={hidden_states.shape[0]}], one per row, got "
            f"{list(input_ids.shape)}"
        )


def check_tree(config: MLPSpeculatorConfig, top_k: Sequence[int], n_candidates: int) -> None:
    """A tree the heads can grow and that has ``n_candidates`` leaves; or ``ValueError``."""
    if not 1 <= len(top_k) <= config.n_predict:
        raise ValueError(
            f"top_k must have one entry per head to run, 1 to n_predict={config.n_predict}, got "
            f"{list(top_k)}"
        )
    if any(not 1 <= k <= config.head_size for k in top_k):
        raise ValueError(
            f"every entry of top_k must be 1 to {config.head_size}, the tokens a head has, got "
            f"{top_k}"
        )
    if not 1 <= n_candidates <= math.prod(top_k):
        raise ValueError(
            f"n_candidates={n_candidates}: a tree of top_k={list(top_k)} has {math.prod(top_k)} "
            "leaves, so it must be 1 to that; enlarge top_k or ask for fewer candidates"
        )


def check_draft_token_ids(config: MLPSpeculatorConfig, token_ids: Tensor) -> None:
    """Distinct ids [Vd] of the target's vocabulary; or ``ValueError``."""
    name = f"token_ids must be draft_vocab_size={config.draft_vocab_size} int64 ids"
    if token_ids.dtype != torch.int64 or token_ids.shape != (config.draft_vocab_size,):
        raise ValueError(f"{name}, got {token_ids.dtype} {list(token_ids.shape)}")
    distinct = token_ids.unique()
    if len(distinct) != len(token_ids):
        raise ValueError(f"{name}, all distinct, got {len(distinct)} distinct ones")
    if distinct[0] < 0 or distinct[-1] >= config.vocab_size:
        raise ValueError(
            f"{name} of 0 to {config.vocab_size - 1}, got {int(distinct[0])} to {int(distinct[-1])}"
        )


def _check_states(
    config: MLPSpeculatorConfig, hidden_states: Tensor, shape: str, dims: int
) -> None:
    if hidden_states.dim() != dims or hidden_states.shape[-1] != config.emb_dim:
        raise ValueError(
            f"hidden_states must be {shape.format(config.emb_dim)}, the target's state after "
            f"its final norm with emb_dim={config.emb_dim} columns, got {list(hidden_states.shape)}"
        )


def _check_columns(name: str, ids: Tensor, batch: int, columns: int, reason: str) -> None:
    _check_ids(name, ids)
    if ids.dim() != 2 or ids.shape[0] != batch or ids.shape[1] < columns:
        raise ValueError(
            f"{name} must be [B={batch}, at least {columns}] ({reason}), got {list(ids.shape)}"
        )


def _check_ids(name: str, ids: Tensor) -> None:
    if ids.is_floating_point() or ids.is_complex():
        raise ValueError(f"{name} must hold integer token ids, got {ids.dtype}")
