"""A Llama expressed as a MiMo says exactly what it said."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
)

import hf_specdec
from hf_specdec.modeling.mimo import MiMoForCausalLM, mimo_from_decoder, mimo_from_llama

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip


def llama(**fields) -> LlamaForCausalLM:
    values: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.4,
    }  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**values, **fields}))
    norm: Any = model.model.norm
    norm.weight.data = torch.rand_like(norm.weight) + 0.5
    return model.eval()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_word_embeddings": True},
        {"head_dim": 12},
        {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},
        {"rope_parameters": LLAMA3_ROPE},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ],
    ids=str,
)
@torch.no_grad()
def test_the_logits_are_the_same(fields, tmp_path):
    target = llama(**fields)
    model = mimo_from_llama(target)
    ids = torch.randint(64, (2, 40))
    expected = target(ids).logits
    assert torch.equal(model(ids).logits, expected)
    model.save_pretrained(tmp_path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    again, report = loaded
    assert type(again) is MiMoForCausalLM
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert torch.equal(again(ids).logits, expected)


SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.4,
}  # fmt: skip


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "mistral"])
@torch.no_grad()
def test_other_families_say_the_same(family, tie):
    config = {
        "qwen2": lambda: Qwen2Config(**SIZES, sliding_window=4, tie_word_embeddings=tie),
        "mistral": lambda: MistralConfig(
            **SIZES, sliding_window=None, head_dim=12, tie_word_embeddings=tie
        ),
    }[family]()
    torch.manual_seed(0)
    target: Any = AutoModelForCausalLM.from_config(config).eval()
    for parameter in target.parameters():
        # Biases begin as zeros.
        parameter.data += 0.1 * torch.randn_like(parameter)
    model = mimo_from_decoder(target)
    ids = torch.randint(64, (2, 40))
    assert torch.equal(model(ids).logits, target(ids).logits)
    ours: Any = model.model.mtp_layers[0]
    theirs = target.model.layers[-1].self_attn.q_proj
    expected = theirs.bias if family == "qwen2" else torch.zeros(len(theirs.weight))
    assert torch.equal(ours.self_attn.q_proj.bias, expected)


@torch.no_grad()
def test_dtype_and_mode_are_the_targets():
    target = llama().bfloat16().train()
    model = mimo_from_llama(target, num_mtp_layers=2)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.training and len(model.model.mtp_layers) == 2
    ids = torch.randint(64, (1, 30))
    assert torch.equal(model(ids).logits, target(ids).logits)


def test_tensors_are_shared_and_the_layers_are_not():
    target = llama(tie_word_embeddings=True)
    model = mimo_from_llama(target, num_mtp_layers=2)
    theirs = dict(target.named_parameters())
    ours = dict(model.named_parameters())
    for name, parameter in theirs.items():
        assert ours[name].data_ptr() == parameter.data_ptr(), name
    assert model.lm_head.weight is model.model.embed_tokens.weight
    fresh = [p.data_ptr() for p in model.model.mtp_layers.parameters()]
    assert len(set(fresh)) == len(fresh)
    assert not set(fresh) & {p.data_ptr() for p in theirs.values()}
    # Freezing one leaves the other alone.
    model.requires_grad_(False)
    assert all(p.requires_grad for p in theirs.values())


def test_where_the_layers_begin():
    target = llama()
    layer: Any = mimo_from_llama(target).model.mtp_layers[0]
    last: Any = target.model.layers[-1]
    norm: Any = target.model.norm
    assert torch.equal(layer.mlp.up_proj.weight, last.mlp.up_proj.weight)
    assert torch.equal(layer.final_layernorm.weight, norm.weight)
    # The state's own scale is back: all of equal size is what the decoder layer knows.
    undone = layer.hidden_layernorm.weight * norm.weight
    torch.testing.assert_close(undone, undone.mean().expand_as(undone))
    before_norm = mimo_from_llama(target, mtp_feed="pre_norm")
    weight: Any = before_norm.model.mtp_layers[0].hidden_layernorm.weight  # type: ignore[union-attr]
    assert torch.equal(weight, torch.ones(32))
    assert before_norm.config.mtp_feed == "pre_norm"


def test_it_drafts_for_itself(prompts):
    model = mimo_from_llama(llama())
    inputs = prompts(3)
    common: dict[str, Any] = {
        "max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    expected = model.generate(**inputs, **common)
    hf_specdec.attach(model, {"method": "mtp", "num_speculative_tokens": 2})
    assert torch.equal(model.generate(**inputs, **common), expected)


class TestRefusals:
    @pytest.mark.parametrize("name", ["attention_bias", "mlp_bias"])
    def test_biases(self, name):
        with pytest.raises(ValueError, match=rf"target\.config\.{name}=True adds biases"):
            mimo_from_llama(llama(**{name: True}))

    def test_another_family(self):
        config = Qwen2Config(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=1, num_key_value_heads=1,
        )  # fmt: skip
        other: Any = Qwen2ForCausalLM(config)
        with pytest.raises(TypeError, match="target must be a LlamaForCausalLM, got Qwen2"):
            mimo_from_llama(other)

    @pytest.mark.parametrize(
        "config",
        [
            MistralConfig(**SIZES, sliding_window=8),
            Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1),
        ],
        ids=lambda config: config.model_type,
    )
    def test_windows(self, config):
        target = AutoModelForCausalLM.from_config(config)
        with pytest.raises(ValueError, match=r"target\.config\.sliding_window=8"):
            mimo_from_decoder(target)

    def test_families_that_compute_something_else(self):
        target = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES, head_dim=8))
        with pytest.raises(TypeError, match="one of LlamaForCausalLM, .*, got Qwen3ForCausalLM"):
            mimo_from_decoder(target)

    def test_quantized_weights(self):
        target = llama()
        projection: Any = target.model.layers[1].mlp.up_proj
        projection.weight = torch.nn.Parameter(
            projection.weight.data.to(torch.int8), requires_grad=False
        )
        with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight is torch\.int8"):
            mimo_from_llama(target)

    def test_fields_of_the_config(self):
        with pytest.raises(ValueError, match="num_nextn_predict_layers=-1"):
            mimo_from_llama(llama(), num_mtp_layers=-1)
        with pytest.raises(ValueError, match="mtp_feed='norm'"):
            mimo_from_llama(llama(), mtp_feed="norm")
