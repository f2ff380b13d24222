"""The kernels' own tests without a GPU, in processes whose kernels run in Triton's interpreter.

Triton decides when a kernel is defined whether it is compiled or interpreted, so that a process has
the interpreter for all kernels or for none.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_specdec.kernels import runtime

HERE = Path(__file__).parent
FOLDERS = [HERE / "interpreted", HERE / "twins"]


@pytest.mark.skipif(not runtime.installed(), reason="needs Triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU itself")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_in_the_interpreter(folder: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop(runtime.SWITCH, None)
    # Options of the outer run, such as a marker or a debugger, aren't meant for the inner one.
    environment.pop("PYTEST_ADDOPTS", None)
    words = ["-q", "-rsp", "--maxfail=3", "-p", "no:cacheprovider", "-k", "not plain", str(folder)]
    command = [sys.executable, "-m", "pytest", *words]
    result = subprocess.run(
        command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True
    )
    if result.returncode:
        said = f"{result.stdout[-6000:]}\n{result.stderr[-3000:]}"
        pytest.fail(f"{' '.join(command)}\n{said}", pytrace=False)
    passed = f"PASSED tests/kernels/{folder.name}/"
    files = sorted(file.name for file in folder.glob("test_*.py"))
    idle = [file for file in files if f"{passed}{file}" not in result.stdout]
    assert files and not idle, f"nothing was run of {idle}:\n{result.stdout}"
    assert "TRITON_INTERPRET" not in result.stdout, "skipped for want of the interpreter"
