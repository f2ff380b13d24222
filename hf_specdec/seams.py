"""What the engine relies on in other packages, looked for when it is imported.

A version that has renamed, moved or reshaped something is refused then, with everything that is
missing, in place of an error in the middle of a call. Names are looked up and signatures read;
nothing is called. A newer version in which all of this is there is used without a word.

Boundary: only looks. What is wrapped or called, and how, is `integration`'s and the other files'
own; each name that they import from a module inside transformers has a row here.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

from hf_specdec._version import __version__

SUPPORTED = {"transformers": ">=5.24", "torch": ">=2.6"}


@dataclass(frozen=True)
class Seam:
    """Something of another package.

    Attributes:
        module: where it is.
        name: its name there, dotted for a member.
        parameters: that it must take, unless it takes any keyword.
        mentions: names that its code must use; what it does with them can't be seen.
        abstract: the methods that a subclass may have to write, at most these.
        returns: what its annotation must begin with.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()
    abstract: tuple[str, ...] | None = None
    returns: str = ""

    def change(self) -> str | None:
        """What is no longer as it was, ``None`` if all is well."""
        try:
            found: Any = importlib.import_module(self.module)
            for part in self.name.split("."):
                found = getattr(found, part)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != self.module.partition(".")[0]:
                raise  # a package that it needs, such as fastapi
            return "is missing"
        except (ImportError, AttributeError):
            return "is missing"
        if self.abstract is not None:
            new = sorted(set(getattr(found, "__abstractmethods__", ())) - set(self.abstract))
            if new:
                return f"wants methods {new} of its subclasses"
        if not (self.parameters or self.mentions or self.returns):
            return None
        plain = inspect.unwrap(found)
        code = getattr(plain, "__code__", None)
        if self.mentions and code is not None:
            unused = [n for n in self.mentions if n not in code.co_names + code.co_consts]
            if unused:
                return f"doesn't use {unused}"
        signature = inspect.signature(plain)
        missing = [name for name in self.parameters if name not in signature.parameters]
        if missing:
            return f"no parameters {missing}"
        if not _text(signature.return_annotation).startswith(self.returns):
            return f"returns {_text(signature.return_annotation)}, not {self.returns}"
        return None


def check(seams: tuple[Seam, ...]) -> None:
    """Raise ImportError, naming all that has changed, unless every seam fits."""
    changes: dict[str, list[str]] = {}
    for seam in seams:
        if (change := seam.change()) is not None:
            package = seam.module.partition(".")[0]
            changes.setdefault(package, []).append(f"{seam.module}.{seam.name} ({change})")
    if not changes:
        return
    for package, found in changes.items():
        version = getattr(importlib.import_module(package), "__version__", "of no version")
        wanted = f"{package}{SUPPORTED[package]}"
        raise ImportError(
            f"hf_specdec {__version__} supports {package} {SUPPORTED[package]}; in {version}, "
            f"which is installed, has changed: {'; '.join(found)}. Install '{wanted}', in the "
            "newest version that this hf_specdec was tested with, or a newer hf_specdec."
        )


def _text(annotation: Any) -> str:
    if isinstance(annotation, str) or annotation is inspect.Signature.empty:
        return annotation if isinstance(annotation, str) else ""
    return getattr(annotation, "__name__", str(annotation))


def _all(module: str, *names: str) -> tuple[Seam, ...]:
    return tuple(Seam(module, name) for name in names)


_GENERATION = "transformers.generation.utils"
_CACHES = "transformers.cache_utils"
_LOADING = "transformers.core_model_loading"

WRAPPED = (
    Seam(
        _GENERATION,
        "GenerationMixin.generate",
        ("self", "kwargs", "assistant_model", "custom_generate", "generation_config"),
        mentions=("_extract_generation_mode_kwargs", "_validate_generation_mode", "_mask_length"),
    ),
    Seam(
        _GENERATION,
        "GenerationMixin._extract_generation_mode_kwargs",
        ("custom_generate", "kwargs", "synced_gpus", "assistant_model", "streamer"),
        returns="dict",
    ),
    Seam(
        _GENERATION,
        "GenerationMixin._validate_generation_mode",
        ("generation_mode", "generation_config", "generation_mode_kwargs"),
    ),
    Seam(_GENERATION, "GenerationMixin._get_candidate_generator", ("assistant_model",)),
    Seam(
        _GENERATION,
        "GenerationMixin._assisted_decoding",
        (
            "input_ids",
            "logits_processor",
            "stopping_criteria",
            "generation_config",
            "synced_gpus",
            "streamer",
            "assistant_model",
        ),
        mentions=("_get_candidate_generator",),
    ),
    Seam(
        "transformers.pipelines.base",
        "load_assistant_model",
        ("model", "assistant_model", "assistant_tokenizer"),
    ),
    Seam(
        "transformers.pipelines.base",
        "Pipeline._prepare_generate_kwargs",
        ("self", "generate_kwargs"),
    ),
)
"""What `integration` wraps."""

