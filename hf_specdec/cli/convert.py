"""`hf-specdec convert`: run a conversion with a bar, and show what it did."""

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from hf_specdec.conversion import ConversionReport, ConvertOptions, TensorRow, convert
from hf_specdec.conversion.layout import PREFIX

_SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def run_convert(
    source: str, destination: str, options: ConvertOptions, console: Console
) -> ConversionReport:
    """Convert, and print the report.

    Raises:
        ValueError: see `hf_specdec.conversion.convert`.
        OSError: reading or writing failed; the destination is as it was.
    """
    # One bar is enough.
    disable_progress_bar()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("reading", total=None)

        def advance(amount: int, name: str) -> None:
            progress.update(task, advance=amount, description=escape(name))

        report = convert(source, destination, options, advance)
    console.print(conversion_table(report))
    for note in (*renamings(report), *report.notes):
        console.print(f"- {note}", markup=False, highlight=False)
    console.print(f"{report.source}\n-> {report.destination}", markup=False, highlight=False)
    return report


def conversion_table(report: ConversionReport) -> Table:
    """One row for every tensor that is or was stored under a name, and a totals row."""
    table = Table(title="Converted", show_footer=True)
    stored = [sum(getattr(r, f"bytes_{w}") > 0 for r in report.rows) for w in ("before", "after")]
    table.add_column("tensor", f"{stored[0]}, now {stored[1]}", no_wrap=True)
    table.add_column("shape")
    table.add_column("dtype")
    table.add_column("before", decimal(report.bytes_before), justify="right", no_wrap=True)
    table.add_column("now", decimal(report.bytes_after), justify="right", no_wrap=True)
    table.add_column("remark")
    for row in report.rows:
        dtypes = dict.fromkeys(_SHORT.get(d, d) for d in (row.dtype_before, row.dtype_after))
        table.add_row(
            # All have the prefix or none; without it the table fits a terminal.
            (row.name or row.source or "").removeprefix(PREFIX),
            "x".join(str(size) for size in row.shape),
            " -> ".join(dtypes),
            decimal(row.bytes_before) if row.bytes_before else "",
            decimal(row.bytes_after) if row.bytes_after else "",
            row.remark,
        )
    return table


def renamings(report: ConversionReport) -> list[str]:
    """A sentence on renamed tensors, if there are any: the rule is the same for all."""

    def is_renamed(row: TensorRow) -> bool:
        return None not in (row.source, row.name) and row.source != row.name

    renamed = [row for row in report.rows if is_renamed(row)]
    if not renamed:
        return []
    return [f"renamed: {len(renamed)} tensors, as {renamed[0].source} -> {renamed[0].name}"]
