"""Model cards: metadata that the Hub reads, and a page that people read.

A card of ours ends with a seal: a comment with a hash of all before it. A README without the seal,
or one that was changed since, is its owner's and never overwritten.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from hf_specdec._version import __version__
from hf_specdec.publishing.card_text import card_body
from hf_specdec.publishing.facts import CardFacts, check_hub_id
from hf_specdec.publishing.whole_files import write_whole

CARD_FILE = "README.md"
_SEAL = re.compile(r"\n<!-- Written by hf_specdec [^,]+, ([0-9a-f]{16})\. [^>]*-->\n?\Z")
# The form of the Hub's licence names; whether there is one of a name the Hub says on pushing.
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.\-]*")
_RELATIONS = {"mlp_speculator": "adapter", "mimo": "finetune"}
_KIND_TAGS = {"mlp_speculator": "mlp-speculator", "mimo": "multi-token-prediction"}


def model_card(facts: CardFacts) -> str:
    """The text of a card.

    Raises:
        ValueError: metadata that the Hub wouldn't take.
    """
    tags = ["speculative-decoding", _KIND_TAGS[facts.model_type], "hf-specdec", *facts.tags]
    if facts.has_custom_generate:
        tags.append("custom_generate")
    data = ModelCardData(
        library_name="hf_specdec" if facts.model_type == "mlp_speculator" else "transformers",
        base_model=facts.base_model,
        base_model_relation=_RELATIONS[facts.model_type] if facts.base_model else None,
        pipeline_tag="text-generation",
        license=facts.license,
        datasets=list(facts.datasets) or None,
        tags=list(dict.fromkeys(tags)),
    )
    text = f"---\n{data.to_yaml()}\n---\n\n{card_body(facts)}"
    check_card(text)
    return sealed(text)


def write_model_card(folder: str | Path, facts: CardFacts, replace_own: bool = True) -> bool:
    """Write ``README.md``, unless there is one that someone else wrote or changed.

    Args:
        folder: of the drafter.
        facts: what the card says.
        replace_own: replace a card that was written here before and not changed since.

    Returns:
        Whether the card was written.

    Raises:
        ValueError: metadata that the Hub wouldn't take.
    """
    path = Path(folder) / CARD_FILE
    if path.exists() and not (replace_own and is_own(path.read_text(encoding="utf-8"))):
        return False
    write_whole(path, model_card(facts))
    return True


def check_card(text: str) -> None:
    """Raise ValueError unless the Hub would take a card, as far as can be told without asking it.

    Args:
        text: of the whole README.
    """
    # Any: CardData has the fields of a model's as attributes that mypy can't see.
    data: Any = ModelCard(text).data
    if not data.to_dict():
        raise ValueError("the model card has no metadata: a block of YAML between lines of ---")
    if data.license is not None and not _LICENSE.fullmatch(str(data.license)):
        raise ValueError(
            f"license={data.license!r} is no name of a licence on the Hub, such as apache-2.0, "
            "llama3 or other"
        )
    models = data.base_model if isinstance(data.base_model, list) else [data.base_model]
    for model in models:
        if model is not None:
            check_hub_id("base_model", model)
    for dataset in data.datasets or ():
        check_hub_id("dataset", dataset)
    if not all(isinstance(tag, str) and tag for tag in data.tags or ()):
        raise ValueError(f"tags={data.tags!r} must be words")


def sealed(text: str) -> str:
    """A card with its seal."""
    return (
        f"{text}\n<!-- Written by hf_specdec {__version__}, {_hash(text)}. Change the card freely: "
        "it is then never overwritten. -->\n"
    )


def is_own(text: str) -> bool:
    """Whether a card was written here and not changed since."""
    # Git may have changed the line ends.
    text = text.replace("\r\n", "\n")
    match = _SEAL.search(text)
    return match is not None and match[1] == _hash(text[: match.start()])


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
