"""When Triton kernels are used at all."""

import os
import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_specdec.kernels import runtime


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_verdicts", {})


@pytest.mark.parametrize("interpreted", [False, True])
def test_on_cpu_only_the_interpreter_runs_kernels(
    monkeypatch: pytest.MonkeyPatch, interpreted: bool
) -> None:
    monkeypatch.delenv(runtime.SWITCH, raising=False)
    monkeypatch.setattr(runtime, "installed", lambda: True)
    monkeypatch.setattr(runtime, "interpreted", lambda: interpreted)
    assert runtime.usable(torch.zeros(1)) is interpreted


def test_tensors_on_two_devices_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "installed", lambda: True)
    monkeypatch.setattr(runtime, "interpreted", lambda: True)
    assert not runtime.usable(torch.zeros(1), torch.zeros(1, device="meta"))


def test_a_variable_turns_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "installed", lambda: True)
    monkeypatch.setattr(runtime, "interpreted", lambda: True)
    monkeypatch.setenv(runtime.SWITCH, "0")
    assert not runtime.usable(torch.zeros(1))


def test_without_triton_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "installed", lambda: False)
    assert not runtime.usable(torch.zeros(1))


def test_a_kernel_that_agrees_is_tried_once() -> None:
    trials = []

    def trial() -> bool:
        trials.append(1)
        return True

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert runtime.trusted("k", torch.zeros(1), trial)
        assert runtime.trusted("k", torch.zeros(1), trial)
    assert len(trials) == 1
    runtime.trusted("k", torch.zeros(1, dtype=torch.bfloat16), trial)
    assert len(trials) == 2, "another dtype is another kernel"


def test_a_kernel_that_disagrees_is_never_used() -> None:
    with pytest.warns(RuntimeWarning, match="kernel 'k'.*results differ"):
        assert not runtime.trusted("k", torch.zeros(1), lambda: False)
    assert not runtime.trusted("k", torch.zeros(1), lambda: True)


def test_a_kernel_that_cannot_be_compiled_is_never_used() -> None:
    def trial() -> bool:
        raise ZeroDivisionError("no such arch")

    with pytest.warns(RuntimeWarning, match="ZeroDivisionError: no such arch"):
        assert not runtime.trusted("k", torch.zeros(1), trial)


def test_no_trial_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch is captured then, and the trial is made later."""
    like: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda"), dtype=torch.float32)
    for capturing in (True, False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)  # noqa: B023
        first_time_and_capturing = capturing and not runtime._verdicts
        assert runtime.trusted("k", like, lambda: True) is not first_time_and_capturing


def test_where_kernels_cannot_run_none_is_imported() -> None:
    """Neither by the package nor by a verification on CPU: only the question whether they can."""
    script = (
        "import sys, torch, hf_specdec\n"
        "from hf_specdec.verification import verify_match\n"
        "verdict = verify_match(torch.zeros(1, 0).long(), torch.ones(1, 1, 9))\n"
        "assert verdict.tokens.tolist() == [[0]]\n"
        "print(sorted(name for name in sys.modules if name.startswith('hf_specdec.kernels.')))\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "['hf_specdec.kernels.runtime']"
