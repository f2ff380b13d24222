"""Every attention implementation: used, stepping aside for the verifying forward, or refused."""

import copy

import pytest
import torch
from multimodal_models import seeing_target
from tiny_models import (
    PAD,
    VOCAB_SIZE,
    ScriptedDrafter,
    _target,
    row_by_row,
    sometimes_wrong,
)
from transformers import AttentionInterface, AttentionMaskInterface, GptOssConfig
from transformers.integrations import flash_attention as flash_integration
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, flash_attention_mask, sdpa_mask
from transformers.models.auto import AutoModelForCausalLM

from hf_specdec.targets.masked_attention import row_masks

NEW = 10
FLASH = ["flash_attention_2", "flash_attention_3", "flash_attention_4"]


def with_attention(family: str, name: str):
    """A copy of a tiny target that uses an implementation, installed or not."""
    model = with_sinks() if family == "gpt_oss" else copy.deepcopy(_target(family))
    for layer in model.model.layers if family == "gemma2" else ():
        # Low enough to be felt: scores of tiny models stay far below a real cap.
        layer.self_attn.attn_logit_softcapping = 0.5
    model.config._attn_implementation = name
    return model


def with_sinks():
    """A tiny GPT-OSS, whose sinks take most of every head's attention."""
    config = GptOssConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=2,
        num_experts_per_tok=1, sliding_window=8, max_position_embeddings=256,
        pad_token_id=PAD, eos_token_id=None, initializer_range=0.4,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config).eval()
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.self_attn.sinks, 2.0)
    model.generation_config.pad_token_id = PAD
    return model


def check_same_text(model, inputs, settings=None) -> None:
    texts = row_by_row(model, inputs, max_new_tokens=NEW, do_sample=False)
    width = inputs["input_ids"].shape[1]
    output = model.generate(
        **inputs, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True,
        assistant_model=ScriptedDrafter(texts, sometimes_wrong), **(settings or {}),
    )  # fmt: skip
    assert output.sequences[:, width:].tolist() == texts
    assert output.speculation.mean_acceptance_length > 1.3


def stand_in(
    query, key, value, attention_mask, query_length, is_causal, dropout=0.0, softmax_scale=None,
    sliding_window=None, softcap=None, s_aux=None, attn_implementation=None, **kwargs,
):  # fmt: skip
    """What a FlashAttention kernel computes, ``[B, T, H, D]``, and no mask but that of the padding.

    Aligned to the end, with a window, capped scores and sinks, as the kernels have them.
    """
    assert attn_implementation in FLASH and is_causal
    assert attention_mask is None or attention_mask.dim() == 2, "kernels know no such masks"
    stand_in.lengths.append(query_length)  # type: ignore[attr-defined]
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    scores = query @ key.transpose(2, 3) * (softmax_scale or query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    num_keys = key.shape[2]
    at = torch.arange(num_keys - query_length, num_keys)[:, None]
    seen = torch.arange(num_keys) <= at
    if sliding_window is not None:
        seen = seen & (torch.arange(num_keys) > at - sliding_window)
    if attention_mask is not None:
        seen = seen & attention_mask[:, None, None, -num_keys:].bool()
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    if s_aux is not None:
        sinks = s_aux[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    return (scores.softmax(-1)[..., :num_keys] @ value).transpose(1, 2)


@pytest.fixture
def flash(monkeypatch):
    """The query lengths that a stand-in for FlashAttention's kernels is called with."""
    monkeypatch.setattr(flash_integration, "_flash_attention_forward", stand_in)
    stand_in.lengths = []  # type: ignore[attr-defined]
    return stand_in.lengths  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "gemma2", "gpt_oss"])
def test_flash_attention_runs_the_prompt_and_steps_aside(family, flash, prompts):
    # Windows, all layers or some, and what sdpa doesn't know: capped scores, and sinks.
    model = with_attention(family, FLASH[0])
    eager = row_by_row(with_attention(family, "eager"), prompts(3), max_new_tokens=4)
    assert row_by_row(model, prompts(3), max_new_tokens=4) == eager
    original = AttentionInterface()[FLASH[0]]
    check_same_text(model, prompts(3))
    assert AttentionInterface()[FLASH[0]] is original
    flash.clear()
    model.generate(**prompts(3), max_new_tokens=NEW, assistant_model=ScriptedDrafter([[0]] * 3),
                   num_assistant_tokens=0, do_sample=False)  # fmt: skip
    assert flash == [prompts(3)["input_ids"].shape[1]] * model.config.num_hidden_layers


