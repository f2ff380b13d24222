"""Whether a corpus fits on the disk, before it is written.

Boundary: sizes and one question to the operating system.
"""

from __future__ import annotations

import shutil
from pathlib import Path

# Left free for checkpoints and the drafter itself.
_RESERVE = 2 * 2**30


def bytes_per_token(hidden_size: int, top_k: int) -> int:
    """Size of a token in a corpus: id, flag, state in bfloat16, top ids and log-probabilities."""
    return 4 + 1 + 2 * hidden_size + (4 + 2) * top_k


def free_bytes(directory: str | Path) -> int:
    """Free space where a folder is, or will be."""
    path = Path(directory).absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def most_tokens(directory: str | Path, hidden_size: int, top_k: int) -> int:
    """Tokens that still fit where the corpora are."""
    free = free_bytes(directory)
    return max(free - _RESERVE, 0) // bytes_per_token(hidden_size, top_k)


def check_space(directory: str | Path, tokens: int, hidden_size: int, top_k: int) -> None:
    """Raise OSError with the numbers unless so many further tokens fit.

    Args:
        directory: of the corpora.
        tokens: still to be written.
        hidden_size: of the target.
        top_k: tokens kept per position.
    """
    if tokens <= (most := most_tokens(directory, hidden_size, top_k)):
        return
    each = bytes_per_token(hidden_size, top_k)
    raise OSError(
        f"the hidden states of {tokens:,} tokens need {tokens * each / 2**30:.1f} GiB ({each} "
        f"bytes a token), and {str(directory)!r} has {free_bytes(directory) / 2**30:.1f} GiB free, "
        f"of which {_RESERVE / 2**30:.0f} are left alone; at most {most:,} tokens fit: lower "
        "--tokens or --text-tokens, or put the corpora on another disk with --corpus"
    )
