"""Verification uses a kernel where it can and where the kernel has equalled plain torch."""

import warnings
from collections.abc import Callable

import pytest
import torch
from kernel_twins import DEVICE, ids

from hf_specdec import verification
from hf_specdec.kernels import runtime


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_verdicts", {})
    if not runtime.usable(torch.zeros(1, device=DEVICE)):
        pytest.skip("needs a GPU or TRITON_INTERPRET=1: see test_interpreted.py")


@pytest.fixture
def count_launches(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    from hf_specdec.kernels import matching, rejection

    launches = []
    for module, name in ((matching, "verify_match"), (rejection, "verify_rejection")):
        launch = getattr(module, name)

        def spy(*args, launch=launch):
            launches.append(1)
            return launch(*args)

        monkeypatch.setattr(module, name, spy)
    return lambda: len(launches)


def arguments(dtype: torch.dtype = torch.float32, vocabulary: int = 80):
    logits = torch.randn(2, 3, vocabulary).to(DEVICE, dtype)
    draft_ids = logits[:, :2].argmax(dim=-1)
    positions = torch.arange(3, device=DEVICE).expand(2, 3)
    return draft_ids, logits, ids(1, 2), positions


def test_a_kernel_that_is_right_is_used_after_one_trial(count_launches) -> None:
    draft_ids, logits, seeds, positions = arguments()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        verdict = verification.verify_match(draft_ids, logits)
        tried = count_launches()
        verification.verify_match(draft_ids, logits)
        assert count_launches() == tried + 1
        assert tried >= 2
    assert verdict.num_accepted.tolist() == [2, 2]
    verification.verify_match(draft_ids, logits, seeds, positions, 0.5)
    assert len(runtime._verdicts) == 2, "with noise it is another kernel"


@pytest.mark.parametrize("wrong", ["tokens", "num_accepted"])
def test_a_wrong_matching_kernel_is_not_used(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_specdec.kernels import matching

    launch = matching.verify_match

    def broken(*args):
        tokens, num_accepted = launch(*args)
        if wrong == "tokens":
            tokens[-1, -1] += 1
        else:
            num_accepted[-1] -= 1
        return tokens, num_accepted

    monkeypatch.setattr(matching, "verify_match", broken)
    draft_ids, logits, *_ = arguments()
    with pytest.warns(RuntimeWarning, match="'verify_match, greedy' isn't used.*results differ"):
        verdict = verification.verify_match(draft_ids, logits)
    assert verdict.num_accepted.tolist() == [2, 2]
    assert torch.equal(verdict.tokens, logits.argmax(dim=-1))


def test_a_wrong_rejection_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_specdec.kernels import rejection

    def broken(draft_ids, *_):
        return torch.nn.functional.pad(draft_ids, (0, 1)), torch.full_like(draft_ids[:, 0], 2)

    monkeypatch.setattr(rejection, "verify_rejection", broken)
    draft_ids, logits, seeds, positions = arguments()
    draft_probs = logits[:, :2].softmax(dim=-1)
    logits[:, 0, draft_ids[:, 0]] = -torch.inf
    with pytest.warns(RuntimeWarning, match="verify_rejection, sampled, with temperature"):
        verdict = verification.verify_rejection(
            draft_ids, draft_probs, logits, seeds, positions, 0.8
        )
    assert verdict.num_accepted.tolist() == [0, 0]


def test_a_kernel_that_cannot_be_launched_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_specdec.kernels import matching

    monkeypatch.setattr(matching, "match_partial", None)
    draft_ids, logits, *_ = arguments(torch.bfloat16, 81)
    with pytest.warns(RuntimeWarning, match="odd vocabulary.*TypeError"):
        verdict = verification.verify_match(draft_ids, logits)
    assert verdict.num_accepted.tolist() == [2, 2]


def test_what_kernels_do_not_read_is_left_to_torch(count_launches) -> None:
    """Another dtype, and rows whose entries aren't neighbours."""
    draft_ids, logits, seeds, positions = arguments()
    sparse = torch.stack([logits, logits], dim=-1)[..., 0]
    doubled = logits.double()
    for given in (sparse, doubled):
        assert verification.verify_match(draft_ids, given).num_accepted.tolist() == [2, 2]
    draft_probs = torch.ones(2, 2, 80, 2, device=DEVICE)[..., 0]
    verification.verify_rejection(draft_ids, draft_probs, logits, seeds, positions)
    assert count_launches() == 0
