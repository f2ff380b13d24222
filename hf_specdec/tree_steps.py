"""One step of the loop with a tree of drafts: draft, verify, accept, move the accepted keys up.

What comes out is what a step with a chain yields, the accepted path in place of the drafts, so that
the rest of the loop needs to know nothing of trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_specdec.drafters.base import Drafter
from hf_specdec.drafting import NodePicker
from hf_specdec.modeling.quantized import num_ids
from hf_specdec.outputs import OutputRequest
from hf_specdec.processors import LogitsPipeline
from hf_specdec.proposals import Proposals
from hf_specdec.ranks import Ranks
from hf_specdec.targets.target import RaggedTarget, TargetOutput
from hf_specdec.tree import TokenTree
from hf_specdec.tree_shape import MeasuredTree, TreePlan
from hf_specdec.tree_verification import (
    accepted_nodes,
    along,
    deepest_path,
    output_along,
    path_to,
    verdict_of,
)
from hf_specdec.verification import Verdict, choose_tokens


@dataclass(frozen=True)
class ActiveRows:
    """The rows of a step.

    Attributes:
        last_tokens: int64 ``[n]``, chosen but not run.
        positions: int64 ``[n]``, of the token that follows each of them.
        seeds: int64 ``[n]``, or ``None`` for greedy decoding.
        sequences: int64 ``[B, L]``, texts of the whole batch.
        host_rows, host_lengths: for each row its number in the batch and its tokens so far.
    """

    last_tokens: torch.Tensor
    positions: torch.Tensor
    seeds: torch.Tensor | None
    sequences: torch.Tensor
    host_rows: Sequence[int]
    host_lengths: Sequence[int]


@dataclass(frozen=True)
class TreeStep:
    """A step's result, as of a chain of D drafts.

    Attributes:
        run_tokens: int64 ``[n, D + 1]``: the last token of each row, then the path that was taken.
        output: of the target on that path.
        verdict: what was accepted and what follows.
        scores: ``[n, D + 1, V]``, the processed logits on that path, if the call collects them.
        num_nodes: drafts that were verified for each row.
    """

    run_tokens: torch.Tensor
    output: TargetOutput
    verdict: Verdict
    scores: torch.Tensor
    num_nodes: int


class TreeStepper:
    """Runs the steps of one call.

    Args:
        target: whose output this is.
        drafter: one that drafts trees.
        pipeline: the call's logits processors.
        plan: says which tree to draft.
        outputs: what the call returns besides the tokens.
        ranks: the processes that the call involves.
    """

    def __init__(
        self,
        target: RaggedTarget,
        drafter: Drafter,
        pipeline: LogitsPipeline,
        plan: TreePlan,
        outputs: OutputRequest,
        ranks: Ranks,
    ):
        self._target = target
        self._pipeline = pipeline
        self._plan = plan
        self._outputs = outputs
        self._vocabulary = num_ids(target.model.get_output_embeddings())
        self._proposals = Proposals(drafter, self._vocabulary)
        self._ranks = ranks

    def step(self, rows: ActiveRows, depth: int) -> TreeStep:
        """Draft, verify and accept.

        Args:
            rows: the active rows.
            depth: the most tokens of a draft, at least 1.
        """
        shape = self._plan.shape(depth)
        node_logits = NodePicker(self._pipeline, rows.seeds, rows.positions, self._vocabulary)
        drafts, tree = self._proposals.tree(rows.last_tokens, depth, shape, node_logits)
        tokens = torch.cat([rows.last_tokens[:, None], drafts], dim=1)
        lengths = self._target.cache.lengths
        output = self._target.verify(tokens, tree)
        logits = output.logits.to(tokens.device)
        if self._pipeline.reads_prefix:
            verdict, path, accepted, scores = self._walk(rows, tokens, tree, logits)
        else:
            scores = self._pipeline.block(logits)
            positions = rows.positions[:, None] + tree.depths
            chosen = self._ranks.of_first(choose_tokens(scores, rows.seeds, positions))
            accepted = accepted_nodes(tokens, chosen, tree)
            num_accepted, path = deepest_path(accepted, tree)
            verdict = verdict_of(chosen, num_accepted, path)
        self._target.cache.keep_path(path)
        if shape is not None and isinstance(self._plan, MeasuredTree):
            self._plan.record(shape, accepted, tree.parents)
        if self._outputs.scores:
            scores = along(scores, path)
        output = output_along(output, path, lengths, bool(self._outputs))
        return TreeStep(along(tokens, path), output, verdict, scores, tree.size - 1)

    def finish(self) -> None:
        """Keep what was learned about the drafter for the next call."""
        if isinstance(self._plan, MeasuredTree):
            self._plan.finish()

    def _walk(
        self, rows: ActiveRows, tokens: torch.Tensor, tree: TokenTree, logits: torch.Tensor
    ) -> tuple[Verdict, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Verify row by row, for processors that must see each token's own prefix.

        Returns:
            The verdict, the path ``[n, D + 1]``, which nodes are on it ``[n, Q]``, and the
            processed logits ``[n, Q, V]`` of those nodes if they are collected.
        """
        count, size = tokens.shape
        emitted = tokens.new_zeros(count, tree.depth + 1)
        accepted = torch.zeros(count, size, dtype=torch.bool)
        nodes = []
        host_tokens = tokens.tolist()
        host_parents = tree.parents.expand(count, -1).tolist()
        host_depths = tree.depths.expand(count, -1).tolist()
        # A copy: the raw logits may be asked for too.
        scores = logits.to(torch.float32, copy=True) if self._outputs.scores else logits
        for i, (row, length) in enumerate(zip(rows.host_rows, rows.host_lengths, strict=True)):
            children = {
                (host_parents[i][q], host_tokens[i][q]): q
                for q in range(size - 1, 0, -1)
                if host_depths[i][q]
            }
            seeds = rows.seeds[i : i + 1] if rows.seeds is not None else None

            def choose(node: int, scores: torch.Tensor, i: int = i, seeds=seeds) -> int:
                position = rows.positions[i : i + 1, None] + host_depths[i][node]
                return int(choose_tokens(scores[None, None], seeds, position))

            def follow(node: int, token: int, children=children) -> int | None:
                return children.get((node, token))

            prefix = rows.sequences[row, :length]
            new, path, processed = self._pipeline.along_path(row, prefix, logits[i], choose, follow)
            emitted[i, : len(new)] = tokens.new_tensor(new)
            accepted[i, path] = True
            nodes.append(path[-1])
            if self._outputs.scores:
                scores[i, path] = torch.stack(processed)
        node = self._ranks.of_first(tokens.new_tensor(nodes))
        emitted = self._ranks.of_first(emitted)
        accepted = self._ranks.of_first(accepted.to(tokens.device))
        num_accepted = tree.depths.expand(count, -1).gather(1, node[:, None])[:, 0]
        verdict = Verdict(emitted, num_accepted)
        return verdict, path_to(node, tree), accepted, scores
