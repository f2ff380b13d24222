"""Several ranks: targets that are cut (tensor parallel), and rows that keep step (FSDP).

The checks are in `tensor_parallel_checks` and `in_step_checks`. All of them run in one launch of
two ranks, and those of tensor parallelism in one of four too.
"""

from pathlib import Path

import four_ranks_checks
import pytest
import rank_runs
import tensor_parallel_checks

CUT, STEP = "tensor_parallel_checks", "in_step_checks"
FOUR = "four_ranks_checks"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks, started by torchrun, have left what they found."""
    folder = tmp_path_factory.mktemp("two")
    tensor_parallel_checks.prepare(folder)
    rank_runs.launch([CUT, STEP], 2, folder)
    return folder


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of four, which share the imports of the process they come from."""
    folder = tmp_path_factory.mktemp("four")
    four_ranks_checks.prepare(folder)
    rank_runs.launch([FOUR], 4, folder, fork=True)
    return folder


@pytest.mark.parametrize("name", [name for name, _ in rank_runs.checks_of(CUT, STEP)])
def test_on_two_ranks(name, two_ranks):
    rank_runs.read(two_ranks, 2, name)


@pytest.mark.parametrize("name", [name for name, _ in rank_runs.checks_of(FOUR)])
def test_on_four_ranks(name, four_ranks):
    rank_runs.read(four_ranks, 4, name)
