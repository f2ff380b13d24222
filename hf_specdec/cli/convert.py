"""`hf-specdec convert`: run a conversion with a bar, and show what it did."""

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from hf_specdec.conversion import ConversionReport, ConvertOptions, TensorRow, convert


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
    table.add_column("tensor", f"{stored[0]} stored, now {stored[1]}")
    table.add_column("shape")
    table.add_column("dtype")
    table.add_column("before", decimal(report.bytes_before), justify="right", no_wrap=True)
    table.add_column("now", decimal(report.bytes_after), justify="right", no_wrap=True)
    table.add_column("remark")
    for row in report.rows:
        same = row.dtype_before == row.dtype_after
        table.add_row(
            row.name or row.source or "",
            "x".join(str(size) for size in row.shape),
            row.dtype_before if same else f"{row.dtype_before} -> {row.dtype_after}",
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
