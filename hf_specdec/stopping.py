"""Where a row stops when several tokens arrive at once: at the token where plain generation stops.

End-of-sequence ids and the length limit are decided on the device for all rows together. Any other
criterion (time, stop strings, the user's own) is asked token by token, about the prefix it would
have seen.
"""

from __future__ import annotations

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria


class StoppingRules:
    """The stopping criteria of one ``generate`` call.

    Args:
        criteria: as transformers built them.
        eos_token_ids: int64 ``[E]`` on the target's device, or ``None``.
        max_length: tokens of a finished row, prompt and padding included.
    """

    def __init__(
        self, criteria: StoppingCriteriaList, eos_token_ids: torch.Tensor | None, max_length: int
    ):
        self.max_length = max_length
        self._eos_token_ids = eos_token_ids
        self._others = StoppingCriteriaList(
            c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)
        )

    @property
    def asks_per_token(self) -> bool:
        """Whether `first_stop` has anything to ask."""
        return len(self._others) > 0

    def cut(
        self, tokens: torch.Tensor, num_tokens: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cut what each row emits at its first end-of-sequence id and at the length limit.

        Args:
            tokens: int64 ``[n, Q]``.
            num_tokens: int64 ``[n]``, how many of them are to be emitted.
            lengths: int64 ``[n]``, tokens of the rows so far.

        Returns:
            The smaller counts, int64 ``[n]``, and whether each row is finished, bool ``[n]``.
        """
        room = self.max_length - lengths
        finished = num_tokens >= room
        num_tokens = torch.minimum(num_tokens, room)
        if self._eos_token_ids is not None:
            is_eos = torch.isin(tokens, self._eos_token_ids)
            index = torch.arange(tokens.shape[1], device=tokens.device)
            # One past the first end-of-sequence id, or the width if there is none.
            first = torch.where(is_eos, index, tokens.shape[1]).amin(dim=1) + 1
            finished = finished | (first <= num_tokens)
            num_tokens = torch.minimum(num_tokens, first)
        return num_tokens, finished

    def first_stop(self, sequence: torch.Tensor, start: int) -> int | None:
        """Ask the other criteria after each token.

        Args:
            sequence: int64 ``[L]``, the row with the tokens about to be emitted.
            start: index of the first of these tokens.

        Returns:
            How many of the new tokens are emitted when a criterion stops the row, else ``None``.
        """
        for end in range(start + 1, sequence.shape[0] + 1):
            # scores are not collected; None is what plain generation passes without output_scores.
            if bool(self._others(sequence[None, :end], None)[0]):
                return end - start
        return None
