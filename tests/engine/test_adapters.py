"""Targets with PEFT adapters: the adapted text, whatever holds the adapter, or a refusal."""

import copy
import functools

import mtp_checkpoints
import peft
import pytest
import torch
from tiny_models import (
    HIDDEN_SIZE,
    ScriptedDrafter,
    _target,
    row_by_row,
    sometimes_wrong,
)

import hf_specdec
from hf_specdec.drafters import MLPDrafter, NGramDrafter, VerifiedStep

NEW = 10


def lora(**fields) -> peft.LoraConfig:
    """A LoRA that changes the text."""
    values = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    return peft.LoraConfig(**{**values, "task_type": "CAUSAL_LM", **fields})


def adapted(config=None, seed: int = 1):
    """A copy of the tiny Llama inside a PEFT model."""
    torch.manual_seed(seed)
    return peft.get_peft_model(copy.deepcopy(_target("llama")), config or lora()).eval()


def check_same_text(model, inputs, text=None, sampled: bool = False) -> list[list[int]]:
    """Greedy and sampled, equal to the model's own rows; returns the greedy ones."""
    texts = row_by_row(model, inputs, max_new_tokens=NEW, do_sample=False)
    assert text is None or texts == text
    width = inputs["input_ids"].shape[1]
    output = model.generate(
        **inputs, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True,
        assistant_model=ScriptedDrafter(texts, sometimes_wrong),
    )  # fmt: skip
    assert output.sequences[:, width:].tolist() == texts
    assert output.speculation.mean_acceptance_length > 1.3
    if not sampled:
        return texts
    seeds = list(range(len(texts)))
    drawn = [
        model.generate(
            **inputs, max_new_tokens=NEW, do_sample=True, row_seeds=seeds, num_assistant_tokens=k,
            assistant_model=ScriptedDrafter(texts) if k == 0 else NGramDrafter(),
        ).tolist()
        for k in (0, 3)
    ]  # fmt: skip
    assert drawn[0] == drawn[1]
    return texts


@pytest.fixture(scope="module")
def base_text():
    """``base_text(inputs)``: what the model says without an adapter."""
    return lambda inputs: row_by_row(_target("llama"), inputs, max_new_tokens=NEW, do_sample=False)


HEAD = {"target_modules": ["lm_head", "q_proj"]}
TABLES = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}
EMBEDDINGS = {"target_modules": ["embed_tokens"]}
NEW_TOKENS = {"trainable_token_indices": {"embed_tokens": [5, 6, 7]}}


@pytest.mark.parametrize("fields", [{}, HEAD, TABLES, EMBEDDINGS, NEW_TOKENS], ids=str)
def test_adapters_inside_the_model(fields, prompts, base_text):
    model = adapted(lora(**fields))
    with torch.no_grad():
        # What was to be trained and saved starts as a copy.
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name or "trainable_tokens_delta" in name:
                parameter.add_(torch.randn_like(parameter) * 0.5)
    assert check_same_text(model, prompts(2), sampled=not fields) != base_text(prompts(2))


@pytest.mark.parametrize(
    "config",
    [
        peft.IA3Config(
            target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"],
            init_ia3_weights=False, task_type="CAUSAL_LM",
        ),
        peft.LoHaConfig(target_modules=["q_proj"], init_weights=False, task_type="CAUSAL_LM"),
        lora(use_dora=True),
    ],
    ids=lambda config: type(config).__name__,
)  # fmt: skip
def test_other_kinds_of_adapters(config, prompts, base_text):
    assert check_same_text(adapted(config), prompts(2)) != base_text(prompts(2))


def test_merged_disabled_injected_and_switched_between_calls(prompts, base_text):
    inputs, model = prompts(2), adapted()
    check = functools.partial(check_same_text, inputs=inputs)
    plain = base_text(inputs)
    first = check(model)
    with model.disable_adapter():
        check(model, text=plain)
    torch.manual_seed(2)
    model.add_adapter("other", lora(target_modules=["o_proj"]))
    model.set_adapter("other")
    second = check(model)
    assert plain != first != second != plain
    model.set_adapter("default")
    check(model, text=first)
    model.delete_adapter("other")
    check(model, text=first)
    merged = copy.deepcopy(model).merge_and_unload()
    assert not isinstance(merged, peft.PeftModel)
    check(merged)
    check(model.unload(), text=plain)
    # What transformers' own model.add_adapter does, without the wrapper.
    injected = copy.deepcopy(_target("llama"))
    torch.manual_seed(1)
    peft.inject_adapter_in_model(lora(), injected)
    check(injected.eval(), text=first)


def test_attach_and_all_that_asks_for_what_is_attached(prompts, make_speculator):
    model, inputs = adapted(), prompts(3)
    plain = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    assert hf_specdec.attach(model, {"model": make_speculator()}) is model
    output = model.generate(
        **inputs, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True
    )
    assert torch.equal(output.sequences, plain)
    totals = hf_specdec.speculation_totals(model)
    assert totals.snapshot().num_drafts == output.speculation.num_drafts > 0
    # The adapter's wrapper may go, or another be put around the same model.
    assert hf_specdec.speculation_totals(model.get_base_model()) is totals
    hf_specdec.detach(model)
    with pytest.raises(ValueError, match="nothing is attached"):
        hf_specdec.speculation_totals(model)
    assert not hasattr(
        model.generate(**inputs, max_new_tokens=2, return_dict_in_generate=True), "speculation"
    )


