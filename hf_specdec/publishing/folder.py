"""Make a drafter's folder complete: code, tokenizer, config, card.

Everything that can be wrong is found before the first file is written.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers import AutoConfig, AutoTokenizer

from hf_specdec.modeling.mlp_speculator import MLPSpeculatorPreTrainedModel
from hf_specdec.publishing import custom_generate
from hf_specdec.publishing.card import CARD_FILE, check_card, is_own, model_card
from hf_specdec.publishing.facts import (
    GENERATE_FILE,
    CardFacts,
    gather_facts,
    has_chat_template,
    has_tokenizer,
    is_hub_id,
    read_config,
)
from hf_specdec.publishing.measurements import RESULT_FILE, SPEED_FILE, last_parts
from hf_specdec.publishing.remote_code import REMOTE_CODE, copied, is_copied, remote_code_files
from hf_specdec.publishing.whole_files import write_whole

_REQUIREMENTS = "transformers>=5.24\ntorch>=2.6\n"


class TokenizerError(ValueError):
    """The target's tokenizer can't be read."""


@dataclass(frozen=True)
class PublishOptions:
    """What the owner of a folder says about it.

    Attributes:
        repo_id: where it will be on the Hub; the card's examples load that.
        target: folder or Hub id to read the target's tokenizer and config from; ``base_model``'s if
            ``None``.
        base_model: Hub id of the target, for card and config; what the config says if ``None``.
        license: the Hub's name of a licence.
        datasets: Hub ids.
        tags: more tags for the card.
        speed: a file of ``hf-specdec bench --json``.
        tokenizer: whether the folder gets the target's tokenizer.
    """

    repo_id: str | None = None
    target: str | None = None
    base_model: str | None = None
    license: str | None = None
    datasets: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    speed: Path | None = None
    tokenizer: bool = True

    def without_tokenizer(self) -> PublishOptions:
        """The same, but for the tokenizer."""
        return replace(self, tokenizer=False)


@dataclass(frozen=True)
class PublishedFolder:
    """What was done.

    Attributes:
        written: files that are new or changed, relative to the folder.
        kept: files that were right already, or that are someone else's.
        notes: what is missing or worth knowing, in sentences.
    """

    written: tuple[str, ...]
    kept: tuple[str, ...]
    notes: tuple[str, ...]


def publish_folder(folder: Path, options: PublishOptions | None = None) -> PublishedFolder:
    """Write what a published folder has, into the folder; nothing is sent anywhere.

    Args:
        folder: with ``config.json`` and weights, as ``save_pretrained`` writes them.
        options: see `PublishOptions`.

    Raises:
        ValueError: a folder without a drafter, weights that don't fit its config, metadata that the
            Hub wouldn't take, or a file in the way that isn't ours.
        TokenizerError: the target's tokenizer can't be read.
    """
    options = options or PublishOptions()
    config = read_config(folder)
    _check_weights(folder, config)
    facts = _facts(folder, options)
    _check_target(options.target, config)
    files: dict[str, str | bytes] = {**_code(folder, facts)}
    if facts.result is not None:
        files[RESULT_FILE.as_posix()] = json.dumps(facts.result, indent=2) + "\n"
    if facts.speed is not None:
        content = _speed_without_places(facts.speed.content, str(facts.base_model))
        files[SPEED_FILE.as_posix()] = json.dumps(content, indent=2) + "\n"
    files["config.json"] = json.dumps(facts.config, indent=2, sort_keys=True) + "\n"
    with tempfile.TemporaryDirectory() as temporary:
        if options.tokenizer and not has_tokenizer(folder):
            files |= _tokenizer(options.target or str(facts.base_model), Path(temporary))
        chats = has_chat_template(folder) or has_chat_template(Path(temporary))
    card = folder / CARD_FILE
    is_theirs = card.exists() and not is_own(card.read_text(encoding="utf-8"))
    if not is_theirs:
        files[CARD_FILE] = model_card(replace(facts, has_chat_template=chats))
    written = [name for name, text in files.items() if write_whole(folder / name, text)]
    kept = [name for name in files if name not in written] + [CARD_FILE] * is_theirs
    return PublishedFolder(tuple(written), tuple(kept), tuple(_notes(folder, facts, is_theirs)))


def _facts(folder: Path, options: PublishOptions) -> CardFacts:
    """What is known of the folder, as it will be."""
    earlier = _earlier_card(folder)
    facts = gather_facts(
        folder,
        repo_id=options.repo_id,
        base_model=options.base_model or (options.target if is_hub_id(options.target) else None),
        license=options.license or earlier.get("license"),
        datasets=options.datasets or earlier.get("datasets") or (),
        tags=options.tags or earlier.get("tags") or (),
        speed=options.speed,
    )
    base_model = facts.base_model or earlier.get("base_model")
    if base_model is None:
        recorded = facts.config.get("base_model_name_or_path")
        raise ValueError(
            "the target has no name: neither config.json nor training/result.json has its Hub id "
            f"(base_model_name_or_path={recorded!r}; a folder is no Hub id). Name it with "
            "--base-model"
        )
    config = {**facts.config, "auto_map": REMOTE_CODE[facts.model_type].auto_map}
    is_speculator = facts.model_type == "mlp_speculator"
    if is_speculator:
        config["base_model_name_or_path"] = base_model
    return replace(
        facts,
        base_model=base_model,
        config=config,
        result=facts.result and _without_places(facts.result, base_model),
        has_remote_code=True,
        has_custom_generate=is_speculator,
    )


def _earlier_card(folder: Path) -> dict[str, Any]:
    """Metadata of a card that was written here before; what was said once needn't be said again."""
    card = folder / CARD_FILE
    if not card.exists() or not is_own(text := card.read_text(encoding="utf-8")):
        return {}
    return ModelCard(text).data.to_dict()


