"""What a drafter's checkpoint is and whether it fits a target: from configs and headers alone."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from huggingface_hub import ModelCard
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from hf_specdec.cli.checkpoint_headers import Headers, read_headers
from hf_specdec.cli.demo_pair import DRAFTER_DIRECTORY
from hf_specdec.cli.fit import Check, checks_of, file_of
from hf_specdec.cli.hub_reach import check_reachable
from hf_specdec.cli.options import DEMO, DtypeName
from hf_specdec.modeling.mimo import MiMoConfig
from hf_specdec.modeling.mtp import family_of
from hf_specdec.options.vllm_words import METHODS
from hf_specdec.registry import FAMILIES

Kind = Literal["mlp_speculator", "gemma4_assistant", "mtp", "draft_model", "unknown"]
DESCRIPTIONS: dict[Kind, str] = {
    "mlp_speculator": "an MLP speculator",
    "gemma4_assistant": "an assistant of a Gemma 4 model (MTP)",
    "mtp": "a model with multi-token prediction layers of its own (MTP)",
    "draft_model": "a plain model, without layers that draft",
    "unknown": "nothing that hf_specdec knows",
}
_SHAPES: dict[Kind, tuple[str, ...]] = {
    "mlp_speculator": (
        "n_predict", "emb_dim", "inner_dim", "vocab_size", "draft_vocab_size", "tie_weights",
        "scale_input", "share_target_weights",
    ),
    "gemma4_assistant": (
        "num_hidden_layers", "hidden_size", "backbone_hidden_size", "vocab_size", "layer_types",
    ),
    "mtp": ("n_predict", "num_hidden_layers", "hidden_size", "vocab_size"),
    "draft_model": ("num_hidden_layers", "hidden_size", "vocab_size"),
    "unknown": (),
}  # fmt: skip
# Extensions of the published format.
_NOT_VLLMS = ("share_target_weights", "draft_vocab_size")


@dataclass(frozen=True)
class Inspection:
    """What is known of a drafter.

    Attributes:
        name: Hub id or folder.
        kind, model_type, architectures: what it is.
        shape: config fields that say how it is built; ``n_predict`` is the most it drafts.
        num_parameters: of what drafts; 0 if the checkpoint's headers don't say.
        stored_dtypes: in its files, most entries first.
        pickled_bytes: size of its files if they are pickles, which aren't opened.
        dtype, memory_bytes: what it needs when loaded in that dtype.
        trained_for: the target, by its config or model card.
        target: what it was compared with.
        checks: of the comparison.
        notes: sentences.
        python: lines that run it.
        speculative_config: vLLM's JSON.
    """

    name: str
    kind: Kind
    model_type: str | None = None
    architectures: list[str] = field(default_factory=list)
    shape: dict[str, Any] = field(default_factory=dict)
    num_parameters: int = 0
    stored_dtypes: list[str] = field(default_factory=list)
    pickled_bytes: int = 0
    dtype: str = "auto"
    memory_bytes: int = 0
    trained_for: str | None = None
    target: str | None = None
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    python: str | None = None
    speculative_config: dict[str, Any] | None = None

    @property
    def fits(self) -> bool | None:
        """Whether all checks passed; ``None`` without a target."""
        return all(check.ok is not False for check in self.checks) if self.checks else None

    def as_json(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {**asdict(self), "fits": self.fits}


def inspect_drafter(name: str, target: str | None = None, dtype: DtypeName = "auto") -> Inspection:
    """Find out all of it.

    Args:
        name: Hub id or folder; ``"demo"``: the demo's drafter.
        target: to compare with, in the same words.
        dtype: in which its memory is counted; ``"auto"``: as stored.

    Raises:
        ValueError: no config can be read there.
    """
    name = str(DRAFTER_DIRECTORY) if name == DEMO else name
    check_reachable(name, "DRAFTER")
    if target != DEMO:
        check_reachable(target, "--target")
    raw = _raw_config(name)
    kind, config, notes = _classify(name, raw)
    headers = read_headers(name)
    if kind == "mtp":
        headers, notes = _mtp_part(headers, config, notes)
    shape = {} if config is None else _shape(kind, config)
    if kind == "mtp":
        shape["n_predict"] = shape["n_predict"] or _stored_modules(headers, config)
    default = _default_tokens(kind, name, shape)
    extensions = [name for name in _NOT_VLLMS if shape.get(name)]
    if extensions:
        notes.append(f"vLLM doesn't know {' and '.join(extensions)}: it runs here only.")
    trained_for = _trained_for(name, raw) if kind != "mtp" else name
    itemsize = None if dtype == "auto" else getattr(torch, dtype).itemsize
    if headers.pickled_bytes:
        notes.append("Its weights are pickled and were not opened; parameters can't be counted.")
    elif not headers.tensors:
        notes.append("No header of its weights could be read.")
    return Inspection(
        name=name,
        kind=kind,
        model_type=raw.get("model_type"),
        architectures=_architectures(raw),
        shape=shape,
        num_parameters=headers.num_parameters,
        stored_dtypes=headers.dtypes,
        pickled_bytes=headers.pickled_bytes,
        dtype=dtype,
        memory_bytes=headers.num_bytes(itemsize),
        trained_for=trained_for,
        target=target,
        checks=[] if target is None else checks_of(kind, name, config, target),
        notes=notes,
        python=_python(kind, name, trained_for if target in (None, DEMO) else target, default),
        speculative_config=_speculative_config(kind, name, default),
    )


def _raw_config(name: str) -> dict[str, Any]:
    try:
        raw: dict[str, Any] = PreTrainedConfig.get_config_dict(name)[0]
    except Exception as error:  # transformers takes it for granted that it is an object
        raise ValueError(f"DRAFTER {name}: no config.json can be read there ({error})") from None
    if not isinstance(raw, dict):
        raise ValueError(f"DRAFTER {name}: its config.json holds a {type(raw).__name__}")
    return raw


def _architectures(raw: dict[str, Any]) -> list[str]:
    found = raw.get("architectures") or []
    return [str(name) for name in found] if isinstance(found, list) else [str(found)]


def _classify(name: str, raw: dict[str, Any]) -> tuple[Kind, Any, list[str]]:
    """Kind, config (``None`` if unknown), and what there is to say."""
    model_type = raw.get("model_type")
    other = raw.get("speculators_model_type")
    if model_type is None or other is not None:
        notes = [f"Its config.json says {what}." for what in _named(raw, other)]
        if other in METHODS:
            notes.append(f"method={other!r} of vLLM: {METHODS[other]}.")
        return "unknown", None, notes
    try:
        config: Any = AutoConfig.from_pretrained(name)
    except Exception as error:  # of a config made up by others anything can come
        first = (str(error).splitlines() or [type(error).__name__])[0]
        return "unknown", None, [f"model_type={model_type!r}: {first}"]
    if model_type in FAMILIES:
        return (
            ("mlp_speculator" if model_type == "mlp_speculator" else "gemma4_assistant"),
            (config),
            [],
        )
    text = config.get_text_config(decoder=True)
    family = family_of(config)
    if isinstance(config, MiMoConfig) or (
        family is not None and family.declared_modules(text, config) != 0
    ):
        return "mtp", config, []
    generates = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    if model_type in generates:
        return "draft_model", config, []
    return "unknown", None, [f"model_type={model_type!r} is a model that generates no text."]


def _named(raw: dict[str, Any], other: str | None) -> list[str]:
    """What a foreign config calls its contents."""
    named = [f"speculators_model_type={other!r}"] if other else ["no model_type"]
    architectures = _architectures(raw)
    return [*named, f"architectures={architectures}"] if architectures else named


def _mtp_part(headers: Headers, config: Any, notes: list[str]) -> tuple[Headers, list[str]]:
    """The tensors of the MTP layers that aren't the target's own again."""
    text = config.get_text_config(decoder=True)
    family = family_of(config)

    def drafts(key: str) -> bool:
        if family is None:
            return key.startswith("model.mtp_layers.")
        rest = family.locate(key, text.num_hidden_layers)
        return rest is not None and family.rename(rest) is not None

    part = headers.where(drafts)
    if headers.tensors and not part.tensors:
        notes = [
            *notes,
            "Its checkpoint holds no weights of MTP layers (transformers' save_pretrained loses "
            "them); use the published one.",
        ]
    return part, notes


def _stored_modules(headers: Headers, config: Any) -> int | None:
    """How many MTP modules the keys name, where the config doesn't say."""
    family, text = family_of(config), config.get_text_config(decoder=True)
    if family is None or not headers.tensors:
        return None
    numbers = {0}
    for tensor in headers.tensors:
        renamed = family.rename(family.locate(tensor.name, text.num_hidden_layers) or "") or ""
        if renamed.startswith("blocks."):
            numbers.add(int(renamed.split(".")[1]))
    return max(numbers) + 1


