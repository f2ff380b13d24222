"""Applying transformers' logits processors to several positions of several rows at once.

Processors that look at nothing but the logits (temperature, top-k, ...) take the whole
``[B * Q, V]`` block in one call, and drafts pass through them too. A processor that may look at the
tokens before a position is called row by row and position by position, and only along the path that
is really emitted: it sees what plain generation would show it, never a rejected draft, and sees it
once. A processor that may keep a state from call to call works on a copy for each row, so that
each state follows its own row; the first row has the original.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from transformers import LogitsProcessorList, PreTrainedTokenizerBase
from transformers.generation import logits_process

_POINTWISE = tuple(
    getattr(logits_process, name)
    for name in (
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinPLogitsWarper",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    )
    if hasattr(logits_process, name)
)
_TEMPERATURE = logits_process.TemperatureLogitsWarper
# transformers' own processors keep no state, except these.
_STATEFUL = (
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
)


class LogitsPipeline:
    """The processors of one ``generate`` call.

    Args:
        processors: as transformers built them.
        num_rows: rows of the whole batch, finished ones included.
        device: where plain generation shows them prefix and logits, and where their own tensors
            are; where these are if ``None``. Those that look at logits alone have no tensors.

    Raises:
        ValueError: a processor that may keep a state can't be copied for the other rows.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        num_rows: int,
        device: torch.device | None = None,
    ):
        self._processors = processors
        self._device = device
        self._num_rows = num_rows
        self._of_row = [processors]
        for _ in range(1, num_rows):
            self._of_row.append(LogitsProcessorList(_for_another_row(p) for p in processors))
        # Exact types: a subclass may look at the prefix.
        self._pointwise = LogitsProcessorList(p for p in processors if type(p) in _POINTWISE)
        self.reads_prefix = len(self._pointwise) < len(processors)

    @property
    def temperature(self) -> float | None:
        """What the logits are divided by, if that is all that is done to them."""
        if len(self._processors) != 1 or type(self._processors[0]) is not _TEMPERATURE:
            return None
        return float(self._processors[0].temperature)

    def block(self, logits: torch.Tensor) -> torch.Tensor:
        """Process ``[B, Q, V]`` logits in one call; only if nothing reads the prefix.

        Returns:
            The logits themselves if there is no processor, else float32 ``[B, Q, V]``.
        """
        assert not self.reads_prefix
        return self._apply_pointwise(logits) if len(self._processors) else logits

    def draft(self, logits: torch.Tensor) -> torch.Tensor:
        """Pass draft logits ``[B, V]`` through the processors that look at logits alone."""
        return self.draft_nodes(logits[:, None])[:, 0]

    def draft_nodes(self, logits: torch.Tensor) -> torch.Tensor:
        """The same for several nodes of every row, ``[B, nodes, V]``."""
        return self._apply_pointwise(logits)

    def _apply_pointwise(self, logits: torch.Tensor) -> torch.Tensor:
        rows, positions, vocabulary = logits.shape
        flat = logits.reshape(rows * positions, vocabulary).float()
        no_ids = torch.empty((flat.shape[0], 0), dtype=torch.long, device=flat.device)
        return self._pointwise(cast(torch.LongTensor, no_ids), flat).view(
            rows, positions, vocabulary
        )

    def along_path(
        self,
        row: int,
        prefix: torch.Tensor,
        logits: torch.Tensor,
        choose: Callable[[int, torch.Tensor], int],
        follow: Callable[[int, int], int | None],
    ) -> tuple[list[int], list[int], list[torch.Tensor]]:
        """Process and choose token by token, as far as the drafts are right.

        Args:
            row: index of the row in the whole batch.
            prefix: int64 ``[L]``, the row so far, padding included.
            logits: ``[Q, V]`` behind each draft; behind the row's last token at index 0.
            choose: picks a token from the processed float32 ``[V]`` logits at an index.
            follow: the index of the draft behind an index that is a certain token, if there is one.

        Returns:
            The tokens to emit, the accepted draft tokens and the one that follows; where they were
            chosen; and the processed logits ``[V]`` of each.
        """
        emitted: list[int] = []
        scores: list[torch.Tensor] = []
        indices: list[int] = []
        index: int | None = 0
        while index is not None:
            indices.append(index)
            scores.append(self._at(row, prefix, logits[index].float()))
            token = choose(index, scores[-1])
            emitted.append(token)
            index = follow(index, token)
            if index is not None:
                prefix = torch.cat([prefix, prefix.new_tensor([token])])
        return emitted, indices, scores

    def _at(self, row: int, prefix: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        # Some processors depend on a row's index in the batch (prefix_allowed_tokens_fn, per-row
        # padding), so they are shown a batch of the size that plain generation has.
        device = self._device or logits.device
        ids = cast(torch.LongTensor, prefix.to(device).expand(self._num_rows, -1))
        scores = logits.to(device).expand(self._num_rows, -1).clone()
        return self._of_row[row](ids, scores)[row].to(logits.device)


def _for_another_row(processor: Any) -> Any:
    """The processor itself if it keeps no state, else a copy of it."""
    kind = type(processor)
    if kind.__module__ == logits_process.__name__ and kind.__name__ not in _STATEFUL:
        return processor
    # Models and tokenizers are read, not written, and too large to copy.
    memo = {
        id(value): value
        for value in getattr(processor, "__dict__", {}).values()
        if isinstance(value, (torch.nn.Module, PreTrainedTokenizerBase))
    }
    try:
        return copy.deepcopy(processor, memo)
    except Exception as error:
        raise ValueError(
            f"logits_processor has a {kind.__name__} that can't be copied ({error}). Each row of a "
            "batch needs a copy, as rows advance by different numbers of tokens. Generate one row "
            "at a time, or give the class a __deepcopy__."
        ) from error
