"""What a `SpeculativeConfig` means for a target: which drafter, of which method, and how many.

An explicit method always wins: names of folders and repositories say nothing, and a model of
another method is refused, from its config, before its weights are read. Without a method the
model's family decides; without a model, too, the target's own MTP layers draft.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from hf_specdec.call import compatibility
from hf_specdec.drafters import Drafter, Gemma4Drafter, MTPDrafter, NGramDrafter
from hf_specdec.modeling.checkpoint_files import read_weights_files
from hf_specdec.modeling.checkpoint_headers import check_stored_dtypes, check_stored_shapes
from hf_specdec.options.config import SpeculativeConfig
from hf_specdec.options.schedule import AUTO
from hf_specdec.options.tree_words import tree_wish
from hf_specdec.registry import FAMILIES, MTP_MODEL_TYPES, drafter_for, mtp_network

_TABLES_OF_IDS = ("draft_token_ids", "token_ordering")


@dataclass(frozen=True)
class Resolution:
    """What a config came down to.

    Attributes:
        assistant: for ``generate(assistant_model=...)``.
        config: without the model, and with everything decided that can be before a call.
    """

    assistant: Any
    config: SpeculativeConfig


def resolve(config: SpeculativeConfig, target: PreTrainedModel) -> Resolution:
    """Find, load and check the drafter.

    Raises:
        ValueError: fields that contradict each other, the model or the target.
    """
    _check_tensor_parallel_size(config, target)
    model = config.model
    assistant: Any
    if config.method == "ngram":
        assistant = NGramDrafter()
    elif model is None or _is_same(model, target):
        assistant = _own_layers(config, target)
    elif isinstance(model, str):
        assistant = _load(config, target)
    else:
        assistant = model
    drafter = drafter_for(assistant)
    if drafter is None:
        raise _no_drafter(config, f"a {type(model).__name__}", _model_type(model))
    _check_method(config, drafter)
    drafter.check(target)
    _check_num_draft_tokens(config, drafter)
    wish = tree_wish(config.speculative_token_tree, config.num_tree_nodes)
    if wish is not None:
        compatibility.check_tree(wish, drafter, target)
    _warn_of_layers_run_again(config, drafter)
    size = config.draft_tensor_parallel_size
    if size is None:
        # vLLM's rule: a speculator is never cut, MTP layers are the target's.
        cut = isinstance(drafter, (MTPDrafter, Gemma4Drafter))
        size = _tensor_parallel_size(target) if cut else 1
    decided = replace(
        config,
        method=drafter.method,
        model=None,
        revision=None,
        draft_tensor_parallel_size=size,
    )
    return Resolution(assistant, decided)


def check_call(config: SpeculativeConfig, drafter: Drafter, assistant: Any, target: Any) -> None:
    """Check the config of one call, whose drafter is its ``assistant_model`` whatever it says.

    Raises:
        ValueError: a config that means another drafter.
    """
    _check_tensor_parallel_size(config, target)
    if config.model is not None:
        # The target may be named for its own MTP layers.
        others = [assistant, target] if drafter.method == "mtp" else [assistant]
        if not any(_is_same(config.model, other) for other in others):
            raise ValueError(
                f"speculative_config names model={_shown(config.model)}, but this call drafts with "
                f"its assistant_model, a {type(assistant).__name__}. Leave model out of the call's "
                "speculative_config, or pass it to hf_specdec.attach"
            )
    _check_method(config, drafter)


def _is_same(model: Any, other: Any) -> bool:
    """Whether ``model`` is a loaded model itself, or the name or folder it was loaded from."""
    if model is other:
        return True
    name = getattr(other, "name_or_path", None)
    if not isinstance(model, str) or not isinstance(name, str) or not name:
        return False
    folders = os.path.isdir(model) and os.path.isdir(name)
    return model == name or (folders and os.path.samefile(model, name))


def _own_layers(config: SpeculativeConfig, target: PreTrainedModel) -> Any:
    """The target's own MTP layers, for a config without a model or with the target as model."""
    if config.method == "mlp_speculator":
        if config.model is None:
            raise ValueError(
                "method='mlp_speculator': speculative_config has no model. Name the speculator's "
                "Hub id or folder, or pass a loaded one"
            )
        raise ValueError(
            f"method='mlp_speculator' contradicts model={_shown(config.model)}, which is the "
            "target itself. Name the speculator's Hub id or folder, or pass a loaded one"
        )
    if config.revision is not None:
        raise ValueError(
            f"revision={config.revision!r} chooses a version of a drafter, but model="
            f"{_shown(config.model)} is the target, which is loaded. Leave revision out, or load "
            "the target in that revision"
        )
    try:
        return mtp_network(target)
    except ValueError as error:
        if config.method is not None:
            raise
        means = "has no model" if config.model is None else "names the target itself as model"
        raise ValueError(
            f"speculative_config {means}, and the target can't draft for itself. Name the "
            f"drafter's Hub id or folder, or pass a loaded drafter. ({error})"
        ) from None


