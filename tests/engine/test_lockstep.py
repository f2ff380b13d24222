"""Targets with recurrent and convolutional layers: exact, in batches, with roll-backs."""

import functools
from typing import Any

import pytest
import torch
from row_watchers import Collect, Limits
from tiny_models import (
    EOS,
    PAD,
    VOCAB_SIZE,
    ScriptedDrafter,
    new_tokens,
    row_by_row,
    sometimes_wrong,
)
from transformers import (
    AutoModelForCausalLM,
    BailingHybridConfig,
    BambaConfig,
    DynamicCache,
    FalconH1Config,
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    NemotronHConfig,
    Qwen3NextConfig,
)
from transformers.generation import StoppingCriteriaList
from transformers.models.qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig

from hf_specdec.targets import lockstep

NEW = 20
# Sometimes right with one draft and with several; always right; never.
DRAFTS: list[tuple[int, Any]] = [
    (1, sometimes_wrong), (3, sometimes_wrong), (3, lambda *_: False), (3, lambda *_: True),
]  # fmt: skip
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "initializer_range": 0.4,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
}
GDN: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
}
CONFIGS = {
    "qwen3_next": lambda: Qwen3NextConfig(
        **COMMON, **GDN, num_hidden_layers=4, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"] * 2,
    ),
    "qwen3_5_text": lambda: Qwen3_5TextConfig(
        **COMMON, **GDN, num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention"] * 2,
    ),
    "nemotron_h": lambda: NemotronHConfig(
        **COMMON, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8, n_groups=1, head_dim=8,
        layers_block_type=["mamba", "attention", "mlp", "mamba"], chunk_size=8,
        # transformers clamps time steps at this in forwards over several tokens alone.
        time_step_min=1e-30, time_step_floor=1e-30,
    ),
    "bailing_hybrid": lambda: BailingHybridConfig(
        **{**COMMON, "num_key_value_heads": 4}, num_hidden_layers=3, q_lora_rank=16,
        kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, head_dim=8,
        num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1,
        topk_group=1,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "bamba": lambda: BambaConfig(
        **COMMON, **MAMBA, num_hidden_layers=3, attn_layer_indices=[1], mamba_expand=2,
        mamba_chunk_size=8,
    ),
    "granitemoehybrid": lambda: GraniteMoeHybridConfig(
        **COMMON, **MAMBA, num_hidden_layers=3, layer_types=["mamba", "attention", "mamba"],
        mamba_expand=2, num_local_experts=0, shared_intermediate_size=48, mamba_chunk_size=8,
    ),
    "falcon_h1": lambda: FalconH1Config(
        **COMMON, num_hidden_layers=3, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16,
        mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=8,
    ),
    "qwen3_5_moe_text": lambda: Qwen3_5MoeTextConfig(
        **COMMON, **GDN, num_hidden_layers=4, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"] * 2,
    ),
    "lfm2_moe": lambda: Lfm2MoeConfig(
        **COMMON, num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2,
        num_dense_layers=1, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    ),
    "lfm2": lambda: Lfm2Config(
        **COMMON, num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2,
        block_auto_adjust_ff_dim=False,
    ),
}  # fmt: skip
FAMILIES = sorted(CONFIGS)


@functools.cache
def hybrid(family):
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(CONFIGS[family]()).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


def test_every_family_that_is_accepted_is_tested():
    assert set(FAMILIES) == lockstep.MODEL_TYPES


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
class TestEveryFamily:
    def test_greedy(self, family, batch, prompts):
        target, inputs = hybrid(family), prompts(batch)
        expected = row_by_row(target, inputs, **GREEDY)
        assert max(len(set(row)) for row in expected) > 4
        for k, wrong in DRAFTS:
            output = target.generate(
                **inputs,
                **GREEDY,
                assistant_model=ScriptedDrafter(expected, wrong, k),
                return_dict_in_generate=True,
            )
            assert new_tokens(output.sequences, inputs, [NEW] * batch) == expected
            assert output.speculation.num_new_tokens == NEW * batch

    def test_sampled(self, family, batch, prompts, make_speculator):
        target, inputs = hybrid(family), prompts(batch)
        common = {"do_sample": True, "max_new_tokens": NEW, "row_seeds": list(range(batch))}
        slow, fast = (
            target.generate(
                **inputs, **common, assistant_model=make_speculator(), num_assistant_tokens=k
            )
            for k in (0, 3)
        )
        assert slow.tolist() == fast.tolist()

    def test_rows_end_at_different_times(self, family, batch, prompts):
        target, inputs = hybrid(family), prompts(batch)
        texts = row_by_row(target, inputs, **GREEDY)
        eos = texts[0][6]
        expected = [r[: r.index(eos) + 1] if eos in r else r for r in texts]
        result = target.generate(
            **inputs,
            **GREEDY,
            eos_token_id=eos,
            assistant_model=ScriptedDrafter(expected, sometimes_wrong, 3),
        )
        assert new_tokens(result, inputs, [len(r) for r in expected]) == expected


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next"])
def test_rows_are_streamed_and_end_at_limits_of_their_own(family, prompts):
    target, inputs, limits = hybrid(family), prompts(3), [4, NEW, 11]
    texts = row_by_row(target, inputs, **GREEDY)
    streamer = Collect()
    target.generate(
        **inputs,
        **GREEDY,
        assistant_model=ScriptedDrafter(texts, sometimes_wrong, 3),
        stopping_criteria=StoppingCriteriaList([Limits(limits)]),
        streamer=streamer,
    )
    for row, limit in enumerate(limits):
        assert streamer.text(row) == texts[row][:limit]


@pytest.mark.parametrize("family", FAMILIES)
class TestTurns:
    def test_a_cache_is_filled_and_continued(self, family):
        target = hybrid(family)
        cache = DynamicCache(config=target.config.get_text_config())
        generator = torch.Generator().manual_seed(3)
        text = torch.randint(3, VOCAB_SIZE, (1, 6), generator=generator)
        for _ in range(3):
            reference = target.generate(text, attention_mask=torch.ones_like(text), **GREEDY)
            said = target.generate(
                text,
                attention_mask=torch.ones_like(text),
                cache=cache,
                assistant_model=ScriptedDrafter(
                    reference[:, text.shape[1] :].tolist(), sometimes_wrong, 3
                ),
                **GREEDY,
            )
            assert said.tolist() == reference.tolist()
            assert cache.get_seq_length() == reference.shape[1] - 1
            more = torch.randint(3, VOCAB_SIZE, (1, 5), generator=generator)
            text = torch.cat([reference, more], dim=1)
        # Plain generation goes on from what we handed back.
        plain = target.generate(text, attention_mask=torch.ones_like(text), cache=cache, **GREEDY)
        alone = target.generate(text, attention_mask=torch.ones_like(text), **GREEDY)
        assert plain.tolist() == alone.tolist()

    def test_chunks_and_hidden_states(self, family, prompts):
        target, inputs = hybrid(family), prompts(1)
        common = {
            **GREEDY,
            "output_hidden_states": True,
            "output_scores": True,
            "return_dict_in_generate": True,
        }
        plain = target.generate(**inputs, **common)
        answers = plain.sequences[:, inputs["input_ids"].shape[1] :].tolist()
        for chunk in (None, 4):
            ours = target.generate(
                **inputs,
                **common,
                prefill_chunk_size=chunk,
                assistant_model=ScriptedDrafter(answers, sometimes_wrong, 3),
            )
            assert ours.sequences.tolist() == plain.sequences.tolist()
            for a, b in zip(ours.scores, plain.scores, strict=True):
                torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)
            for step_a, step_b in zip(ours.hidden_states[1:], plain.hidden_states[1:], strict=True):
                for a, b in zip(step_a, step_b, strict=True):
                    torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", ["qwen3_next", "bamba"])
