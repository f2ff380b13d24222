"""The seams into transformers; the only file that touches its internals.

transformers has no registry for candidate generators, so a few methods of ``GenerationMixin`` are
wrapped when hf_specdec is imported. A wrapper looks at its arguments, serves our assistants, and
calls the original for everything else, untouched. `disable` puts every original back. Whether this
version of transformers has what they rely on, `seams` looks at before.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMixin
from transformers.pipelines import base as transformers_pipelines

from hf_specdec import pipelines
from hf_specdec.call import call_options, compatibility, compile_options, resolution
from hf_specdec.call.decoding_settings import DecodingSettings
from hf_specdec.call.runners import target_runner
from hf_specdec.common_call import call_context, common_drafter, settle_call
from hf_specdec.decoding import SpeculativeDecoder
from hf_specdec.metrics import SpeculationStats, SpeculationTotals
from hf_specdec.modeling.placement import head_device
from hf_specdec.options.config import SpeculativeConfig, check_verification
from hf_specdec.ranks import ranks_of
from hf_specdec.registry import FAMILIES, drafter_for, has_mtp, mtp_network
from hf_specdec.targets.adapters import check_rows
from hf_specdec.targets.prompt import Prompt
from hf_specdec.targets.reach import check_reach
from hf_specdec.targets.slow_dtypes import warn_if_slow

# Where the seams are that aren't methods of GenerationMixin.
_OWNERS: dict[str, Any] = {
    "load_assistant_model": transformers_pipelines,
    "_prepare_generate_kwargs": transformers_pipelines.Pipeline,
}
_OPTIONS = "speculation_options"
# Arguments of ``generate`` that transformers doesn't know.
_OWN_ARGUMENTS = (
    "num_speculative_tokens_per_batch_size",
    "num_tree_nodes",
    "row_seeds",
    "speculative_config",
    "speculative_token_tree",
    "verification",
)
ATTACHED = "_hf_specdec_attachment"
"""Where a target keeps its `Attachment`."""
_originals: dict[str, Callable[..., Any]] = {}


@dataclass(frozen=True)
class Attachment:
    """What `attach` leaves with a target: it is copied, pickled and deleted with it."""

    assistant: Any
    config: SpeculativeConfig
    totals: SpeculationTotals = field(default_factory=SpeculationTotals)


def _generate(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let a target use the assistant that `attach` gave it, or its own MTP layers if asked to."""

    @functools.wraps(original)
    def wrapper(self, *args, **kwargs):
        # assistant_model is the seventh positional argument behind self.
        is_free = len(args) < 7 and kwargs.get("assistant_model") is None
        if not is_free or not _speculates(self, args, kwargs):
            return original(self, *args, **kwargs)
        attachment = self.__dict__.get(ATTACHED)
        if has_mtp(self) and _asks_for_mtp(self, args, kwargs, attachment):
            kwargs["assistant_model"] = mtp_network(self)
            kwargs["use_mtp"] = False
        elif attachment is not None:
            kwargs["assistant_model"] = attachment.assistant
            kwargs.setdefault("speculative_config", attachment.config)
        return original(self, *args, **kwargs)

    return wrapper


