"""Convert a checkpoint of an MLP speculator: read, check everything, cast, write at once.

Nothing is written before all that can be wrong has been checked, and then into a temporary place
beside the destination, which is renamed when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_specdec.conversion.destination import check_destination, write_fms, write_folder
from hf_specdec.conversion.layout import (
    PREFIX,
    check_tensors,
    config_from_shapes,
    network_names,
    shapes_of,
)
from hf_specdec.conversion.report import ConversionReport, TensorRow
from hf_specdec.conversion.sources import FMS_SUFFIXES, Source, read_source
from hf_specdec.conversion.tying import are_equal, check_equal
from hf_specdec.modeling.mlp_speculator import MLPSpeculatorConfig
from hf_specdec.modeling.mlp_speculator.loading import tied_weight_names

DTYPES = ("float32", "bfloat16", "float16")
Advance = Callable[[int, str], None]


@dataclass(frozen=True)
class ConvertOptions:
    """What a conversion is to change; ``None`` leaves a thing as it is.

    Attributes:
        dtype: of `DTYPES`, for every weight.
        tie_weights: whether the heads share their tensors.
        scale_input: of the config; must be given for fms files and only for them.
        top_k_tokens_per_head: of the config, for fms files.
        n_candidates: of the config, for fms files.
        base_model: ``base_model_name_or_path`` of the config.
        force: replace what is at the destination.
    """

    dtype: str | None = None
    tie_weights: bool | None = None
    scale_input: bool | None = None
    top_k_tokens_per_head: list[int] | None = None
    n_candidates: int | None = None
    base_model: str | None = None
    force: bool = False


def convert(
    source: str | Path,
    destination: str | Path,
    options: ConvertOptions | None = None,
    advance: Advance | None = None,
) -> ConversionReport:
    """Convert a checkpoint.

    Args:
        source: an fms ``.pth`` file, a folder, or a Hub id.
        destination: a name that ends in ``.pth`` for an fms file, any other for a folder.
        options: what to change.
        advance: called with 1 and a name for every tensor that is ready.

    Raises:
        ValueError: anything that is wrong with the source, the options or the destination, which is
            then left as it was.
    """
    options = options or ConvertOptions()
    destination = Path(destination)
    if options.dtype is not None and options.dtype not in DTYPES:
        raise ValueError(f"dtype={options.dtype!r} must be one of {list(DTYPES)}")
    check_destination(Path(source), destination, options.force)
    read = read_source(source)
    found = _config(read, options)
    notes = [f"beside the weights, not carried over: {name}" for name in read.left_out]

    names = network_names(read.tensors)
    tensors = {names[name]: tensor for name, tensor in read.tensors.items()}
    check_tensors(tensors, found, tied_weight_names(found))
    config = _with_tying(found, tensors, options, is_fms=read.config is None, notes=notes)
    is_fms = destination.suffix in FMS_SUFFIXES
    if is_fms:
        _check_fms_can_hold(config)

    aliases = tied_weight_names(config)
    source_names = {new: old for old, new in names.items()}
    order = list(shapes_of(config))
    for alias, first in {**tied_weight_names(found), **aliases}.items():
        tensors.setdefault(alias, tensors[first])
    stored = {name: tensors[name] for name in order if name not in aliases}
    cast = _cast(stored, options.dtype, advance)
    rows = _rows(order, tensors, cast, source_names, aliases, is_fms)
    if options.base_model is not None:
        config.base_model_name_or_path = options.base_model
    if is_fms:
        notes += _left_behind(config, read)
        everything = {name: cast[aliases.get(name, name)] for name in order}
        plain = {name.removeprefix(PREFIX): tensor for name, tensor in everything.items()}
        write_fms(destination, plain, options.force)
        kind = "fms .pth, model_state"
    else:
        write_folder(destination, config, cast, aliases, read, options.force)
        notes += [f"copied: {file.as_posix()}" for file in read.files]
        kind = "safetensors"
    return ConversionReport(
        f"{read.path} ({read.kind})", f"{destination} ({kind})", tuple(rows), tuple(notes)
    )


def _config(read: Source, options: ConvertOptions) -> MLPSpeculatorConfig:
    """The config that the source has, or that its shapes and the options say."""
    fms_only: dict[str, Any] = {
        "scale_input": options.scale_input,
        "top_k_tokens_per_head": options.top_k_tokens_per_head,
        "n_candidates": options.n_candidates,
    }
    if read.config is None:
        if options.scale_input is None:
            raise ValueError(
                "scale_input must be given: an fms file has no config, and its tensors are the "
                "same either way. Pass --scale-input if the speculator was trained with it "
                "(scale_input=True in fms), else --no-scale-input"
            )
        return config_from_shapes(read.tensors, **{**fms_only, "scale_input": options.scale_input})
    if given := [name for name, value in fms_only.items() if value is not None]:
        raise ValueError(
            f"{', '.join(given)}: for fms files alone, which have no config; that of "
            f"{str(read.path)!r} says it. Edit its config.json if that is wrong"
        )
    model_type = read.config.get("model_type")
    if model_type != MLPSpeculatorConfig.model_type:
        raise ValueError(
            f"SOURCE={str(read.path)!r} has model_type={model_type!r}; convert knows checkpoints "
            f"of model_type={MLPSpeculatorConfig.model_type!r}"
        )
    return MLPSpeculatorConfig.from_dict(read.config)


def _with_tying(
    found: MLPSpeculatorConfig,
    tensors: dict[str, Tensor],
    options: ConvertOptions,
    is_fms: bool,
    notes: list[str],
) -> MLPSpeculatorConfig:
    """The config of the result, once tying is known to lose nothing."""
    if found.tie_weights:
        check_equal(tensors, tied_weight_names(found))
    ties = found.tie_weights if options.tie_weights is None else options.tie_weights
    fields = {**found.to_dict(), "tie_weights": True}
    could_be = found.n_predict > 1 and tied_weight_names(MLPSpeculatorConfig.from_dict(fields))
    if is_fms and options.tie_weights is None and could_be and are_equal(tensors, could_be):
        ties = True
        notes.append("the heads' tensors are equal, so they are tied; --no-tie-weights stores each")
    config = MLPSpeculatorConfig.from_dict({**fields, "tie_weights": ties})
    if ties and not found.tie_weights:
        check_equal(tensors, tied_weight_names(config))
    return config


def _cast(
    tensors: dict[str, Tensor], dtype: str | None, advance: Advance | None
) -> dict[str, Tensor]:
    """The tensors in another dtype, ids excepted; a value that becomes infinite is an error.

    No two of the result share memory.
    """
    result: dict[str, Tensor] = {}
    places: set[int] = set()
    for name, tensor in tensors.items():
        if dtype is not None and tensor.is_floating_point():
            cast = tensor.to(getattr(torch, dtype))
            if cast.dtype != tensor.dtype and bool((cast.isinf() & tensor.isfinite()).any()):
                raise ValueError(
                    f"dtype={dtype}: {name} has values up to {float(tensor.abs().max()):.3g}, "
                    f"which {dtype} can't hold; use bfloat16 or float32"
                )
            tensor = cast
        result[name] = tensor.clone() if tensor.data_ptr() in places else tensor
        places.add(result[name].data_ptr())
        if advance is not None:
            advance(1, name)
    return result


def _rows(
    order: list[str],
    before: dict[str, Tensor],
    after: dict[str, Tensor],
    source_names: dict[str, str],
    aliases: dict[str, str],
    is_fms: bool,
) -> list[TensorRow]:
    rows, places = [], set()
    for name in order:
        old, first = before[name], aliases.get(name, name)
        new, written = after[first], name.removeprefix(PREFIX) if is_fms else name
        source = source_names.get(name)
        place = (old.data_ptr(), old.nbytes)
        is_stored = source is not None and place not in places
        places.add(place)
        remark = ""
        if first != name:
            remark = f"same as {first.removeprefix(PREFIX)}"
        elif source is None:
            remark = "its own copy"
        stored = written if first == name or is_fms else None
        if source is None and stored is None:
            continue
        rows.append(
            TensorRow(
                source=source,
                name=stored,
                shape=tuple(old.shape),
                dtype_before=_dtype(old),
                dtype_after=_dtype(new),
                bytes_before=old.nbytes if is_stored else 0,
                bytes_after=new.nbytes if first == name else 0,
                remark=remark,
            )
        )
    return rows


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _check_fms_can_hold(config: MLPSpeculatorConfig) -> None:
    for name, value in (
        ("share_target_weights", config.share_target_weights),
        ("draft_vocab_size", config.draft_vocab_size),
    ):
        if value:
            raise ValueError(
                f"DEST: fms has no speculators with {name}={value}, so it can't be a .pth file; "
                "name a folder"
            )


def _left_behind(config: MLPSpeculatorConfig, read: Source) -> list[str]:
    """What an fms file has no place for, and how to say it again when converting back."""
    no = "" if config.scale_input else "no-"
    top_k = ",".join(str(k) for k in config.top_k_tokens_per_head)
    fields: list[Any] = [
        f"--{no}scale-input", f"--top-k {top_k}", f"--n-candidates {config.n_candidates}"
    ]  # fmt: skip
    if target := getattr(config, "base_model_name_or_path", None):
        fields.append(f"--base-model {target}")
    notes = [f"an fms file has no config; to convert back, pass {' '.join(fields)}"]
    if read.files:
        names = ", ".join(file.as_posix() for file in read.files)
        notes.append(f"an fms file is weights alone; left behind: {names}")
    return notes
