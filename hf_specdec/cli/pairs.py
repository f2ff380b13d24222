"""Load a target and its drafter, once, as the options of `options` say."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    CompileConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from hf_specdec.attach import attach
from hf_specdec.cli.demo_pair import DRAFTER_DIRECTORY, demo_dtype, load_demo_pair
from hf_specdec.cli.hub_reach import check_reachable
from hf_specdec.cli.options import DEMO, DtypeName, PairSettings
from hf_specdec.cli.spread import Spread
from hf_specdec.integration import ATTACHED
from hf_specdec.targets.packing import pack_weights


@dataclass(frozen=True)
class Pair:
    """A loaded target in evaluation mode, with its drafter attached if there is one.

    Attributes:
        settings: what was asked for.
        target: the model; ``target.generate`` speculates.
        tokenizer: its tokenizer; pads on the left, and has a token for it.
    """

    settings: PairSettings
    target: Any
    tokenizer: Any

    @property
    def speculates(self) -> bool:
        """Whether a drafter is attached."""
        return self.settings.speculative_config is not None


def choose_device(device: str, option: str = "--device") -> torch.device:
    """The device of a name; ``"auto"``: a GPU if torch sees one.

    Args:
        device: the name.
        option: where it is from, for the message.

    Raises:
        ValueError: a name that torch doesn't know, or a device that isn't there.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(
            f"{option} {device}: torch can't use it here ({str(error).splitlines()[0]}). "
            "Use cpu, or auto"
        ) from None
    return chosen


def load_pair(settings: PairSettings) -> Pair:
    """Load the target, then the drafter in its dtype and on its device, and attach it.

    Raises:
        DemoPairUnavailableError: the demo's target is asked for and not installed.
        OSError, ValueError: a model that can't be loaded, or a pair that doesn't fit.
    """
    spread = settings.spread
    device = choose_device(settings.device)
    config = settings.speculative_config
    if config is not None:
        # Before the target is loaded.
        check_reachable(config.model, "--spec-model")
    if settings.target == DEMO:
        demo = load_demo_pair(demo_dtype(settings.dtype, device), device)
        target, tokenizer = demo.target, _ready(demo.tokenizer)
        if config is not None and config.model == str(DRAFTER_DIRECTORY):
            config = replace(config, model=demo.drafter)
    else:
        target, tokenizer = load_target(settings.target, settings.dtype, device, spread)
    if config is not None:
        attach(target, config)
    if settings.pack_weights:
        _pack(target)
    if settings.compiles:
        target.generation_config.cache_implementation = "static"
        target.generation_config.compile_config = CompileConfig()
    return Pair(settings, target, tokenizer)


def _pack(target: Any) -> None:
    """Pack the target's weights, and those of a drafter that is a model of its own."""
    try:
        pack_weights(target)
        attachment = target.__dict__.get(ATTACHED)
        if attachment is not None and isinstance(attachment.assistant, PreTrainedModel):
            pack_weights(attachment.assistant)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"--pack-weights: {error}") from None


def load_target(
    name: str, dtype: DtypeName, device: torch.device, spread: Spread | None = None
) -> tuple[Any, Any]:
    """Load a target of any kind that generates text, and its tokenizer.

    Args:
        name: Hub id or folder.
        dtype: ``"auto"``: the checkpoint's.
        device: where it is put.
        spread: where its parts are put instead.

    Raises:
        OSError, ValueError: it can't be loaded.
    """
    check_reachable(name, "TARGET")
    try:
        config = AutoConfig.from_pretrained(name)
    except Exception as error:  # of a config made up by others anything can come
        raise ValueError(
            f"TARGET {name} is neither a folder with a config.json that transformers knows nor a "
            f"Hub id that can be loaded: {error}"
        ) from None
    auto: Any = AutoModelForCausalLM
    if config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        auto = AutoModelForImageTextToText
    chosen: Any = dtype if dtype == "auto" else getattr(torch, dtype)
    if spread is not None and isinstance(spread.device_map, dict):
        for place in {*spread.device_map.values()} - {"cpu", "disk"}:
            choose_device(f"cuda:{place}" if isinstance(place, int) else place, "--device-map")
    if spread is None:
        target = auto.from_pretrained(name, dtype=chosen).to(device)
    else:
        target = auto.from_pretrained(name, dtype=chosen, **spread.arguments())
    return target.eval(), _ready(AutoTokenizer.from_pretrained(name))


def _ready(tokenizer: Any) -> Any:
    """The tokenizer, fit for batches to generate from."""
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
