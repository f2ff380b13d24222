"""How drafts are looked up in the text; imports nothing, so that options can be checked early."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PromptLookup:
    """How drafts are looked up.

    Attributes:
        num_tokens: tokens drafted behind a match.
        max_ngram: tokens compared at most.
        min_ngram: tokens that must match.

    Raises:
        ValueError: a number that isn't a positive integer, or ``min_ngram`` above ``max_ngram``.
    """

    num_tokens: int = 8
    max_ngram: int = 4
    min_ngram: int = 2

    def __post_init__(self) -> None:
        for name in ("num_tokens", "max_ngram", "min_ngram"):
            check_positive(getattr(self, name), name)
        if self.min_ngram > self.max_ngram:
            raise ValueError(
                f"min_ngram={self.min_ngram} must not be more than max_ngram={self.max_ngram}"
            )


def check_positive(value: object, name: str) -> int:
    """Return ``value``, or raise ValueError unless it is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be an integer of at least 1")
    return value
