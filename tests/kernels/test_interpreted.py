"""Runs the tests of ``interpreted/`` in processes whose kernels are interpreted, a file in each."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_specdec.kernels import runtime

FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(FOLDER.glob("test_*.py"))


def test_there_are_files() -> None:
    assert FILES


@pytest.mark.skipif(not runtime.installed(), reason="triton isn't installed")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_in_the_interpreter(file: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop(runtime.SWITCH, None)
    # Options of the outer run, such as a marker or a debugger, aren't meant for the inner one.
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    result = subprocess.run(
        command, env=environment, cwd=FOLDER.parents[2], capture_output=True, text=True
    )
    if result.returncode:
        pytest.fail(f"{' '.join(command)}\n{result.stdout}\n{result.stderr}", pytrace=False)
    assert " passed" in result.stdout, f"nothing was run:\n{result.stdout}"
