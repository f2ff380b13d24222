"""Drafters of trees whose quality is known."""

import functools
import random
from collections.abc import Callable
from typing import Any

import torch
from tiny_models import HIDDEN_SIZE, VOCAB_SIZE, ScriptedDrafter, _target

from hf_specdec import MLPSpeculatorConfig, MLPSpeculatorPreTrainedModel
from hf_specdec.tree import TokenTree, TreeShape, merge_chains


class ScriptedTreeDrafter(ScriptedDrafter):
    """Knows what each row will say, and hides the right token among others.

    Args:
        answers: the tokens each row will emit.
        rank: ``rank(row, index)`` says the how manieth child is the token ``answers[row][index]``;
            a rank that no child of a node has makes all of them wrong.
        num_draft_tokens: its limit K.
    """

    drafts_trees = True
    max_children = VOCAB_SIZE
    max_candidate_nodes = 64

    def __init__(
        self, answers: list[list[int]], rank: Callable[[int, int], int], num_draft_tokens: int = 4
    ):
        super().__init__(answers, num_draft_tokens=num_draft_tokens)
        self._rank = rank

    def propose_tree(
        self, token_ids: torch.Tensor, depth: int, shape: TreeShape | None, node_logits: Any
    ) -> tuple[torch.Tensor, TokenTree]:
        rows = []
        for token, row in zip(token_ids.tolist(), self._rows, strict=True):
            start = self._emitted[row]
            assert token == self._answers[row][start - 1]
            rows.append(self._tokens(row, start, shape or TreeShape.of(_paths(row, start, depth))))
        if shape is not None:
            return torch.tensor(rows), shape.on(token_ids.device)
        # Chains of a tree that differs from row to row and step to step.
        chains = []
        for i, row in enumerate(self._rows):
            paths = TreeShape.of(_paths(row, self._emitted[row], depth)).paths
            token_of = dict(zip(paths, rows[i], strict=True))
            leaves = [path for path in paths if len(path) == depth]
            of_row = [[token_of[path[: k + 1]] for k in range(depth)] for path in leaves]
            chains.append(of_row + [of_row[0]] * (12 - len(of_row)))
        return merge_chains(torch.tensor(chains))

    def _tokens(self, row: int, start: int, shape: TreeShape) -> list[int]:
        known = (self._answers[row] + [3] * shape.depth)[start:]
        tokens = []
        for path in shape.paths:
            index = start + len(path) - 1
            is_on_way = all(self._rank(row, start + k) == rank for k, rank in enumerate(path[:-1]))
            right = known[len(path) - 1]
            if is_on_way and self._rank(row, index) == path[-1]:
                tokens.append(right)
            else:
                # Wrong, and another one than its siblings.
                tokens.append(3 + (right - 3 + 1 + path[-1]) % (VOCAB_SIZE - 3))
        return tokens


def _paths(row: int, start: int, depth: int) -> list[tuple[int, ...]]:
    """Up to four chains and what they share."""
    leaves = {tuple((row + start + c * (k + 1)) % 2 for k in range(depth)) for c in range(4)}
    paths = {leaf[:k] for leaf in leaves for k in range(1, depth + 1)}
    # Elder siblings, too, or ranks would have gaps: as deep as the others.
    for path in sorted(paths):
        if path[-1] == 1:
            paths |= {(*path[:-1], *([0] * (k + 1))) for k in range(depth - len(path) + 1)}
    return sorted(paths)


def mixed_rank(row: int, index: int) -> int:
    """The right token is the first or second child mostly, sometimes the third, or none."""
    chance = random.Random(1000 * row + index).random()
    return 0 if chance < 0.4 else 1 if chance < 0.75 else 2 if chance < 0.9 else 99


@functools.cache
def known_prompts() -> dict[str, torch.Tensor]:
    """Eight prompts without padding, whose answers `trained_speculator` has seen."""
    ids = torch.randint(3, VOCAB_SIZE, (8, 8), generator=torch.Generator().manual_seed(21))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@functools.cache
def trained_speculator(steps: int = 30) -> MLPSpeculatorPreTrainedModel:
    """A speculator that was trained on some answers of the tiny Llama: good, and not perfect."""
    target: Any = _target("llama")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        config = MLPSpeculatorConfig(
            vocab_size=VOCAB_SIZE,
            emb_dim=HIDDEN_SIZE,
            inner_dim=48,
            n_predict=3,
            top_k_tokens_per_head=[3, 2, 2],
            n_candidates=4,
            tie_weights=False,
        )
        model = MLPSpeculatorPreTrainedModel(config)
        ids = target.generate(**known_prompts(), max_new_tokens=40, do_sample=False)
        with torch.no_grad():
            states = target.model(ids).last_hidden_state
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        width = ids.shape[1] - 4
        for _ in range(steps):
            output = model(states[:, :width], ids[:, 1:], labels=ids[:, 1:], return_logits=False)
            output.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.eval()
