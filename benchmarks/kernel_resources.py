"""What the kernels need of a GPU, without one: registers, spills, shared memory, bytes moved.

    python benchmarks/kernel_resources.py          a Markdown table, as in docs/kernels.md
    python benchmarks/kernel_resources.py --json   the same for programs

Every variant of every kernel is compiled for sm_80 (A100) and sm_90 (H100). In the formulas n are
rows, H heads, Q new tokens, D sizes, V the vocabulary, s bytes of an element.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from importlib import import_module
from typing import Any

from hf_specdec.kernels import ahead_of_time
from hf_specdec.kernels.variants import Variant


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json = parser.parse_args().json
    if reason := ahead_of_time.missing_tools():
        print(json.dumps({"skipped": reason}) if as_json else f"Nothing is compiled: {reason}.")
        return
    variants = ahead_of_time.all_variants()
    rows = [
        compiled(variant, architecture)
        for variant in variants
        for architecture in ahead_of_time.ARCHITECTURES
    ]
    if as_json:
        report = {
            "modules": ahead_of_time.kernel_modules(),
            "kernels_without_variant": without_variant(variants),
            "rows": rows,
        }
        print(json.dumps(report))
    else:
        print(table(variants, rows))


def compiled(variant: Variant, architecture: int) -> dict[str, Any]:
    """Resources of a variant, or the error that its compilation ended with."""
    row: dict[str, Any] = {
        "variant": variant.name,
        "architecture": architecture,
        "error": None,
    }
    try:
        row |= asdict(ahead_of_time.compile_variant(variant, architecture))
    except Exception as error:  # of any kind: a report of all variants is worth more than the first
        row["error"] = f"{type(error).__name__}: {error}"
    return row


def without_variant(variants: list[Variant]) -> list[str]:
    """Kernels (functions that a grid is launched of) that no variant names."""
    named = {id(variant.kernel) for variant in variants}
    return [
        f"{module}.{name}"
        for module in ahead_of_time.kernel_modules()
        for name, value in vars(import_module(module)).items()
        if "tl.program_id" in getattr(value, "src", "")
        and name.endswith("_kernel")
        and id(value) not in named
    ]


def table(variants: list[Variant], rows: list[dict[str, Any]]) -> str:
    """One line a variant, ``sm_80 / sm_90`` in a cell where they differ."""
    lines = [
        "| kernel and variant | warps | registers | spilled bytes | shared memory | bytes moved "
        "| floor |",
        "|---|---|---|---|---|---|---|",
    ]
    for variant in variants:
        own = [row for row in rows if row["variant"] == variant.name]
        cells = [variant.name, str(variant.num_warps)]
        for field in ("registers", "spilled", "shared"):
            values = [str(row.get(field, "failed")) for row in own]
            cells.append(values[0] if len(set(values)) == 1 else " / ".join(values))
        cells += [variant.bytes_moved, variant.floor]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
