"""What a call of the loop is asked for, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers.cache_utils import Cache

from hf_specdec.metrics import SpeculationStats
from hf_specdec.options.lookup_options import PromptLookup
from hf_specdec.options.schedule import DraftLength
from hf_specdec.outputs import OutputRequest
from hf_specdec.ranks import Ranks
from hf_specdec.tree_shape import TreePlan


@dataclass
class DecodingSettings:
    """What one call is asked for.

    Attributes:
        draft_length: K; 0 decodes without drafts, by the same rules.
        do_sample: sample from the processed logits instead of taking the largest.
        row_seeds: int64 ``[B]`` on the target's device, the seeds of the sampling noise.
        rejection: verify by rejection sampling instead of by matching.
        eos_token_ids: int64 ``[E]`` or ``None``.
        pad_token_id: fills a finished row.
        max_length: tokens of the longest result, prompt and padding included.
        confidence_threshold: stop drafting after a token less probable than this in every row.
        prefill_chunk_size: tokens per forward of the prompt; all at once if ``None``.
        outputs: what to return besides the tokens.
        tree: which trees to draft; chains if ``None``.
        lookup: draft from the text itself where it repeats; never if ``None``.
        ranks: the processes that the call involves.
    """

    draft_length: DraftLength
    do_sample: bool
    row_seeds: torch.Tensor
    rejection: bool
    eos_token_ids: torch.Tensor | None
    pad_token_id: int
    max_length: int
    confidence_threshold: float = 0.0
    prefill_chunk_size: int | None = None
    outputs: OutputRequest = field(default_factory=OutputRequest)
    tree: TreePlan | None = None
    lookup: PromptLookup | None = None
    ranks: Ranks = field(default_factory=Ranks)

    @property
    def most_draft_tokens(self) -> int:
        """No step drafts more than this."""
        looked_up = self.lookup.num_tokens if self.lookup else 0
        nodes = self.tree.num_nodes if self.tree else 0
        return max(self.draft_length.limit, looked_up, nodes)


@dataclass
class Decoded:
    """The result of one call.

    Attributes:
        sequences: int64 ``[B, L]``, prompts and new tokens, finished rows padded.
        stats: acceptance statistics.
        outputs: the fields of transformers' output class that were asked for.
        cache: filled for the caller, if it was wanted and can be.
    """

    sequences: torch.Tensor
    stats: SpeculationStats
    outputs: dict[str, Any]
    cache: Cache | None

    def on(self, device: torch.device) -> Decoded:
        """The same where the caller's prompts are; a cache stays where its layers are."""
        if self.sequences.device == device:
            return self
        outputs = {name: _moved(value, device) for name, value in self.outputs.items()}
        return replace(self, sequences=self.sequences.to(device), outputs=outputs)


def _moved(value: Any, device: torch.device) -> Any:
    """Tensors in tuples of any depth, on a device."""
    if isinstance(value, tuple):
        return tuple(_moved(part, device) for part in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value
