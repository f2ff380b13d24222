"""The structure of a tree of drafts: which node continues which, and where all of them stand.

Node 0 is the root, the last token of a row; every other node is a draft. A tree of N drafts is run
as 1 + N tokens behind a row's kept ones: node q is written at slot ``length + q``, has the position
of its *depth*, and sees the kept tokens, the nodes on its way from the root, and itself. (Tree
attention: Miao et al. 2024, arXiv 2305.09781; Cai et al. 2024, arXiv 2401.10774.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from hf_specdec.options.tree_words import NodePath


@dataclass(frozen=True, eq=False)
class TokenTree:
    """A tree as tensors: one structure for all rows (R = 1), or one for each (R = n).

    Nodes that only fill up a smaller tree of one row have depth 0, and the root alone before them.

    Attributes:
        depth: D, of the deepest node.
        parents: int64 ``[R, Q]``; the root's is itself.
        depths: int64 ``[R, Q]``, 0 for the root.
        ancestors: bool ``[R, Q, Q]``: whether the second node is on the way from the root to the
            first, which is on its own way.
        paths: int64 ``[R, Q, D + 1]``, the node at each depth on the way to a node; behind the
            node's own depth the depth itself stands in.
    """

    depth: int
    parents: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor
    paths: torch.Tensor

    @property
    def size(self) -> int:
        """Q = 1 + N, the root included."""
        return self.parents.shape[1]


@dataclass(frozen=True)
class TreeLevel:
    """What a drafter does at one depth; all indices count within that depth.

    Attributes:
        inner: nodes that have children, among the nodes of this depth.
        parents: for each of them its parent, among the depth before's ``inner``.
        width: the most children that one of them has.
        children: nodes of the next depth, each as index of its parent in ``inner`` times ``width``
            plus its rank.
    """

    inner: tuple[int, ...]
    parents: tuple[int, ...]
    width: int
    children: tuple[int, ...]


@dataclass(frozen=True)
class TreeShape:
    """A tree whose structure is the same in every row and step.

    Nodes are numbered in the order of their paths, so that the first child's first child and so on
    come first: where the drafter's best guesses are right, the accepted keys are in place already.

    Args:
        paths: of all drafts, in order.
    """

    paths: tuple[NodePath, ...]

    @classmethod
    def of(cls, paths: Iterable[Sequence[int]]) -> TreeShape:
        """The tree of these nodes, in any order; nodes that are named twice count once."""
        return cls(tuple(sorted({tuple(path) for path in paths})))

    @property
    def num_nodes(self) -> int:
        """N, drafts."""
        return len(self.paths)

    @cached_property
    def depth(self) -> int:
        """D, tokens of the longest draft."""
        return max(len(path) for path in self.paths)

    @cached_property
    def width(self) -> int:
        """The most children of a node."""
        return max(path[-1] for path in self.paths) + 1

    def up_to(self, depth: int) -> TreeShape:
        """The same tree without the nodes below a depth of at least 1."""
        return self if depth >= self.depth else _up_to(self, depth)

    @cached_property
    def levels(self) -> tuple[TreeLevel, ...]:
        """What to do at depth 0, 1, ... to draft the nodes of depth 1, 2, ..."""
        nodes: list[NodePath] = [()]
        before: list[NodePath] = []
        levels = []
        for depth in range(self.depth):
            following = [path for path in self.paths if len(path) == depth + 1]
            with_children = {path[:-1] for path in following}
            inner = [path for path in nodes if path in with_children]
            width = max(path[-1] for path in following) + 1
            levels.append(
                TreeLevel(
                    tuple(nodes.index(path) for path in inner),
                    tuple(before.index(path[:-1]) for path in inner) if depth else (0,),
                    width,
                    tuple(inner.index(path[:-1]) * width + path[-1] for path in following),
                )
            )
            nodes, before = following, inner
        return tuple(levels)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """For each draft its index among all drafts taken depth by depth."""
        by_depth = sorted(self.paths, key=lambda path: (len(path), path))
        return tuple(by_depth.index(path) for path in self.paths)

    def on(self, device: torch.device) -> TokenTree:
        """As tensors on a device; made once."""
        return _token_tree(self, device)


@lru_cache(maxsize=256)
def _up_to(shape: TreeShape, depth: int) -> TreeShape:
    return TreeShape(tuple(path for path in shape.paths if len(path) <= depth))


@lru_cache(maxsize=256)
def _token_tree(shape: TreeShape, device: torch.device) -> TokenTree:
    nodes: list[NodePath] = [(), *shape.paths]
    number = {path: q for q, path in enumerate(nodes)}
    parents = [number[path[:-1]] for path in nodes]
    ways = [[number[path[:k]] for k in range(len(path) + 1)] for path in nodes]
    ancestors = torch.zeros(1, len(nodes), len(nodes), dtype=torch.bool)
    for q, way in enumerate(ways):
        ancestors[0, q, way] = True
    padded = [way + list(range(len(way), shape.depth + 1)) for way in ways]
    return TokenTree(
        shape.depth,
        torch.tensor([parents], device=device),
        torch.tensor([[len(path) for path in nodes]], device=device),
        ancestors.to(device),
        torch.tensor([padded], device=device),
    )


def merge_chains(chains: torch.Tensor) -> tuple[torch.Tensor, TokenTree]:
    """The tree of several chains for each row: a beginning that chains share is there once.

    Args:
        chains: int64 ``[n, C, D]``, best chain first.

    Returns:
        The drafts int64 ``[n, Q - 1]``, the best chain's first, and the tree, with a structure for
        each row. Reads the device, as Q is the size of the largest row's tree.
    """
    rows, count, depth = chains.shape
    device = chains.device
    same = (chains[:, :, None] == chains[:, None]).cumprod(dim=-1).bool()
    # The first chain that begins with the same tokens: [n, C, D].
    first = same.byte().max(dim=2).indices
    is_new = first == torch.arange(count, device=device)[:, None]
    flat_new = is_new.flatten(1)
    number = flat_new.long().cumsum(1)
    size = 1 + int(number[:, -1].max())
    number = number.view(rows, count, depth)
    # The node at every place of every chain, [n, C, D + 1] with the root in front.
    ways = number.gather(1, first)
    ways = torch.nn.functional.pad(ways, (1, 0))
    index = torch.arange(depth + 1, device=device)
    # Chain and depth of each node, [n, Q]; what fills up keeps those of the root.
    row, chain, k = is_new.nonzero(as_tuple=True)
    node = number[row, chain, k]
    depths = chains.new_zeros(rows, size)
    depths[row, node] = k + 1
    paths = index.expand(rows, size, -1).clone()
    paths[row, node] = torch.where(index <= (k + 1)[:, None], ways[row, chain], index)
    parents = chains.new_zeros(rows, size)
    parents[row, node] = ways[row, chain, k]
    tokens = chains[:, 0, :1].expand(-1, size).clone()
    tokens[row, node] = chains[row, chain, k]
    ancestors = torch.eye(size, dtype=torch.bool, device=device).expand(rows, -1, -1).clone()
    on_way = torch.where(index <= depths[..., None], paths, 0)
    ancestors.scatter_(2, on_way, True)
    return tokens[:, 1:], TokenTree(depth, parents, depths, ancestors, paths)