def test_drafters_see_the_adapted_states(prompts, make_speculator):
    model, inputs = adapted(), prompts(1)
    seen = []

    class Watches(MLPDrafter):
        def observe(self, step: VerifiedStep) -> None:
            seen.append(step.last_states())
            super().observe(step)

    text = model.generate(
        **inputs, max_new_tokens=5, do_sample=False, assistant_model=Watches(make_speculator())
    )
    with torch.no_grad():
        states = model.get_base_model().model(text).last_hidden_state[0]
    last = inputs["input_ids"].shape[1] - 1
    torch.testing.assert_close(seen[0][0], states[last], atol=1e-5, rtol=1e-4)
    with torch.no_grad(), model.disable_adapter():
        other = model.get_base_model().model(text).last_hidden_state[0]
    assert not torch.allclose(seen[0][0], other[last], atol=1e-2)


def test_adapters_on_the_drafter(target, prompts, make_speculator):
    inputs = prompts(2)
    torch.manual_seed(4)
    config = peft.LoraConfig(r=4, target_modules=r".*(head|proj)\.\d", init_lora_weights=False)
    wrapped = peft.get_peft_model(make_speculator(), config).eval()
    merged = copy.deepcopy(wrapped).merge_and_unload()
    plain = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    drafts = []
    for assistant in (wrapped, merged, make_speculator()):
        drafter = hf_specdec.integration.drafter_for(assistant)
        assert isinstance(drafter, MLPDrafter)
        state = torch.randn(2, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            drafts.append(drafter.model.propose(state, torch.tensor([5, 6]), 4, None))
        output = target.generate(
            **inputs, max_new_tokens=NEW, do_sample=False, assistant_model=assistant
        )
        assert torch.equal(output, plain)
    assert torch.equal(drafts[0], drafts[1]) and not torch.equal(drafts[0], drafts[2])


def test_mtp_layers_of_an_adapted_target(prompts):
    target, inputs = mtp_checkpoints.load("glm4_moe"), prompts(2)
    torch.manual_seed(1)
    model = peft.get_peft_model(target, lora(target_modules=["o_proj"])).eval()
    plain = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    hf_specdec.attach(model, {"method": "mtp"})
    output = model.generate(
        **inputs, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True
    )
    assert torch.equal(output.sequences, plain) and output.speculation.num_drafts


VIRTUAL = [
    peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    peft.PromptEncoderConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
]


@pytest.mark.parametrize("config", VIRTUAL, ids=lambda config: config.peft_type.value)
def test_virtual_tokens_are_refused(config, prompts, make_speculator):
    model, speculator = adapted(config), make_speculator()
    match = f"{config.peft_type.value}, which puts virtual tokens.*without assistant_model"
    with pytest.raises(ValueError, match=match):
        model.generate(**prompts(2), max_new_tokens=3, assistant_model=speculator)
    with pytest.raises(ValueError, match=match):
        hf_specdec.attach(model, {"model": speculator})
    # Its base is as good a target as ever.
    base = model.get_base_model()
    base.generate(**prompts(2), max_new_tokens=3, assistant_model=speculator)


def test_adapters_that_look_at_the_whole_forward_are_refused(prompts, make_speculator):
    model = adapted(lora(alora_invocation_tokens=[5, 6]))
    with pytest.raises(ValueError, match="'default' is an activated LoRA.*plain LoRA"):
        model.generate(**prompts(1), max_new_tokens=3, assistant_model=make_speculator())
    model = adapted()
    model.get_base_model().peft_config["default"].peft_type = "XLORA"
    with pytest.raises(ValueError, match="'default' is of type XLORA.*without assistant_model"):
        model.generate(**prompts(1), max_new_tokens=3, assistant_model=make_speculator())


def test_an_adapter_for_every_row(prompts, make_speculator):
    model = adapted()
    torch.manual_seed(2)
    model.add_adapter("other", lora(target_modules=["o_proj"]))
    settings = {"max_new_tokens": NEW, "do_sample": False, "assistant_model": make_speculator()}
    with pytest.raises(ValueError, match="adapter_names with a batch of 2.*set_adapter"):
        model.generate(**prompts(2), adapter_names=["default", "other"], **settings)
    alone = model.generate(**prompts(1), adapter_names=["other"], **settings)
    model.set_adapter("other")
    assert torch.equal(model.generate(**prompts(1), max_new_tokens=NEW, do_sample=False), alone)


def test_a_drafter_that_doesnt_fit_a_target_with_a_wrapped_head(prompts, make_speculator):
    model, speculator = adapted(lora(**TABLES)), make_speculator(emb_dim=48)
    with pytest.raises(ValueError, match=r"emb_dim=48.*hidden_size=32"):
        hf_specdec.attach(model, {"model": speculator})
    with pytest.raises(ValueError, match=r"emb_dim=48.*hidden_size=32"):
        model.generate(**prompts(1), max_new_tokens=3, assistant_model=speculator)
