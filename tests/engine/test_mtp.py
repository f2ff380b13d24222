"""Drafting with a target's own MTP layers: the same tokens, and drafts that are worth it."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from mtp_training import rate, text, train_together
from tiny_models import EOS, PAD, VOCAB_SIZE, new_tokens, row_by_row
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import hf_specdec
from hf_specdec.drafters import MTPDrafter
from hf_specdec.modeling.mimo import MiMoConfig, MiMoForCausalLM, MiMoMTP

NEW = 20
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}
FEEDS = ["pre_norm", "post_norm"]


def tiny_config(**fields) -> MiMoConfig:
    values = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "initializer_range": 0.4,
    }
    return MiMoConfig(**{**values, **fields})


@functools.cache
def random_target(feed: str) -> MiMoForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = MiMoForCausalLM(tiny_config(mtp_feed=feed)).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("feed", FEEDS)
class TestTheSameTokens:
    def test_greedy(self, feed, batch, prompts):
        target, inputs = random_target(feed), prompts(batch)
        expected = row_by_row(target, inputs, **GREEDY)
        for k in (1, 3):
            output = target.generate(
                **inputs,
                **GREEDY,
                assistant_model=MiMoMTP(target),
                num_assistant_tokens=k,
                return_dict_in_generate=True,
            )
            assert new_tokens(output.sequences, inputs, [NEW] * batch) == expected
            assert output.speculation.num_drafts > 0

    def test_sampled(self, feed, batch, prompts):
        target, inputs = random_target(feed), prompts(batch)
        common = {"do_sample": True, "max_new_tokens": NEW, "row_seeds": list(range(batch))}
        common["assistant_model"] = MiMoMTP(target)
        slow, fast = (target.generate(**inputs, **common, num_assistant_tokens=k) for k in (0, 3))
        assert slow.tolist() == fast.tolist()

    def test_rows_end_at_different_times(self, feed, batch, prompts):
        target, inputs = random_target(feed), prompts(batch)
        texts = row_by_row(target, inputs, **GREEDY)
        eos = texts[0][6]
        expected = [r[: r.index(eos) + 1] if eos in r else r for r in texts]
        result = target.generate(
            **inputs,
            **GREEDY,
            eos_token_id=eos,
            assistant_model=MiMoMTP(target),
            num_assistant_tokens=2,
        )
        assert new_tokens(result, inputs, [len(r) for r in expected]) == expected


@functools.cache
def trained_target(feed: str) -> MiMoForCausalLM:
    """A small model trained for seconds, its MTP layer with it, to say the license."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = tiny_config(
            hidden_size=64, intermediate_size=128, initializer_range=0.06, mtp_feed=feed,
            bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )  # fmt: skip
        model = MiMoForCausalLM(config)
        train_together(model, MiMoMTP(model))
    return model.eval()


class ReadsTheStateBefore(MTPDrafter):
    """Every entry is paired with its neighbour's state."""

    def observe(self, step):
        super().observe(replace(step, hidden_states=step.hidden_states.roll(1, dims=1)))


class ForgetsTheVerified(MTPDrafter):
    """Runs only the last verified token: the entries before it are those of drafting, or none."""

    def observe(self, step):
        super().observe(step)
        cache: Any = self._cache
        cache.padding = cache.lengths.clone()


@pytest.mark.parametrize("feed", FEEDS)
class TestAcceptance:
    def test_a_trained_layer_is_accepted(self, feed):
        target = trained_target(feed)
        assert rate(target, MiMoMTP(target))[0] > 0.7
        first, second, third = rate(target, MiMoMTP(target), k=3)
        assert first > 0.7 and first > second > third > 0.05

    @pytest.mark.parametrize("wrong", ["feed", "hidden_first", "token_shift"])
    def test_a_wrong_feed_is_seen(self, feed, wrong):
        target = trained_target(feed)
        other = {"pre_norm": "post_norm", "post_norm": "pre_norm"}[feed]
        change = {"feed": other, "hidden_first": False, "token_shift": 0}[wrong]
        right = rate(target, MiMoMTP(target))[0]
        assert rate(target, MiMoMTP(target).with_switches(**{wrong: change}))[0] < right - 0.1

    def test_the_neighbours_state_is_seen(self, feed):
        target = trained_target(feed)
        right = rate(target, MiMoMTP(target))[0]
        assert rate(target, ReadsTheStateBefore(MiMoMTP(target)))[0] < right - 0.1

    def test_entries_before_the_last_token_matter(self, feed):
        target = trained_target(feed)
        right = rate(target, MiMoMTP(target))[0]
        assert rate(target, ForgetsTheVerified(MiMoMTP(target)))[0] < right - 0.03

    def test_what_was_not_drafted_for_is_made_up_for(self, feed):
        """A drafter that begins late drafts what one says that drafted all the time."""
        target = trained_target(feed)
        passage = text()[900:940][None]

        class Records(MTPDrafter):
            """Notes each draft under the number of tokens it knows."""

            silent = 0
            drafts: dict[int, list]

            def propose(self, token_ids, num_draft_tokens, pick=None):
                self.silent -= 1
                if self.silent >= 0:
                    # As if no draft had been asked for: the layer isn't run.
                    return torch.zeros_like(token_ids)[:, None]
                draft = super().propose(token_ids, num_draft_tokens, pick)
                cache: Any = self._cache
                self.drafts[cache.host_length] = draft.tolist()
                return draft

        said = []
        for silent in (0, 15):
            drafter = Records(MiMoMTP(target))
            drafter.silent, drafter.drafts = silent, {}
            target.generate(
                passage,
                attention_mask=torch.ones_like(passage),
                assistant_model=drafter,
                do_sample=False,
                max_new_tokens=60,
                pad_token_id=1,
            )
            said.append(drafter.drafts)
        always, late = said
        common = sorted(set(always) & set(late))
        assert len(common) > 8 and common[0] > 50
        assert [late[n] for n in common] == [always[n] for n in common]

    def test_chunks_of_the_prompt_change_nothing(self, feed):
        target = trained_target(feed)
        whole = rate(target, MiMoMTP(target), k=2)
        assert rate(target, MiMoMTP(target), k=2, prefill_chunk_size=7) == whole
        from hf_specdec.drafters import mtp

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mtp, "_CHUNK", 8)
            assert rate(target, MiMoMTP(target), k=2) == whole


