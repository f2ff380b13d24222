"""`hf-specdec train`: loads the target, has a drafter trained, and prints what came of it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec.cli.demo_pair import load_demo_pair
from hf_specdec.training.parallel import Processes
from hf_specdec.training.plot import PLOT_FILE
from hf_specdec.training.result import RESULT_FILE, read_result
from hf_specdec.training.run import TrainingRun, train_alone
from hf_specdec.training.sole_run import sole_run
from hf_specdec.training.stages import TrainingResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEMO = "demo"
DEMO_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class TargetChoice:
    """Which target, and how it is loaded; the fields are the command's options."""

    name: str
    dtype: str = "auto"
    device: str = "auto"


def run_train(run: TrainingRun, choice: TargetChoice, console: Console) -> TrainingResult:
    """Load, train, report. See `train_drafter` for the errors.

    Raises:
        DemoPairUnavailableError: the demo's target is asked for and not installed.
    """
    if choice.name == DEMO and run.target_name is None:
        run = replace(run, target_name=DEMO_NAME)
    processes = Processes(choice.device)
    console.quiet = not processes.is_main
    # A folder that is taken is refused before anything is loaded.
    with sole_run(run.out, processes):
        with console.status("Loading the target ..."):
            target, tokenizer = load_target(choice, processes.device)
        result = train_alone(run, target, tokenizer, processes)
    if processes.is_main:
        print_result(run.out, console)
    return result


def print_result(out: Path, console: Console | None = None) -> None:
    """Say what `train_drafter` has left in a folder."""
    console = console or Console()
    values = read_result(out)
    console.print(acceptance_table(values["acceptance"]))
    numbers, spent = values["training"], values["training"]["seconds"]
    console.print(
        f"{numbers['tokens_trained']:,} tokens trained on; {spent['generation'] / 60:.1f} min "
        f"of generation, {spent['training'] / 60:.1f} of training, {spent['total'] / 60:.1f} "
        f"in all. Ended: {numbers['stopped']}."
    )
    console.print(
        f"In {escape(str(out))}: the drafter, its numbers in {RESULT_FILE}, its curve in "
        f"{PLOT_FILE}."
    )


def load_target(
    choice: TargetChoice, device: torch.device
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """The frozen target on its device, and its tokenizer."""
    if choice.name == DEMO:
        exact = torch.bfloat16 if choice.dtype == "auto" else getattr(torch, choice.dtype)
        pair = load_demo_pair(exact, device)
        return pair.target, pair.tokenizer
    dtype: Any = choice.dtype if choice.dtype == "auto" else getattr(torch, choice.dtype)
    tokenizer = AutoTokenizer.from_pretrained(choice.name)
    target: Any = AutoModelForCausalLM.from_pretrained(choice.name, dtype=dtype)
    return target.to(device).eval().requires_grad_(False), tokenizer


def acceptance_table(acceptance: dict[str, Any]) -> Table:
    """Acceptance of the saved drafter on held-out text, as in the run's result."""
    table = Table(title=f"Greedy acceptance on held-out text, {acceptance['num_positions']} drafts")
    table.add_column("draft token")
    table.add_column("accepted", justify="right")
    for number, rate in enumerate(acceptance["per_position"], start=1):
        table.add_row(str(number), f"{100 * rate:.1f} %")
    table.add_section()
    table.add_row("mean acceptance length", f"{acceptance['mean_acceptance_length']:.2f}")
    return table
