"""`hf-specdec generate`: texts behind prompts, streamed to the terminal or saved in a file."""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from hf_specdec.attach import speculation_totals
from hf_specdec.cli.options import PairSettings
from hf_specdec.cli.pairs import Pair, load_pair
from hf_specdec.cli.processes import Processes
from hf_specdec.cli.prompt_files import Messages, PromptItem
from hf_specdec.cli.results_file import ResultsFile, WriteRow
from hf_specdec.cli.sampling import Sampling
from hf_specdec.cli.saving import SavedRun
from hf_specdec.cli.streaming import ACCEPTED_STYLE, TARGET_STYLE, BlockStreamer
from hf_specdec.drafters import NoDrafts
from hf_specdec.metrics import SpeculationStats, log_line
from hf_specdec.modeling.placement import input_device
from hf_specdec.training.progress import progress_bar

LOG_INTERVAL = 10.0
"""Seconds between two lines of statistics."""


@dataclass(frozen=True)
class GenerateSettings:
    """What the user chose; the fields are the command's options."""

    pair: PairSettings
    items: Sequence[PromptItem]
    max_new_tokens: int = 256
    batch_size: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    chat: bool = True
    system: str | None = None
    output: Path | None = None
    overwrite: bool = False
    stream: bool = False
    mark_accepted: bool = False
    log_stats: bool = False

    def as_json(self) -> dict[str, Any]:
        """What the rows of an output file depend on."""
        prompts = json.dumps([[item.prompt, item.seed] for item in self.items])
        return {
            **self.pair.as_json(),
            "max_new_tokens": self.max_new_tokens,
            **asdict(self.sampling),
            "chat": self.chat,
            "system": self.system,
            "prompts": hashlib.sha256(prompts.encode()).hexdigest(),
        }


@dataclass(frozen=True)
class Result:
    """What was generated behind one prompt.

    Attributes:
        token_ids: the new ones, an end token included.
        stats: of this row; ``None`` without a drafter.
    """

    item: PromptItem
    text: str
    num_prompt_tokens: int
    token_ids: list[int]
    finish_reason: str
    stats: SpeculationStats | None

    def as_json(self, sampling: Sampling) -> dict[str, Any]:
        """A row of the output file."""
        row: dict[str, Any] = {
            "index": self.item.index,
            "prompt": self.item.prompt,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_new_tokens": len(self.token_ids),
        }
        if not sampling.is_greedy:
            row["seed"] = seed_of(self.item, sampling)
        if self.stats is not None:
            counts = self.stats.as_dict()
            # Of a call, not of a row; and what stands above.
            del counts["num_target_forwards"], counts["num_new_tokens"]
            row["speculation"] = counts
        return row


def run_generate(settings: GenerateSettings, console: Console, log: Console) -> None:
    """Generate behind every prompt.

    Args:
        settings: what to do.
        console: takes the texts, unless they go to a file.
        log: takes progress and statistics.

    Raises:
        ValueError: a prompt, file or pair that doesn't work.
    """
    processes = Processes.of_launcher()
    if settings.pair.spread is not None:
        settings.pair.spread.check_processes(processes.count)
    if settings.output is None:
        if processes.count > 1:
            raise ValueError(
                f"{processes.count} processes share the prompts; name the file that their texts "
                "are joined in: --output"
            )
        _print_all(settings, console, log)
        return
    run = SavedRun(
        ResultsFile(settings.output),
        settings.as_json(),
        len(settings.items),
        processes,
        log,
        settings.overwrite,
    )
    run.run(functools.partial(_generate_share, settings, processes, log))


def _print_all(settings: GenerateSettings, console: Console, log: Console) -> None:
    pair = load_pair(settings.pair)
    rows = list(zip(settings.items, encode(settings, pair, settings.items), strict=True))
    reporter = _Reporter(settings, pair, log)
    several = len(settings.items) > 1
    for batch in batches(rows, settings.batch_size):
        streamer = None
        if settings.stream:
            style = ACCEPTED_STYLE if settings.mark_accepted else TARGET_STYLE
            streamer = BlockStreamer(pair.tokenizer, console, style)
            _print_prompt(batch[0][0], several, console)
        for result in generate_batch(settings, pair, batch, streamer):
            if streamer is None:
                _print_prompt(result.item, several, console)
                console.print(result.text, markup=False, highlight=False, soft_wrap=True)
        if several:
            console.print()
        reporter.report()
    reporter.report(last=True)


def _generate_share(
    settings: GenerateSettings,
    processes: Processes,
    log: Console,
    indices: list[int],
    write: WriteRow,
) -> None:
    """Load the pair and write a row for each of some prompts."""
    wanted = set(indices)
    items = [item for item in settings.items if item.index in wanted]
    pair = load_pair(replace(settings.pair, device=processes.device(settings.pair.device)))
    rows = list(zip(items, encode(settings, pair, items), strict=True))
    reporter = _Reporter(settings, pair, log)
    name = "prompts" if processes.count == 1 else f"prompts of process {processes.rank}"
    with progress_bar(name, len(rows), enabled=processes.is_main, console=log) as advance:
        for batch in batches(rows, settings.batch_size):
            for result in generate_batch(settings, pair, batch):
                write(result.as_json(settings.sampling))
            advance(len(batch), "")
            reporter.report()
    reporter.report(last=True)


