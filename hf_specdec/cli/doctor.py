"""`hf-specdec doctor`: acceptance under every plausible feed, the configured one marked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModel

from hf_specdec.cli.demo import DEFAULT_PROMPTS
from hf_specdec.cli.demo_pair import demo_dtype, load_demo_pair
from hf_specdec.cli.hub_reach import check_reachable
from hf_specdec.cli.options import DEMO, DtypeName
from hf_specdec.cli.pairs import choose_device, load_target
from hf_specdec.doctor import Finding, better_than_configured, examine, feedings
from hf_specdec.modeling.placement import input_device
from hf_specdec.registry import drafter_for, mtp_network


@dataclass(frozen=True)
class DoctorSettings:
    """What the user chose; the fields are the command's options."""

    target: str
    assistant: str | None = None
    prompts: tuple[str, ...] = DEFAULT_PROMPTS
    max_new_tokens: int = 64
    num_assistant_tokens: int | None = None
    dtype: DtypeName = "auto"
    device: str = "auto"


def run_doctor(settings: DoctorSettings, console: Console) -> list[Finding]:
    """Load, examine, and print the table with a verdict.

    Raises:
        DemoPairUnavailableError: the demo's target is asked for and not installed.
        ValueError: a target without MTP layers and without an assistant, or an assistant that
            doesn't fit.
    """
    target, tokenizer, assistant = _load(settings)
    ways = feedings(assistant)
    for way in ways:
        way.drafter.check(target)
    prompts = [_encode(tokenizer, text).to(input_device(target)) for text in settings.prompts]
    findings = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("examining", total=len(ways))
        for finding in examine(
            target, ways, prompts, settings.max_new_tokens, settings.num_assistant_tokens
        ):
            findings.append(finding)
            progress.advance(task)
    console.print(feed_table(findings))
    console.print(verdict(findings))
    return findings


def feed_table(findings: Sequence[Finding]) -> Table:
    """One row for every feed."""
    table = Table(title="Acceptance under every plausible feed")
    table.add_column("")
    table.add_column("feed")
    for name in ("per position", "mean length", "drafts"):
        table.add_column(name, justify="right")
    for finding in findings:
        configured = finding.feeding.configured
        name = finding.feeding.name if configured else f"… but {finding.feeding.name}"
        table.add_row(
            "→" if configured else "",
            # Brackets in it are not markup.
            escape(name),
            " ".join(f"{rate:.2f}" for rate in finding.stats.per_position),
            f"{finding.stats.mean_acceptance_length:.2f}",
            str(finding.stats.num_drafts),
            style="bold" if configured else None,
        )
    return table


def verdict(findings: Sequence[Finding]) -> str:
    """What follows from the table, in a sentence."""
    better = better_than_configured(findings)
    if better:
        return (
            f"[yellow]More drafts are accepted with: {escape(better[0].feeding.name)} "
            f"({better[0].first:.2f} of the first tokens). The configured feed (→) is probably "
            "wrong for this checkpoint."
        )
    return "[green]No other feed is clearly better than the configured one (→)."


def _load(settings: DoctorSettings) -> tuple[Any, Any, Any]:
    """Target, tokenizer and assistant."""
    device = choose_device(settings.device)
    if settings.assistant is not None:
        check_reachable(settings.assistant, "ASSISTANT")
    assistant: Any = None
    if settings.target == DEMO:
        pair = load_demo_pair(demo_dtype(settings.dtype, device), device)
        target, tokenizer = pair.target, pair.tokenizer
        assistant = pair.drafter if settings.assistant is None else None
    else:
        target, tokenizer = load_target(settings.target, settings.dtype, device)
    if settings.assistant is not None:
        assistant = AutoModel.from_pretrained(settings.assistant, dtype=target.dtype)
        drafter = drafter_for(assistant)
        if drafter is not None:
            assistant = assistant.to(drafter.device_for(target))
        assistant = assistant.eval()
    if assistant is None:
        assistant = mtp_network(target)
    return target, tokenizer, assistant


def _encode(tokenizer: Any, text: str) -> torch.Tensor:
    """A prompt as the model expects it, ``[1, T]``."""
    if getattr(tokenizer, "chat_template", None):
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
    else:
        encoded = tokenizer(text, return_tensors="pt")
    return encoded["input_ids"]
