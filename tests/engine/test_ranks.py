"""Several ranks: targets that are cut (tensor parallel), and rows that keep step (FSDP).

What is checked stands in `tensor_parallel_checks`, `in_step_checks` and `four_ranks_checks`; here
all of it is run once, and every check is a test.
"""

from pathlib import Path

import pytest
import rank_runs

TWO, FOUR = ("tensor_parallel_checks", "in_step_checks"), ("four_ranks_checks",)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks, and then four, have left what they found."""
    folder = tmp_path_factory.mktemp("ranks")
    rank_runs.launch(folder, f"{','.join(TWO)}:2", f"{','.join(FOUR)}:4")
    return folder


@pytest.mark.parametrize("name", [name for name, _ in rank_runs.checks_of(*TWO)])
def test_on_two_ranks(name, results):
    rank_runs.read(results, 2, name)


@pytest.mark.parametrize("name", [name for name, _ in rank_runs.checks_of(*FOUR)])
def test_on_four_ranks(name, results):
    rank_runs.read(results, 4, name)


@pytest.mark.exhaustive
def test_started_by_torchrun(tmp_path):
    rank_runs.prepare(TWO, tmp_path)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    rank_runs.launch(tmp_path, f"{','.join(TWO)}:2", launcher=torchrun)
    for name, _ in rank_runs.checks_of(*TWO):
        rank_runs.read(tmp_path, 2, name)


def test_a_process_on_its_own_keeps_step_with_nobody(target, make_speculator, prompts):
    inputs = prompts(3)
    options = {"assistant_model": make_speculator(), "max_new_tokens": 8, "do_sample": False}
    alone = target.generate(**inputs, **options)
    assert target.generate(**inputs, synced_gpus=True, **options).equal(alone)
