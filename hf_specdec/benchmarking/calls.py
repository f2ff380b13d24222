"""The two calls that are compared: plain ``generate``, and the same with a drafter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import CompileConfig

from hf_specdec.benchmarking.workload import Group
from hf_specdec.modeling.placement import input_device
from hf_specdec.options.schedule import BatchSizeSchedule, NumDraftTokens
from hf_specdec.targets.packing import suspended


@dataclass(frozen=True)
class Pair:
    """What is measured.

    Attributes:
        target: the model.
        tokenizer: the target's.
        assistant: for ``generate(assistant_model=...)``; ``None`` with a synthetic drafter.
    """

    target: Any
    tokenizer: Any
    assistant: Any = None


class Calls:
    """Greedy calls of one target, without a repetition penalty.

    Args:
        target: the model.
        max_new_tokens: for each row.
        schedule: K by the rows still active.
        compiles: calls with a drafter run with static shapes, compiled.
        lookup: what the speculative config says about prompt lookup.
    """

    def __init__(
        self,
        target: Any,
        max_new_tokens: int,
        schedule: BatchSizeSchedule | None,
        compiles: bool = False,
        lookup: Mapping[str, int] | None = None,
    ):
        self.target = target
        self.device: torch.device = input_device(target)
        self.max_new_tokens = max_new_tokens
        self._schedule = schedule
        self._lookup = dict(lookup or {})
        self._compiled: dict[str, Any] = {}
        if compiles:
            self._compiled = {"cache_implementation": "static", "compile_config": CompileConfig()}
        config = target.generation_config
        ends = config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
        # Without one transformers would choose, and say so at every call.
        self._pad = config.pad_token_id
        if self._pad is None:
            self._pad = min(self._ends, default=0)

    def plain(self, group: Group, max_new_tokens: int | None = None) -> torch.Tensor:
        """The target alone, as it was before its weights were packed: int64 ``[B, L]``."""
        with suspended(self.target):
            return self.target.generate(**group.inputs, **self._shared(max_new_tokens))

    def speculative(
        self,
        group: Group,
        assistant: Any,
        k: NumDraftTokens,
        max_new_tokens: int | None = None,
        tree_nodes: int = 0,
        **extra: Any,
    ) -> Any:
        """The same with a drafter."""
        return self.target.generate(
            **group.inputs,
            **self._shared(max_new_tokens),
            assistant_model=assistant,
            num_assistant_tokens=k,
            num_tree_nodes=tree_nodes,
            num_speculative_tokens_per_batch_size=self._schedule,
            speculative_config=self._lookup,
            **self._compiled,
            **extra,
        )

    def new_tokens(self, sequences: torch.Tensor, group: Group) -> list[list[int]]:
        """What each row of a call's result emitted, up to its end token."""
        rows = sequences[:, group.width :].tolist()
        return [self._up_to_end(row) for row in rows]

    def _shared(self, max_new_tokens: int | None) -> dict[str, Any]:
        return {
            "max_new_tokens": max_new_tokens or self.max_new_tokens,
            "do_sample": False,
            "num_beams": 1,
            # A model's own penalty would hide what its logits say about a difference.
            "repetition_penalty": 1.0,
            "pad_token_id": self._pad,
        }

    def _up_to_end(self, tokens: list[int]) -> list[int]:
        for index, token in enumerate(tokens):
            if token in self._ends:
                return tokens[: index + 1]
        return tokens
