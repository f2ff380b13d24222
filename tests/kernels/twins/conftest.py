"""Each test of this folder runs on the plain torch function and on its kernel.

Without a GPU the kernels run in Triton's interpreter, which a process has for all kernels or for
none: `tests/kernels/test_interpreted.py` runs this folder again in a process that has it.
"""

import pytest
import torch
from kernel_twins import BLOCK, DEVICE

from hf_specdec.kernels import runtime


@pytest.fixture(params=["plain", "kernel"])
def implementation(request: pytest.FixtureRequest) -> str:
    if request.param == "kernel" and not runtime.usable(torch.zeros(1, device=DEVICE)):
        pytest.skip("needs a GPU or TRITON_INTERPRET=1: see test_interpreted.py")
    return request.param


@pytest.fixture(params=["one program a row", "many programs a row"])
def grid(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How a kernel shares rows out."""
    if runtime.usable(torch.zeros(1, device=DEVICE)):
        from hf_specdec.kernels import rows

        slots = 1 if request.param.startswith("one") else 10**6
        monkeypatch.setattr(rows, "program_slots", lambda device: slots)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few hundred ids are several blocks: the interpreter is slow."""
    _set_blocks(monkeypatch, BLOCK)


@pytest.fixture
def large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large vocabularies are few blocks, for the same reason; only where nothing is compiled."""
    if DEVICE.type == "cpu":
        _set_blocks(monkeypatch, 16384)


def _set_blocks(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    if runtime.usable(torch.zeros(1, device=DEVICE)):
        from hf_specdec.kernels import matching, rejection, softmax

        for module in (matching, rejection, softmax):
            monkeypatch.setattr(module, "_BLOCK", block)
        monkeypatch.setattr(matching, "_NOISY_BLOCK", block)
