"""What a training loop is made of: stages with their examples, and how a run ends.

Boundary: types only; `loop` runs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hf_specdec.training.evaluation import Acceptance
from hf_specdec.training.settings import StageSettings


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended.

    Attributes:
        best: acceptance of the saved weights on held-out documents.
        best_step: the step after which it was measured.
        steps: steps done, over all stages.
        stopped_early: ``patience`` ran out.
        out_of_time: ``until`` was reached.
        tokens_trained: positions run through the drafter, repeats included.
        best_tokens_trained: those before the best weights were measured.
    """

    best: Acceptance
    best_step: int
    steps: int
    stopped_early: bool
    out_of_time: bool = False
    tokens_trained: int = 0
    best_tokens_trained: int = 0


class Examples(Protocol):
    """The training data of one stage, with its loss."""

    @property
    def tokens_per_example(self) -> int:
        """Positions of an example."""

    @property
    def blocks(self) -> Tensor | None:
        """int64 ``[N]``, which examples are best run together; ``None`` if it doesn't matter."""

    def __len__(self) -> int:
        """Examples of one pass."""

    def losses(self, numbers: Tensor, generator: torch.Generator) -> Tensor:
        """Mean loss at each draft position, float32 ``[n]``, with its graph.

        Args:
            numbers: int64 ``[B]``, the examples to run.
            generator: on CPU, for whatever is drawn at random.
        """


class HeldOut(Protocol):
    """Where acceptance is measured."""

    @property
    def greedy_text(self) -> bool:
        """Whether all of it is text that the target generated greedily."""


@dataclass(frozen=True)
class Stage:
    """A stage with its data; ``first`` is the number of its first step in the run."""

    name: str
    settings: StageSettings
    examples: Examples
    first: int
    steps: int
