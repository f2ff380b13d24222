"""How far a tree of drafts is right, and what follows (plain torch, any device).

One rule for greedy decoding and for sampling, that of `verification.verify_match`: the token that
the target chooses behind a node depends on the node's *position*, not on the node, so the choice
behind the root leads to the child with that token, if there is one, the choice there to the next,
and the first choice that no child has is emitted in its place. Every emitted token is the target's
own choice behind the tokens before it, as if nothing had been drafted.

The same holds for rejection sampling. A tree's drafts are not random given the noise, so the rule
for them is to sample from the target's distribution and to follow the child that was sampled
(Miao et al. 2024, arXiv 2305.09781, with one-hot draft distributions), which is what this does.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hf_specdec.targets.target import TargetOutput
from hf_specdec.tree import TokenTree
from hf_specdec.verification import Verdict


def accepted_nodes(tokens: torch.Tensor, chosen: torch.Tensor, tree: TokenTree) -> torch.Tensor:
    """Which nodes the target's choices lead to: bool ``[n, Q]``, the root among them.

    Args:
        tokens: int64 ``[n, Q]``, of the nodes.
        chosen: int64 ``[n, Q]``, the target's choice behind each node.
        tree: see `TokenTree`.
    """
    expected = chosen.gather(1, tree.parents.expand_as(chosen))
    wrong = tokens != expected
    wrong[:, 0] = False
    return ~(wrong[:, None] & tree.ancestors).any(dim=-1)


def deepest_path(accepted: torch.Tensor, tree: TokenTree) -> tuple[torch.Tensor, torch.Tensor]:
    """The way to the deepest accepted node.

    Args:
        accepted: see `accepted_nodes`.
        tree: see `TokenTree`.

    Returns:
        Its depth int64 ``[n]``, and the nodes on the way int64 ``[n, D + 1]``, the root first;
        behind that depth the depth itself stands in.
    """
    # Of equal depths the first: the same token twice among siblings is one path, found once.
    depth, node = torch.where(accepted, tree.depths, -1).max(dim=1)
    return depth, path_to(node, tree)


def path_to(node: torch.Tensor, tree: TokenTree) -> torch.Tensor:
    """The nodes on the way to a node of each row, int64 ``[n]``: see `deepest_path`."""
    paths = tree.paths.expand(node.shape[0], -1, -1)
    return paths[torch.arange(node.shape[0], device=node.device), node]


def verdict_of(chosen: torch.Tensor, num_accepted: torch.Tensor, path: torch.Tensor) -> Verdict:
    """The accepted drafts and the token behind them, as of a chain.

    Args:
        chosen: int64 ``[n, Q]``, the target's choice behind each node.
        num_accepted, path: see `deepest_path`.
    """
    return Verdict(chosen.gather(1, path), num_accepted)


def along(states: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """What belongs to the nodes of a path ``[n, D + 1]``, out of ``[n, Q, ...]``."""
    return states[torch.arange(path.shape[0], device=path.device)[:, None], path]


def output_along(
    output: TargetOutput, path: torch.Tensor, lengths: torch.Tensor, everything: bool
) -> TargetOutput:
    """What the forward over a tree said on one path, as a forward over a chain would have.

    Args:
        output: of all nodes.
        path: int64 ``[n, D + 1]``.
        lengths: int64 ``[n]``, the slot of each row's root.
        everything: all of it, not only what drafters read.
    """
    hidden_states = along(output.hidden_states, path.to(output.hidden_states.device))
    if not everything:
        return replace(output, hidden_states=hidden_states)
    layers, attentions = output.all_hidden_states, output.attentions
    return TargetOutput(
        along(output.logits, path.to(output.logits.device)),
        hidden_states,
        layers and tuple(along(layer, path.to(layer.device)) for layer in layers),
        attentions and tuple(_weights_along(layer, path, lengths) for layer in attentions),
    )


def _weights_along(
    weights: torch.Tensor, path: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Attention weights ``[n, H, Q, keys]`` of a path's nodes, its keys in consecutive slots."""
    heads, keys = weights.shape[1], weights.shape[-1]
    path, lengths = path.to(weights.device), lengths.to(weights.device)
    weights = along(weights.transpose(1, 2), path)
    source = (lengths[:, None] + path) % keys
    target = (lengths[:, None] + torch.arange(path.shape[1], device=path.device)) % keys
    shape = (-1, path.shape[1], heads, -1)
    moved = weights.gather(3, source[:, None, None].expand(shape))
    return weights.scatter(3, target[:, None, None].expand(shape), moved).transpose(1, 2)
