"""Files that are written whole or not at all."""

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> bool:
    """Write bytes, or a text in UTF-8, unless the file says the same already.

    Returns:
        Whether it was written.

    Raises:
        OSError: it can't be written; what was there before stays.
    """
    new = content.encode() if isinstance(content, str) else content
    if path.exists() and path.read_bytes() == new:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(new)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return True
