"""A document while it is generated: which token is run next, and what follows it.

Boundary: works through one script on the host; knows nothing of the batch it is part of.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from hf_specdec.training.scripts import Forced, Free, Script


@dataclass
class DocumentInProgress:
    """Tokens so far and the rest of the script.

    Attributes:
        document_id: its number in the corpus.
        row_seed: seed of its sampling noise.
        prefix: its first tokens.
        script: what follows them.
        stop_ids: tokens that end every free segment.
        max_length: the document is cut off there.
        tokens: what is known; all of them are to be run.
        learn: for each token whether the drafter learns to predict it.
        position: index of the token to be run next.
        finished: all tokens have been run and none follows.
    """

    document_id: int
    row_seed: int
    prefix: tuple[int, ...]
    script: Script
    stop_ids: Set[int]
    max_length: int
    tokens: list[int] = field(init=False)
    learn: list[bool] = field(init=False)
    position: int = 0
    finished: bool = False
    _segment: int = 0
    _emitted: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.prefix)
        self.learn = [False] * len(self.prefix)
        if not self.tokens:
            if not self.script or isinstance(self.script[0], Free):
                raise ValueError(
                    f"document {self.document_id} begins with a free segment, but there is no "
                    "token before it to run; begin with a Forced segment or give a prefix"
                )
            self._force(self.script[0])

    @property
    def temperature(self) -> float:
        """Temperature of the choice that follows the token at ``position``; 0 if none is made."""
        if self.position + 1 < len(self.tokens):
            return 0.0
        segment = self._upcoming()
        return segment.temperature if isinstance(segment, Free) else 0.0

    def advance(self, chosen: int) -> bool:
        """Count the token at ``position`` as run.

        Args:
            chosen: the target's choice after it, ignored where the script forces another.

        Returns:
            Whether there is a token to run; ``False`` once the document is finished.
        """
        self.position += 1
        if self.position == len(self.tokens):
            self._extend(chosen)
        self.finished = self.position == len(self.tokens)
        return not self.finished

    def _upcoming(self) -> Forced | Free | None:
        """The segment the next token belongs to."""
        if self._segment < len(self.script):
            segment = self.script[self._segment]
            if isinstance(segment, Free) and self._emitted == segment.max_tokens:
                self._segment, self._emitted = self._segment + 1, 0
        return self.script[self._segment] if self._segment < len(self.script) else None

    def _extend(self, chosen: int) -> None:
        segment = self._upcoming()
        if segment is None or len(self.tokens) >= self.max_length:
            return
        if isinstance(segment, Forced):
            self._force(segment)
            return
        self._emitted += 1
        if chosen in self.stop_ids or chosen in segment.stop_ids:
            self._segment, self._emitted = self._segment + 1, 0
            following = self._upcoming()
            if isinstance(following, Forced):
                first = len(self.tokens)
                self._force(following)
                self.learn[first] = segment.learn and following.tokens[0] == chosen
                return
        self.tokens.append(chosen)
        self.learn.append(segment.learn)

    def _force(self, segment: Forced) -> None:
        tokens = segment.tokens[: self.max_length - len(self.tokens)]
        self.tokens += tokens
        self.learn += [False] * len(tokens)
        self._segment, self._emitted = self._segment + 1, 0
