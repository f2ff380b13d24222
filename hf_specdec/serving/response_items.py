"""The output items of ``/v1/responses``, and the events that tell how they grow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers.cli.serving.utils import ReasoningText, ToolCall

Event = tuple[str, dict[str, Any]]


class ResponseItems:
    """Puts pieces of text together to a message, reasoning and tool calls, in their order.

    Args:
        request_id: the items' ids end with it.
    """

    def __init__(self, request_id: str):
        self._request_id = request_id
        self.output: list[dict[str, Any]] = []
        """The items so far."""
        self._open: dict[str, Any] | None = None

    def add(self, piece: Any) -> list[Event]:
        """Take a piece of `RowText.release`; returns the events, kind and fields of each."""
        if isinstance(piece, ToolCall):
            return [*self._close(), *self._tool_call(piece)]
        kind = "reasoning" if isinstance(piece, ReasoningText) else "message"
        events = []
        if self._open is None or self._open["type"] != kind:
            events += [*self._close(), *self._begin(kind)]
        assert self._open is not None
        self._open["content"][0]["text"] += piece
        name = "reasoning_text" if kind == "reasoning" else "output_text"
        where = {**self._where(), "delta": str(piece)}
        if kind == "message":
            where["logprobs"] = []
        return [*events, (f"response.{name}.delta", where)]

    def finish(self) -> list[Event]:
        """End the open item; an answer without any item gets an empty message."""
        events: list[Event] = []
        if not self.output:
            events += self._begin("message")
        return [*events, *self._close()]

    def _where(self) -> dict[str, Any]:
        assert self._open is not None
        index = len(self.output) - 1
        return {"item_id": self._open["id"], "output_index": index, "content_index": 0}

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._request_id}_{len(self.output)}"

    def _begin(self, kind: str) -> Iterator[Event]:
        if kind == "reasoning":
            item = {"id": self._item_id("rs"), "type": "reasoning", "summary": []}
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            item = {"id": self._item_id("msg"), "type": "message", "role": "assistant"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._open = {**item, "status": "in_progress", "content": [part]}
        self.output.append(self._open)
        shown = {**self._open, "content": []}
        index = len(self.output) - 1
        yield "response.output_item.added", {"output_index": index, "item": shown}
        if kind == "message":
            yield "response.content_part.added", {**self._where(), "part": dict(part)}

    def _close(self) -> Iterator[Event]:
        if self._open is None:
            return
        part = self._open["content"][0]
        where = self._where()
        if self._open["type"] == "message":
            text = {**where, "text": part["text"], "logprobs": []}
            yield "response.output_text.done", text
            yield "response.content_part.done", {**where, "part": part}
        else:
            yield "response.reasoning_text.done", {**where, "text": part["text"]}
        self._open["status"] = "completed"
        index = len(self.output) - 1
        yield "response.output_item.done", {"output_index": index, "item": self._open}
        self._open = None

    def _tool_call(self, call: ToolCall) -> Iterator[Event]:
        call_id = self._item_id("call")
        item = {
            "id": self._item_id("fc"),
            "call_id": call_id,
            "type": "function_call",
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        index = len(self.output)
        self.output.append(item)
        shown = {**item, "arguments": "", "status": "in_progress"}
        yield "response.output_item.added", {"output_index": index, "item": shown}
        done = {"item_id": item["id"], "output_index": index}
        arguments = {**done, "name": call.name, "arguments": call.arguments}
        yield "response.function_call_arguments.done", arguments
        yield "response.output_item.done", {"output_index": index, "item": item}
