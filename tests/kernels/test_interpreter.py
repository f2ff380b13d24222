"""The kernels' own tests without a GPU: `twins/` once more, in a process with the interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_specdec.kernels import runtime

ROOT = Path(__file__).parent.parent.parent
TWINS = Path(__file__).parent / "twins"


@pytest.mark.skipif(not runtime.installed(), reason="needs Triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU, in twins/")
def test_kernels_in_the_interpreter() -> None:
    # Triton decides when a kernel is defined whether it is compiled or interpreted.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop(runtime.SWITCH, None)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--maxfail=3",
        "-k",
        "not plain",
        "-rs",
        str(TWINS),
    ]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-3000:]
    assert "TRITON_INTERPRET" not in run.stdout, "none was skipped for want of the interpreter"
