"""`hf-specdec publish`: complete a drafter's folder, show what it has, and push it if asked to."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from hf_specdec.publishing.folder import PublishOptions, publish_folder
from hf_specdec.publishing.hub import files_to_push, push_folder


def run_publish(folder: Path, options: PublishOptions, push: bool, console: Console) -> None:
    """Write, list, and with ``push`` send to ``options.repo_id``.

    Raises:
        ValueError: see `publish_folder` and `push_folder`.
        OSError: reading, writing or sending failed.
    """
    published = publish_folder(folder, options)
    table = Table(title=f"{folder}")
    table.add_column("file")
    table.add_column("")
    for name in files_to_push(folder):
        done = "written" if name in published.written else ""
        table.add_row(name, "as it was" if name in published.kept else done)
    console.print(table)
    for note in published.notes:
        console.print(f"- {note}", markup=False, highlight=False)
    if not push:
        console.print("Nothing was sent; --push OWNER/NAME does that.")
        return
    assert options.repo_id is not None
    pushed = push_folder(folder, options.repo_id)
    if pushed.kept_card:
        console.print("- the repository has a README.md that someone wrote; it is left as it is")
    console.print(f"Pushed {len(pushed.files)} files: {pushed.commit}", markup=False)