ENGINE = (
    *WRAPPED,
    # Fields of a call's generation config and cache that only these functions set.
    Seam(
        _GENERATION,
        "GenerationMixin._prepare_special_tokens",
        mentions=("_eos_token_tensor", "_pad_token_tensor"),
    ),
    Seam(
        _GENERATION,
        "GenerationMixin._prepare_cache_for_generation",
        mentions=("_is_user_defined",),
    ),
    *_all(_GENERATION, "GenerateDecoderOnlyOutput", "GenerationMixin"),
    Seam("transformers.generation.candidate_generator", "CandidateGenerator", abstract=()),
    Seam(
        "transformers.generation.candidate_generator",
        "CandidateGenerator.get_candidates",
        ("input_ids", "kwargs"),
    ),
    Seam(
        "transformers.generation.candidate_generator",
        "CandidateGenerator.update_candidate_strategy",
        ("input_ids", "scores", "num_matches"),
    ),
    *_all(
        "transformers.generation.logits_process",
        "TemperatureLogitsWarper",
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    ),
    *_all(
        "transformers.generation.stopping_criteria",
        "EosTokenCriteria",
        "MaxLengthCriteria",
        "StopStringCriteria",
        "StoppingCriteriaList",
    ),
    Seam("transformers.generation.stopping_criteria", "StoppingCriteria", abstract=()),
    Seam("transformers.generation.streamers", "BaseStreamer", abstract=()),
    # Caches: the layers are ours, what they are asked for is transformers'.
    Seam(_CACHES, "Cache.__init__", ("layers",)),
    Seam(_CACHES, "Cache.update", ("key_states", "value_states", "layer_idx")),
    *_all(_CACHES, "Cache.get_seq_length", "Cache.get_mask_sizes", "Cache.reset"),
    Seam(
        _CACHES,
        "CacheLayerMixin",
        abstract=(
            "get_mask_sizes",
            "get_max_length",
            "get_seq_length",
            "lazy_initialization",
            "update",
        ),
    ),
    *_all(_CACHES, "CacheLayerMixin.offload", "CacheLayerMixin.prefetch", "DynamicLayer"),
    Seam(_CACHES, "DynamicCache.__init__", ("config",)),
    *_all(_CACHES, "DynamicSlidingWindowLayer", "LinearAttentionCacheLayerMixin"),
    Seam(_CACHES, "get_layer_types_and_kwargs", ("config",), returns="tuple"),
    # Attention and masks.
    Seam("transformers", "AttentionInterface.register", ("key", "value")),
    Seam("transformers", "AttentionMaskInterface.register", ("key", "value")),
    Seam(
        "transformers.integrations.sdpa_attention",
        "sdpa_attention_forward",
        ("module", "query", "key", "value", "attention_mask", "dropout", "scaling"),
    ),
    *_all("transformers.masking_utils", "eager_mask", "flash_attention_mask", "sdpa_mask"),
    *_all("transformers.integrations.flash_attention", "flash_attention_forward"),
    *_all("transformers.distributed", "DistributedConfig"),
    # MTP weights out of a target's checkpoint.
    Seam("transformers.conversion_mapping", "get_checkpoint_conversion_mapping", ("model_type",)),
    Seam(
        _LOADING,
        "convert_and_load_state_dict_in_model",
        ("model", "state_dict", "load_config"),
    ),
    Seam(
        "transformers.modeling_utils",
        "LoadStateDictConfig",
        ("weight_mapping", "device_map", "dtype"),
    ),
    # Layers that networks of ours are made of.
    *_all(
        "transformers.models.longcat_flash.modeling_longcat_flash",
        "LongcatFlashMLA",
        "LongcatFlashMLP",
        "LongcatFlashRMSNorm",
    ),
    *_all(
        "transformers.models.qwen2.modeling_qwen2",
        "Qwen2DecoderLayer",
        "Qwen2ForCausalLM",
        "Qwen2Model",
        "Qwen2PreTrainedModel",
        "Qwen2RMSNorm",
    ),
    *_all(
        "transformers.models.auto.modeling_auto",
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    ),
    *_all("transformers.utils", "ModelOutput", "cached_file"),
    *_all(
        "transformers.utils.logging",
        "disable_progress_bar",
        "enable_progress_bar",
        "is_progress_bar_enabled",
    ),
    # torch.
    *_all("torch.compiler", "is_compiling"),
    *_all("torch.nn.functional", "scaled_dot_product_attention"),
)
"""What `import hf_specdec` brings needs."""

SERVING = (
    Seam(
        "transformers.cli.serving.server",
        "build_server",
        (
            "chat_handler",
            "completion_handler",
            "response_handler",
            "transcription_handler",
            "generation_state",
            "enable_cors",
        ),
    ),
    *_all("transformers.cli.serving.response", "ResponseHandler"),
    *_all(
        "transformers.cli.serving.utils",
        "BaseHandler",
        "GenerationState",
        "Modality",
        "ReasoningText",
        "ToolCall",
        "build_response_parser",
        "response_events_to_chunks",
    ),
)
"""What `hf_specdec.serving` needs."""