@pytest.mark.parametrize("name", FLASH[1:])
def test_later_flash_attention(name, flash, prompts, make_speculator):
    model, inputs = with_attention("llama", name), prompts(3)
    check_same_text(model, inputs, {"prefill_chunk_size": 4})
    sampled = [
        model.generate(
            **inputs, max_new_tokens=NEW, do_sample=True, row_seeds=[1, 2, 3],
            num_assistant_tokens=k, assistant_model=make_speculator(),
        )
        for k in (0, 4)
    ]  # fmt: skip
    assert torch.equal(*sampled)
    plain = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    tree = model.generate(
        **inputs, max_new_tokens=NEW, do_sample=False, num_tree_nodes=4,
        assistant_model=make_speculator(),
    )  # fmt: skip
    assert torch.equal(tree, plain)


def test_flash_attention_under_layers_of_the_target_itself(flash, monkeypatch):
    import mtp_checkpoints

    import hf_specdec

    target = mtp_checkpoints.load("glm4_moe")
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": NEW}
    with_sdpa = target.generate(
        **inputs, assistant_model=hf_specdec.registry.mtp_network(target), do_sample=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    # As layers are made with it where it is installed.
    network = hf_specdec.registry.mtp_network(target)
    for config in (target.config, network.config):
        config._attn_implementation = FLASH[0]
    with_flash = target.generate(
        **inputs, assistant_model=network, do_sample=False, return_dict_in_generate=True
    )
    assert flash
    assert torch.equal(with_flash.sequences, with_sdpa.sequences)
    assert with_flash.speculation == with_sdpa.speculation


def test_flash_attention_under_recurrent_layers(flash, prompts):
    # Their rows advance together, with masks that the kernels know: nothing steps aside.
    model, inputs = copy.deepcopy(seeing_target("qwen3_5")), prompts(2)
    model.config.text_config._attn_implementation = FLASH[0]
    texts = row_by_row(model, inputs, max_new_tokens=NEW, do_sample=False)
    flash.clear()
    output = model.generate(
        **inputs, max_new_tokens=NEW, do_sample=False, assistant_model=ScriptedDrafter(texts)
    )
    assert output[:, inputs["input_ids"].shape[1] :].tolist() == texts
    assert max(flash[1:]) > 1


def test_a_failed_call_puts_the_implementation_back(flash, prompts):
    class Breaks(ScriptedDrafter):
        def propose(self, *args, **kwargs):
            raise RuntimeError("broken drafter")

    original = AttentionInterface()[FLASH[0]]
    model = with_attention("llama", FLASH[0])
    with pytest.raises(RuntimeError, match="broken drafter"):
        model.generate(**prompts(1), max_new_tokens=8, assistant_model=Breaks([[]]))
    assert AttentionInterface()[FLASH[0]] is original
    # Of several calls at once the last one does; one inside another stands for two threads.
    with row_masks(model):
        with row_masks(model):
            assert AttentionInterface()[FLASH[0]] is not original
        assert AttentionInterface()[FLASH[0]] is not original
    assert AttentionInterface()[FLASH[0]] is original


class Blocks:
    """In place of flex attention's BlockMask, which takes a compiler."""

    def __init__(self, **kwargs):
        self.visible = sdpa_mask(**{**kwargs, "allow_is_causal_skip": False})


def test_flex_attention_runs_the_prompt_and_steps_aside(register, prompts):
    lengths = []

    def flex(module, query, key, value, attention_mask, **kwargs):
        assert isinstance(attention_mask, Blocks), "flex attention knows no other masks"
        lengths.append(query.shape[2])
        return sdpa_attention_forward(module, query, key, value, attention_mask.visible, **kwargs)

    AttentionInterface.register("flex_attention", flex)
    AttentionMaskInterface.register("flex_attention", lambda **kwargs: Blocks(**kwargs))
    model, inputs = with_attention("qwen2", "flex_attention"), prompts(2)
    check_same_text(model, inputs)
    lengths.clear()
    model.generate(**inputs, max_new_tokens=NEW, assistant_model=ScriptedDrafter([[0]] * 2),
                   num_assistant_tokens=0, do_sample=False)  # fmt: skip
    assert lengths == [inputs["input_ids"].shape[1]] * model.config.num_hidden_layers


def own_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """A user's function: like sdpa, but sharper."""
    own_attention.masks.append(attention_mask)  # type: ignore[attr-defined]
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling * 1.5, **kwargs
    )