def _shape(kind: Kind, config: Any) -> dict[str, Any]:
    text = config.get_text_config(decoder=True)
    family = family_of(config) if kind == "mtp" else None
    shape = {}
    for name in _SHAPES[kind]:
        value = getattr(config, name, getattr(text, name, None))
        if kind == "mtp" and name == "n_predict":
            value = (
                config.num_nextn_predict_layers
                if family is None
                else family.declared_modules(text, config)
            )
        shape[name] = value
    return shape


def _default_tokens(kind: Kind, name: str, shape: dict[str, Any]) -> int | None:
    """K where nobody asks for one."""
    if kind != "gemma4_assistant":
        return shape.get("n_predict")
    try:
        return GenerationConfig.from_pretrained(name).num_assistant_tokens or 1
    except OSError:
        return 1


def _trained_for(name: str, raw: dict[str, Any]) -> str | None:
    """The target that the config names, or the model card."""
    named = raw.get("base_model_name_or_path")
    if named:
        return str(named)
    card = file_of(name, "README.md")
    if card is None:
        return None
    try:
        base = ModelCard.load(card).data.base_model
    except ValueError:
        return None
    return base[0] if isinstance(base, list) and base else base


def _speculative_config(kind: Kind, name: str, default: int | None) -> dict[str, Any] | None:
    if kind == "unknown":
        return None
    config: dict[str, Any] = {"method": "mtp" if kind == "gemma4_assistant" else kind}
    if kind != "mtp":
        config["model"] = name
    if default is not None:
        config["num_speculative_tokens"] = default
    return config


