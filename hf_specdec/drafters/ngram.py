"""Drafting without a model: what followed the last tokens when they stood in the text before.

The search is the loop's own (`prompt_lookup`), which does it for every drafter that is asked to;
where nothing matches there is nothing to propose.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from hf_specdec.drafters.no_drafts import NoDrafts
from hf_specdec.options.config import Method
from hf_specdec.options.lookup_options import PromptLookup
from hf_specdec.prompt_lookup import LookupDrafts

# Tokens that a step can look up; wider forwards cost more than such long matches bring.
_MOST = 64


class NGramDrafter(NoDrafts):
    """Drafts from the text alone, for any target.

    Args:
        lookup: what transformers' own assisted loop uses; ours has it from the call.
    """

    method: ClassVar[Method | None] = "ngram"
    requires_model_outputs = False

    def __init__(self, lookup: PromptLookup | None = None):
        self._lookup = lookup or PromptLookup()

    @property
    def max_draft_tokens(self) -> int:
        """The most tokens that are looked up in a step."""
        return _MOST

    @property
    def default_draft_tokens(self) -> int:
        """Tokens to look up where nobody asks for a number."""
        return PromptLookup.num_tokens

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs: Any) -> Any:
        """See `Drafter.get_candidates`."""
        found = LookupDrafts(self._lookup)
        lengths = torch.full_like(input_ids[:, 0], input_ids.shape[1])
        found.settle(found.search(input_ids, lengths).tolist())
        if not found.serves_all:
            return input_ids, None
        drafts = found.fill(input_ids, lengths, self._lookup.num_tokens, None)
        return torch.cat([input_ids, drafts], dim=1), None
