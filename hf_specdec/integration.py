"""The seams into transformers; the only file that touches its internals.

transformers has no registry for candidate generators, so a few methods of ``GenerationMixin`` are
wrapped when hf_specdec is imported. A wrapper looks at its arguments, serves our assistants, and
calls the original for everything else, untouched. `disable` puts every original back.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMixin

from hf_specdec import compatibility
from hf_specdec.config import SpeculativeConfig, check_verification
from hf_specdec.decoding import DecodingSettings, SpeculativeDecoder
from hf_specdec.drafters import Drafter
from hf_specdec.registry import FAMILIES

SUPPORTED_TRANSFORMERS = ">=5.24"

# Parameters that each wrapper relies on, checked at import.
_RELIED_ON = {
    "_extract_generation_mode_kwargs": ["custom_generate", "kwargs", "assistant_model"],
    "_validate_generation_mode": [
        "generation_mode",
        "generation_config",
        "generation_mode_kwargs",
    ],
    "_get_candidate_generator": ["assistant_model"],
    "_assisted_decoding": [
        "input_ids",
        "logits_processor",
        "stopping_criteria",
        "generation_config",
        "synced_gpus",
        "streamer",
        "assistant_model",
    ],
}
_OPTIONS = "speculation_options"
# transformers fills in 20 where nobody asked for a number; it can't be told from a wish.
_TRANSFORMERS_DEFAULT_K = 20

_originals: dict[str, Callable[..., Any]] = {}


def drafter_for(assistant_model: Any) -> Drafter | None:
    """The drafter that serves an ``assistant_model``, or ``None`` if it isn't one of ours."""
    if isinstance(assistant_model, Drafter):
        return assistant_model
    config = getattr(assistant_model, "config", None)
    family = FAMILIES.get(getattr(config, "model_type", ""))
    if family is None:
        return None
    return family.drafter_class(assistant_model)


def _extract_generation_mode_kwargs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Take our own arguments of ``generate`` out before transformers would refuse them."""

    @functools.wraps(original)
    def wrapper(self, custom_generate, kwargs, synced_gpus, assistant_model, streamer):
        if drafter_for(assistant_model) is None or custom_generate is not None:
            return original(self, custom_generate, kwargs, synced_gpus, assistant_model, streamer)
        options = {name: kwargs.pop(name, None) for name in ("row_seeds", "verification")}
        options["num_assistant_tokens"] = kwargs.get("num_assistant_tokens")
        extracted = original(self, custom_generate, kwargs, synced_gpus, assistant_model, streamer)
        return {**extracted, _OPTIONS: options}

    return wrapper


def _validate_generation_mode(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace checks that would refuse a good pair, and refuse bad ones before any work."""

    @functools.wraps(original)
    def wrapper(self, generation_mode, generation_config, generation_mode_kwargs):
        drafter = drafter_for(generation_mode_kwargs.get("assistant_model"))
        if drafter is None or _OPTIONS not in generation_mode_kwargs:
            return original(self, generation_mode, generation_config, generation_mode_kwargs)
        compatibility.check_target(self)
        compatibility.check_generation_config(generation_config)
        drafter.check(self)
        options = generation_mode_kwargs[_OPTIONS]
        options["num_draft_tokens"] = _num_draft_tokens(
            options["num_assistant_tokens"],
            generation_config,
            drafter,
            generation_mode_kwargs["assistant_model"],
        )
        options["verification"] = (
            options["verification"]
            or _attached(generation_mode_kwargs["assistant_model"]).verification
        )
        check_verification(options["verification"])
        return None

    return wrapper