def _auto_class(target: str | None) -> str:
    """The class that loads a target; the usual one where its config isn't at hand."""
    path = None if target is None else file_of(target, "config.json")
    if path is not None:
        with open(path, encoding="utf-8") as file:
            if json.load(file).get("model_type") in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
                return "AutoModelForImageTextToText"
    return "AutoModelForCausalLM"


def _python(kind: Kind, name: str, target: str | None, default: int | None) -> str | None:
    """Lines that run the drafter."""
    if kind == "unknown":
        return None
    auto = _auto_class(target)
    load = 'from_pretrained({}, dtype="auto", device_map="auto")'
    lines = [f"from transformers import {auto}"]
    target_line = f"target = {auto}.{load.format(repr(target or 'TARGET'))}"
    if kind == "draft_model":
        lines = [f"from transformers import {', '.join(sorted({auto, 'AutoModelForCausalLM'}))}"]
        assistant = f"assistant = AutoModelForCausalLM.{load.format(repr(name))}"
        call = "target.generate(**inputs, assistant_model=assistant)"
        return "\n".join([*lines, "", target_line, assistant, call])
    config = json.dumps(_speculative_config(kind, name, default))
    attach = f"hf_specdec.attach(target, {config})"
    lines = ["import hf_specdec", *lines, "", target_line, attach]
    return "\n".join([*lines, "target.generate(**inputs)"])
