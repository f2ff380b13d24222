"""MTP weights from the checkpoint that a target was loaded from.

transformers drops them when it loads the target. They are looked up in the same folder or Hub
repository; of a sharded checkpoint only the shards that hold them are opened.

Boundary: from a loaded target to its [`MTPModel`]. When, and how long it is kept, is decided
elsewhere.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import cached_file

from hf_specdec.modeling.placement import head_device

from .families import MTPFamily, family_of
from .modeling_mtp import MTPModel

logger = logging.getLogger(__name__)

_INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
# DeepSeek's format for 8-bit weights: one factor for every block.
_SCALE = "_scale_inv"
_FP8_BLOCK = (128, 128)


def load_mtp(target: Any) -> MTPModel:
    """The MTP modules of a loaded target, on its device and in its dtype.

    Args:
        target: loaded with ``from_pretrained`` from a checkpoint that has MTP weights.

    Raises:
        ValueError: an unknown family; a target that says nothing of where it came from; a
            checkpoint without MTP weights, or with only some of those it declares (the keys are
            named).
    """
    family = family_of(target.config)
    if family is None:
        raise ValueError(
            f"{type(target).__name__} (model_type={target.config.model_type!r}) is of no family "
            "whose MTP layers are known"
        )
    text_config = target.config.get_text_config(decoder=True)
    source = target.config.name_or_path
    found = _read(
        source,
        getattr(target.config, "_commit_hash", None),
        lambda key: family.locate(key, text_config.num_hidden_layers) is not None,
        type(target).__name__,
    )
    if not found:
        raise ValueError(
            f"{source!r} holds no MTP weights: no key matches {family.where!r}"
            f"{_behind(family, text_config)}. Checkpoints saved by transformers' save_pretrained "
            f"lose them; load {type(target).__name__} from the published one"
        )
    weights = {}
    for key, tensor in found.items():
        rest = family.locate(key, text_config.num_hidden_layers)
        assert rest is not None
        name = family.rename(rest)
        if name is not None:
            weights[name] = (key, tensor)
    return _build(target, family, weights, source)


def _behind(family: MTPFamily, text_config: Any) -> str:
    if "<layer>" not in family.where:
        return ""
    return f" with a layer number of at least {text_config.num_hidden_layers}"


def _build(
    target: Any, family: MTPFamily, weights: dict[str, tuple[str, Tensor]], source: str
) -> MTPModel:
    """The network with its weights."""
    text_config = target.config.get_text_config(decoder=True)
    stored = 1 + max(
        (int(name.split(".")[1]) for name in weights if name.startswith("blocks.")), default=0
    )
    num_modules = family.declared_modules(text_config, target.config) or stored
    device = head_device(target)
    dtype = target.get_input_embeddings().weight.dtype
    with torch.device("meta"):
        model = MTPModel(target, family, num_modules)
        # Weights are read in the dtype that they have by now.
        model.cast(dtype)
    state = _dequantize({name: tensor for name, (_, tensor) in weights.items()}, dtype)
    conversions: list[Any] = []
    for model_type in dict.fromkeys((target.config.model_type, text_config.model_type)):
        conversions += get_checkpoint_conversion_mapping(model_type) or []
    report, _ = convert_and_load_state_dict_in_model(
        model,
        state,
        LoadStateDictConfig(weight_mapping=conversions, device_map={"": device}, dtype=dtype),
    )
    if report.missing_keys or report.mismatched_keys:
        found = sorted(key for key, _ in weights.values())
        layers = text_config.num_hidden_layers

        def published(name: str) -> str:
            return family.published(name, found[0], layers)

        wrong = [f"{published(name)} (missing)" for name in sorted(report.missing_keys)]
        wrong += [
            f"{published(name)} (shape {tuple(a)}, needs {tuple(b)})"
            for name, a, b in sorted(report.mismatched_keys)
        ]
        raise ValueError(
            f"{source!r} declares {num_modules} MTP module(s) of {family.method}, but these "
            f"weights don't fit: {', '.join(wrong)}. Found: "
            f"{', '.join(found)}"
        )
    if report.unexpected_keys:
        logger.warning(
            "%s: MTP weights of %r that nothing reads: %s",
            family.method,
            source,
            ", ".join(sorted(report.unexpected_keys)),
        )
    return model.eval().requires_grad_(False)


def _dequantize(state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Multiply 8-bit weights with the factors of their blocks, as DeepSeek-V3 stores them."""
    result = {}
    for name, tensor in state.items():
        if name.endswith(_SCALE):
            continue
        scale = state.get(name + _SCALE)
        if scale is not None:
            rows, columns = tensor.shape
            factors = scale.float().repeat_interleave(_FP8_BLOCK[0], 0)
            factors = factors.repeat_interleave(_FP8_BLOCK[1], 1)[:rows, :columns]
            tensor = (tensor.float() * factors).to(dtype)
        result[name] = tensor
    return result


def _read(
    source: str, revision: str | None, wanted: Callable[[str], bool], target_name: str
) -> dict[str, Tensor]:
    """The wanted tensors of a checkpoint, by key."""
    if not source:
        raise ValueError(
            f"{target_name} doesn't say which checkpoint it was loaded from "
            "(config.name_or_path is empty), so its MTP weights can't be found. Load it with "
            "from_pretrained"
        )
    tensors: dict[str, Tensor] = {}
    for file, keys in _files(source, revision, wanted):
        if file.endswith(".safetensors"):
            with safe_open(file, framework="pt", device="cpu") as shard:
                names = [k for k in shard.keys() if wanted(k)] if keys is None else keys  # noqa: SIM118
                tensors.update({name: shard.get_tensor(name) for name in names})
        else:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            tensors.update({name: t for name, t in state.items() if wanted(name)})
    return tensors


def _files(
    source: str, revision: str | None, wanted: Callable[[str], bool]
) -> Iterator[tuple[str, list[str] | None]]:
    """The files that hold wanted keys, and which, if an index says so."""
    for name in _INDEX_FILES:
        index = _find(source, name, revision)
        if index is None:
            continue
        with open(index, encoding="utf-8") as text:
            weight_map = json.load(text)["weight_map"]
        by_file: dict[str, list[str]] = {}
        for key, shard in weight_map.items():
            if wanted(key):
                by_file.setdefault(shard, []).append(key)
        for shard, keys in by_file.items():
            file = _find(source, shard, revision)
            if file is None:
                raise ValueError(f"{source!r} lacks {shard}, which holds its MTP weights {keys}")
            yield file, keys
        return
    for name in _SINGLE_FILES:
        file = _find(source, name, revision)
        if file is not None:
            yield file, None
            return
    raise ValueError(
        f"{source!r}, from which the target was loaded, has none of "
        f"{[*_INDEX_FILES, *_SINGLE_FILES]} any more, so its MTP weights can't be read"
    )


def _find(source: str, name: str, revision: str | None) -> str | None:
    try:
        return cached_file(source, name, revision=revision)
    except OSError:
        return None