def _get_candidate_generator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Give transformers' own loop our drafter."""

    @functools.wraps(original)
    def wrapper(self, *args, **kwargs):
        drafter = drafter_for(kwargs.get("assistant_model"))
        if drafter is None:
            return original(self, *args, **kwargs)
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
    if synced_gpus:
        raise ValueError(
            "synced_gpus=True isn't available together with assistant_model: ranks would have to "
            "run the same number of forwards. Set synced_gpus=False."
        )
    device = target.get_output_embeddings().weight.device
    attention_mask = model_kwargs.get("attention_mask")
    compatibility.check_inputs(input_ids, attention_mask, model_kwargs)
    compatibility.check_processors(logits_processor, input_ids.shape[0])
    num_rows = input_ids.shape[0]
    if streamer is not None and num_rows > 1:
        raise ValueError(f"streamer takes one row, but the batch has {num_rows} rows")
    input_ids = input_ids.to(device)
    padding = input_ids.new_zeros(num_rows)
    if attention_mask is not None:
        padding = (attention_mask == 0).sum(dim=1).to(device)
    eos, pad = generation_config._eos_token_tensor, generation_config._pad_token_tensor
    settings = DecodingSettings(
        num_draft_tokens=options["num_draft_tokens"],
        do_sample=bool(generation_config.do_sample),
        row_seeds=compatibility.row_seeds(options["row_seeds"], num_rows, device),
        rejection=options["verification"] == "rejection",
        eos_token_ids=eos.to(device) if eos is not None else None,
        pad_token_id=int(pad) if pad is not None else 0,
        max_length=generation_config.max_length,
    )
    drafter = drafter_for(assistant_model)
    assert drafter is not None
    decoder = SpeculativeDecoder(
        target, drafter, input_ids, padding, settings, logits_processor, stopping_criteria, streamer
    )
    sequences, stats = decoder.run(model_kwargs)
    if not generation_config.return_dict_in_generate:
        return sequences
    output = GenerateDecoderOnlyOutput(sequences=cast(torch.LongTensor, sequences))
    output.speculation = stats
    return output


def _num_draft_tokens(
    argument: Any, generation_config: GenerationConfig, drafter: Drafter, assistant_model: Any
) -> int:
    """K: the call's argument, its config, the assistant's config, SpeculativeConfig, checkpoint."""
    if argument is not None:
        return compatibility.check_num_draft_tokens(argument, drafter, "num_assistant_tokens")
    own = getattr(getattr(assistant_model, "generation_config", None), "num_assistant_tokens", None)
    for value, source in (
        (generation_config.num_assistant_tokens, "generation_config.num_assistant_tokens"),
        (own, "assistant_model.generation_config.num_assistant_tokens"),
    ):
        if value not in (None, _TRANSFORMERS_DEFAULT_K):
            return compatibility.check_num_draft_tokens(value, drafter, source)
    value = _attached(assistant_model).num_speculative_tokens
    if value is not None:
        return compatibility.check_num_draft_tokens(value, drafter, "num_speculative_tokens")
    return drafter.max_draft_tokens


def _attached(assistant_model: Any) -> SpeculativeConfig:
    """The SpeculativeConfig that `attach` left on an assistant, or the defaults."""
    return getattr(assistant_model, "speculative_config", None) or SpeculativeConfig()


_WRAPPERS = {
    "_extract_generation_mode_kwargs": _extract_generation_mode_kwargs,
    "_validate_generation_mode": _validate_generation_mode,
    "_get_candidate_generator": _get_candidate_generator,
    "_assisted_decoding": _assisted_decoding,
}


def check_transformers() -> None:
    """Raise ImportError if this transformers lacks what the seams rely on."""
    for name, parameters in _RELIED_ON.items():
        method = getattr(GenerationMixin, name, None)
        found = inspect.signature(method).parameters if method is not None else {}
        missing = [p for p in parameters if p not in found]
        if method is None or missing:
            what = f"no parameters {missing}" if method is not None else "is missing"
            raise ImportError(
                f"hf_specdec supports transformers {SUPPORTED_TRANSFORMERS}; in "
                f"{transformers.__version__} GenerationMixin.{name} has changed ({what}). Install "
                f"'transformers{SUPPORTED_TRANSFORMERS}' or a newer hf_specdec."
            )


def enable() -> None:
    """Open the seams; done on import, harmless when done again."""
    if _originals:
        return
    check_transformers()
    for name, wrap in _WRAPPERS.items():
        _originals[name] = getattr(GenerationMixin, name)
        setattr(GenerationMixin, name, wrap(_originals[name]))
    for family in FAMILIES.values():
        # Pipelines and servers look up config.architectures in the transformers namespace.
        setattr(transformers, family.model_class.__name__, family.model_class)


def disable() -> None:
    """Close the seams: every original is put back. Loaded models keep working without us."""
    for name, original in _originals.items():
        setattr(GenerationMixin, name, original)
    for family in FAMILIES.values() if _originals else ():
        delattr(transformers, family.model_class.__name__)
    _originals.clear()
