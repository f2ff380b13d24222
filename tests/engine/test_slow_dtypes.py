"""A target in a dtype that the processor has no instructions for: said where drafts are lost on."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import cpu_offload

from hf_specdec.targets import slow_dtypes
from hf_specdec.targets.slow_dtypes import has_kernels_for


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("supported", "expected"),
    [(lambda: True, True), (lambda: False, False), (None, True)],
    ids=["with instructions", "without", "torch without oneDNN"],
)
def test_whether_the_processor_has_it(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, supported: Any, expected: bool
) -> None:
    short = "bf16" if dtype == torch.bfloat16 else "fp16"
    queries = {} if supported is None else {f"_is_mkldnn_{short}_supported": supported}
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(**queries))
    assert has_kernels_for(dtype) is expected
    assert has_kernels_for(torch.float32)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings; the processor has instructions for float32 alone."""
    messages: list[str] = []
    monkeypatch.setattr(slow_dtypes.logger, "warning_once", messages.append)
    monkeypatch.setattr(slow_dtypes, "has_kernels_for", lambda dtype: dtype == torch.float32)
    return messages


def call(target: Any, speculator: Any, **arguments: Any) -> torch.Tensor:
    """Three tokens."""
    ids = torch.tensor([[5, 6, 7]])
    made: torch.Tensor = target.generate(
        ids, assistant_model=speculator, max_new_tokens=3, do_sample=False, **arguments
    )
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_said(target, make_speculator, said, dtype) -> None:
    target = copy.deepcopy(target).to(dtype)
    call(target, make_speculator())
    (message,) = said
    name = "bfloat16" if dtype == torch.bfloat16 else "float16"
    assert f"LlamaForCausalLM is in {name}, for which this processor has no" in message
    assert "Pass num_assistant_tokens='auto'" in message
    assert "load it with dtype=torch.float32" in message


def test_what_it_says_works(target, make_speculator, said) -> None:
    slow = copy.deepcopy(target).bfloat16()
    call(slow, make_speculator(), num_assistant_tokens="auto")
    call(copy.deepcopy(slow).float(), make_speculator())
    assert said == []


def test_without_drafts_nothing_is_lost(target, make_speculator, said) -> None:
    target = copy.deepcopy(target).bfloat16()
    call(target, make_speculator(), num_assistant_tokens=0)
    assert said == []


def test_weights_that_are_unpacked_or_fetched(target, make_speculator, said) -> None:
    packed = copy.deepcopy(target).bfloat16()
    packed.hf_quantizer = SimpleNamespace(is_compileable=False)
    call(packed, make_speculator())
    fetched = copy.deepcopy(target).bfloat16()
    # Not the embedding, whose place is the model's device.
    cpu_offload(fetched.model.layers, torch.device("cpu"))
    assert fetched.device.type == "cpu"
    call(fetched, make_speculator())
    assert said == []
