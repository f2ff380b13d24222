"""Drafts looked up in the text itself: what followed the last tokens when they stood there before.

Texts repeat themselves: names, quotations, code, the prompt's own sentences. Where the last tokens
of a row have occurred earlier in its prompt or output, what stood behind them then is drafted, at
no cost but a search (prompt lookup decoding, Saxena 2023; n-gram speculation in vLLM). Elsewhere
the drafter is asked as always. Verification is the same, so the output is the target's own.

A longer match promises more. How many drafts came true is kept by the length of the match, and a
length that brings no more than the drafter does is not used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_specdec.options.lookup_options import PromptLookup

# Drafts that a match of each length is taken to bring before it was tried: 1, 2, 3 and more tokens.
_EXPECTED = (0.5, 1.5, 3.0)
# Steps that this guess counts as, and the weight that counts keep with every newer step.
_GUESS_WEIGHT, _DECAY = 3.0, 0.9


def find(
    sequences: torch.Tensor, lengths: torch.Tensor, max_ngram: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the last tokens of each row stood before: the longest match, of those the newest.

    Args:
        sequences: int64 ``[n, L]``; what stands behind a row's length is ignored.
        lengths: int64 ``[n]``, at least 1.
        max_ngram: tokens compared at most.

    Returns:
        int64 ``[n]``, how many tokens match (0..``max_ngram``), and the index of the token behind
        the match, meaningful only where some do.
    """
    width = sequences.shape[1]
    max_ngram = min(max_ngram, width)
    back = torch.arange(max_ngram, device=lengths.device)
    suffix = sequences.gather(1, (lengths[:, None] - 1 - back).clamp_(min=0))
    # Index of the last token of each place compared; the first few have no room for a whole match.
    end = torch.arange(max_ngram - 1, width, device=lengths.device)
    run = torch.zeros((), dtype=torch.long, device=lengths.device)
    for i in range(max_ngram - 1, -1, -1):
        window = sequences[:, max_ngram - 1 - i : width - i]
        run = (run + 1) * (window == suffix[:, i : i + 1])
    run = run * (end < lengths[:, None] - 1)
    best = (run * width + end).amax(dim=1)
    return best // width, best % width + 1


class LookupDrafts:
    """Matches of one call's active rows, and what matches of each length have brought.

    Args:
        options: see `PromptLookup`.
    """

    def __init__(self, options: PromptLookup):
        self.options = options
        self._starts: torch.Tensor
        self._matched: list[int] = []
        self._used: list[bool] = []
        self._brought = {
            n: _EXPECTED[min(n, len(_EXPECTED)) - 1]
            for n in range(options.min_ngram, options.max_ngram + 1)
        }
        self._weights = dict.fromkeys(self._brought, _GUESS_WEIGHT)
        self._drafter_brought = 0.0
        self._drafter_weight = 0.0

    def search(self, sequences: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Search every active row; see `find`. Nothing here waits for the device.

        Returns:
            int64 ``[n]``, tokens that match; `settle` wants them on the host.
        """
        matched, self._starts = find(sequences, lengths, self.options.max_ngram)
        return matched

    def settle(self, matched: Sequence[int]) -> None:
        """Take the result of `search` on the host, and decide which rows use it."""
        self._matched = list(matched)
        self._used = [
            n >= self.options.min_ngram and self._brought[n] > self._drafter_brought
            for n in matched
        ]

    def applies(self, everywhere: bool) -> bool:
        """Whether the next step looks up: in at least half of the rows it is expected to pay.

        Args:
            everywhere: in all of them. The rejection rule needs to know what each draft was sampled
                from, and can't mix the two kinds.
        """
        return self.serves_all if everywhere else 2 * sum(self._used) >= len(self._used) > 0

    @property
    def serves_all(self) -> bool:
        """Whether it is expected to pay in every row."""
        return len(self._used) > 0 and all(self._used)

    def fill(
        self,
        sequences: torch.Tensor,
        lengths: torch.Tensor,
        num_tokens: int,
        drafted: torch.Tensor | None,
    ) -> torch.Tensor:
        """The drafts of a step that looks up.

        Args:
            sequences, lengths: as for `search`.
            num_tokens: how many to draft.
            drafted: int64 ``[n, K']``, what the drafter proposes for the other rows; ``None`` if
                there are none.

        Returns:
            int64 ``[n, num_tokens]``.
        """
        steps = torch.arange(num_tokens, device=lengths.device)
        # A text that repeats itself goes on repeating itself beyond its end.
        period = (lengths - self._starts).clamp_(min=1)[:, None]
        # Rows without a match have a start beyond the end: any token will do there.
        index = (self._starts[:, None] + steps % period).clamp_(max=sequences.shape[1] - 1)
        drafts = sequences.gather(1, index)
        if drafted is not None:
            others = [i for i, used in enumerate(self._used) if not used]
            rows = torch.tensor(others, device=drafts.device)
            width = min(num_tokens, drafted.shape[1])
            drafts[rows, :width] = drafted[rows, :width]
        return drafts

    def learn(self, accepted: Sequence[int], looked_up: bool) -> None:
        """Count what a step brought: accepted drafts of each row."""
        if not looked_up:
            self._drafter_brought, self._drafter_weight = _updated(
                self._drafter_brought, self._drafter_weight, sum(accepted) / len(accepted)
            )
            return
        for count, matched, used in zip(accepted, self._matched, self._used, strict=True):
            if used:
                self._brought[matched], self._weights[matched] = _updated(
                    self._brought[matched], self._weights[matched], count
                )

    def keep_rows(self, order: Sequence[int], index: torch.Tensor) -> None:
        """Row i becomes the present row ``order[i]``."""
        self._starts = self._starts[index]
        self._matched = [self._matched[i] for i in order]
        self._used = [self._used[i] for i in order]


def _updated(mean: float, weight: float, value: float) -> tuple[float, float]:
    """A decaying mean with one more value, and its weight."""
    weight *= _DECAY
    return (mean * weight + value) / (weight + 1.0), weight + 1.0
