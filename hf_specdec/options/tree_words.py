"""How a tree of drafts is asked for: vLLM's ``speculative_token_tree``, or a number of nodes."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any, Final

CHECKPOINT: Final = "checkpoint"
"""In place of a tree: the one that the drafter's checkpoint describes."""
MOST_NODES: Final = 256
"""Nodes of the largest tree; a step costs a target's forward over all of them."""
NodePath = tuple[int, ...]
"""A node as vLLM writes it: which child to take, by rank, at every depth from the root."""


def read_tree(value: Any) -> tuple[NodePath, ...]:
    """A tree as vLLM writes it: ``"[(0,), (1,), (0, 0)]"``, as text or as a list.

    Returns:
        The nodes, each once and behind its parent.

    Raises:
        ValueError: not such a list; a node whose parent or elder sibling isn't there; too many.
    """
    shown = f"speculative_token_tree={value!r}"
    example = "such as '[(0,), (1,), (0, 0)]', or 'checkpoint'"
    paths = value
    if isinstance(value, str):
        try:
            paths = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise ValueError(f"{shown} must be a list of nodes, {example}") from None
    if not isinstance(paths, (list, tuple)) or not paths or not all(map(_is_path, paths)):
        raise ValueError(
            f"{shown} must be a list of nodes, {example}: each node is a tuple of integers of at "
            "least 0, the rank of the child to take at every depth"
        )
    nodes = tuple(sorted({tuple(path) for path in paths}))
    known = {(), *nodes}
    for path in nodes:
        missing = [path[:-1]] if path[:-1] not in known else []
        missing += [(*path[:-1], rank) for rank in range(path[-1])]
        for needed in missing:
            if needed not in known:
                raise ValueError(f"{shown} has the node {path} without {needed}; add that node")
    if len(nodes) > MOST_NODES:
        raise ValueError(f"{shown} has {len(nodes)} nodes; at most {MOST_NODES} are possible")
    return nodes


def _is_path(path: Any) -> bool:
    return (
        isinstance(path, (list, tuple))
        and len(path) > 0
        and all(isinstance(r, int) and not isinstance(r, bool) and r >= 0 for r in path)
    )


def check_num_tree_nodes(value: Any) -> int:
    """Raise ValueError unless ``value`` is a number of nodes, 0 for a chain."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_NODES:
        raise ValueError(
            f"num_tree_nodes={value!r} must be an integer from 0 to {MOST_NODES}: the drafts "
            "that a step verifies for each row (0 drafts chains)"
        )
    return value


@dataclass(frozen=True)
class TreeWish:
    """What is asked for.

    Attributes:
        num_nodes: the best tree of so many; 0 where the tree is given.
        paths: the nodes of a given tree; empty for the checkpoint's.
    """

    num_nodes: int = 0
    paths: tuple[NodePath, ...] = ()

    def __str__(self) -> str:
        """As the argument that asked."""
        if self.num_nodes:
            return f"num_tree_nodes={self.num_nodes}"
        value = str(list(self.paths)) if self.paths else CHECKPOINT
        return f"speculative_token_tree={value!r}"


def tree_wish(speculative_token_tree: Any, num_tree_nodes: Any) -> TreeWish | None:
    """What the two fields ask for together; ``None`` for chains.

    Raises:
        ValueError: one that doesn't work, or both.
    """
    num_nodes = 0 if num_tree_nodes is None else check_num_tree_nodes(num_tree_nodes)
    if speculative_token_tree is None:
        return TreeWish(num_nodes) if num_nodes else None
    wish = TreeWish()
    if speculative_token_tree != CHECKPOINT:
        wish = TreeWish(paths=read_tree(speculative_token_tree))
    if num_nodes:
        raise ValueError(
            f"speculative_token_tree={speculative_token_tree!r} and num_tree_nodes={num_nodes} "
            "both say which tree to draft; give one of them"
        )
    return None if num_tree_nodes == 0 else wish
