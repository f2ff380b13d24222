"""All drafts of a text at once: an MTP layer run over windows, again on its own output.

When it drafts, the layer runs one entry after the other (`hf_specdec.drafters.mtp`). For training,
the k-th draft is made behind all entries in one pass. What pass k (from 0) does at entry i:

    state       the target's at i for k = 0, else the output of pass k - 1 at i
    token       i + 1 + k, of the text
    position    i + k
    attends to  entries 0 .. i of pass 0; entry i of the passes 1 .. k

which is what drafting does while its drafts are right; once one is wrong, the others don't count.
So the outputs give the losses, and acceptance on a greedy text as well.

Boundary: tensors in, the layer's outputs out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hf_specdec.drafters.mtp import MTPNetwork


class _PassCache:
    """Keys and values of all passes so far, one behind the other, with their gradients."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add a pass ``[B, heads, N, dim]``; returns all, ``[B, heads, N * passes, dim]``."""
        self._keys.append(keys)
        self._values.append(values)
        return torch.cat(self._keys, dim=2), torch.cat(self._values, dim=2)


def run_passes(
    network: MTPNetwork,
    hidden_states: Tensor,
    input_ids: Tensor,
    position_ids: Tensor,
    document: Tensor,
) -> Iterator[Tensor]:
    """Run an MTP layer over whole windows, once for each draft position.

    Args:
        network: the layer with its embedding.
        hidden_states: the target's ``[B, N, d]``.
        input_ids: int64 ``[B, N, n]``, the token that each pass reads.
        position_ids: int64 ``[B, N]``, of the first pass.
        document: int64 ``[B, N]``; entries of different documents don't see each other.

    Yields:
        Outputs ``[B, N, d]``, n times: what ``lm_head`` reads for the k-th draft.
    """
    length = hidden_states.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool, device=document.device).tril()
    first = (document[:, :, None] == document[:, None, :]) & earlier
    own = torch.eye(length, dtype=torch.bool, device=document.device).expand_as(first)
    # What an attention layer asks of a Cache, and no more.
    cache: Any = _PassCache()
    state, visible = hidden_states, first
    for k in range(input_ids.shape[2]):
        embeds = network.embed(input_ids[:, :, k], position_ids + k)
        mask = torch.zeros(visible.shape, dtype=embeds.dtype, device=visible.device)
        mask = mask.masked_fill(~visible, torch.finfo(embeds.dtype).min)[:, None]
        masks = dict.fromkeys(network.layer_types, mask)
        state = network(state, embeds, position_ids + k, masks, cache)
        yield state
        visible = torch.cat([visible, own], dim=2)
