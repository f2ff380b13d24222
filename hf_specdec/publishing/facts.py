"""What a model card is made of, gathered from a drafter's folder and from what its owner says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_specdec.modeling.checkpoint_headers import read_header, read_json
from hf_specdec.publishing.measurements import CURVE_FILE, SPEED_FILE, read_result
from hf_specdec.publishing.remote_code import REMOTE_CODE
from hf_specdec.publishing.speed import Speed, read_speed

GENERATE_FILE = Path("custom_generate") / "generate.py"


@dataclass(frozen=True)
class CardFacts:
    """See the fields.

    Attributes:
        repo_id: what the card's examples load: a Hub id, or the folder's name.
        config: the fields of ``config.json``.
        base_model: Hub id of the target, if it is known.
        num_parameters: of the weights on disk.
        license: the Hub's name of a licence.
        datasets: Hub ids.
        tags: besides those that every card has.
        result: of training; see `measurements`.
        speed: of the benchmark.
        has_remote_code: whether the folder loads with ``trust_remote_code=True``.
        has_custom_generate: whether it can be named as ``custom_generate``.
        has_chat_template: whether its tokenizer has one.
        has_curve: whether training left a plot of loss and acceptance.
    """

    repo_id: str
    config: dict[str, Any]
    base_model: str | None = None
    num_parameters: int | None = None
    license: str | None = None
    datasets: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    result: dict[str, Any] | None = None
    speed: Speed | None = None
    has_remote_code: bool = False
    has_custom_generate: bool = False
    has_chat_template: bool = False
    has_curve: bool = False

    @property
    def model_type(self) -> str:
        """``"mlp_speculator"`` or ``"mimo"``."""
        return str(self.config["model_type"])


def gather_facts(
    folder: Path,
    *,
    repo_id: str | None = None,
    base_model: str | None = None,
    license: str | None = None,
    datasets: Sequence[str] = (),
    tags: Sequence[str] = (),
    speed: Path | None = None,
) -> CardFacts:
    """Read a folder; arguments come before what the folder says.

    Args:
        folder: of the drafter.
        repo_id: see `CardFacts`.
        base_model: see `CardFacts`.
        license: see `CardFacts`.
        datasets: see `CardFacts`; those of ``training/result.json`` are added.
        tags: see `CardFacts`.
        speed: a file of the benchmark; by default the one that the folder keeps.

    Raises:
        ValueError: no config, a model type that isn't published, or a name that the Hub wouldn't
            take; the message says which.
    """
    config = read_config(folder)
    result = read_result(folder)
    if speed is None and (folder / SPEED_FILE).is_file():
        speed = folder / SPEED_FILE
    for name, value in (("repo_id", repo_id), ("base_model", base_model)):
        if value is not None:
            check_hub_id(name, value)
    named = [*datasets, *(result or {}).get("data", {}).get("datasets", [])]
    for dataset in named:
        check_hub_id("dataset", dataset)
    return CardFacts(
        repo_id=repo_id or folder.resolve().name,
        config=config,
        base_model=base_model or _recorded_base_model(config, result),
        num_parameters=_num_parameters(folder),
        license=license,
        datasets=tuple(dict.fromkeys(named)),
        tags=tuple(tags),
        result=result,
        speed=read_speed(speed) if speed else None,
        has_remote_code="auto_map" in config,
        has_custom_generate=(folder / GENERATE_FILE).is_file(),
        has_chat_template=has_chat_template(folder),
        has_curve=(folder / CURVE_FILE).is_file(),
    )


def read_config(folder: Path) -> dict[str, Any]:
    """The fields of ``config.json``.

    Raises:
        ValueError: there is none, or not of a model that can be published.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{str(folder)!r} has no config.json, so it is no drafter's folder")
    config = read_json(file)
    if config.get("model_type") not in REMOTE_CODE:
        raise ValueError(
            f"{str(folder)!r} has model_type={config.get('model_type')!r}; drafters that can be "
            f"published are of {sorted(REMOTE_CODE)}"
        )
    return config


def check_hub_id(name: str, value: str) -> None:
    """Raise ValueError unless a value can be a repository's name on the Hub."""
    try:
        validate_repo_id(value)
    except HFValidationError as error:
        raise ValueError(f"{name}={value!r} is no Hub id such as owner/name: {error}") from None


def is_hub_id(value: Any) -> bool:
    """Whether a recorded name is a Hub id of the form owner/name, not a folder."""
    if not isinstance(value, str) or value.count("/") != 1 or Path(value).exists():
        return False
    try:
        validate_repo_id(value)
    except HFValidationError:
        return False
    return True


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer was saved there."""
    return (folder / "tokenizer_config.json").is_file()


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer of a folder has a chat template."""
    if (folder / "chat_template.jinja").is_file():
        return True
    if not has_tokenizer(folder):
        return False
    fields = read_json(folder / "tokenizer_config.json")
    return bool(fields.get("chat_template"))


def _recorded_base_model(config: dict[str, Any], result: dict[str, Any] | None) -> str | None:
    names = [config.get("base_model_name_or_path"), (result or {}).get("target", {}).get("name")]
    return next((name for name in names if is_hub_id(name)), None)


def _num_parameters(folder: Path) -> int | None:
    count = 0
    for file in folder.glob("*.safetensors"):
        entries = read_header(file).items()
        count += sum(math.prod(e.shape) for n, e in entries if not n.endswith("draft_token_ids"))
    return count or None