def test_rejected_drafts_cost_few_forwards(family, prompts, count_forwards):
    """The kept tokens run again with the next step: one forward a step, and rarely another."""
    target, inputs = hybrid(family), prompts(1)
    long = {"do_sample": False, "max_new_tokens": 60}
    answers = row_by_row(target, inputs, **long)
    with count_forwards(target) as lengths:
        output = target.generate(
            **inputs,
            **long,
            assistant_model=ScriptedDrafter(answers, sometimes_wrong, 3),
            return_dict_in_generate=True,
        )
    steps = output.speculation.num_target_forwards
    assert steps < len(lengths) <= steps + 60 // lockstep.MAX_PENDING + 1
    assert max(lengths[1:]) <= lockstep.MAX_PENDING + 2 * 4


def test_a_cache_comes_back_unless_rows_have_left(prompts):
    target, inputs = hybrid("bamba"), prompts(3)
    texts = row_by_row(target, inputs, **GREEDY)
    common = {**GREEDY, "return_dict_in_generate": True}
    together = target.generate(**inputs, **common, assistant_model=ScriptedDrafter(texts))
    assert together.cache.get_seq_length() == together.sequences.shape[1] - 1
    eos = texts[0][6]
    assert len({r.index(eos) if eos in r else NEW for r in texts}) > 1
    apart = target.generate(
        **inputs, **common, eos_token_id=eos, assistant_model=ScriptedDrafter(texts)
    )
    assert apart.cache is None


class TestRefusals:
    def test_a_cache_with_several_rows(self, prompts):
        target = hybrid("bamba")
        with pytest.raises(ValueError, match="recurrent state"):
            target.generate(
                **prompts(3),
                cache=DynamicCache(config=target.config),
                assistant_model=ScriptedDrafter([[0]] * 3),
            )

    def test_attentions(self, prompts):
        target = hybrid("lfm2")
        target.set_attn_implementation("eager")
        try:
            with pytest.raises(ValueError, match="layers without attention"):
                target.generate(
                    **prompts(1),
                    assistant_model=ScriptedDrafter([[0]]),
                    output_attentions=True,
                    return_dict_in_generate=True,
                )
        finally:
            target.set_attn_implementation("sdpa")

    def test_a_recurrent_family_whose_forward_begins_anew(self, prompts):
        config = JambaConfig(
            **COMMON, num_hidden_layers=2, attn_layer_period=2, attn_layer_offset=1, num_experts=2,
            num_experts_per_tok=1, mamba_d_state=8, mamba_dt_rank=4, use_mamba_kernels=False,
        )  # fmt: skip
        target = AutoModelForCausalLM.from_config(config)
        with pytest.raises(
            ValueError, match="JambaForCausalLM.*only known to be right for bailing_hybrid, bamba"
        ):
            target.generate(**prompts(1), assistant_model=ScriptedDrafter([[0]]))
