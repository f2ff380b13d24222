"""`hf-specdec inspect`: shows what is known of a drafter's checkpoint."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_specdec.cli.inspection import DESCRIPTIONS, Inspection, inspect_drafter
from hf_specdec.cli.options import DtypeName

_MARKS = {True: "[green]yes[/]", False: "[red]no[/]", None: "-"}
_CONFIG_TITLES = {
    False: "As --speculative-config, here and for vLLM",
    True: "For vLLM, with num_speculative_tokens (here transformers drafts itself)",
}
_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def run_inspect(
    name: str, target: str | None, dtype: DtypeName, as_json: bool, console: Console
) -> Inspection:
    """Inspect and print.

    Raises:
        ValueError: no config can be read.
    """
    found = inspect_drafter(name, target, dtype)
    if as_json:
        console.print_json(json.dumps(found.as_json()))
        return found
    console.print(f"{escape(found.name)} is {DESCRIPTIONS[found.kind]}.", highlight=False)
    for note in found.notes:
        console.print(note, style="yellow", markup=False, highlight=False)
    console.print(facts_table(found))
    if found.checks:
        console.print(checks_table(found))
    if found.python is not None:
        console.print("\nIn Python:\n", style="bold")
        console.print(found.python, markup=False, highlight=False, soft_wrap=True)
        console.print(f"\n{_CONFIG_TITLES[found.kind == 'draft_model']}:\n", style="bold")
        text = json.dumps(found.speculative_config)
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    return found


def facts_table(found: Inspection) -> Table:
    """Name and value of everything that is known."""
    table = Table(show_header=False)
    facts: dict[str, Any] = {
        "model type": found.model_type,
        "architectures": ", ".join(found.architectures),
        **{name: _shown(value) for name, value in found.shape.items()},
        "parameters": f"{found.num_parameters:,}" if found.num_parameters else "",
        "stored as": ", ".join(found.stored_dtypes),
        "pickled files": _size(found.pickled_bytes) if found.pickled_bytes else "",
        f"memory ({'as stored' if found.dtype == 'auto' else found.dtype})": (
            _size(found.memory_bytes) if found.memory_bytes else ""
        ),
        "trained for": found.trained_for,
    }
    for name, value in facts.items():
        if value not in (None, ""):
            table.add_row(name, escape(str(value)))
    return table


def checks_table(found: Inspection) -> Table:
    """Every comparison with the target."""
    table = Table(title=escape(f"Fits {found.target}? {'yes' if found.fits else 'no'}"))
    for header in ("", "fits", "found"):
        table.add_column(header)
    for check in found.checks:
        table.add_row(check.name, _MARKS[check.ok], escape(check.detail))
    return table


def _shown(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value


def _size(num_bytes: int) -> str:
    for unit, name in _UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} bytes"
