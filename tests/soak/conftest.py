"""Lets tests import the scripts of the soaks, and forgets them afterwards."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hf_specdec

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def script() -> Iterator[Callable[[str], Any]]:
    """``script(name)``: a module of ``benchmarks/``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        before = set(sys.modules)
        yield importlib.import_module
        for name in set(sys.modules) - before:
            if name.startswith("soak_") or name == "random_models":
                del sys.modules[name]
    hf_specdec.enable()
