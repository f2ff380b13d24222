"""Whether this process is the command line, which wants an answer before torch is imported.

Importing hf_specdec imports transformers, registers models and opens the seams. In the process of
the command `hf-specdec` all of that waits until a command runs, so that `--help`, `--version` and
wrong options are answered at once.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

COMMAND = "hf-specdec"
PACKAGE = "hf_specdec"


def is_command_line() -> bool:
    """Whether Python was started as ``hf-specdec`` or ``python -m hf_specdec``; in doubt, no.

    Read from how the interpreter was started, which nothing changes later, and which differs in
    processes that the command line starts.
    """
    for i, argument in enumerate(sys.orig_argv[1:], start=1):
        if argument == "-m":
            return sys.orig_argv[i + 1 : i + 2] == [PACKAGE]
        if argument == "-c":
            return False
        if not argument.startswith("-"):
            return Path(argument).stem == COMMAND
    return False


def complete_package() -> None:
    """Do what ``import hf_specdec`` does everywhere else; harmless when that has been done."""
    package = sys.modules[PACKAGE]
    public = importlib.import_module(f"{PACKAGE}.public")
    for name in public.__all__:
        setattr(package, name, getattr(public, name))
