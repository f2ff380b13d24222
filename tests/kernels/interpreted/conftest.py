"""Tests of what kernels compute, collected where kernels run: in Triton's interpreter or on a GPU.

The interpreter is chosen for a whole process, before a kernel is imported. ``test_interpreted.py``
one folder up runs every file here in such a process.
"""

from collections.abc import Iterator

import pytest
import torch

from hf_specdec.kernels import runtime

collect_ignore_glob = (
    [] if runtime.interpreted() or (runtime.installed() and torch.cuda.is_available()) else ["*"]
)


@pytest.fixture
def device() -> str:
    return "cpu" if runtime.interpreted() else "cuda"


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fills memory that isn't written with NaN and the largest integers."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