class TestChoosingIt:
    @pytest.mark.filterwarnings("ignore:num_speculative_tokens=2 is more than")
    def test_attach(self, prompts):
        target, inputs = random_target("pre_norm"), prompts(3)
        expected = row_by_row(target, inputs, **GREEDY)
        for config in ({"method": "mtp"}, '{"method": "mtp", "num_speculative_tokens": 2}'):
            hf_specdec.attach(target, config)
            try:
                output = target.generate(**inputs, **GREEDY, return_dict_in_generate=True)
            finally:
                hf_specdec.detach(target)
            assert new_tokens(output.sequences, inputs, [NEW] * 3) == expected
            assert len(output.speculation.per_position) == (1 if isinstance(config, dict) else 2)

    def test_a_cache_from_turn_to_turn_and_embeddings(self):
        target = random_target("pre_norm")
        ids = torch.randint(3, VOCAB_SIZE, (1, 9), generator=torch.Generator().manual_seed(2))
        cache = DynamicCache(config=target.config)
        for _ in range(3):
            reference = target.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
            result = target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                cache=cache,
                assistant_model=MiMoMTP(target),
                **GREEDY,
            )
            assert result.tolist() == reference.tolist()
            ids = torch.cat([reference, ids[:, :4]], dim=1)
        embeds = target.get_input_embeddings()(ids)
        result = target.generate(inputs_embeds=embeds, assistant_model=MiMoMTP(target), **GREEDY)
        assert result.tolist() == target.generate(inputs_embeds=embeds, **GREEDY).tolist()

    def test_a_target_without_mtp_layers(self):
        config = LlamaConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=1,
        )  # fmt: skip
        with pytest.raises(
            ValueError, match=r"method='mtp'.*LlamaForCausalLM.*'mimo'.*'qwen3_next'"
        ):
            hf_specdec.attach(LlamaForCausalLM(config), {"method": "mtp"})

    def test_a_method_and_a_model_that_contradict(self, make_speculator):
        with pytest.raises(ValueError, match="method='mtp' drafts with the target's own layers"):
            hf_specdec.attach(
                random_target("pre_norm"), {"method": "mtp", "model": make_speculator()}
            )

    def test_the_layers_of_another_model(self, prompts):
        with pytest.raises(ValueError, match="MTP layers of another model object"):
            random_target("pre_norm").generate(
                **prompts(1), assistant_model=MiMoMTP(random_target("post_norm"))
            )

    def test_k_that_is_no_multiple_of_the_layers(self, prompts):
        torch.manual_seed(0)
        target = MiMoForCausalLM(tiny_config(num_nextn_predict_layers=2)).eval()
        with pytest.raises(ValueError, match="num_assistant_tokens=3 must be a multiple of 2"):
            target.generate(**prompts(1), assistant_model=MiMoMTP(target), num_assistant_tokens=3)

    def test_a_decoder_whose_final_norm_has_another_name(self):
        from hf_specdec.targets.target import final_norm

        config = GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1)
        with pytest.raises(ValueError, match="GPT2LMHeadModel has no module 'norm'"):
            final_norm(GPT2LMHeadModel(config))

    def test_transformers_own_loop_has_no_states_before_the_norm(self):
        target: Any = random_target("pre_norm")
        with pytest.raises(ValueError, match="feed='pre_norm'"):
            target._get_candidate_generator(assistant_model=MiMoMTP(target))
