"""``generate`` with kernels says what it says without them, and really uses them."""

import copy
from collections import Counter

import pytest
import torch
from tiny_models import new_tokens, row_by_row

from hf_specdec.drafters import MLPDrafter
from hf_specdec.kernels import cache_moves, head_argmax, mlp_stage, runtime

KERNELS = {
    "move_accepted": cache_moves,
    "write_ragged": cache_moves,
    "finish_stage": mlp_stage,
    "head_argmax": head_argmax,
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """How often each kernel was used, the trials not counted."""
    counter: Counter = Counter()
    for name, module in KERNELS.items():
        monkeypatch.setattr(module, "agrees", lambda like: True)
        kernel = getattr(module, name)

        def counted(*args, name=name, kernel=kernel):
            counter[name] += 1
            return kernel(*args)

        monkeypatch.setattr(module, name, counted)
    monkeypatch.setattr(runtime, "_verdicts", {})
    return counter


def both_ways(monkeypatch, target, speculator, inputs, device, **kwargs):
    """Texts, accepted tokens by row and all drafts, without and with kernels."""
    drafts: list[list[list[int]]] = []
    propose = MLPDrafter.propose

    def watch(self, *args):
        drafts.append(propose(self, *args).tolist())
        return torch.tensor(drafts[-1], device=device)

    monkeypatch.setattr(MLPDrafter, "propose", watch)
    target, speculator = (copy.deepcopy(model).to(device) for model in (target, speculator))
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    results = []
    for switch in ("0", "1"):
        monkeypatch.setenv(runtime.SWITCH, switch)
        out = target.generate(
            **inputs, assistant_model=speculator, return_dict_in_generate=True, **kwargs
        )
        rows = [row.accepted_per_position for row in out.speculation.rows]
        results.append((out.sequences.tolist(), rows, drafts.copy()))
        drafts.clear()
    return results


def knowing(target, speculator, inputs, length):
    """A speculator that is right now and then: rows of a batch then stand at different slots."""
    answers = row_by_row(target, inputs, max_new_tokens=length, do_sample=False)
    with torch.no_grad():
        for head in speculator.speculator.head:
            head.weight[[token for row in answers for token in row[:4]]] *= 3
    return speculator


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_same_text_and_same_drafts(
    family, do_sample, make_target, make_speculator, prompts, monkeypatch, calls, device
) -> None:
    """Mistral's layers attend to a window: its keys are written into a ring."""
    target, inputs = make_target(family), prompts(2)
    speculator = knowing(target, make_speculator(n_predict=2), inputs, 10)
    kwargs = {"row_seeds": [5, 6], "temperature": 0.1} if do_sample else {}
    plain, fused = both_ways(
        monkeypatch,
        target,
        speculator,
        inputs,
        device,
        max_new_tokens=10,
        do_sample=do_sample,
        **kwargs,
    )
    assert fused == plain
    # Rows must come to stand at different slots.
    assert sum(plain[1][0]) != sum(plain[1][1])
    assert calls["write_ragged"] and calls["finish_stage"]
    # A sampled draft is picked from logits.
    assert bool(calls["head_argmax"]) is not do_sample


@pytest.mark.parametrize(
    "fields",
    [
        {"share_target_weights": True},
        {"share_target_weights": True, "draft_vocab_size": 40},
        {"tie_weights": True, "scale_input": True},
        {"draft_vocab_size": 33, "inner_dim": 23},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_every_kind_of_speculator(
    fields, target, make_speculator, prompts, monkeypatch, calls, device
) -> None:
    speculator = make_speculator(n_predict=2, **fields)
    if size := fields.get("draft_vocab_size"):
        speculator.set_draft_token_ids(torch.arange(63, 63 - size, -1))
    plain, fused = both_ways(
        monkeypatch, target, speculator, prompts(1), device, max_new_tokens=6, do_sample=False
    )
    assert fused == plain
    assert calls["finish_stage"] == calls["head_argmax"] > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_drafts_in_half_precision(
    dtype, target, make_speculator, prompts, monkeypatch, calls, device
) -> None:
    speculator = make_speculator(n_predict=2).to(dtype)
    plain, fused = both_ways(
        monkeypatch, target, speculator, prompts(1), device, max_new_tokens=6, do_sample=False
    )
    assert fused[0] == plain[0]
    assert calls["finish_stage"] == calls["head_argmax"] > 0


def test_more_rows_than_a_kernel_takes_use_a_matrix_product(
    make_speculator, calls, device, monkeypatch
) -> None:
    model = make_speculator(n_predict=2).to(device)
    states, tokens = torch.randn(17, 32, device=device), torch.arange(17, device=device)
    drafts = {}
    for switch in ("0", "1"):
        monkeypatch.setenv(runtime.SWITCH, switch)
        drafter = MLPDrafter(model)
        drafter._num_target_ids, drafter._hidden_states = 64, states
        drafts[switch] = drafter.propose(tokens, 2)
    assert torch.equal(drafts["0"], drafts["1"])
    assert calls["finish_stage"] == 2 and not calls["head_argmax"]


def test_hooked_and_other_modules_are_asked_themselves(make_speculator, calls, device) -> None:
    """A look-up or a head that isn't plain (quantised, hooked) isn't read past."""
    from hf_specdec.drafters.mlp_chain import draft_chain

    model = make_speculator(n_predict=2).to(device)
    states, tokens = torch.randn(2, 32, device=device), torch.tensor([3, 4], device=device)
    seen = []
    model.speculator.head[0].register_forward_hook(lambda *_: seen.append("head"))
    model.speculator.emb[1].register_forward_pre_hook(lambda *_: seen.append("embedding"))
    found = draft_chain(model, states, tokens, 2, None)
    assert seen == ["head", "embedding"]
    assert calls["finish_stage"] == calls["head_argmax"] == 1
    assert torch.equal(found, model.propose(states, tokens, 2))


def test_kernels_that_disagree_are_not_used(
    target, make_speculator, prompts, monkeypatch, calls, device
) -> None:
    for module in KERNELS.values():
        monkeypatch.setattr(module, "agrees", lambda like: False)
    with pytest.warns(RuntimeWarning) as warned:
        plain, fused = both_ways(
            monkeypatch,
            target,
            make_speculator(n_predict=2),
            prompts(2),
            device,
            max_new_tokens=6,
            do_sample=False,
        )
    assert fused == plain and not calls
    assert {str(w.message).split("'")[1] for w in warned if "kernel" in str(w.message)} >= {
        "mlp_stage",
        "head_argmax",
    }


def test_autocast_is_left_to_torch(make_speculator, calls, device) -> None:
    from hf_specdec.drafters.mlp_chain import draft_chain

    model = make_speculator(n_predict=2).to(device)
    states, tokens = torch.randn(2, 32, device=device), torch.tensor([3, 4], device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = draft_chain(model, states, tokens, 2, None)
        assert torch.equal(found, model.propose(states, tokens, 2))
    assert not calls


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_accepted_paths_of_trees_are_moved_by_the_kernel(
    family, make_target, make_speculator, prompts, monkeypatch, calls, device
) -> None:
    target, inputs = make_target(family), prompts(2)
    speculator = knowing(target, make_speculator(n_predict=2), inputs, 10)
    expected = row_by_row(target, inputs, max_new_tokens=10, do_sample=False)
    target, speculator = (copy.deepcopy(model).to(device) for model in (target, speculator))
    monkeypatch.delenv(runtime.SWITCH, raising=False)
    out = target.generate(
        **{name: tensor.to(device) for name, tensor in inputs.items()},
        assistant_model=speculator,
        # The second guess alone goes on, so that its keys have to move.
        speculative_token_tree="[(0,), (1,), (2,), (1, 0), (2, 0)]",
        max_new_tokens=10,
        do_sample=False,
    )
    assert new_tokens(out, inputs, [10, 10]) == expected
    assert calls["move_accepted"]