def batches(
    rows: Sequence[tuple[PromptItem, list[int]]], size: int
) -> Iterator[list[tuple[PromptItem, list[int]]]]:
    """Consecutive rows, ``size`` at a time."""
    for start in range(0, len(rows), size):
        yield list(rows[start : start + size])


def encode(settings: GenerateSettings, pair: Pair, items: Sequence[PromptItem]) -> list[list[int]]:
    """Token ids of the prompts, by the chat template where there is one.

    Raises:
        ValueError: messages without a chat template, or a prompt of no tokens.
    """
    tokenizer = pair.tokenizer
    has_template = bool(getattr(tokenizer, "chat_template", None))
    encoded = []
    for item in items:
        prompt = item.prompt
        if settings.chat and has_template:
            messages: Messages = (
                [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            )
            if settings.system is not None and messages[0]["role"] != "system":
                messages = [{"role": "system", "content": settings.system}, *messages]
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True
            )["input_ids"]
        elif isinstance(prompt, str) and settings.system is None:
            ids = tokenizer(prompt)["input_ids"]
        else:
            what = "--system" if isinstance(prompt, str) else f"prompt {item.index} of messages"
            why = "its tokenizer has none" if settings.chat else "--no-chat leaves it out"
            raise ValueError(
                f"{what} needs a chat template, but for {settings.pair.target} {why}. Give "
                "prompts as text"
            )
        if not ids:
            raise ValueError(f"prompt {item.index} ({prompt!r}) has no tokens; nothing goes on")
        encoded.append(list(ids))
    return encoded


def seed_of(item: PromptItem, sampling: Sampling) -> int:
    """The seed of a prompt."""
    return sampling.seed + item.index if item.seed is None else item.seed


def generate_batch(
    settings: GenerateSettings,
    pair: Pair,
    batch: Sequence[tuple[PromptItem, list[int]]],
    streamer: Any = None,
) -> list[Result]:
    """Generate behind some prompts at once.

    Args:
        settings: of the run.
        pair: the loaded models.
        batch: prompts and their token ids.
        streamer: as in ``generate``, for one prompt.
    """
    items, ids = zip(*batch, strict=True)
    inputs = pair.tokenizer.pad({"input_ids": list(ids)}, return_tensors="pt")
    device = input_device(pair.target)
    inputs = {name: inputs[name].to(device) for name in ("input_ids", "attention_mask")}
    sampling = settings.sampling
    arguments: dict[str, Any] = {
        "max_new_tokens": settings.max_new_tokens,
        "do_sample": not sampling.is_greedy,
        "pad_token_id": pair.tokenizer.pad_token_id,
        "return_dict_in_generate": True,
    }
    if not sampling.is_greedy:
        seeds = [seed_of(item, sampling) for item in items]
        arguments |= {**sampling.arguments(), "row_seeds": seeds}
        if not pair.speculates:
            # Plain generate knows no seeds of rows; our loop gives the tokens of every drafter.
            arguments["assistant_model"] = NoDrafts()
    if streamer is not None:
        arguments["streamer"] = streamer
    output = pair.target.generate(**inputs, **arguments)
    stats = output.speculation.rows if pair.speculates else [None] * len(items)
    new_ids = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    ends = _end_tokens(pair.target)
    return [
        _result(item, prompt, row, record, ends, pair)
        for item, prompt, row, record in zip(items, ids, new_ids, stats, strict=True)
    ]


def _result(
    item: PromptItem,
    prompt: list[int],
    row: list[int],
    stats: SpeculationStats | None,
    ends: set[int],
    pair: Pair,
) -> Result:
    end = next((i for i, token in enumerate(row) if token in ends), None)
    # Behind the end there is padding.
    token_ids = row if end is None else row[: end + 1]
    text = pair.tokenizer.decode(token_ids, skip_special_tokens=True)
    reason = "length" if end is None else "stop"
    return Result(item, text, len(prompt), token_ids, reason, stats)


def _end_tokens(target: Any) -> set[int]:
    ends = target.generation_config.eos_token_id
    if ends is None:
        return set()
    return set(ends) if isinstance(ends, (list, tuple)) else {ends}


def _print_prompt(item: PromptItem, several: bool, console: Console) -> None:
    """Which prompt the text is behind, where there are several."""
    if several:
        text = item.prompt if isinstance(item.prompt, str) else item.prompt[-1]["content"]
        console.print(f"> {text}", style="bold", markup=False, highlight=False, soft_wrap=True)


class _Reporter:
    """Prints vLLM's line of statistics now and then, if asked for."""

    def __init__(self, settings: GenerateSettings, pair: Pair, log: Console):
        self._totals = (
            speculation_totals(pair.target) if settings.log_stats and pair.speculates else None
        )
        self._log = log
        self._start = self._last = time.monotonic()

    def report(self, last: bool = False) -> None:
        """Print a line if the last one was a while ago; at the end, one about the whole run."""
        if self._totals is None:
            return
        now = time.monotonic()
        if last:
            self._print(log_line(self._totals.snapshot(), now - self._start))
        elif now - self._last >= LOG_INTERVAL:
            self._print(self._totals.log_line())
            self._last = now

    def _print(self, line: str) -> None:
        self._log.print(line, highlight=False, soft_wrap=True)
