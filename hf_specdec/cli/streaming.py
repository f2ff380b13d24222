"""Prints generated text as it comes, with the accepted draft tokens marked.

Each step of speculative decoding hands its streamer one block of new tokens: the accepted draft
tokens, then the one token the target chose itself. A block that ends the generation (end token or
length limit) may consist of draft tokens only; its last one is then shown as the target's, so that
the marks never claim too much.
"""

import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text
from transformers.generation.streamers import BaseStreamer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

ACCEPTED_STYLE = "bold green"
TARGET_STYLE = ""


class BlockStreamer(BaseStreamer):
    """A transformers streamer that prints each block's accepted draft tokens in their own style.

    Attributes:
        seconds: Time spent in the streamer so far, for taking out of a measured run.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        console: Console,
        accepted_style: str = ACCEPTED_STYLE,
    ) -> None:
        self.seconds = 0.0
        self._accepted_style = accepted_style
        self._tokenizer = tokenizer
        self._console = console
        self._prompt_seen = False
        self._token_ids: list[int] = []
        self._printed = 0

    def put(self, value: "torch.Tensor") -> None:
        """Prints one block; the first call brings the prompt, as in transformers, and is skipped.

        Args:
            value: Token ids of one row, [T] or [1, T], int64.

        Raises:
            ValueError: `value` holds more than one row.
        """
        start = time.perf_counter()
        if value.dim() > 1 and value.shape[0] > 1:
            raise ValueError(
                f"value has shape {tuple(value.shape)}; BlockStreamer prints one row, [T] or [1, T]"
            )
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        *accepted, own = value.flatten().tolist()
        self._print(accepted, self._accepted_style)
        self._print([own], TARGET_STYLE)
        self.seconds += time.perf_counter() - start

    def end(self) -> None:
        """Prints what was held back, and a line end."""
        self._print([], TARGET_STYLE, hold_back=False)
        self._console.print()

    def _print(self, token_ids: list[int], style: str, hold_back: bool = True) -> None:
        self._token_ids += token_ids
        text = self._tokenizer.decode(self._token_ids, skip_special_tokens=True)
        assert isinstance(text, str)
        # A character of several tokens decodes to U+FFFD until its last token is there.
        if hold_back and text.endswith("\ufffd"):
            return
        new_text, self._printed = text[self._printed :], len(text)
        if new_text:
            self._console.print(Text(new_text, style=style), end="", soft_wrap=True)
        if text.endswith("\n"):
            # Nothing before a line's end changes any more: long texts needn't be decoded again. The
            # last token stays, as some tokenizers drop a space that a text begins with.
            self._token_ids = self._token_ids[-1:]
            kept = self._tokenizer.decode(self._token_ids, skip_special_tokens=True)
            self._printed = len(kept)
