"""The corpora of a run: made, continued, or found as an earlier run left them.

A folder of corpora holds one for each way of making them, for all drafters of one target:

    text/       stage 1, given texts
    prompts/    stage 2, answers to given prompts
    chat/       stage 2, conversations of which the target wrote the questions, too

Several processes write one part each, ``process-0-of-2/`` and so on.

Boundary: decides what is generated into which folder. Reading data, running the target and the
format of a corpus are elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from hf_specdec.training.corpus import Corpus, shard_paths, shard_tokens
from hf_specdec.training.corpus_metadata import METADATA_FILE, CorpusMetadata, check_target
from hf_specdec.training.data_sources import DataChoice
from hf_specdec.training.disk_space import check_space
from hf_specdec.training.ground_truth import extract_ground_truth
from hf_specdec.training.parallel import Processes
from hf_specdec.training.prompt_data import read_prompts, read_texts
from hf_specdec.training.recipes import OPENINGS, CorpusSettings
from hf_specdec.training.recomputed_states import recompute_states
from hf_specdec.training.scripts import ChatScripts, PromptScripts, ScriptSource
from hf_specdec.training.self_generation import generate_corpus
from hf_specdec.training.time_budget import RunPlan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Folder of a corpus -> its stage.
STAGES = {"text": "ground_truth", "prompts": "self_generated", "chat": "self_generated"}
# Of a time budget for generation, stage 1 takes at most this part.
_TEXT_SHARE = 0.4
# Documents of a row in a round.
_ROUNDS = 6


@dataclass(frozen=True)
class StageCorpora:
    """What there is to train on.

    Attributes:
        ground_truth: of stage 1, ``None`` if there is none.
        self_generated: of stage 2, ``None`` if there is none.
        description: one entry for each corpus, see `result`.
    """

    ground_truth: Corpus | None
    self_generated: Corpus | None
    description: list[dict[str, Any]]


class CorpusMaker:
    """Makes the corpora of one target.

    Args:
        target: the target, in evaluation mode.
        tokenizer: the target's.
        directory: of the corpora.
        settings: what to make.
        data: texts or prompts; ``None`` lets the target write the prompts, too.
        target_name: recorded in the corpora.
        plan: time there is, and what was decided.
        processes: that work together.
        progress: show bars.

    Raises:
        ValueError: a folder with a corpus of another target; nothing to make the corpora from.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        directory: Path,
        settings: CorpusSettings,
        data: DataChoice | None,
        target_name: str | None,
        plan: RunPlan,
        processes: Processes,
        progress: bool,
    ) -> None:
        self._target = target
        self._tokenizer = tokenizer
        self._directory = directory
        self._settings = settings
        self._data = data
        self._name = target_name
        self._plan = plan
        self._processes = processes
        self._progress = progress and processes.is_main
        for folder in found_corpora(directory):
            check_target(folder, target, target_name)
        if settings.text_tokens and data is None:
            raise ValueError(
                f"text_tokens={settings.text_tokens} needs texts: name them with data, or leave "
                "stage 1 out (text_tokens=0)"
            )
        if settings.tokens is None and plan.minutes is None:
            raise ValueError("tokens=None needs a time budget; give one of the two")
        self._needs_scripts = settings.tokens != 0
        if self._needs_scripts and data is None and tokenizer.chat_template is None:
            raise ValueError(
                f"tokenizer={type(tokenizer).__name__} has no chat template, so the target can't "
                "write its own prompts; give data with texts or prompts"
            )

    def make(self, generation_share: float) -> None:
        """Make what is missing; nothing, once the run has decided what it trains on.

        Args:
            generation_share: part of a time budget.

        Raises:
            OSError: the corpora don't fit on the disk; the message has the numbers.
            ValueError: data that can't be used.
        """
        if "shards" in self._plan.decided:
            return
        with self._plan.spending("generation"):
            if self._settings.text_tokens:
                self._read_texts(self._plan.end(generation_share * _TEXT_SHARE))
            if self._needs_scripts:
                self._generate(self._plan.end(generation_share))
        self._processes.wait()

    def _read_texts(self, until: float | None) -> None:
        assert self._data is not None
        folder = self._folder("text")
        wanted = self._share(self._settings.text_tokens)
        keep_states = self._keeps_states(folder, wanted)
        texts = read_texts(self._tokenizer, self._data)
        extract_ground_truth(
            self._target,
            islice(texts, self._processes.index, None, self._processes.count),
            folder,
            num_tokens=wanted,
            max_length=self._settings.max_length,
            top_k=self._settings.top_k,
            target_name=self._name,
            keep_states=keep_states,
            until=until,
            on_batch=self._plan.tick,
            progress=self._progress,
        )

    def _generate(self, until: float | None) -> None:
        settings = self._settings
        folder = self._folder("chat" if self._data is None else "prompts")
        scripts, max_length = self._scripts()
        wanted = None
        if settings.tokens is not None:
            wanted = self._share(settings.tokens)
        keep_states = self._keeps_states(folder, wanted)
        generate_corpus(
            self._target,
            scripts,
            folder,
            wanted,
            stop_ids=stop_ids(self._target, self._tokenizer),
            batch_size=settings.rows,
            max_length=max_length,
            # Documents are a function of seed and number, so every process has its own seed.
            seed=settings.seed + 1_000_003 * self._processes.index,
            top_k=settings.top_k,
            sample_top_k=settings.sample_top_k,
            target_name=self._name,
            # What is made until a time can't be made again bit by bit anyway.
            round_size=None if until is not None else _ROUNDS * settings.rows,
            keep_states=keep_states,
            until=until,
            on_step=self._plan.tick,
            progress=self._progress,
        )

    def _scripts(self) -> tuple[ScriptSource, int]:
        """What to generate, and the length of a document at most."""
        settings = self._settings
        if self._data is None:
            scripts = ChatScripts(
                self._tokenizer,
                OPENINGS,
                max_new_tokens=settings.answer_tokens,
                temperatures=settings.temperatures,
            )
            return scripts, settings.max_length
        prompts = read_prompts(
            self._tokenizer, self._data, settings.prompt_tokens, settings.max_length - 2
        )
        longest = max(map(len, prompts))
        mine = prompts[self._processes.index :: self._processes.count]
        answers = PromptScripts(mine, settings.answer_tokens, settings.temperatures)
        return answers, min(settings.max_length, longest + settings.answer_tokens)

    @property
    def _hidden_size(self) -> int:
        return self._target.config.get_text_config(decoder=True).hidden_size

    def _folder(self, name: str) -> Path:
        """Where this process writes.

        Raises:
            ValueError: another number of processes has begun the corpus. Documents are a function
                of seed and number, so some would be there twice.
        """
        folder, count = self._directory / name, self._processes.count
        alone = (folder / METADATA_FILE).exists()
        others = {path.name.rpartition("-")[2] for path in folder.glob("process-*-of-*")}
        if (alone and count > 1) or others - {str(count)}:
            begun = "1" if alone else others.pop()
            raise ValueError(
                f"corpus={str(folder)!r} was begun by {begun} processes, not {count}; go on with "
                "as many, train on what there is (tokens=0), or name another folder"
            )
        return folder if count == 1 else folder / f"process-{self._processes.index}-of-{count}"

    def _share(self, tokens: int) -> int:
        return -(-tokens // self._processes.count)

    def _keeps_states(self, folder: Path, wanted: int | None) -> bool:
        """Whether a corpus gets states: as it was begun, as asked for, or as they fit."""
        settings = self._settings
        asked = settings.keep_states
        if (folder / METADATA_FILE).exists():
            begun = CorpusMetadata.read(folder).has_states
            if asked is not None and asked != begun:
                raise ValueError(
                    f"corpus={str(folder)!r} was begun with keep_states={begun}, not {asked}; go "
                    "on with the same, or name another folder for the corpora"
                )
            asked = begun
        if wanted is None:
            return asked is not False
        missing = max(wanted - corpus_tokens(folder), 0) * self._processes.count
        size = self._hidden_size
        return check_space(folder, missing, size, settings.top_k, asked)


def count_shards(directory: Path) -> dict[str, int]:
    """Shards of all corpora in a folder that have any, by their folders in it."""
    counts = {folder: len(shard_paths(folder)) for folder in found_corpora(directory)}
    return {str(folder.relative_to(directory)): count for folder, count in counts.items() if count}


def open_corpora(directory: Path, target: PreTrainedModel, shards: dict[str, int]) -> StageCorpora:
    """The corpora in a folder.

    Args:
        directory: the folder.
        target: is run again for the states of corpora that don't hold them.
        shards: what to read, from `count_shards`; a corpus can have grown since.

    Raises:
        FileNotFoundError: there is none.
    """
    if not shards:
        raise FileNotFoundError(
            f"corpus={str(directory)!r} holds no corpus to train on; generate one (tokens), or "
            "name the folder that has it"
        )
    by_stage: dict[str, list[tuple[Path, int]]] = {"ground_truth": [], "self_generated": []}
    description = []
    for name, count in shards.items():
        stage = STAGES[Path(name).parts[0]]
        by_stage[stage].append((directory / name, count))
        corpus = Corpus(directory / name, num_shards=[count])
        entry = {"stage": stage, "name": Path(name).parts[0], "tokens": len(corpus)}
        entry |= {"documents": corpus.num_documents, "settings": corpus.metadata.settings}
        description.append(entry)
    ground_truth, self_generated = (
        Corpus(*(folder for folder, _ in parts), num_shards=[count for _, count in parts])
        if parts
        else None
        for parts in by_stage.values()
    )
    for opened in (ground_truth, self_generated):
        if opened is not None and not opened.has_states:
            recompute_states(opened, target)
    return StageCorpora(ground_truth, self_generated, description)


def found_corpora(directory: Path) -> list[Path]:
    """The folders of all corpora in a folder, in a fixed order."""
    found = []
    for name in STAGES:
        for pattern in (f"{name}/metadata.json", f"{name}/process-*/metadata.json"):
            found += [path.parent for path in sorted(directory.glob(pattern))]
    return found


def corpus_tokens(directory: Path) -> int:
    """Tokens in a corpus so far, 0 if there is none."""
    return sum(map(shard_tokens, shard_paths(directory)))


def stop_ids(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end the target's texts, by its generation config and its tokenizer."""
    generation: Any = target.generation_config
    configured = generation.eos_token_id if generation is not None else None
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None})
