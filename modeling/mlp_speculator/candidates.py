"""A tree of drafts and its most probable branches.

Boundary: grows the tree with a network's stages; which candidate the target accepts is not decided
    here.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .network import MLPSpeculatorNetwork


def grow_candidates(
    network: MLPSpeculatorNetwork,
    hidden_states: Tensor,
    input_ids: Tensor,
    top_k: Sequence[int],
    n_candidates: int,
) -> Tensor:
    """Extend every live chain by its most probable tokens, head after head; keep the best chains.

    Args:
        network: the weights.
        hidden_states: the target's state [B, d].
        input_ids: the token the target chose last, int64 [B].
        top_k: branches per head.
        n_candidates: chains to keep, at most the product of ``top_k``.

    Returns:
        Target ids, int64 [B, n_candidates, len(top_k)], by descending joint probability.
    """
    batch = input_ids.shape[0]
    state, tokens = network.initial_state(hidden_states).unsqueeze(1), input_ids.unsqueeze(1)
    score = torch.zeros(batch, 1, dtype=torch.float32, device=state.device)
    chains = tokens.new_empty(batch, 1, 0)
    for i, k in enumerate(top_k):
        state = network.stage(i, state, tokens)
        # Sums of log-probabilities decide the order, and lower precision would invent ties.
        best, index = network.head_logits(i, state).float().log_softmax(-1).topk(k, dim=-1)
        score = (score.unsqueeze(-1) + best).flatten(1)
        tokens = network.draft_ids(index).flatten(1)
        chains = torch.cat([chains.repeat_interleave(k, dim=1), tokens.unsqueeze(-1)], dim=-1)
        if i + 1 < len(top_k):
            state = state.repeat_interleave(k, dim=1)
    order = score.topk(n_candidates, dim=1).indices
    return chains.gather(1, order.unsqueeze(-1).expand(-1, -1, len(top_k)))
