"""Files that are written whole or not at all, with a clear error when the disk is full.

Boundary: writes and replaces files; what is in them is the caller's.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hf_specdec.modeling.checkpoint_headers import load_pickle

_OF_A_RUN = {"best", "best_step", "evaluations_since_best", "fingerprint", "model"}
_OF_A_RUN |= {"optimizer", "step"}


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


def load_run(path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """The state of a run, as `save_tensors` wrote it; no code in the file is run.

    Args:
        path: of the file.
        wanted: the fingerprint of the run that goes on.

    Raises:
        ValueError: no such state, or one of another run.
    """
    # Not mapped: the next checkpoint takes the file's place.
    state = load_pickle(path, mmap=False)
    if missing := sorted(_OF_A_RUN - set(state)):
        raise ValueError(f"{path} is no checkpoint of a run: it lacks {', '.join(missing)}")
    present = state["fingerprint"]
    if not isinstance(present, dict) or not isinstance(state["step"], int):
        raise ValueError(f"{path} is damaged: fingerprint or step is of the wrong kind")
    if different := sorted(key for key in wanted if wanted[key] != present.get(key)):
        raise ValueError(
            f"{path} was made with other {', '.join(different)}; continue with the same, use "
            "another output_dir, or call train(resume=False) to start anew"
        )
    return state


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """What torch raises over contents that don't fit becomes a ``ValueError`` about the file."""
    try:
        yield
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged: {str(error).partition(chr(10))[0]}; call train(resume=False) to "
            "start anew"
        ) from error


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