def _load(config: SpeculativeConfig, target: PreTrainedModel) -> PreTrainedModel:
    """Load the drafter that ``config.model`` names, once its config is known to be right."""
    name, revision = config.model, config.revision
    assert isinstance(name, str)
    try:
        model_type = PreTrainedConfig.get_config_dict(name, revision=revision)[0].get("model_type")
        family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
        if family is not None:
            drafter_config = AutoConfig.from_pretrained(name, revision=revision)
            drafter = family.without_weights(drafter_config)
    except Exception as error:  # of a config made up by others anything can come
        what = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
        at = "" if revision is None else f" with revision={revision!r}"
        raise ValueError(
            f"speculative_config.model={name!r}{at} can't be read; it must be the Hub id or folder "
            f"of a drafter, or a loaded one: {what}{error}"
        ) from error
    if family is None:
        what = "a model" if model_type else "something without a model_type in a config.json"
        raise _no_drafter(config, what, model_type)
    _check_method(config, drafter)
    drafter.check_config(target)
    _check_num_draft_tokens(config, drafter)
    cut: dict[str, Any] = {}
    size = _tensor_parallel_size(target)
    if size > 1 and isinstance(drafter, Gemma4Drafter):
        # It attends to the keys of the target, of which each rank has those of some heads.
        cut = {"distributed_config": DistributedConfig(tp_size=size)}
    network = drafter.model  # type: ignore[attr-defined]
    loaded = _loaded(name, revision, network, target.dtype, cut)
    return loaded if cut else loaded.to(drafter.device_for(target))


def _loaded(
    name: str,
    revision: str | None,
    network: PreTrainedModel,
    dtype: torch.dtype,
    cut: dict[str, Any],
) -> Any:
    """A drafter's network with all of its weights.

    Args:
        name, revision: of the checkpoint.
        network: of its config, without weights.
        dtype: the target's.
        cut: how it is spread over ranks, in the words of ``from_pretrained``.
    """
    files = read_weights_files(name, revision=revision)
    if files is not None and getattr(network.config, "quantization_config", None) is None:
        check_stored_dtypes(name, files.entries, lambda key: key.endswith(_TABLES_OF_IDS))
        check_stored_shapes(name, files.entries, network)
    try:
        loaded, report = AutoModel.from_pretrained(
            name, revision=revision, dtype=dtype, output_loading_info=True, **cut
        )
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ValueError(f"the weights of {name!r} don't fit its config: {error}") from error
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"the weights of {name!r} don't fit its config: {len(missing)} are missing, "
            f"{', '.join(missing[:8])}; download the checkpoint again"
        )
    return loaded


def _no_drafter(config: SpeculativeConfig, what: str, model_type: str | None) -> ValueError:
    """The error for a model that isn't a drafter."""
    known = f"{what} with model_type={model_type!r}" if model_type else what
    named = f"speculative_config.model={_shown(config.model)} is {known}"
    if config.method == "mtp" or model_type in MTP_MODEL_TYPES:
        return ValueError(
            f"method='mtp' drafts with the target's own layers, but {named} and not the target. "
            "Leave model out, or name the assistant of a Gemma 4 target"
        )
    if config.method is not None:
        named = f"method={config.method!r} contradicts model: {named}"
    return ValueError(
        f"{named}, which hf_specdec has no drafter for; it has drafters for {sorted(FAMILIES)}. A "
        "plain smaller model drafts in transformers itself: load it and call "
        "generate(assistant_model=...)"
    )


def _check_method(config: SpeculativeConfig, drafter: Drafter) -> None:
    """Raise ValueError if an explicit method is not the drafter's."""
    if config.method in (None, drafter.method):
        return
    model = "the assistant_model" if config.model is None else f"model={_shown(config.model)}"
    if drafter.method is None:
        what = f"a drafter of its own kind ({type(drafter).__name__}). Leave method out"
    else:
        what = f"of method={drafter.method!r}. Set that method or leave it out"
    if config.method == "mtp":
        raise ValueError(
            f"method='mtp' drafts with the target's own layers, but {model} is {what}; for the "
            "target's own layers leave model out"
        )
    raise ValueError(f"method={config.method!r} contradicts {model}, which is {what}")


def _check_num_draft_tokens(config: SpeculativeConfig, drafter: Drafter) -> None:
    k = config.num_speculative_tokens
    if k is not None and k != AUTO:
        compatibility.check_num_draft_tokens(k, drafter, "num_speculative_tokens")


def _warn_of_layers_run_again(config: SpeculativeConfig, drafter: Drafter) -> None:
    """Say, when a config is attached and not in every call, that K exceeds the MTP layers."""
    k, layers = config.num_speculative_tokens, drafter.default_draft_tokens
    if isinstance(drafter, MTPDrafter) and isinstance(k, int) and k > layers:
        warnings.warn(
            f"num_speculative_tokens={k} is more than n_predict={layers}, the number of MTP layers "
            "of the model: they run again for the further tokens, of which fewer may be accepted",
            stacklevel=4,
        )


def _tensor_parallel_size(target: Any) -> int:
    """Ranks that the target is cut for; transformers has ``None`` where it isn't."""
    return getattr(target, "tp_size", None) or 1


def _check_tensor_parallel_size(config: SpeculativeConfig, target: Any) -> None:
    """Raise ValueError unless the drafter's tensor-parallel size is 1 or the target's."""
    size = _tensor_parallel_size(target)
    if config.draft_tensor_parallel_size not in (None, 1, size):
        works = "1" if size == 1 else f"1 or {size}"
        raise ValueError(
            f"draft_tensor_parallel_size={config.draft_tensor_parallel_size} must be {works}: the "
            f"target's tensor-parallel size is {size}"
        )


def _model_type(model: Any) -> str | None:
    return getattr(getattr(model, "config", None), "model_type", None)


def _shown(model: Any) -> str:
    """A model in a message: its name, or the class of an object, whose repr may fill pages."""
    return repr(model) if isinstance(model, str) else f"<{type(model).__name__}>"
