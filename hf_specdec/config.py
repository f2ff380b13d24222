"""SpeculativeConfig: how to speculate, in vLLM's words."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from hf_specdec.schedule import BatchSizeSchedule, check_per_batch_size

Method = Literal["mlp_speculator", "mtp"]
Verification = Literal["match", "rejection"]


@dataclass
class SpeculativeConfig:
    """How to speculate; the fields are named as in vLLM's ``--speculative-config``.

    Attributes:
        method: the way of drafting; found from the model if ``None``.
        model: the drafter: Hub id, local folder, or a loaded model.
        num_speculative_tokens: K, tokens drafted a step; ``None`` leaves it to the checkpoint.
        num_speculative_tokens_per_batch_size: ``[[start, end, K], ...]``, upper limits of K by the
            number of rows that are still generating.
        verification: ``"match"`` (default) emits exactly what the target alone would emit, also
            when sampling under a seed; ``"rejection"`` is the classical rule, equal in
            distribution.

    Raises:
        ValueError: a field's value is not one of those that work.
    """

    method: Method | None = None
    model: Any = None
    num_speculative_tokens: int | None = None
    num_speculative_tokens_per_batch_size: BatchSizeSchedule | None = None
    verification: Verification = "match"

    def __post_init__(self) -> None:
        if self.method is not None and self.method not in get_args(Method):
            raise ValueError(
                f"method={self.method!r} is not known; choose from {list(get_args(Method))}"
            )
        check_verification(self.verification)
        if self.num_speculative_tokens_per_batch_size is not None:
            check_per_batch_size(self.num_speculative_tokens_per_batch_size)
        k = self.num_speculative_tokens
        if k is not None and (isinstance(k, bool) or not isinstance(k, int) or k < 0):
            raise ValueError(
                f"num_speculative_tokens={k!r} must be an integer of at least 0 "
                "(0 decodes without drafts)"
            )

    @classmethod
    def from_value(cls, value: SpeculativeConfig | dict[str, Any] | str) -> SpeculativeConfig:
        """Read a config from a dict or from JSON text, as vLLM's command line takes it.

        Raises:
            ValueError: not JSON, or a key that isn't a field.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError as error:
                raise ValueError(f"speculative_config={value!r} is not JSON: {error}") from None
        known = [f.name for f in fields(cls)]
        if not isinstance(value, dict) or (unknown := sorted(set(value) - set(known))):
            what = f"keys {unknown}" if isinstance(value, dict) else type(value).__name__
            raise ValueError(f"speculative_config has {what}; its fields are {known}")
        return cls(**value)


def check_verification(verification: object) -> None:
    """Raise ValueError unless ``verification`` names a verification rule."""
    if verification not in get_args(Verification):
        raise ValueError(
            f"verification={verification!r} is not known; "
            f"choose from {list(get_args(Verification))}"
        )
