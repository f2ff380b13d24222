"""What a corpus was made from: ``metadata.json`` in its folder, and whose states it holds.

Boundary: one small file, and comparisons with a target. The data is `corpus`' business.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hf_specdec.modeling.checkpoint_headers import read_json
from hf_specdec.modeling.quantized import stored_parts
from hf_specdec.training.checkpoint import write_whole

FORMAT_VERSION = 1
METADATA_FILE = "metadata.json"
# Key of the settings; corpora of the first release don't have it.
_WEIGHTS = "target_weights"
# Key of the settings of a corpus without hidden states.
_STATES = "states"
# What the file's fields hold, by their annotations.
_KINDS: dict[str, type] = {"str": str, "int": int, "dict[str, Any]": dict}


def fingerprint(target: PreTrainedModel) -> str:
    """A short sum over parts of a target's weights: different models have different ones."""
    digest = hashlib.sha256()
    for name, weight in target.named_parameters():
        for part in stored_parts(weight.detach()):
            some = part.flatten()[:64].float().cpu()
            digest.update(f"{name} {list(part.shape)} {some.tolist()}".encode())
    return digest.hexdigest()[:16]


def check_target(directory: str | Path, target: PreTrainedModel, name: str | None = None) -> None:
    """Raise ValueError unless a corpus was made with ``target``.

    Args:
        directory: of the corpus.
        target: the model.
        name: what it was recorded as; ``None``: the name it was loaded from.
    """
    present = CorpusMetadata.read(Path(directory))
    wanted = CorpusMetadata.of_target(target, present.source, present.top_k, {}, name)
    names = ("target", "hidden_size", "vocab_size")
    different = [
        f"{key} {getattr(present, key)!r}, not {getattr(wanted, key)!r}"
        for key in names
        if getattr(present, key) != getattr(wanted, key)
    ]
    for key in ("dtype", _WEIGHTS):
        if (there := present.settings.get(key, wanted.settings[key])) != wanted.settings[key]:
            different.append(f"{key} {there!r}, not {wanted.settings[key]!r}")
    if different:
        raise ValueError(
            f"corpus={str(directory)!r} was made with another target: {'; '.join(different)}. Name "
            "another folder for the corpora, or the target it was made with"
        )


@dataclass(frozen=True)
class CorpusMetadata:
    """What a corpus was made from. A corpus is only ever continued under the same metadata.

    Attributes:
        target: name or path of the target model.
        hidden_size: d.
        vocab_size: V, the number of logits of the target.
        top_k: k, tokens kept per position.
        source: ``"ground_truth"`` or ``"self_generated"``.
        settings: everything else that decides the content (seed, temperatures, lengths ...).
        format_version: version of this layout.
    """

    target: str
    hidden_size: int
    vocab_size: int
    top_k: int
    source: str
    settings: dict[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @classmethod
    def of_target(
        cls,
        target: PreTrainedModel,
        source: str,
        top_k: int,
        settings: dict[str, Any],
        target_name: str | None = None,
        keep_states: bool = True,
    ) -> CorpusMetadata:
        """Metadata of a corpus that ``target`` is run for.

        Args:
            target: the model.
            source: see the class.
            top_k: see the class.
            settings: see the class; what is known of the target is added.
            target_name: what the target is called; ``None``: what it was loaded as.
            keep_states: whether the hidden states are written, too. Without them the corpus is
                small, and the target is run again in training (`recomputed_states`).
        """
        if not keep_states:
            settings = {**settings, _STATES: "recomputed"}
        config = target.config.get_text_config(decoder=True)
        return cls(
            target=target_name or config._name_or_path or type(target).__name__,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            top_k=top_k,
            source=source,
            settings={"dtype": str(target.dtype), _WEIGHTS: fingerprint(target), **settings},
        )

    @property
    def has_states(self) -> bool:
        """Whether the corpus holds the hidden states."""
        return _STATES not in self.settings

    def write(self, directory: Path) -> None:
        """Write ``metadata.json``, whole or not at all."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        path = directory / METADATA_FILE
        write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8"))

    @classmethod
    def read(cls, directory: Path) -> CorpusMetadata:
        """Read ``metadata.json``.

        Raises:
            FileNotFoundError: the folder holds no corpus.
            ValueError: it was written in another version of the layout.
        """
        path = directory / METADATA_FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"directory={str(directory)!r} holds no corpus: {METADATA_FILE} is missing; write "
                "one with generate_corpus or extract_ground_truth"
            )
        values = read_json(path)
        if values.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"{path} has format_version={values.get('format_version')!r}, this release reads "
                f"{FORMAT_VERSION}; generate the corpus again"
            )
        kinds = {field.name: _KINDS.get(str(field.type), object) for field in fields(cls)}
        wrong = [
            f"{name}={values.get(name)!r}"
            for name in sorted({*kinds, *values})
            if name not in kinds
            or not isinstance(values.get(name), kinds[name])
            or isinstance(values.get(name), bool)
        ]
        if wrong:
            raise ValueError(
                f"{path} is damaged: {', '.join(wrong)[:200]}; generate the corpus again"
            )
        return cls(**values)


def check_same_metadata(directory: Path, metadata: CorpusMetadata) -> None:
    """Raise ValueError unless a corpus was made with the same metadata; see `CorpusWriter`."""
    # Through JSON, where tuples become lists, so that equal settings compare as equal.
    wanted = json.loads(json.dumps(asdict(metadata)))
    present = asdict(CorpusMetadata.read(directory))
    if _WEIGHTS not in present["settings"]:
        wanted["settings"].pop(_WEIGHTS, None)
    different = [key for key in wanted if wanted[key] != present[key]]
    if different:
        listed = ", ".join(f"{key} ({present[key]!r} there)" for key in different)
        raise ValueError(
            f"directory={str(directory)!r} holds a corpus made with other metadata: {listed}. "
            "Continue it with the same settings, or write to another folder"
        )
