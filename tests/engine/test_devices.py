"""Targets whose layers are on several devices: the tokens and the drafts of one device.

The devices are imitated (`second_device`): what is on the wrong one raises, as on GPUs.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mtp_checkpoints
import pytest
import torch
from gemma4_models import gemma4_assistant, gemma4_target
from second_device import FIRST, SECOND, separate_devices, spread
from test_lockstep import hybrid
from test_mtp import random_target, tiny_config
from tiny_models import HIDDEN_SIZE, PAD, _target, new_tokens, row_by_row
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria

import hf_specdec
from hf_specdec import MLPSpeculatorConfig, MLPSpeculatorPreTrainedModel
from hf_specdec.drafters import NGramDrafter
from hf_specdec.modeling.mimo import MiMoForCausalLM
from hf_specdec.registry import mtp_network

NEW = 8
BOTTOM = ("layers.0", "embed", "rotary", "per_layer")
SEEDS = [1, 2, 3]
SAMPLED: dict[str, Any] = {"do_sample": True, "row_seeds": SEEDS, "temperature": 0.8}


def speculator(target: Any, **fields: Any) -> Any:
    values: dict[str, Any] = {
        "vocab_size": target.config.vocab_size,
        "emb_dim": HIDDEN_SIZE,
        "inner_dim": 24,
        "n_predict": 3,
        "top_k_tokens_per_head": [2] * 3,
        "n_candidates": 2,
    }
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = MLPSpeculatorConfig(**{**values, **fields})
        return MLPSpeculatorPreTrainedModel(config).eval()


def shared_speculator(target: Any) -> Any:
    return speculator(target, share_target_weights=True, inner_dim=HIDDEN_SIZE)


def mimo() -> MiMoForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = MiMoForCausalLM(tiny_config(mtp_draft_token_ids=list(range(3, 50)))).eval()
    model.generation_config = copy.deepcopy(random_target("pre_norm").generation_config)
    return model


@dataclass(frozen=True)
class Case:
    """A pair and a call.

    Attributes:
        target: makes a target of its own.
        drafter: makes its drafter.
        call: arguments of ``generate``.
        on_first: of `spread`.
        place: of the drafter.
        repeats: whether the text can be looked up in the prompts.
    """

    target: Callable[[], Any]
    drafter: Callable[[Any], Any] = speculator
    call: dict[str, Any] = field(default_factory=dict)
    on_first: tuple[str, ...] = BOTTOM
    place: torch.device = SECOND
    repeats: bool = False


def repeating(rows: int) -> dict[str, torch.Tensor]:
    """Prompts that have almost any token in them."""
    ids = 3 + (torch.arange(50) * 7 + 11 * torch.arange(rows)[:, None]) % 60
    ids[1, :5] = PAD
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def tiny(family: str) -> Callable[[], Any]:
    return lambda: copy.deepcopy(_target(family))


def gemma4(name: str) -> Callable[[], Any]:
    return lambda: copy.deepcopy(gemma4_target(name))


def published(name: str) -> Callable[[], Any]:
    return functools.partial(mtp_checkpoints.load, name)


LOOKUP = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1}
TIED = ("layers.0", "layers.1", "embed", "rotary", "head")
CASES = {
    "mlp": Case(tiny("llama")),
    "mlp, last layers first": Case(tiny("llama"), on_first=("norm", "layers.2", "layers.3")),
    "mlp, sampled": Case(tiny("gemma3"), call=SAMPLED),
    "mlp, rejection": Case(tiny("llama"), call={**SAMPLED, "verification": "rejection"}),
    "mlp, tree": Case(tiny("gemma3"), call={"num_tree_nodes": 6}),
    "mlp, target's tables": Case(tiny("llama"), shared_speculator),
    "mlp, lookup": Case(tiny("llama"), call=LOOKUP, repeats=True),
    "ngram": Case(tiny("mistral"), lambda target: NGramDrafter(), LOOKUP, repeats=True),
    "lockstep": Case(lambda: copy.deepcopy(hybrid("qwen3_5_text"))),
    "mtp": Case(published("deepseek_v3-two_modules"), mtp_network, {"num_assistant_tokens": 4}),
    "mtp, windows": Case(published("mimo_v2_flash"), mtp_network, {"num_assistant_tokens": 3}),
    "mtp, masks position 0": Case(published("longcat_flash"), mtp_network, SAMPLED),
    "mimo, layer and head apart": Case(
        mimo, mtp_network, {"num_assistant_tokens": 3}, on_first=(*BOTTOM, "mtp_layers")
    ),
    "gemma 4": Case(gemma4("E2B"), gemma4_assistant, {"num_assistant_tokens": 3}),
    "gemma 4, head with the embedding": Case(
        gemma4("31B"), gemma4_assistant, {**SAMPLED, "num_assistant_tokens": 3}, TIED
    ),
    "gemma 4, assistant with the head": Case(
        gemma4("31B"), gemma4_assistant, {"num_assistant_tokens": 3}, TIED, FIRST
    ),
    "gemma 4, rejection": Case(
        gemma4("31B"),
        gemma4_assistant,
        {**SAMPLED, "num_assistant_tokens": 3, "verification": "rejection"},
        TIED,
    ),
}


def run(target: Any, assistant: Any, inputs: dict[str, torch.Tensor], **call: Any):
    """The output, and the ids of every forward: each draft is among them."""
    fed: list[Any] = []
    handle = target.register_forward_pre_hook(
        lambda _module, _args, kwargs: fed.append(kwargs["input_ids"].tolist()), with_kwargs=True
    )
    arguments = {"do_sample": False, "max_new_tokens": NEW, **call}
    try:
        output = target.generate(
            **inputs, assistant_model=assistant, return_dict_in_generate=True, **arguments
        )
    finally:
        handle.remove()
    return output, fed


def on_first(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(FIRST) for name, tensor in inputs.items()}


def placed(assistant: Any, device: torch.device) -> Any:
    """A drafter of its own on a device; MTP layers follow the target."""
    is_own = isinstance(assistant, torch.nn.Module) and not hasattr(assistant, "target")
    return assistant.to(device) if is_own else assistant


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_the_same_tokens_and_drafts_as_on_one_device(case: Case, prompts):
    target, inputs = case.target(), repeating(3) if case.repeats else prompts(3)
    expected, expected_feed = run(target, case.drafter(target), inputs, **case.call)
    if not case.call.get("do_sample"):
        plain = row_by_row(target, inputs, do_sample=False, max_new_tokens=NEW)
        assert new_tokens(expected.sequences, inputs, [NEW] * 3) == plain
    with separate_devices():
        spread(target, *case.on_first)
        assistant = placed(case.drafter(target), case.place)
        output, feed = run(target, assistant, on_first(inputs), **case.call)
        assert output.sequences.device == FIRST
        assert output.sequences.tolist() == expected.sequences.tolist()
        assert feed == expected_feed
        assert output.speculation.num_drafts == expected.speculation.num_drafts > 0


class Forbid(LogitsProcessor):
    """Has a tensor where the prompts are, and looks at the prefix."""

    def __init__(self, device: Any):
        self.ids = torch.tensor([5, 9], device=device)

    def __call__(self, input_ids, scores):
        allowed = torch.isin(input_ids, self.ids).any(dim=1, keepdim=True)
        forbidden = torch.zeros_like(scores)
        forbidden[:, self.ids] = -torch.inf
        return torch.where(allowed, scores, scores + forbidden)


class Ends(StoppingCriteria):
    """Ends a row behind any of some ids, which it keeps where the prompts are."""

    def __init__(self, device: Any):
        self.ids = torch.arange(20, 28, device=device)

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, -1], self.ids)


def test_processors_and_criteria_see_what_plain_generation_shows_them(target, prompts):
    target, inputs = copy.deepcopy(target), prompts(3)
    common = {"min_new_tokens": 2, "eos_token_id": [30, 31], "repetition_penalty": 1.2}

    def call(device):
        return {
            **common,
            "logits_processor": LogitsProcessorList([Forbid(device)]),
            "stopping_criteria": [Ends(device)],
        }

    expected, _ = run(target, speculator(target), inputs, **call("cpu"))
    with separate_devices():
        spread(target, *BOTTOM)
        plain = target.generate(
            **on_first(inputs), do_sample=False, max_new_tokens=NEW, **call(FIRST)
        )
        output, _ = run(target, speculator(target).to(SECOND), on_first(inputs), **call(FIRST))
        assert output.sequences.tolist() == plain.tolist() == expected.sequences.tolist()


def test_rows_that_end_leave_the_cache_of_every_layer(target, prompts):
    target, inputs = copy.deepcopy(target), prompts(8)
    texts = row_by_row(target, inputs, do_sample=False, max_new_tokens=NEW)
    ends = [texts[0][1], texts[2][3], texts[3][4]]
    expected, expected_feed = run(target, speculator(target), inputs, eos_token_id=ends)
    with separate_devices():
        spread(target, *BOTTOM)
        assistant = speculator(target).to(SECOND)
        output, feed = run(target, assistant, on_first(inputs), eos_token_id=ends)
        assert output.sequences.tolist() == expected.sequences.tolist()
        assert feed == expected_feed
        widths = {len(ids) for ids in feed}
        assert max(widths) == 8 and min(widths) < 8
        for layer, alone in zip(output.cache.layers, expected.cache.layers, strict=True):
            # What follows a row's end is nobody's business.
            length = inputs["input_ids"].shape[1]
            torch.testing.assert_close(layer.keys[:, :, :length].cpu(), alone.keys[:, :, :length])
        assert {layer.keys.device for layer in output.cache.layers} == {FIRST, SECOND}


def test_a_conversation_goes_on_with_the_cache(target, prompts):
    target, inputs = copy.deepcopy(target), prompts(1)
    first = row_by_row(target, inputs, do_sample=False, max_new_tokens=2 * NEW)[0]
    with separate_devices():
        spread(target, *BOTTOM)
        assistant = speculator(target).to(SECOND)
        output, _ = run(target, assistant, on_first(inputs))
        again = {"input_ids": output.sequences}
        output, feed = run(target, assistant, again, cache=output.cache)
        new = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        assert new == first
        # Of the text so far its last token alone is run.
        assert len(feed[0][0]) == 1


def test_what_is_returned_is_where_plain_generation_returns_it(target, prompts):
    target, inputs = copy.deepcopy(target), prompts(3)
    wanted = {"output_scores": True, "output_hidden_states": True}
    expected, _ = run(target, speculator(target), inputs, **wanted)
    with separate_devices():
        spread(target, *BOTTOM)
        plain = target.generate(
            **on_first(inputs),
            do_sample=False,
            max_new_tokens=NEW,
            return_dict_in_generate=True,
            **wanted,
        )
        output, _ = run(target, speculator(target).to(SECOND), on_first(inputs), **wanted)
        for ours, theirs, alone in zip(output.scores, plain.scores, expected.scores, strict=True):
            assert ours.device == theirs.device == FIRST
            torch.testing.assert_close(ours.cpu(), alone, atol=1e-4, rtol=1e-3)
        for ours, theirs in zip(output.hidden_states, plain.hidden_states, strict=True):
            assert [x.device for x in ours] == [x.device for x in theirs]


def test_indices_are_moved_once_a_step_and_not_once_a_layer(target, prompts):
    def copies(*names: str) -> tuple[int, int, int]:
        """Of a verifying forward: to the first device, back, and back of a plain forward."""
        model, inputs = copy.deepcopy(target), prompts(3)
        with separate_devices() as devices:
            spread(model, "embed", "rotary", *names)
            assistant = speculator(model).to(SECOND)
            seen = []
            for num_new in (3, 4):
                devices.copies.clear()
                # Nothing of a random speculator is accepted: each forward emits one token.
                output, feed = run(model, assistant, on_first(inputs), max_new_tokens=num_new)
                assert len(feed) == num_new
                seen.append(devices.copies.copy())
            to_first = (str(SECOND), str(FIRST))
            back = (str(FIRST), str(SECOND))
            plain = []
            for num_new in (3, 4):
                devices.copies.clear()
                model.generate(**on_first(inputs), do_sample=False, max_new_tokens=num_new)
                plain.append(devices.copies.copy())
        return (
            seen[1][to_first] - seen[0][to_first],
            seen[1][back] - seen[0][back],
            plain[1][back] - plain[0][back],
        )

    few, many = copies("layers.0"), copies("layers.0", "layers.1", "layers.2")
    assert few[0] == many[0] <= 8
    # Of two layers more behind the border accelerate moves cosines and sines; in a plain forward
    # mask and position ids as well.
    assert few[1] - many[1] == 2 * 2
    assert few[2] - many[2] == 2 * 4
    assert few[1] < few[2] and many[1] < many[2]


def test_one_device_moves_nothing(target, prompts):
    target, inputs = copy.deepcopy(target), prompts(3)
    with separate_devices() as devices:
        target.to(FIRST)
        run(target, speculator(target).to(FIRST), on_first(inputs))
        assert not any(SECOND.type in a and SECOND.type in b for a, b in devices.copies)


def test_a_drafter_on_another_device_is_refused_and_both_are_named(target, prompts):
    target, inputs = copy.deepcopy(target), prompts(2)
    with separate_devices():
        spread(target, *BOTTOM)
        with pytest.raises(
            ValueError,
            match=rf"on device {FIRST}, but .* states on {SECOND}. .*to\('{SECOND}'\)",
        ):
            run(target, speculator(target).to(FIRST), on_first(inputs))


@pytest.mark.parametrize("kind", ["mlp", "gemma 4"])
def test_a_drafter_that_is_loaded_goes_where_the_target_ends(kind, tmp_path, prompts):
    target = copy.deepcopy(_target("llama") if kind == "mlp" else gemma4_target("31B"))
    assistant = speculator(target) if kind == "mlp" else gemma4_assistant(target)
    assistant.save_pretrained(tmp_path)
    with separate_devices():
        spread(target, *(BOTTOM if kind == "mlp" else TIED))
        hf_specdec.attach(target, {"model": str(tmp_path)})
        attached = target.__dict__[hf_specdec.integration.ATTACHED].assistant
        assert attached.device == SECOND
        assert attached.dtype == target.dtype
        output = target.generate(
            **on_first(prompts(2)),
            do_sample=False,
            max_new_tokens=4,
            pad_token_id=PAD,
            return_dict_in_generate=True,
        )
        assert output.speculation.num_drafts > 0


def test_the_imitation_refuses_what_a_gpu_refuses():
    with separate_devices() as devices:
        here, there = torch.ones(3, device=FIRST), torch.ones(3, device=SECOND)
        for call in (
            lambda: here + there,
            lambda: here + torch.ones(3),
            lambda: here[torch.tensor([1], device=SECOND)],
            lambda: here.index_copy_(0, torch.tensor([1], device=SECOND), here[:1]),
            lambda: torch.where(here > 0, here, torch.zeros((), device=SECOND)),
        ):
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                call()
        assert (here * torch.tensor(2.0)).device == FIRST
        moved = here.to(SECOND) + there
        assert moved.tolist() == [2.0] * 3
        assert devices.copies[str(FIRST), str(SECOND)] == 1
