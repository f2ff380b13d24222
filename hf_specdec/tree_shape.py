"""Which tree of drafts a step verifies: a given one, or the best of N nodes by what was accepted.

How often the target's choice is the drafter's guess of rank r at depth d is counted for every d and
r, and a node's chance of being on the accepted path is the product of these rates on its way from
the root. The tree of the N nodes with the largest chances is the one from which most tokens are
expected. (As in Sequoia, Chen et al. 2024, arXiv 2402.12374, where rates depend on the rank alone.)
"""

from __future__ import annotations

import heapq
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch

from hf_specdec.tree import NodePath, TreeShape

# Children that a node can get; guesses beyond are hardly ever right.
MOST_CHILDREN = 8
# Rates before anything was measured, by rank, and how many trials they count for.
_PRIOR = (0.5, 0.13, 0.07, 0.045, 0.03, 0.02, 0.015, 0.01)
_PRIOR_TRIALS = 8.0
# Weight that trials keep with every newer one of the same depth and rank: the last 500 count.
_DECAY = 0.998
# Steps between two choices of a shape; the first ones come soon.
_FIRST_WAIT, _WAIT = 8, 32


class AcceptanceRates:
    """How often guesses were right, by depth and rank; kept from call to call.

    Attributes:
        lock: to be held around every use: calls in several threads may share a drafter.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        # [accepted, offered] by (depth, rank), both from 0.
        self._counts: dict[tuple[int, int], tuple[float, float]] = {}

    def counts(self) -> dict[tuple[int, int], tuple[float, float]]:
        """What was counted: accepted and offered guesses by depth and rank."""
        with self.lock:
            return dict(self._counts)

    def copy_counts(self, counts: dict[tuple[int, int], tuple[float, float]]) -> None:
        """Know what others know, and forget everything else."""
        with self.lock:
            self._counts = dict(counts)

    def record(self, depth: int, rank: int, accepted: float, offered: float) -> None:
        """Count guesses of one rank behind accepted nodes of one depth."""
        if offered == 0:
            return
        kept = _DECAY**offered
        before = self._counts.get((depth, rank), (0.0, 0.0))
        self._counts[depth, rank] = (before[0] * kept + accepted, before[1] * kept + offered)

    def rates(self, depth: int, width: int) -> list[float]:
        """Rates of the guesses behind a node of a depth, by rank, never rising with it."""
        found: list[float] = []
        for rank in range(width):
            accepted, offered = self._counts.get((depth, rank), (0.0, 0.0))
            prior = _PRIOR[min(rank, len(_PRIOR) - 1)] * _PRIOR_TRIALS
            rate = (accepted + prior) / (offered + _PRIOR_TRIALS)
            found.append(min(rate, found[-1]) if found else rate)
        return found


def best_shape(rates: AcceptanceRates, num_nodes: int, depth: int, width: int) -> TreeShape:
    """The tree from which most accepted drafts are expected.

    Args:
        rates: see `AcceptanceRates`.
        num_nodes: N, at least 1.
        depth: of the deepest node.
        width: most children of a node.
    """
    of_depth = [rates.rates(d, width) for d in range(depth)]
    paths: list[NodePath] = []
    # The best candidates: a node's first child, and its next sibling, come in when it is taken. A
    # node is never less likely than what follows it, so this is the best tree.
    heap: list[tuple[float, NodePath, float]] = [(-of_depth[0][0], (0,), 1.0)]
    while heap and len(paths) < num_nodes:
        chance, path, of_parent = heapq.heappop(heap)
        paths.append(path)
        d, rank = len(path), path[-1]
        if d < depth:
            heapq.heappush(heap, (chance * of_depth[d][0], (*path, 0), -chance))
        if rank + 1 < width:
            sibling = (*path[:-1], rank + 1)
            heapq.heappush(heap, (-of_parent * of_depth[d - 1][rank + 1], sibling, of_parent))
    return TreeShape.of(paths)


class TreePlan(ABC):
    """Says which tree a step is to draft.

    Attributes:
        num_nodes: most drafts of a step.
    """

    num_nodes: int

    @abstractmethod
    def shape(self, depth: int) -> TreeShape | None:
        """The tree for a step in which drafts may have ``depth`` tokens; `None`: the drafter's own.

        Args:
            depth: at least 1.
        """


@dataclass
class FixedTree(TreePlan):
    """A tree that was asked for, cut at the depth that a step may have.

    Attributes:
        given: that tree.
    """

    given: TreeShape

    @property
    def num_nodes(self) -> int:  # type: ignore[override]
        """Most drafts of a step."""
        return self.given.num_nodes

    def shape(self, depth: int) -> TreeShape:
        """See `TreePlan.shape`."""
        return self.given.up_to(depth)


@dataclass
class CheckpointTree(TreePlan):
    """The tree that the drafter's checkpoint describes; each row's has a structure of its own.

    Attributes:
        num_nodes: most drafts of a step.
    """

    num_nodes: int

    def shape(self, depth: int) -> None:
        """See `TreePlan.shape`."""


@dataclass
class MeasuredTree(TreePlan):
    """The best tree of a number of nodes, chosen again now and then.

    Attributes:
        num_nodes: N.
        width: most children of a node.
        rates: what is known, from earlier calls too.
    """

    num_nodes: int
    width: int = MOST_CHILDREN
    rates: AcceptanceRates = field(default_factory=AcceptanceRates)

    def __post_init__(self) -> None:
        self._shapes: dict[int, TreeShape] = {}
        # By shape: accepted and offered nodes, int64 [2, Q] on the device.
        self._counts: dict[TreeShape, torch.Tensor] = {}
        self._steps_left = _FIRST_WAIT

    def shape(self, depth: int) -> TreeShape:
        """See `TreePlan.shape`."""
        if depth not in self._shapes:
            with self.rates.lock:
                self._shapes[depth] = best_shape(self.rates, self.num_nodes, depth, self.width)
        return self._shapes[depth]

    def record(self, shape: TreeShape, accepted: torch.Tensor, parents: torch.Tensor) -> None:
        """Learn from a step; reads the device when it is time to choose anew.

        Args:
            shape: that was drafted.
            accepted: bool ``[n, Q]``, nodes that the target's choices lead to.
            parents: int64 ``[1, Q]``.
        """
        offered = accepted.gather(1, parents.expand_as(accepted))
        counts = torch.stack([accepted, offered]).sum(1)
        before = self._counts.get(shape)
        self._counts[shape] = counts if before is None else before + counts
        self._steps_left -= 1
        if self._steps_left <= 0:
            self._steps_left = _WAIT
            self.finish()

    def finish(self) -> None:
        """Keep what was learned, and choose anew."""
        with self.rates.lock:
            for shape, counts in self._counts.items():
                accepted, offered = counts[:, 1:].tolist()
                # All nodes of one depth and rank together.
                sums: dict[tuple[int, int], tuple[int, int]] = {}
                for path, yes, asked in zip(shape.paths, accepted, offered, strict=True):
                    place = len(path) - 1, path[-1]
                    found = sums.get(place, (0, 0))
                    sums[place] = (found[0] + yes, found[1] + asked)
                for (depth, rank), (yes, asked) in sums.items():
                    self.rates.record(depth, rank, yes, asked)
        self._counts = {}
        self._shapes = {}
