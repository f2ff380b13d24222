"""Trees of drafts from an MLP speculator: one stage and one head for all nodes of a depth.

The state of head i at a node reads the state that proposed this node's token, so the branches of a
tree share what they have in common, and nothing is run for nodes without children.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from hf_specdec.drafters.base import NodeLogits
from hf_specdec.modeling.mlp_speculator import MLPSpeculatorConfig, MLPSpeculatorPreTrainedModel
from hf_specdec.tree import TokenTree, TreeShape, merge_chains

# Groups whose maxima are compared first; see `largest`.
_GROUPS = 128


def largest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the ``count`` largest values, largest first: ``[..., V]`` to int64 ``[..., c]``.

    On CPU by way of the largest groups: two to six times as fast as ``topk`` over a vocabulary.
    """
    vocabulary = logits.shape[-1]
    width = vocabulary // _GROUPS
    if logits.device.type != "cpu" or vocabulary % _GROUPS or width < 2 * count or count > _GROUPS:
        return logits.topk(count, dim=-1).indices
    groups = logits.unflatten(-1, (_GROUPS, width))
    # A group outside the best ``count`` has no value among the best ``count``.
    best = groups.amax(dim=-1).topk(count, dim=-1).indices
    among = groups.gather(-2, best[..., None].expand(*best.shape, width)).flatten(-2)
    index = among.topk(count, dim=-1).indices
    return best.gather(-1, index // width) * width + index % width


@torch.no_grad()
def draft_shape(
    model: MLPSpeculatorPreTrainedModel,
    hidden_states: torch.Tensor,
    token_ids: torch.Tensor,
    shape: TreeShape,
    node_logits: NodeLogits,
) -> torch.Tensor:
    """Draft the nodes of a tree.

    Args:
        model: the speculator, bound to the target's tables if it shares them.
        hidden_states: the target's state ``[n, d]`` at the last right position.
        token_ids: int64 ``[n]``, the token chosen there.
        shape: at most as deep as there are heads.
        node_logits: see `NodeLogits`.

    Returns:
        int64 ``[n, N]`` target ids, in the order of the tree's nodes.
    """
    rows = token_ids.shape[0]
    device = token_ids.device
    state, tokens = model.initial_state(hidden_states)[:, None], token_ids[:, None]
    drafts = []
    for i, level in enumerate(shape.levels):
        if i:
            state = _take(state, level.parents, device)
            tokens = _take(tokens, level.inner, device)
        state = model.stage(i, state, _known(model, tokens))
        logits, ids = node_logits(i, model.head_logits(i, state), _column_ids(model))
        found = largest(logits, level.width).view(rows, -1)
        found = _take(found, level.children, device)
        tokens = found if ids is None else ids[found]
        drafts.append(tokens)
    return _take(torch.cat(drafts, dim=1), shape.order, device)


@torch.no_grad()
def draft_candidates(
    model: MLPSpeculatorPreTrainedModel,
    hidden_states: torch.Tensor,
    token_ids: torch.Tensor,
    depth: int,
    node_logits: NodeLogits,
) -> tuple[torch.Tensor, TokenTree]:
    """Draft what the checkpoint says: its ``n_candidates`` most probable chains, as one tree.

    As `MLPSpeculatorPreTrainedModel.propose_candidates` of the first ``depth`` heads: each extends
    every chain by its ``top_k_tokens_per_head`` best tokens, the best chains are kept at the end.

    Args:
        model, hidden_states, token_ids, node_logits: see `draft_shape`.
        depth: heads to run.

    Returns:
        int64 ``[n, N]`` target ids and their tree, with a structure for every row; see
        `merge_chains`.
    """
    rows = token_ids.shape[0]
    state, tokens = model.initial_state(hidden_states)[:, None], token_ids[:, None]
    score = torch.zeros(rows, 1, dtype=torch.float32, device=token_ids.device)
    chains = tokens.new_empty(rows, 1, 0)
    for i, k in enumerate(model.config.top_k_tokens_per_head[:depth]):
        state = model.stage(i, state, _known(model, tokens))
        logits, ids = node_logits(i, model.head_logits(i, state), _column_ids(model))
        index = largest(logits, min(k, logits.shape[-1]))
        k = index.shape[-1]
        # Sums of log-probabilities decide the order, and lower precision would invent ties.
        best = logits.float().log_softmax(dim=-1).gather(-1, index)
        score = (score[..., None] + best).flatten(1)
        tokens = (index if ids is None else ids[index]).flatten(1)
        chains = torch.cat([chains.repeat_interleave(k, dim=1), tokens[..., None]], dim=-1)
        state = state.repeat_interleave(k, dim=1)
    kept = score.topk(min(model.config.n_candidates, score.shape[1]), dim=1).indices
    return merge_chains(chains.gather(1, kept[..., None].expand(-1, -1, chains.shape[-1])))


def most_candidate_nodes(config: MLPSpeculatorConfig) -> int:
    """The most nodes that a tree of `draft_candidates` can have."""
    total, chains = 0, 1
    for k in config.top_k_tokens_per_head:
        chains *= k
        total += min(chains, config.n_candidates)
    return total


def _column_ids(model: MLPSpeculatorPreTrainedModel) -> torch.Tensor | None:
    return model.speculator.draft_token_ids


def _known(model: MLPSpeculatorPreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
    """Ids beyond a vocabulary that one side has padded are never real; they only need a row."""
    return token_ids.clamp(max=model.config.vocab_size - 1)


def _take(states: torch.Tensor, index: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The nodes ``index`` out of ``[n, nodes, ...]``; the same tensor if that is all of them."""
    if index == tuple(range(states.shape[1])):
        return states
    return states.index_select(1, _index(index, device))


@lru_cache(maxsize=1024)
def _index(index: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(index, device=device)
