"""A row's text while its tokens arrive: whole characters only, cut where a stop string begins."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

from transformers.cli.serving.utils import response_events_to_chunks

_INCOMPLETE = "\ufffd"


class RowText:
    """Decodes one row.

    Args:
        tokenizer: of the target.
        stop: strings that end the row; neither they nor what follows is part of its text.
        parser: transformers' parser of tool calls and reasoning, for models that have one. It
            reads special tokens; without it they are left out.
        end_ids: end-of-sequence ids, which are no text whether special or not.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        parser: Any = None,
        end_ids: frozenset[int] = frozenset(),
    ):
        self._tokenizer = tokenizer
        self._stop = stop
        self._parser = parser
        self._gave_up = False
        self._first_events = [] if parser is None else parser.initial_events
        self._end_ids = end_ids
        self._ids: list[int] = []
        # Decoded: ids before _read. Decoding begins at _start, so that spaces are seen in context.
        self._start = self._read = 0
        self._text = ""
        self._released = 0
        self.stopped = False

    def push(self, token_id: int) -> bool:
        """Add a token; returns whether a stop string is complete with it."""
        if self._parser is None and token_id in self._end_ids:
            return False
        self._ids.append(token_id)
        before = self._decode(self._ids[self._start : self._read])
        text = self._decode(self._ids[self._start :])
        # A character of several tokens decodes to U+FFFD until its last token is there.
        if text.endswith(_INCOMPLETE):
            return False
        self._start, self._read = self._read, len(self._ids)
        return self._append(text[len(before) :])

    def release(self, final: bool = False) -> list[Any]:
        """What can be shown now and hasn't been yet.

        Args:
            final: the row is finished: nothing is held back, though it may begin a stop string.

        Returns:
            Pieces of text: ``str``, and with a parser transformers' ``ReasoningText`` (a ``str``)
            and ``ToolCall``.
        """
        if final and not self.stopped:
            before = self._decode(self._ids[self._start : self._read])
            self._append(self._decode(self._ids[self._start :])[len(before) :])
        end = len(self._text) - (0 if final else self._held_back())
        new, self._released = self._text[self._released : end], max(end, self._released)
        if self._parser is None:
            return [new] if new else []
        return self._parse(new, final)

    def _append(self, piece: str) -> bool:
        # A stop string may have begun before this piece.
        longest = max((len(stop) for stop in self._stop), default=1)
        search_from = max(len(self._text) - longest + 1, 0)
        self._text += piece
        found = [at for stop in self._stop if (at := self._text.find(stop, search_from)) >= 0]
        if found:
            self._text = self._text[: min(found)]
            self.stopped = True
        return self.stopped

    def _held_back(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        if self.stopped:
            return 0
        return max(
            (
                length
                for stop in self._stop
                for length in range(1, min(len(stop), len(self._text) + 1))
                if self._text.endswith(stop[:length])
            ),
            default=0,
        )

    def _parse(self, new: str, final: bool) -> list[Any]:
        # The prompt may have opened a region, such as reasoning.
        events, self._first_events = list(self._first_events), []
        unparsed = [new] if new else []
        if new and not self._gave_up:
            try:
                events += self._parser.feed(new)
                unparsed = []
            except (ValueError, RuntimeError):
                # Such as a tool call that is no JSON: what it says is shown as it is.
                self._gave_up = True
        if final and not self._gave_up:
            # A row may end inside a structure, such as half a tool call: then there is none.
            with contextlib.suppress(ValueError, RuntimeError):
                events += self._parser.finalize()[1]
        return [piece for event in events for piece in _pieces(event)] + unparsed

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._parser is None)


def _pieces(event: dict[str, Any]) -> list[Any]:
    """What an event of the parser says."""
    try:
        return response_events_to_chunks([event])
    except (AttributeError, KeyError, TypeError):
        # A tool call in JSON, but without a name or arguments: it is shown as it is.
        value = event.get("value")
        return [json.dumps(value.get("function") if isinstance(value, dict) else value)]