@pytest.fixture
def register(monkeypatch):
    """``register(mask)``: the user's function under a name, with a way to make masks or none."""
    monkeypatch.setattr(
        AttentionInterface, "_global_mapping", dict(AttentionInterface._global_mapping)
    )
    monkeypatch.setattr(
        AttentionMaskInterface, "_global_mapping", dict(AttentionMaskInterface._global_mapping)
    )
    own_attention.masks = []  # type: ignore[attr-defined]

    def make(mask):
        AttentionInterface.register("sharper", own_attention)
        if mask is not None:
            AttentionMaskInterface.register("sharper", mask)
        return own_attention.masks  # type: ignore[attr-defined]

    return make


@pytest.mark.parametrize("mask", [sdpa_mask, eager_mask], ids=["sdpa_mask", "eager_mask"])
def test_own_function_that_takes_masks(mask, register, prompts):
    masks = register(mask)
    model, inputs = with_attention("llama", "sharper"), prompts(3)
    plain = row_by_row(_target("llama"), inputs, max_new_tokens=NEW, do_sample=False)
    assert row_by_row(model, inputs, max_new_tokens=NEW, do_sample=False) != plain
    masks.clear()
    check_same_text(model, inputs)
    dtypes = {mask.dtype for mask in masks if mask is not None}
    assert dtypes == {torch.bool if mask is sdpa_mask else torch.float32}


@pytest.mark.parametrize("mask", [None, flash_attention_mask], ids=["none", "flash"])
def test_own_function_that_takes_no_masks(mask, register, prompts, make_speculator):
    register(mask)
    model = with_attention("llama", "sharper")
    match = "'sharper', which takes no per-row.*'sdpa' or 'eager'.*register.'sharper', sdpa_mask"
    with pytest.raises(ValueError, match=match):
        model.generate(**prompts(1), max_new_tokens=3, assistant_model=make_speculator())


def test_paged_attention(prompts, make_speculator):
    for name in ("paged|eager", "paged|sdpa", "paged|flash_attention_2"):
        model = with_attention("llama", name)
        with pytest.raises(ValueError, match="attn_implementation='paged.*'sdpa' or 'eager'"):
            model.generate(**prompts(1), max_new_tokens=3, assistant_model=make_speculator())


def test_layers_that_call_flash_attention_past_the_interface(prompts, make_speculator):
    class LlamaFlashAttention2(torch.nn.Module):
        pass

    model = with_attention("llama", FLASH[0])
    model.model.layers[0].extra = LlamaFlashAttention2()
    with pytest.raises(ValueError, match="has a LlamaFlashAttention2 of its own.*'sdpa'"):
        model.generate(**prompts(1), max_new_tokens=3, assistant_model=make_speculator())


@pytest.mark.parametrize("way", ["capped", "sinks"])
def test_capped_scores_without_an_eager_function(way, prompts, make_speculator):
    class OwnAttention(torch.nn.Module):
        pass

    model = with_attention("llama", FLASH[0])
    model.model.layers[0].extra = OwnAttention()
    if way == "sinks":
        model.model.layers[0].extra.sinks = torch.zeros(4)
    else:
        model.model.layers[0].self_attn = model.model.layers[0].extra
        for layer in model.model.layers[1:]:
            layer.self_attn = torch.nn.Identity()
        model.config.attn_logit_softcapping = 20.0
    with pytest.raises(ValueError, match="OwnAttention caps its scores or has sinks.*'eager'"):
        model.generate(**prompts(1), max_new_tokens=3, assistant_model=make_speculator())
