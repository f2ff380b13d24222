"""A drafter that outlives a call keeps none of its states, keys or weights; nor after an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_calls import Graphs, small_target
from gemma4_models import gemma4_assistant, gemma4_target
from test_mtp import random_target
from tiny_models import _target
from transformers import LogitsProcessor, LogitsProcessorList

from hf_specdec.drafters import Drafter, Gemma4Drafter, MLPDrafter, MTPDrafter
from hf_specdec.modeling.mimo import MiMoMTP

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8}
Pair = tuple[Any, Drafter]


def held(drafter: Drafter) -> dict[str, int]:
    """Identities of what a drafter holds, but for numbers and tables of numbers."""
    kept = {}
    for name, value in vars(drafter).items():
        parts = value.values() if isinstance(value, dict) else [value]
        if not all(isinstance(part, (bool, int)) for part in parts):
            kept[name] = id(value)
    return kept


class Looks(LogitsProcessor):
    """Notes which attributes of a drafter a call has filled, and can raise in its n-th call."""

    def __init__(self, drafter: Drafter, fails_after: int | None = None):
        self.drafter, self.left = drafter, fails_after
        self.idle = held(drafter)
        self.filled: set[str] = set()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.filled |= {name for name, _ in held(self.drafter).items() - self.idle.items()}
        if self.left is not None:
            if self.left == 0:
                raise RuntimeError("broken")
            self.left -= 1
        return scores

    def __deepcopy__(self, memo: Any) -> "Looks":
        return self


def pair_of(kind: str, make_speculator: Callable[..., Any]) -> Pair:
    if kind == "mtp":
        target = random_target("post_norm")
        return target, MTPDrafter(MiMoMTP(target))
    if kind == "gemma4":
        target = gemma4_target("31B")
        return target, Gemma4Drafter(gemma4_assistant(target))
    return _target("llama"), MLPDrafter(make_speculator(share_target_weights=True))


# What a call must have filled, or there would be nothing to let go of.
FILLS = {
    "mlp": {"_hidden_states", "_bound"},
    "mtp": {"_cache", "_prompt", "_tail"},
    "gemma4": {"_cache", "_hidden_states", "_embeddings"},
}


@pytest.fixture(params=sorted(FILLS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def pair(kind: str, make_speculator: Callable[..., Any]) -> Pair:
    return pair_of(kind, make_speculator)


@pytest.mark.parametrize("fails_after", [None, 9], ids=["returns", "fails"])
def test_a_drafter_is_empty_after_a_call(fails_after, kind, pair, prompts) -> None:
    target, drafter = pair
    looks = Looks(drafter, fails_after)

    def call() -> Any:
        return target.generate(
            **prompts(2),
            **GREEDY,
            assistant_model=drafter,
            logits_processor=LogitsProcessorList([looks]),
            return_dict_in_generate=True,
        )

    if fails_after is None:
        assert call().speculation.num_drafts > 0
    else:
        with pytest.raises(RuntimeError, match="broken"):
            call()
    assert looks.filled >= FILLS[kind]
    assert held(drafter) == looks.idle


def test_a_drafter_is_empty_after_a_start_that_fails(pair, prompts, monkeypatch) -> None:
    target, drafter = pair
    idle, start = held(drafter), drafter.start

    def fails(*args: Any) -> None:
        start(*args)
        assert held(drafter) != idle
        raise RuntimeError("no start")

    monkeypatch.setattr(type(drafter), "start", lambda _self, *args: fails(*args))
    with pytest.raises(RuntimeError, match="no start"):
        target.generate(**prompts(2), **GREEDY, assistant_model=drafter)
    assert held(drafter) == idle


def test_the_buffers_of_compiled_steps_are_let_go(prompts, make_speculator) -> None:
    target = small_target(num_hidden_layers=1)
    drafter = MLPDrafter(make_speculator(n_predict=1))
    looks = Looks(drafter)
    target.generate(
        **prompts(1),
        **GREEDY,
        **Graphs().arguments,
        assistant_model=drafter,
        logits_processor=LogitsProcessorList([looks]),
    )
    assert looks.filled >= {"_compiled", "_choice", "_hidden_states"}
    assert held(drafter) == looks.idle
