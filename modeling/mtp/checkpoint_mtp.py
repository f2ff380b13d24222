"""MTP weights from the checkpoint that a target was loaded from.

transformers drops them when it loads the target. They are looked up in the same folder or Hub
repository; of a sharded checkpoint only the shards that hold them are opened.

Boundary: from a loaded target to its [`MTPModel`]. When, and how long it is kept, is decided
elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from hf_specdec.modeling.checkpoint_files import find
from hf_specdec.modeling.checkpoint_headers import (
    StoredTensor,
    load_pickle,
    read_header,
    read_index,
    shown,
)
from hf_specdec.modeling.placement import head_device
from hf_specdec.modeling.quantized import compute_dtype

from .families import MTPFamily, family_of
from .modeling_mtp import MTPModel

logger = logging.getLogger(__name__)

_INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
# DeepSeek's format for 8-bit weights: one factor for every block.
_SCALE = "_scale_inv"
_FP8_BLOCK = (128, 128)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Far beyond every family there is.
_MOST_MODULES = 64


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
    if not 1 <= num_modules <= _MOST_MODULES:
        raise ValueError(
            f"the config of {source!r} declares {shown(num_modules)} MTP modules of "
            f"{family.method}; it must be 1 to {_MOST_MODULES}. Its files hold {stored}"
        )
    _check_dtypes(source, weights)
    device = head_device(target)
    dtype = compute_dtype(target)
    with torch.device("meta"):
        model = MTPModel(target, family, num_modules)
        # Weights are read in the dtype that they have by now.
        model.cast(dtype)
    stored_state = {name: tensor for name, (_, tensor) in weights.items()}
    try:
        state = _dequantize(stored_state, dtype, _block_size(target))
    except ValueError as error:
        raise ValueError(f"{source!r}: {error}") from None
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


def _check_dtypes(source: str, weights: Mapping[str, tuple[str, Tensor]]) -> None:
    """Raise ValueError for weights that would be taken for other numbers than they stand for."""
    for name, (key, tensor) in weights.items():
        scaled = tensor.dtype in _FP8 and name + _SCALE in weights
        if not scaled and tensor.dtype not in _FLOATS:
            raise ValueError(
                f"{source!r} holds the MTP weight {shown(key)} as {tensor.dtype}; it must be "
                f"floating point of 16 bits or more, or 8 bits with {_SCALE} for each block beside "
                "it. Load the target from a checkpoint that keeps its MTP layers in full precision"
            )


def _dequantize(
    state: dict[str, Tensor], dtype: torch.dtype, block: Sequence[int] = _FP8_BLOCK
) -> dict[str, Tensor]:
    """Multiply 8-bit weights with the factors of their blocks, as DeepSeek-V3 stores them.

    Raises:
        ValueError: factors of other blocks.
    """
    result = {}
    for name, tensor in state.items():
        if name.endswith(_SCALE):
            continue
        scale = state.get(name + _SCALE)
        if scale is not None:
            blocks = [-(-n // size) for n, size in zip(tensor.shape, block, strict=False)]
            if tensor.dim() != 2 or list(scale.shape) != blocks:
                raise ValueError(
                    f"the MTP weight {name} has shape {tuple(tensor.shape)}, but its {_SCALE} has "
                    f"{tuple(scale.shape)}; it must be one factor for each block of {tuple(block)}"
                )
            rows, columns = tensor.shape
            factors = scale.float().repeat_interleave(block[0], 0)
            factors = factors.repeat_interleave(block[1], 1)[:rows, :columns]
            tensor = (tensor.float() * factors).to(dtype)
        result[name] = tensor
    return result


def _block_size(target: Any) -> Sequence[int]:
    """Rows and columns that share a factor, as the checkpoint's config says."""
    quantization = getattr(target.config, "quantization_config", None)
    if quantization is None:
        return _FP8_BLOCK
    if not isinstance(quantization, Mapping):
        quantization = quantization.to_dict()
    return quantization.get("weight_block_size") or _FP8_BLOCK


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
        if file.name.endswith(".safetensors"):
            entries = read_header(file)
            names = [name for name in entries if wanted(name)] if keys is None else keys
            _check_names(file, entries, names)
            with safe_open(file, framework="pt", device="cpu") as shard:
                tensors.update({name: shard.get_tensor(name) for name in names})
        else:
            state = load_pickle(file)
            names = [k for k in state if isinstance(k, str) and wanted(k)] if keys is None else keys
            _check_names(file, state, names)
            tensors.update({name: state[name] for name in names})
    return tensors


def _check_names(file: Path, entries: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise ValueError unless a file holds what it should, as tensors."""
    for name in names:
        if not isinstance(entries.get(name), (StoredTensor, Tensor)):
            what = "isn't in there" if name not in entries else "is no tensor"
            raise ValueError(f"{file} should hold the MTP weight {shown(name)}, which {what}")


def _files(
    source: str, revision: str | None, wanted: Callable[[str], bool]
) -> Iterator[tuple[Path, list[str] | None]]:
    """The files that hold wanted keys, and which, if an index says so."""
    for name in _INDEX_FILES:
        index = find(source, name, revision=revision)
        if index is None:
            continue
        by_file: dict[str, list[str]] = {}
        for key, shard in read_index(index).items():
            if wanted(key):
                by_file.setdefault(shard, []).append(key)
        for shard, keys in by_file.items():
            file = find(source, shard, revision=revision)
            if file is None:
                raise ValueError(f"{source!r} lacks {shard}, which holds its MTP weights {keys}")
            yield file, keys
        return
    for name in _SINGLE_FILES:
        file = find(source, name, revision=revision)
        if file is not None:
            yield file, None
            return
    raise ValueError(
        f"{source!r}, from which the target was loaded, has none of "
        f"{[*_INDEX_FILES, *_SINGLE_FILES]} any more, so its MTP weights can't be read"
    )
