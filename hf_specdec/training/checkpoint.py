"""Files that are written whole or not at all, with a clear error when the disk is full.

Boundary: writes and replaces files; what is in them is the caller's.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` write a file next to ``path``, then put it in its place.

    Args:
        path: an older file there stays as it is until the new one is complete.
        write: writes to the path it is given.

    Raises:
        OSError: it could not be written; the part that was is removed.
    """
    partial = path.with_suffix(".tmp")
    try:
        write(partial)
        os.replace(partial, path)
    except Exception as error:
        if (clearer := _clearer(path, error)) is error:
            raise
        raise clearer from error
    finally:
        partial.unlink(missing_ok=True)


def write_folder(directory: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a folder, then move its files to ``directory``, the largest first.

    Args:
        directory: its files stay as they are until all new ones are complete.
        write: writes into the folder it is given.

    Raises:
        OSError: it could not be written; what was is removed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / ".incoming"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        write(partial)
        files = sorted(partial.iterdir(), key=lambda file: file.stat().st_size, reverse=True)
        for file in files:
            os.replace(file, directory / file.name)
    except Exception as error:
        if (clearer := _clearer(directory, error)) is error:
            raise
        raise clearer from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def save_tensors(state: dict[str, Any], path: Path) -> None:
    """``torch.save`` by `write_whole`, and on the disk when it returns."""

    def write(partial: Path) -> None:
        # Given the path, torch hides what the operating system says.
        with open(partial, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    write_whole(path, write)


def _clearer(path: Path, error: Exception) -> Exception:
    """A clear error where space is wanting, else the same one."""
    if not _is_for_want_of_space(error):
        return error
    free = shutil.disk_usage(path.parent).free / 2**20
    kept = "what was written before is kept" if path.exists() else "nothing was there before"
    return OSError(
        errno.ENOSPC,
        f"{path} could not be written, no space left on the device ({free:.0f} MiB free); {kept}. "
        "Make room and start again: the run continues from there",
    )


def _is_for_want_of_space(error: BaseException | None) -> bool:
    """Whether an error, or one that it followed, says so: safetensors only does in words."""
    while error is not None:
        number = getattr(error, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT) or "no space left" in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False
