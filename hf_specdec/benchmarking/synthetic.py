"""A drafter of known quality: it separates what the loop costs from how well somebody drafts.

It is told what each row will say and proposes that, except for tokens that a coin, tossed once for
every token, makes wrong. The coins are fixed by the seed, so a draft token that is looked at (all
before it were accepted) is accepted with the given probability, independently of all others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from hf_specdec.drafters import Drafter, PickToken, VerifiedStep
from hf_specdec.modeling.placement import head_device
from hf_specdec.targets.prompt import Prompt

# Rounding can make a target say something else behind a near-tie when drafts are accepted; what it
# says then becomes the answer. A few near-ties per text settle in as many rounds.
ROUNDS = 10


class SyntheticDrafter(Drafter):
    """Proposes each row's known continuation with a given per-token acceptance.

    For greedy decoding: it has no logits for a sampler to choose from.

    Args:
        answers: the tokens each row will emit, one sequence a row.
        max_new_tokens: of the longest answer there can be.
        vocab_size: V of the target.
        acceptance: probability in [0, 1] that a draft token is right.
        max_draft_tokens: the limit K.
        seed: of the coins.
        seconds_per_token: time to spend, on the host, on each token of a draft.

    Raises:
        ValueError: a probability outside [0, 1], a negative cost, or a longer answer than allowed.
    """

    def __init__(
        self,
        answers: Sequence[Sequence[int]],
        max_new_tokens: int,
        vocab_size: int,
        acceptance: float,
        max_draft_tokens: int,
        seed: int = 0,
        seconds_per_token: float = 0.0,
    ):
        if not 0.0 <= acceptance <= 1.0:
            raise ValueError(f"acceptance={acceptance} must be a probability from 0 to 1")
        if seconds_per_token < 0:
            raise ValueError(f"seconds_per_token={seconds_per_token} must not be negative")
        self._limit = max_draft_tokens
        self._vocab_size = vocab_size
        self._seconds_per_token = seconds_per_token
        generator = torch.Generator().manual_seed(seed)
        coins = torch.rand((len(answers), max_new_tokens + max_draft_tokens), generator=generator)
        self._right = coins < acceptance
        self._emitted = torch.zeros(0, dtype=torch.int64)
        self.answers = answers

    @property
    def answers(self) -> list[list[int]]:
        """The tokens each row will emit; may be replaced between calls."""
        return self._answers

    @answers.setter
    def answers(self, answers: Sequence[Sequence[int]]) -> None:
        rows, width = self._right.shape
        longest = max(len(answer) for answer in answers)
        if len(answers) != rows or longest > width - self._limit:
            raise ValueError(
                f"{len(answers)} answers of up to {longest} tokens: there must be {rows} of at "
                f"most {width - self._limit}"
            )
        self._answers = [list(answer) for answer in answers]
        tokens = torch.zeros(rows, width, dtype=torch.int64)
        for row, answer in enumerate(self._answers):
            tokens[row, : len(answer)] = torch.tensor(answer, dtype=torch.int64)
        wrong = (tokens + 1) % self._vocab_size
        self._all_drafts = torch.where(self._right, tokens, wrong)

    @property
    def max_draft_tokens(self) -> int:
        """The limit it was made with."""
        return self._limit

    def check(self, target: PreTrainedModel) -> None:
        """Any target will do."""

    def start(
        self,
        target: PreTrainedModel,
        prompt: Prompt | None = None,
        num_draft_tokens: int | None = None,
    ) -> None:
        """Begin at the first token of every row."""
        self._first_proposal = True
        self._drafts = self._all_drafts.to(head_device(target))
        self._emitted = self._drafts.new_zeros(len(self._drafts))

    def observe(self, step: VerifiedStep) -> None:
        """Count what was emitted: the accepted tokens and the one behind them."""
        self._emitted = self._emitted + step.num_accepted.to(self._emitted.device) + 1

    def propose(
        self, token_ids: torch.Tensor, num_draft_tokens: int, pick: PickToken | None = None
    ) -> torch.Tensor:
        """Look the next tokens up; see `Drafter.propose`. ``pick`` has no logits to look at."""
        if self._seconds_per_token:
            end = time.perf_counter() + num_draft_tokens * self._seconds_per_token
            while time.perf_counter() < end:
                pass
        offsets = torch.arange(num_draft_tokens, device=self._emitted.device)
        index = self._emitted[:, None] + offsets
        return self._drafts.gather(1, index.clamp(max=self._drafts.shape[1] - 1))

    def keep_rows(self, order: Sequence[int]) -> None:
        """Reorder the rows."""
        index = torch.tensor(order, device=self._emitted.device)
        self._emitted, self._drafts = self._emitted[index], self._drafts[index]


def settle(drafter: SyntheticDrafter, run: Callable[[], list[list[int]]]) -> bool:
    """Replace the answers by what is really said, until the two agree.

    Args:
        drafter: its answers are the target's texts without drafts.
        run: generates with the drafter; returns each row's new tokens.

    Returns:
        Whether they agree now. They do at once where the dtype leaves no near-ties.
    """
    for _ in range(ROUNDS):
        said = run()
        if said == drafter.answers:
            return True
        drafter.answers = said
    return False