def _generation_config(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The config of a call of ``generate``, whose own arguments come before it."""
    config = args[1] if len(args) > 1 else kwargs.get("generation_config")
    return config or target.generation_config


def _asks_for_mtp(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], attachment: Attachment | None
) -> bool:
    """Whether a call says ``use_mtp``; what is attached comes before a config that says so."""
    if "use_mtp" in kwargs or attachment is not None:
        return bool(kwargs.get("use_mtp"))
    return bool(getattr(_generation_config(target, args, kwargs), "use_mtp", False))


def _speculates(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is one that speculation can serve."""
    config = _generation_config(target, args, kwargs)
    beams = kwargs.get("num_beams") or getattr(config, "num_beams", None) or 1
    return beams == 1 and kwargs.get("custom_generate") is None


def _extract_generation_mode_kwargs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Take our own arguments of ``generate`` out before transformers would refuse them."""

    @functools.wraps(original)
    def wrapper(self, custom_generate, kwargs, synced_gpus, assistant_model, streamer):
        if drafter_for(assistant_model) is None or custom_generate is not None:
            return original(self, custom_generate, kwargs, synced_gpus, assistant_model, streamer)
        options = {name: kwargs.pop(name, None) for name in _OWN_ARGUMENTS}
        config = options["speculative_config"]
        options["speculative_config"] = SpeculativeConfig.from_value(config or {})
        for name in call_options.TRANSFORMERS_DEFAULTS:
            options[name] = kwargs.get(name)
        extracted = original(self, custom_generate, kwargs, synced_gpus, assistant_model, streamer)
        return {**extracted, _OPTIONS: options}

    return wrapper


def _validate_generation_mode(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace checks that would refuse a good pair, and refuse bad ones before any work."""

    @functools.wraps(original)
    def wrapper(self, generation_mode, generation_config, generation_mode_kwargs):
        assistant = generation_mode_kwargs.get("assistant_model")
        drafter = drafter_for(assistant)
        if drafter is None or _OPTIONS not in generation_mode_kwargs:
            return original(self, generation_mode, generation_config, generation_mode_kwargs)
        compatibility.check_target(self)
        compatibility.check_generation_config(generation_config)
        drafter.check(self)
        options = generation_mode_kwargs[_OPTIONS]
        resolution.check_call(options["speculative_config"], drafter, assistant, self)
        options["draft_length"] = call_options.draft_length(
            options, generation_config, drafter, assistant
        )
        options["confidence_threshold"] = call_options.confidence_threshold(
            options, generation_config, assistant
        )
        options["lookup"] = call_options.prompt_lookup(
            options, generation_config, drafter, options["draft_length"]
        )
        options["tree"] = call_options.tree_plan(options, drafter, assistant, self)
        options["verification"] = (
            options["verification"] or options["speculative_config"].verification
        )
        check_verification(options["verification"])
        options["outputs"] = compatibility.output_request(generation_config, self)
        options["compile"] = compile_options.compile_choice(
            generation_config, self, options["outputs"], drafter.feed, options["tree"] is not None
        )
        # Checked above: what is left gives the same tokens from a cache of ours.
        generation_config.cache_implementation = None
        return None

    return wrapper


def _get_candidate_generator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Give transformers' own loop our drafter."""

    @functools.wraps(original)
    def wrapper(self, *args, **kwargs):
        drafter = drafter_for(kwargs.get("assistant_model"))
        if drafter is None:
            return original(self, *args, **kwargs)
        if drafter.feed != "post_norm":
            raise ValueError(
                "transformers' own assisted loop hands out states behind the final norm only, and "
                f"this assistant_model reads feed={drafter.feed!r}. Use hf_specdec's loop: "
                "generate(assistant_model=...) while hf_specdec is enabled."
            )
        drafter.start(self)
        return drafter

    return wrapper


def _assisted_decoding(original: Callable[..., Any]) -> Callable[..., Any]:
    """Run our loop when the assistant is ours."""

    # generate() looks at the signature to see which arguments to prepare.
    @functools.wraps(original)
    def wrapper(self, input_ids, *args, **kwargs):
        options = kwargs.pop(_OPTIONS, None)
        if options is None:
            return original(self, input_ids, *args, **kwargs)
        return _decode(self, input_ids, options, *args, **kwargs)

    return wrapper


def _decode(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    options: dict[str, Any],
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    assistant_model: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    inputs_tensor: Any = None,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """What ``_assisted_decoding`` is called with, served by `SpeculativeDecoder`."""
    device = head_device(target)
    ranks = ranks_of(target, synced_gpus, device)
    drafter = drafter_for(assistant_model)
    assert drafter is not None
    compatibility.check_ranks(ranks.in_step, target, options["compile"], drafter)
    num_rows = input_ids.shape[0]
    compatibility.check_inputs(input_ids, model_kwargs.get("attention_mask"), model_kwargs)
    compatibility.check_chunks(generation_config.prefill_chunk_size, model_kwargs)
    compatibility.check_processors(logits_processor, num_rows)
    compatibility.check_streamer(streamer, num_rows)
    check_rows(target, num_rows)
    prompt = _prompt(input_ids, generation_config, model_kwargs, device)
    cache = model_kwargs.get("cache")
    is_given = cache is not None and getattr(cache, "_is_user_defined", False)
    if is_given:
        compatibility.check_cache(cache, num_rows, input_ids.shape[1], prompt.num_slots, target)
    max_length = generation_config.max_length + prompt.slots_before
    held = cache.get_seq_length() if cache is not None and is_given else 0
    check_reach(target, prompt, max_length, held, generation_config.prefill_chunk_size)
    settings = _settings(generation_config, options, num_rows, device)
    warn_if_slow(target, settings.most_draft_tokens, settings.draft_length.schedule)
    settings = settle_call(ranks, settings, prompt, target, cache if is_given else None)
    returns_dict = generation_config.return_dict_in_generate
    is_retained = returns_dict or is_given
    runner, windows = target_runner(
        target,
        prompt,
        settings,
        max_length,
        options["compile"],
        given=cache if is_given else None,
        retain=is_retained,
    )
    drafter.compile_with(options["compile"])
    drafter = common_drafter(drafter, settings)
    decoder = SpeculativeDecoder(
        runner, drafter, prompt, settings, logits_processor, stopping_criteria, streamer, windows
    )
    with call_context(ranks, drafter, target):
        decoded = decoder.run(model_kwargs, cache if is_retained else None)
    decoded = decoded.on(input_ids.device)
    call_options.remember(assistant_model, settings.draft_length)
    _count(target, assistant_model, decoded.stats)
    if not returns_dict:
        return decoded.sequences
    output = GenerateDecoderOnlyOutput(
        sequences=cast(torch.LongTensor, decoded.sequences), cache=decoded.cache, **decoded.outputs
    )
    output.speculation = decoded.stats
    return output


def _count(target: Any, assistant_model: Any, stats: SpeculationStats) -> None:
    """Add a call to the totals of the attachment that it drafted with."""
    attachment: Attachment | None = target.__dict__.get(ATTACHED)
    if attachment is not None and attachment.assistant is assistant_model:
        attachment.totals.add(stats)


def _settings(
    generation_config: GenerationConfig,
    options: dict[str, Any],
    num_rows: int,
    device: torch.device,
) -> DecodingSettings:
    """What the loop is asked for."""
    eos, pad = generation_config._eos_token_tensor, generation_config._pad_token_tensor
    do_sample = bool(generation_config.do_sample)
    return DecodingSettings(
        draft_length=options["draft_length"],
        do_sample=do_sample,
        row_seeds=compatibility.row_seeds(options["row_seeds"], num_rows, device, do_sample),
        rejection=options["verification"] == "rejection",
        eos_token_ids=eos.to(device) if eos is not None else None,
        pad_token_id=int(pad) if pad is not None else 0,
        max_length=generation_config.max_length,
        confidence_threshold=options["confidence_threshold"],
        prefill_chunk_size=generation_config.prefill_chunk_size,
        outputs=options["outputs"],
        lookup=options["lookup"],
        tree=options["tree"],
    )


def _prompt(
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    device: torch.device,
) -> Prompt:
    """Where the prompt's tokens stand, by the rules of transformers' own prefill."""
    mask, embeds = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
    num_slots = input_ids.shape[1] if embeds is None else embeds.shape[1]
    cache = model_kwargs.get("cache")
    if embeds is None and cache is not None and cache.get_seq_length() > 0:
        # A mask longer than the ids says that only the new tokens were passed. A mask of ones has
        # been dropped by now, and its length noted.
        length = getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
        if length > num_slots:
            num_slots = length
    position_ids = model_kwargs.get("position_ids")
    return Prompt.of_call(input_ids, num_slots, mask, position_ids, embeds, device)


_WRAPPERS = {
    "generate": _generate,
    "_extract_generation_mode_kwargs": _extract_generation_mode_kwargs,
    "_validate_generation_mode": _validate_generation_mode,
    "_get_candidate_generator": _get_candidate_generator,
    "_assisted_decoding": _assisted_decoding,
    "load_assistant_model": pipelines.load_our_assistants,
    "_prepare_generate_kwargs": pipelines.pass_our_assistants,
}


def _owner(name: str) -> Any:
    """The class or module that a seam is in."""
    return _OWNERS.get(name, GenerationMixin)


def _namespaces() -> list[Any]:
    """The module ``transformers``, which its first import of a network replaces by another."""
    modules = (transformers, sys.modules["transformers"])
    return list({id(module): module for module in modules}.values())


def _own_models() -> list[type[PreTrainedModel]]:
    """The networks that transformers doesn't have itself."""
    classes = [family.model_class for family in FAMILIES.values()]
    return [cls for cls in classes if not cls.__module__.startswith("transformers.")]


def enable() -> None:
    """Open the seams; done on import, harmless when done again."""
    if _originals:
        return
    for name, wrap in _WRAPPERS.items():
        _originals[name] = getattr(_owner(name), name)
        setattr(_owner(name), name, wrap(_originals[name]))
    for model_class in _own_models():
        # Pipelines and servers look up config.architectures in the transformers namespace.
        for namespace in _namespaces():
            setattr(namespace, model_class.__name__, model_class)


def disable() -> None:
    """Close the seams: every original is put back. Loaded models keep working without us."""
    for name, original in _originals.items():
        setattr(_owner(name), name, original)
    for model_class in _own_models() if _originals else ():
        for namespace in _namespaces():
            vars(namespace).pop(model_class.__name__, None)
    _originals.clear()
