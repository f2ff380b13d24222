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
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, (OSError, RuntimeError)):
            reason = _explain(path, error)
            if reason is not None:
                raise OSError(errno.ENOSPC, reason) from error
        raise


def save_tensors(state: dict[str, Any], path: Path) -> None:
    """``torch.save`` by `write_whole`."""
    write_whole(path, lambda partial: torch.save(state, partial))


def _explain(path: Path, error: OSError | RuntimeError) -> str | None:
    """What to say of an error for want of space, ``None`` for any other.

    torch and safetensors report a failed write in words of their own, without the error's number.
    """
    number = getattr(error, "errno", None)
    words = str(error).lower()
    said = "no space left" in words or "disk quota" in words
    by_torch = isinstance(error, RuntimeError) and "write" in words
    if number not in (errno.ENOSPC, errno.EDQUOT) and not said and not by_torch:
        return None
    free = shutil.disk_usage(path.parent).free
    kept = "the one written before is kept" if path.exists() else "none was written before"
    return (
        f"{path} could not be written: no space left on the device ({free / 2**20:.0f} MiB free); "
        f"{kept}. Make room and start the same command again: it continues from there"
    )
