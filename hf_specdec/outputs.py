"""Scores, logits, hidden states and attentions of a call, in the shapes of plain ``generate``.

Plain generation yields one entry a token; here one forward yields several, a different number for
each row, and an entry i gathers what belongs to every row's i-th new token. Rows that have ended
leave the batch; where plain generation shows what the model says about padding, their entries are
zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_specdec.targets.target import TargetOutput


@dataclass(frozen=True)
class OutputRequest:
    """What ``generate`` was asked to return besides the tokens."""

    scores: bool = False
    logits: bool = False
    hidden_states: bool = False
    attentions: bool = False

    @property
    def of_model(self) -> dict[str, bool]:
        """Arguments for the model's forward."""
        return {
            "output_hidden_states": self.hidden_states,
            "output_attentions": self.attentions,
        }

    def __bool__(self) -> bool:
        return self.scores or self.logits or self.hidden_states or self.attentions


@dataclass
class _Piece:
    """What one forward said about some rows.

    Attributes:
        rows, first, count: for each active row its number in the batch, the index of its first new
            token of this forward, and how many it emitted.
        block: ``[n, Q, ...]``.
    """

    rows: Sequence[int]
    first: Sequence[int]
    count: Sequence[int]
    block: torch.Tensor


@dataclass
class OutputCollector:
    """Collects the steps of one call.

    Args:
        request: what to collect.
        num_rows: rows of the whole batch.
        layer_windows: for each layer the window of its attention, or ``None``.
        num_slots: slots of the prompt.
    """

    request: OutputRequest
    num_rows: int
    layer_windows: Sequence[int | None]
    num_slots: int
    _scores: list[_Piece] = field(default_factory=list)
    _logits: list[_Piece] = field(default_factory=list)
    _hidden: list[list[_Piece]] = field(default_factory=list)
    _prompt: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    # attentions[token][layer]
    _attentions: list[list[torch.Tensor]] = field(default_factory=list)

    def record(
        self,
        rows: Sequence[int],
        first: Sequence[int],
        count: Sequence[int],
        output: TargetOutput,
        scores: torch.Tensor | None,
    ) -> None:
        """Take one forward.

        Args:
            rows, first, count: see `_Piece`.
            output: of the target, for the prompt or for a verified run.
            scores: ``[n, Q, V]``, the processed logits.
        """
        where = (list(rows), list(first), list(count))
        if self.request.scores:
            assert scores is not None
            self._scores.append(_Piece(*where, scores.float()))
        if self.request.logits:
            self._logits.append(_Piece(*where, output.logits.float()))
        prompt = max(first) == 0
        for name, layers in (
            ("hidden_states", output.all_hidden_states),
            ("attentions", output.attentions),
        ):
            if layers is None:
                continue
            if prompt:
                self._prompt[name] = tuple(layers)
            elif name == "hidden_states":
                width = output.logits.shape[1]
                self._hidden.append([_Piece(*where, layer[:, -width:]) for layer in layers])
            else:
                self._record_attentions(where, output.logits.shape[1], layers)

    def _record_attentions(
        self,
        where: tuple[list[int], list[int], list[int]],
        width: int,
        layers: Sequence[torch.Tensor],
    ) -> None:
        for i, (row, first, count) in enumerate(zip(*where, strict=True)):
            for q in range(count):
                token = first + q
                # The query is the token before: it stands in the last slot it sees.
                end = self.num_slots + token
                while len(self._attentions) < token:
                    self._attentions.append([])
                entry = self._attentions[token - 1]
                for number, (layer, window) in enumerate(
                    zip(layers, self.layer_windows, strict=True)
                ):
                    start = 0 if window is None else max(0, end - window)
                    slots = torch.arange(start, end, device=layer.device)
                    # A ring is read modulo its size; anything else is longer than that.
                    weights = layer[i, :, q - width][:, slots % layer.shape[-1]]
                    if len(entry) == number:
                        entry.append(
                            weights.new_zeros((self.num_rows, weights.shape[0], 1, end - start))
                        )
                    entry[number][row, :, 0] = weights

    def finish(self, num_new_tokens: int) -> dict[str, Any]:
        """The fields for transformers' output class.

        Args:
            num_new_tokens: of the longest row.
        """
        fields: dict[str, Any] = {}
        if self.request.scores:
            fields["scores"] = self._entries(self._scores, num_new_tokens)
        if self.request.logits:
            fields["logits"] = self._entries(self._logits, num_new_tokens)
        if self.request.hidden_states:
            layers = [
                self._entries([step[i] for step in self._hidden], num_new_tokens, first=1)
                for i in range(len(self._prompt["hidden_states"]))
            ]
            steps = [tuple(state[:, None] for state in step) for step in zip(*layers, strict=True)]
            fields["hidden_states"] = (self._prompt["hidden_states"], *steps)
        if self.request.attentions:
            steps = [tuple(layer) for layer in self._attentions]
            fields["attentions"] = (self._prompt["attentions"], *steps)
        return fields

    def _entries(
        self, pieces: list[_Piece], num_new_tokens: int, first: int = 0
    ) -> tuple[torch.Tensor, ...]:
        """One ``[B, ...]`` tensor for each new token from ``first`` on."""
        if not pieces:
            return ()
        block = pieces[0].block
        shape = (num_new_tokens - first, self.num_rows, *block.shape[2:])
        entries = block.new_zeros(shape)
        for piece in pieces:
            for i, (row, start, count) in enumerate(
                zip(piece.rows, piece.first, piece.count, strict=True)
            ):
                begin = start - first
                entries[begin : begin + count, row] = piece.block[i, :count]
        return entries.unbind(0)

    def scores_of(self, row: int) -> tuple[torch.Tensor, ...]:
        """Scores ``[V]`` of a row's tokens so far, for criteria that look at them."""
        return tuple(
            piece.block[i, q]
            for piece in self._scores
            for i, (of, count) in enumerate(zip(piece.rows, piece.count, strict=True))
            if of == row
            for q in range(count)
        )


def padded_behind(
    sequences: torch.Tensor, lengths: Sequence[int], pad_token_id: int
) -> torch.Tensor:
    """Rows cut to the longest of them, with padding behind the end of each.

    Args:
        sequences: int64 ``[B, L]``.
        lengths: tokens of every row, at most L.
        pad_token_id: what the padding is.
    """
    longest = max(lengths)
    index = torch.arange(longest, device=sequences.device)
    ends = torch.tensor(lengths, device=sequences.device)
    return sequences[:, :longest].masked_fill(index >= ends[:, None], pad_token_id)
