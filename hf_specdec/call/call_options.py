"""What a call asks for about drafting, from every place that can say so.

An argument of the call comes before the call's generation_config, that before the assistant's, that
before the `SpeculativeConfig`, and that before what the checkpoint says.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.auto_length import TREE, AutoDraftLength, Measurements
from hf_specdec.call import compatibility
from hf_specdec.drafters import Drafter, Gemma4Drafter, NGramDrafter
from hf_specdec.options.config import SpeculativeConfig
from hf_specdec.options.lookup_options import PromptLookup, check_positive
from hf_specdec.options.schedule import (
    AUTO,
    MOST_AUTO,
    DraftLength,
    check_confidence_threshold,
    check_per_batch_size,
    check_schedule,
)
from hf_specdec.options.tree_words import tree_wish
from hf_specdec.tree import TreeShape
from hf_specdec.tree_shape import (
    MOST_CHILDREN,
    AcceptanceRates,
    CheckpointTree,
    FixedTree,
    MeasuredTree,
    TreePlan,
)

# transformers fills these in where nobody asked for them; they can't be told from a wish.
TRANSFORMERS_DEFAULTS = {
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
}
# Drafters whose heuristic schedule goes on from call to call: the K they have reached.
_reached: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
# What "auto" has measured of a drafter.
_measured: WeakKeyDictionary[Any, Measurements] = WeakKeyDictionary()
# What trees of a drafter have shown.
_rates: WeakKeyDictionary[Any, AcceptanceRates] = WeakKeyDictionary()


def _first_wish(
    name: str, options: dict[str, Any], generation_config: GenerationConfig, assistant_model: Any
) -> Any:
    """A setting from the call's argument, its config, or the assistant's generation_config."""
    if options[name] is not None:
        return options[name]
    own = getattr(assistant_model, "generation_config", None)
    for value in (getattr(generation_config, name, None), getattr(own, name, None)):
        if value is not None and value != TRANSFORMERS_DEFAULTS[name]:
            return value
    return None


def draft_length(
    options: dict[str, Any],
    generation_config: GenerationConfig,
    drafter: Drafter,
    assistant_model: Any,
) -> DraftLength:
    """K and how it changes, from every place that can say so."""
    config: SpeculativeConfig = options["speculative_config"]
    how = check_schedule(
        _first_wish("num_assistant_tokens_schedule", options, generation_config, assistant_model)
        or "constant"
    )
    per_batch_size = options["num_speculative_tokens_per_batch_size"]
    if per_batch_size is None:
        per_batch_size = config.num_speculative_tokens_per_batch_size
    else:
        check_per_batch_size(per_batch_size)
    initial = _num_draft_tokens(options, generation_config, drafter, assistant_model)
    if isinstance(drafter, NGramDrafter):
        # What is looked up needs no proposal: the number is that of `prompt_lookup`.
        wanted = drafter.default_draft_tokens if initial == AUTO else initial
        return DraftLength(0, wanted, per_batch_size)
    if initial == AUTO:
        return _auto_length(drafter, assistant_model, per_batch_size, how)
    if how == "heuristic" and options["num_assistant_tokens"] is None:
        initial = _reached.get(assistant_model, initial)
    return DraftLength(initial, drafter.max_draft_tokens, per_batch_size, how)


def _auto_length(
    drafter: Drafter, assistant_model: Any, per_batch_size: Any, schedule: str
) -> AutoDraftLength:
    if schedule != "constant":
        raise ValueError(
            f"num_assistant_tokens={AUTO!r} and num_assistant_tokens_schedule={schedule!r} both "
            "change K while generating; give one of them"
        )
    layers = drafter.default_draft_tokens
    most = min(drafter.max_draft_tokens, max(layers, MOST_AUTO))
    # MTP layers are used in turn: all of them equally often where K goes beyond them.
    choices = [k for k in range(most + 1) if k <= layers or k % layers == 0]
    return AutoDraftLength(
        layers,
        most,
        per_batch_size,
        AUTO,
        measurements=_measured.setdefault(assistant_model, Measurements()),
        choices=choices,
    )


def _num_draft_tokens(
    options: dict[str, Any],
    generation_config: GenerationConfig,
    drafter: Drafter,
    assistant_model: Any,
) -> Any:
    """K: the call's argument, its config, the assistant's config, SpeculativeConfig, checkpoint."""
    name = "num_assistant_tokens"
    own = getattr(assistant_model, "generation_config", None)
    if isinstance(drafter, Gemma4Drafter):
        # Published with the checkpoint: its default, which a SpeculativeConfig comes before.
        own = None
    for value, source, default in (
        (options[name], name, None),
        (getattr(generation_config, name), f"generation_config.{name}", 20),
        (getattr(own, name, None), f"assistant_model.generation_config.{name}", 20),
        (options["speculative_config"].num_speculative_tokens, "num_speculative_tokens", None),
    ):
        if value == AUTO:
            return AUTO
        if value not in (None, default):
            return compatibility.check_num_draft_tokens(value, drafter, source)
    return drafter.default_draft_tokens


def confidence_threshold(
    options: dict[str, Any], generation_config: GenerationConfig, assistant_model: Any
) -> float:
    """The least probability after which drafting goes on; 0 where nobody asked for one."""
    name = "assistant_confidence_threshold"
    wish = _first_wish(name, options, generation_config, assistant_model)
    return 0.0 if wish is None else check_confidence_threshold(wish)


def prompt_lookup(
    options: dict[str, Any],
    generation_config: GenerationConfig,
    drafter: Drafter,
    length: DraftLength,
) -> PromptLookup | None:
    """How drafts are looked up in the text before the drafter is asked; ``None``: not at all.

    A call with ``num_assistant_tokens=0`` decodes without drafts of any kind.

    Raises:
        ValueError: a number that isn't a positive integer.
    """
    config: SpeculativeConfig = options["speculative_config"]
    name = "prompt_lookup_num_tokens"
    wanted = getattr(generation_config, name, None)
    if wanted is None:
        wanted = config.prompt_lookup_num_tokens
    elif isinstance(wanted, bool) or wanted != 0:
        # 0 turns off, for one call, what is attached.
        check_positive(wanted, name)
    if isinstance(drafter, NGramDrafter):
        wanted = wanted or length.most
    elif length.limit == 0:
        return None
    if not wanted:
        return None
    size_name = "max_matching_ngram_size"
    size = getattr(generation_config, size_name, None)
    if size is not None:
        check_positive(size, size_name)
    low = config.prompt_lookup_min
    high = size or config.prompt_lookup_max or max(PromptLookup.max_ngram, low or 0)
    return PromptLookup(wanted, high, min(low or PromptLookup.min_ngram, high))


def tree_plan(
    options: dict[str, Any], drafter: Drafter, assistant_model: Any, target: PreTrainedModel
) -> TreePlan | None:
    """Which trees to draft, by the call's arguments or the `SpeculativeConfig`; ``None``: chains.

    Raises:
        ValueError: a tree that doesn't work, or not with this drafter, target or threshold.
    """
    asked = options["speculative_token_tree"], options["num_tree_nodes"]
    if asked == (None, None):
        config: SpeculativeConfig = options["speculative_config"]
        asked = config.speculative_token_tree, config.num_tree_nodes
    wish = tree_wish(*asked)
    if wish is None:
        return None
    compatibility.check_tree(wish, drafter, target)
    if options["confidence_threshold"]:
        raise ValueError(
            f"{wish} and assistant_confidence_threshold={options['confidence_threshold']} don't go "
            "together: a tree is drafted as a whole. Give one of them"
        )
    if options["draft_length"].limit == 0:
        return None
    plan: TreePlan
    if wish.paths:
        plan = FixedTree(TreeShape(wish.paths))
    elif not wish.num_nodes:
        plan = CheckpointTree(drafter.max_candidate_nodes)
    else:
        plan = MeasuredTree(
            wish.num_nodes,
            min(MOST_CHILDREN, drafter.max_children),
            _rates.setdefault(assistant_model, AcceptanceRates()),
        )
    length = options["draft_length"]
    if isinstance(length, AutoDraftLength):
        length.choices = [*length.choices, TREE + plan.num_nodes]
    return plan


def remember(assistant_model: Any, length: DraftLength) -> None:
    """Let the next call go on where this one's heuristic ended."""
    if length.schedule == "heuristic":
        _reached[assistant_model] = length.current
