"""Whether a drafter fits a target: by their configs and tokenizers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, AutoTokenizer
from transformers.utils import cached_file

from hf_specdec.cli.demo_pair import find_target_file
from hf_specdec.cli.options import DEMO
from hf_specdec.registry import FAMILIES

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


@dataclass(frozen=True)
class Check:
    """One thing that must fit.

    Attributes:
        name: of what is compared.
        ok: whether it fits; ``None`` if it can't be told.
        detail: what was found.
    """

    name: str
    ok: bool | None
    detail: str


def checks_of(kind: str, name: str, config: Any, target: str) -> list[Check]:
    """Compare a drafter with a target.

    Args:
        kind, name, config: of the drafter, as in `inspection`.
        target: Hub id or folder; ``"demo"``: the demo's.

    Raises:
        ValueError: the target has no config that can be read.
    """
    if kind == "unknown":
        return [Check("kind", False, "there is no drafter for it")]
    same = name == target or (
        os.path.isdir(name) and os.path.isdir(target) and os.path.samefile(name, target)
    )
    if kind == "mtp":
        detail = "the layers are its own" if same else f"MTP layers of {name} draft for it alone"
        return [Check("target", same, detail)]
    theirs, their_tokenizer = _target(target)
    text = theirs.get_text_config(decoder=True)
    mine = config.get_text_config(decoder=True)
    checks = []
    width = {"mlp_speculator": "emb_dim", "gemma4_assistant": "backbone_hidden_size"}.get(kind)
    if width is not None:
        read = getattr(config, width)
        detail = f"reads states of {read}, the target has {text.hidden_size}"
        checks.append(Check("hidden size", read == text.hidden_size, detail))
        checks.append(_config_check(config, theirs))
    sizes = f"{mine.vocab_size} ids, the target has {text.vocab_size}"
    equal = mine.vocab_size == text.vocab_size
    # The drafter's own rule knows padding.
    checks.append(Check("vocabulary", equal or (checks[-1].ok if checks else False), sizes))
    checks.append(_tokenizer_check(name, their_tokenizer))
    return checks


def _target(name: str) -> tuple[Any, Any]:
    """Config and tokenizer (``None`` if there is none) of a target."""
    options: dict[str, Any] = {}
    if name == DEMO:
        file = find_target_file()
        name, options = str(file.parent), {"gguf_file": file.name}
    try:
        config = AutoConfig.from_pretrained(name, **options)
    except Exception as error:  # of a config made up by others anything can come
        raise ValueError(f"--target {name}: no config can be read there ({error})") from None
    return config, _tokenizer(name, **options)


def _tokenizer(name: str, **options: Any) -> Any:
    if not options and all(file_of(name, file) is None for file in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError):
        return None


def _config_check(config: Any, target_config: Any) -> Check:
    """The drafter's own check of configs, that `generate` makes, too."""
    drafter = FAMILIES[config.model_type].without_weights(config)
    architecture = (target_config.architectures or [target_config.model_type])[0]
    # All that the check looks at: no weights, and for large targets no minutes.
    stand_in: Any = type(architecture, (), {})()
    stand_in.config = target_config
    try:
        drafter.check_config(stand_in)
    except ValueError as error:
        return Check("configs", False, str(error))
    return Check("configs", True, "what generate checks before it loads weights")


def _tokenizer_check(name: str, theirs: Any) -> Check:
    """Whether every token has the same id."""
    mine = _tokenizer(name)
    if mine is None:
        return Check("tokenizer", None, "the drafter has none, and reads the target's ids")
    if theirs is None:
        return Check("tokenizer", None, "the target has none to compare with")
    ours, others = mine.get_vocab(), theirs.get_vocab()
    tokens = sorted({*ours, *others})
    different = [token for token in tokens if ours.get(token) != others.get(token)]
    if not different:
        return Check("tokenizer", True, f"all {len(tokens)} tokens have the same ids")
    token = different[0]
    example = f"{token!r} is {ours.get(token)} here and {others.get(token)} there"
    return Check("tokenizer", False, f"{len(different)} tokens have other ids: {example}")


def file_of(name: str, file: str) -> str | None:
    """The path of a file of a folder or Hub repository, ``None`` if it isn't there."""
    try:
        return cached_file(name, file)
    except OSError:
        return None
