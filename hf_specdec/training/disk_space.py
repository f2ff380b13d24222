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


def check_space(
    directory: str | Path, tokens: int, hidden_size: int, top_k: int, keep_states: bool | None
) -> bool:
    """Whether a corpus is to hold the hidden states of so many further tokens.

    Args:
        directory: of the corpora.
        tokens: still to be written.
        hidden_size: of the target.
        top_k: tokens kept per position.
        keep_states: whether it must, or ``None``: if they fit.

    Raises:
        OSError: it doesn't fit; the message has the numbers.
    """
    if keep_states is not False and tokens <= most_tokens(directory, hidden_size, top_k):
        return True
    size = 0 if keep_states is not True else hidden_size
    most = most_tokens(directory, size, top_k)
    if not size and tokens <= most:
        return False
    each = bytes_per_token(size, top_k)
    what = "tokens with their hidden states" if size else "tokens without their hidden states"
    advice = " leave the states out (--no-keep-states)," if size else ""
    raise OSError(
        f"{tokens:,} {what} need {tokens * each / 2**30:.1f} GiB ({each} bytes each), and "
        f"{str(directory)!r} has {free_bytes(directory) / 2**30:.1f} GiB free, of which "
        f"{_RESERVE / 2**30:.0f} are left alone; {most:,} tokens fit: lower --tokens or "
        f"--text-tokens,{advice} or put the corpora on another disk with --corpus"
    )
