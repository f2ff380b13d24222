"""The chain of an MLP speculator's stages, with Triton kernels where they can run.

`MLPSpeculatorPreTrainedModel.propose` is the definition; networks know nothing of kernels. Here the
projections stay the network's own, what follows each of them is one kernel, and where nobody asks
for logits the head is only asked for its largest.
"""

from __future__ import annotations

from importlib import import_module
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from hf_specdec.drafters.base import PickToken
from hf_specdec.kernels import runtime
from hf_specdec.modeling.largest import index_of_largest
from hf_specdec.modeling.mlp_speculator import MLPSpeculatorPreTrainedModel
from hf_specdec.modeling.mlp_speculator.network import MLPSpeculatorNetwork, SpeculatorNorm


@torch.no_grad()
def draft_chain(
    model: MLPSpeculatorPreTrainedModel,
    hidden_states: torch.Tensor,
    token_ids: torch.Tensor,
    num_draft_tokens: int,
    pick: PickToken | None,
) -> torch.Tensor:
    """Draft K tokens for every row, each head reading the token chosen from the head before.

    Args:
        model: the speculator, bound to its target if it shares tables.
        hidden_states: ``[n, d]``, in the speculator's dtype.
        token_ids: int64 ``[n]``, the last token of each row.
        num_draft_tokens: K.
        pick: see `Drafter.propose`.

    Returns:
        int64 ``[n, K]`` target ids, fewer columns if ``pick`` was done.
    """
    network = model.speculator
    # Asked first, as on CPU the answer costs a microsecond. Autocast changes dtypes on the way.
    if not runtime.usable(hidden_states, token_ids, network.reference) or _autocasts(hidden_states):
        return model.propose(hidden_states, token_ids, num_draft_tokens, pick)
    state, drafts = network.initial_state(hidden_states), []
    for k in range(num_draft_tokens):
        state = _stage(network, k, state, token_ids)
        if pick is None:
            index = _largest(network, k, state)
        else:
            index = pick(k, network.head_logits(k, state), network.draft_token_ids)
        token_ids = network.draft_ids(index)
        drafts.append(token_ids)
        if pick is not None and pick.done:
            break
    return torch.stack(drafts, dim=1)


def _stage(
    network: MLPSpeculatorNetwork, k: int, state: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """`MLPSpeculatorNetwork.stage`, by a kernel if it fits."""
    norm = cast(SpeculatorNorm, network.ln[k])
    tables = network.target_tables
    if tables is not None:
        table, rows = tables.embeddings, None
    elif not network.config.share_target_weights and _is_plain(network.emb[k], nn.Embedding):
        table, rows = cast(torch.Tensor, network.emb[k].weight), token_ids.contiguous()
    else:
        return network.stage(k, state, token_ids)
    if not _readable(state, table, norm.weight, norm.bias) or not _trusted("mlp_stage", state):
        return network.stage(k, state, token_ids)
    from hf_specdec.kernels import mlp_stage

    if not mlp_stage.fits(network.config.inner_size):
        return network.stage(k, state, token_ids)
    if rows is None:
        table = network.emb_proj[k](F.embedding(token_ids, table))
    projected = network.proj[k](state)
    return mlp_stage.finish_stage(projected, table, rows, network.emb_scale, norm.weight, norm.bias)


def _largest(network: MLPSpeculatorNetwork, k: int, state: torch.Tensor) -> torch.Tensor:
    """Index of the largest logit of head k, int64 ``[n]``, by a kernel if it fits."""
    tables = network.target_tables
    if tables is not None:
        head = tables.head
    elif not network.config.share_target_weights and _is_plain(network.head[k], nn.Linear):
        head = cast(torch.Tensor, network.head[k].weight)
    else:
        return index_of_largest(network.head_logits(k, state))
    if not _readable(state, head) or not _trusted("head_argmax", state):
        return index_of_largest(network.head_logits(k, state))
    from hf_specdec.kernels import head_argmax

    if len(state) > head_argmax.MOST_ROWS:
        return index_of_largest(network.head_logits(k, state))
    if tables is not None:
        state = network.head_proj[k](state)
    return head_argmax.head_argmax(state, head)


def _trusted(name: str, like: torch.Tensor) -> bool:
    """Whether the kernels of a module agree with their twins; see `runtime.trusted`."""

    def trial() -> bool:
        # Here, so that a Triton that can't be imported costs a warning and no more.
        return import_module(f"hf_specdec.kernels.{name}").agrees(like)

    return runtime.trusted(name, like, trial)


def _is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module does what its class does with its weight: not quantised, nothing hooked."""
    return type(module) is kind and not module._forward_hooks and not module._forward_pre_hooks


def _readable(*tensors: torch.Tensor) -> bool:
    """Whether kernels can read them: in one place (not offloaded), one dtype, contiguous rows."""
    first = tensors[0]
    return runtime.usable(*tensors) and all(
        t.dtype == first.dtype and t.stride(-1) == 1 for t in tensors
    )


def _autocasts(tensor: torch.Tensor) -> bool:
    return torch.is_autocast_enabled(tensor.device.type)
