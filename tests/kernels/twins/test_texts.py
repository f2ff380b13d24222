"""Texts with kernels are the texts without."""

import copy

import pytest
from kernel_twins import DEVICE

from hf_specdec.kernels import runtime

PLAIN = {"max_new_tokens": 6, "do_sample": False}
SAMPLED = {"max_new_tokens": 6, "do_sample": True, "top_k": 0, "row_seeds": [5, 6]}


@pytest.fixture
def kernels(implementation: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict]]:
    """What kernels were called for, in order: nothing in a process without them."""
    if implementation == "plain":
        monkeypatch.setenv(runtime.SWITCH, "0")
        return []
    from hf_specdec.kernels import matching, rejection

    calls: list[tuple[str, dict]] = []

    def spy_on(module, name: str, logits_at: int) -> None:
        launch = getattr(module, name)

        def spy(*args):
            calls.append((name, {"dtype": args[logits_at].dtype, "temperature": args[-1]}))
            return launch(*args)

        monkeypatch.setattr(module, name, spy)

    spy_on(matching, "verify_match", 1)
    spy_on(rejection, "verify_rejection", 2)
    return calls


@pytest.mark.parametrize(
    ("arguments", "kernel", "temperature"),
    [
        (PLAIN, "verify_match", None),
        ({**SAMPLED, "temperature": 0.7}, "verify_match", 0.7),
        ({**SAMPLED, "top_k": 5}, "verify_match", None),
        ({**SAMPLED, "temperature": 0.7, "verification": "rejection"}, "verify_rejection", 0.7),
    ],
    ids=["greedy", "temperature", "top-k", "rejection"],
)
def test_texts_are_the_same_with_kernels(
    implementation,
    kernels,
    target,
    make_speculator,
    prompts,
    monkeypatch,
    arguments,
    kernel,
    temperature,
) -> None:
    target = copy.deepcopy(target).to(DEVICE)
    inputs = {name: tensor.to(DEVICE) for name, tensor in prompts(2).items()}
    speculator = make_speculator(n_predict=2).to(DEVICE)
    texts = target.generate(**inputs, assistant_model=speculator, **arguments)
    used = list(kernels)
    monkeypatch.setenv(runtime.SWITCH, "0")  # read at every step
    without = target.generate(**inputs, assistant_model=speculator, **arguments)
    assert texts.tolist() == without.tolist()
    assert kernels == used, "the variable turned them off"
    if implementation == "kernel":
        assert (kernel, {"dtype": target.dtype, "temperature": temperature}) in used
