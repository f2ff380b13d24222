"""SpeculativeConfig: how to speculate, in vLLM's words."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from hf_specdec.options import tree_words, vllm_words
from hf_specdec.options.lookup_options import check_positive
from hf_specdec.options.schedule import (
    AUTO,
    BatchSizeSchedule,
    NumDraftTokens,
    check_per_batch_size,
)

Method = Literal["mlp_speculator", "mtp", "ngram"]
Verification = Literal["match", "rejection"]
# Characters of a text in a message.
_LONGEST_SHOWN = 200


@dataclass
class SpeculativeConfig:
    """How to speculate; the fields are named as in vLLM's ``--speculative-config``.

    Attributes:
        method: the way of drafting; found from the model if ``None``. vLLM's deprecated ``*_mtp``
            names are read as ``"mtp"``.
        model: the drafter: Hub id, local folder, or a loaded model. ``"mtp"`` and ``"ngram"`` need
            none.
        num_speculative_tokens: K, tokens drafted a step; ``None`` leaves it to the checkpoint,
            ``"auto"`` chooses it while generating (not in vLLM).
        prompt_lookup_max: tokens compared at most where drafts are looked up in the text itself; 4
            if ``None``, and never less than ``prompt_lookup_min``.
        prompt_lookup_min: tokens that must match; 2 if ``None``, and never more than the former.
        prompt_lookup_num_tokens: with another method than ``"ngram"``: look up so many tokens first
            and ask the drafter where nothing matches (transformers' word, not vLLM's).
        draft_tensor_parallel_size: 1 or the target's tensor-parallel size.
        num_speculative_tokens_per_batch_size: ``[[start, end, K], ...]``, upper limits of K by the
            number of rows that are still generating.
        revision: of ``model``, where that is a Hub id.
        verification: ``"match"`` (default) emits exactly what the target alone would emit, also
            when sampling under a seed; ``"rejection"`` is the classical rule, equal in
            distribution. Not a field of vLLM's.
        speculative_token_tree: the tree of drafts to verify in place of a chain, as vLLM writes it:
            ``"[(0,), (1,), (0, 0)]"``, or ``"checkpoint"`` for the one the drafter's checkpoint
            describes (not in vLLM).
        num_tree_nodes: verify the best tree of so many drafts, chosen from measured acceptance; 0
            drafts chains. Not a field of vLLM's.

    Raises:
        ValueError: a field's value is not one of those that work.
    """

    method: Method | None = None
    model: Any = None
    num_speculative_tokens: NumDraftTokens | None = None
    draft_tensor_parallel_size: int | None = None
    num_speculative_tokens_per_batch_size: BatchSizeSchedule | None = None
    revision: str | None = None
    verification: Verification = "match"
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_num_tokens: int | None = None
    speculative_token_tree: str | Sequence[Sequence[int]] | None = None
    num_tree_nodes: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.method, str) and self.method in vllm_words.MTP_METHODS:
            # A FutureWarning, which Python shows to users; a DeprecationWarning it would not.
            warnings.warn(
                f"method={self.method!r} is deprecated, here as in vLLM; use method='mtp'",
                FutureWarning,
                stacklevel=3,
            )
            self.method = "mtp"
        if self.method is not None:
            vllm_words.check_method(self.method, get_args(Method))
        self._check_model()
        self._check_prompt_lookup()
        check_verification(self.verification)
        tree_words.tree_wish(self.speculative_token_tree, self.num_tree_nodes)
        if self.num_speculative_tokens_per_batch_size is not None:
            check_per_batch_size(self.num_speculative_tokens_per_batch_size)
        is_auto = self.num_speculative_tokens == AUTO
        if not is_auto and not _is_integer(self.num_speculative_tokens, at_least=0):
            raise ValueError(
                f"num_speculative_tokens={self.num_speculative_tokens!r} must be an integer of at "
                "least 0 (0 decodes without drafts), or 'auto'"
            )
        if not _is_integer(self.draft_tensor_parallel_size, at_least=1):
            raise ValueError(
                f"draft_tensor_parallel_size={self.draft_tensor_parallel_size!r} must be an "
                "integer: 1, or the target's tensor-parallel size"
            )

    def _check_model(self) -> None:
        """Raise ValueError for a model or revision that names nothing."""
        if isinstance(self.model, os.PathLike):
            self.model = os.fspath(self.model)
        if isinstance(self.model, str):
            if not self.model.strip():
                raise ValueError(
                    f"model={self.model!r} is empty: name a Hub id or a folder, or leave it out"
                )
            if self.model in vllm_words.NGRAM_MODELS:
                self._read_ngram_model()
        if self.revision is None:
            return
        if not isinstance(self.revision, str):
            raise ValueError(
                f"revision={self.revision!r} must be a string: a branch, tag or commit of model"
            )
        if not isinstance(self.model, str) or os.path.isdir(self.model):
            what = "a folder" if isinstance(self.model, str) else "no Hub id"
            raise ValueError(
                f"revision={self.revision!r} chooses a version of a model on the Hub, but model "
                f"is {what}. Leave revision out, or name a Hub id"
            )

    def _read_ngram_model(self) -> None:
        """Take the model's name for the method, as vLLM does."""
        if self.method not in (None, "ngram"):
            raise ValueError(
                f"method={self.method!r} contradicts model={self.model!r}, which means "
                "method='ngram'. Give one of them"
            )
        self.method, self.model = "ngram", None

    def _check_prompt_lookup(self) -> None:
        """Raise ValueError for lengths that don't work, or that nothing here would use."""
        names = ("prompt_lookup_max", "prompt_lookup_min", "prompt_lookup_num_tokens")
        given = [name for name in names if getattr(self, name) is not None]
        for name in given:
            check_positive(getattr(self, name), name)
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"prompt_lookup_min={low} must not be more than prompt_lookup_max={high}"
            )
        if self.method in ("mtp", "mlp_speculator") and given and not self.prompt_lookup_num_tokens:
            raise ValueError(
                f"{given[0]}={getattr(self, given[0])} is of method='ngram', but method="
                f"{self.method!r}. With it, set prompt_lookup_num_tokens as well: so many tokens "
                "are looked up first"
            )
        if self.method == "ngram":
            if self.prompt_lookup_num_tokens is not None:
                raise ValueError(
                    f"prompt_lookup_num_tokens={self.prompt_lookup_num_tokens} goes with another "
                    "method; with method='ngram' num_speculative_tokens says how many are looked up"
                )
            if self.model is not None:
                raise ValueError(
                    f"method='ngram' drafts from the text alone, but model is given "
                    f"({type(self.model).__name__}). Leave model out; or leave method out and set "
                    "prompt_lookup_num_tokens, to look up first and ask the model elsewhere"
                )

    @classmethod
    def from_value(cls, value: SpeculativeConfig | dict[str, Any] | str) -> SpeculativeConfig:
        """Read a config from a dict or from JSON text, as vLLM's command line takes it.

        Dashes in keys count as underscores. An object is checked again, as its fields may have
        been set since it was made.

        Raises:
            ValueError: not JSON, a key that isn't a field, or a value that doesn't work.
        """
        if isinstance(value, cls):
            return replace(value)
        if isinstance(value, str):
            text = value
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                start = text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
                raise ValueError(f"speculative_config={start!r} is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise ValueError(
                f"speculative_config is a {type(value).__name__}: it must be a dict, the JSON text "
                "of one, or a SpeculativeConfig"
            )
        named = {str(key).replace("-", "_"): entry for key, entry in value.items()}
        if len(named) < len(value):
            raise ValueError(
                f"speculative_config has keys {sorted(map(str, value))}, some of which differ in "
                "dashes and underscores alone; give each field once"
            )
        vllm_words.check_fields(named, [f.name for f in fields(cls)])
        return cls(**named)


def check_verification(verification: object) -> None:
    """Raise ValueError unless ``verification`` names a verification rule."""
    if verification not in get_args(Verification):
        raise ValueError(
            f"verification={verification!r} is not known; "
            f"choose from {list(get_args(Verification))}"
        )


def _is_integer(value: object, at_least: int) -> bool:
    """Whether an optional field holds an integer or nothing; True and False are no integers."""
    if value is None:
        return True
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least