def _without_places(result: dict[str, Any], base_model: str) -> dict[str, Any]:
    """A training result without names of folders, which are nobody's business."""
    target, training = result.get("target", {}), result.get("training", {})
    if not is_hub_id(target.get("name")):
        target = {**target, "name": base_model}
    before = training.get("continued_from")
    if before is not None and not is_hub_id(before):
        training = {**training, "continued_from": Path(before).name}
    return {**result, "target": target, "training": training}


def _speed_without_places(content: dict[str, Any], base_model: str) -> dict[str, Any]:
    """A benchmark without names of folders."""
    settings = dict(content.get("settings", {}))
    for name in ("target", "drafter"):
        value = settings.get(name)
        # A word such as demo or mtp is no folder.
        if isinstance(value, str) and not is_hub_id(value) and Path(value).name != value:
            settings[name] = base_model if name == "target" else Path(value).name
    return last_parts({**content, "settings": settings} if settings else content)


def _check_weights(folder: Path, config: dict[str, Any]) -> None:
    if not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{str(folder)!r} has no weights in safetensors; `hf-specdec convert` makes them from "
            "other formats"
        )
    if config["model_type"] == "mlp_speculator":
        # Raises, naming the weights, if they don't fit.
        MLPSpeculatorPreTrainedModel.from_pretrained(folder, local_files_only=True)


def _check_target(target: str | None, config: dict[str, Any]) -> None:
    """Raise ValueError if a target that was named is not the one the drafter is for."""
    if target is None or config["model_type"] != "mlp_speculator":
        return
    try:
        found = AutoConfig.from_pretrained(target).get_text_config()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--target={target!r} can't be read: {str(error).partition(chr(10))[0]}"
        ) from None
    if found.hidden_size != config["emb_dim"]:
        raise ValueError(
            f"--target={target!r} has hidden_size={found.hidden_size}, but the drafter reads "
            f"states of width emb_dim={config['emb_dim']}: it was trained for another target"
        )


def _code(folder: Path, facts: CardFacts) -> dict[str, str]:
    """The files of code, none of which may be in the way of someone else's."""
    files = remote_code_files(facts.model_type)
    if facts.has_custom_generate:
        files[GENERATE_FILE.as_posix()] = copied(Path(custom_generate.__file__))
    for name in files:
        path = folder / name
        if path.exists() and not is_copied(path.read_text(encoding="utf-8")):
            raise ValueError(
                f"{str(path)!r} is in the way and was not written by hf-specdec; move it, the "
                "folder needs a file of that name"
            )
    if facts.has_custom_generate:
        files[GENERATE_FILE.with_name("requirements.txt").as_posix()] = _REQUIREMENTS
    return files


def _tokenizer(target: str, temporary: Path) -> dict[str, bytes]:
    """The files of the target's tokenizer."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(target)
    except (OSError, ValueError) as error:
        raise TokenizerError(
            f"the tokenizer of {target!r} can't be read; name the target's folder or Hub id with "
            f"--target, or leave it out with --no-tokenizer: {str(error).partition(chr(10))[0]}"
        ) from None
    tokenizer.save_pretrained(temporary)
    return {
        file.relative_to(temporary).as_posix(): file.read_bytes()
        for file in sorted(temporary.rglob("*"))
        if file.is_file()
    }


def _notes(folder: Path, facts: CardFacts, is_theirs: bool) -> list[str]:
    notes = []
    if is_theirs:
        return [
            f"{CARD_FILE} was written by someone else or changed since, and is left as it is",
            *_problems_of_their_card(folder),
        ]
    if facts.license is None:
        notes.append("the card names no licence; pass --license, the target's as a rule")
    if facts.result is None:
        notes.append("no training/result.json: the card has no acceptance and no recipe")
    if facts.speed is None:
        notes.append("the card has no speed; pass --speed FILE of hf-specdec bench --json")
    return notes


def _problems_of_their_card(folder: Path) -> list[str]:
    """What is wrong with a card that stays as it is; the Hub would say so, but later."""
    text = (folder / CARD_FILE).read_text(encoding="utf-8")
    try:
        check_card(text)
    except ValueError as error:
        return [f"{CARD_FILE}: {error}"]
    fields = ModelCard(text).data.to_dict()
    missing = [name for name in ("base_model", "license") if not fields.get(name)]
    return [f"{CARD_FILE} doesn't say: {', '.join(missing)}"] if missing else []
