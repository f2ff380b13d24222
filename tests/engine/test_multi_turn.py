"""Caches that are passed in and handed back: turn 2 and 3 of a chat say what a fresh call says."""

from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, VOCAB_SIZE, ScriptedDrafter, sometimes_wrong
from transformers import DynamicCache, QuantizedCache, StaticCache

NEW = 11
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}


def user_turn(turn, rows=1, length=6):
    generator = torch.Generator().manual_seed(100 + turn)
    return torch.randint(3, VOCAB_SIZE, (rows, length), generator=generator)


def fresh(target, ids, mask=None):
    """The reference: everything from the beginning, without a cache from before."""
    mask = torch.ones_like(ids) if mask is None else mask
    return target.generate(ids, attention_mask=mask, **GREEDY)


def drafter(ids, sequence, wrong=sometimes_wrong):
    return ScriptedDrafter(sequence[:, ids.shape[1] :].tolist(), wrong, 3)


@pytest.mark.parametrize("how", ["full ids", "new ids"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_passed_cache_is_filled_and_continued(family, how, make_target):
    # The window of 8 is passed in turn 1 already.
    target = make_target(family)
    cache = DynamicCache(config=target.config)
    text = user_turn(0)
    for turn in range(3):
        reference = fresh(target, text)
        held = cache.get_seq_length()
        given = text if how == "full ids" else text[:, held:]
        said = target.generate(
            given,
            attention_mask=torch.ones_like(text),
            assistant_model=drafter(text, reference),
            cache=cache,
            **GREEDY,
        )
        assert said[:, -NEW:].tolist() == reference[:, -NEW:].tolist()
        assert said.shape[1] == given.shape[1] + NEW
        assert cache.get_seq_length() == reference.shape[1] - 1
        text = torch.cat([reference, user_turn(turn + 1)], dim=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_caches_pass_between_plain_and_speculative_calls(family, make_target):
    target, text, cache = make_target(family), user_turn(0), None
    for turn in range(4):
        reference = fresh(target, text)
        ours = {"assistant_model": drafter(text, reference)} if turn % 2 == 0 else {}
        output = target.generate(
            text,
            attention_mask=torch.ones_like(text),
            cache=cache,
            return_dict_in_generate=True,
            **ours,
            **GREEDY,
        )
        assert output.sequences.tolist() == reference.tolist()
        cache = output.cache
        assert type(cache) is DynamicCache
        assert cache.get_seq_length() == reference.shape[1] - 1
        text = torch.cat([reference, user_turn(turn + 1)], dim=1)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_the_cache_holds_what_plain_generation_leaves(family, make_target):
    target, text = make_target(family), user_turn(0)
    plain = target.generate(
        text, attention_mask=torch.ones_like(text), return_dict_in_generate=True, **GREEDY
    )
    ours = target.generate(
        text,
        attention_mask=torch.ones_like(text),
        return_dict_in_generate=True,
        assistant_model=drafter(text, plain.sequences),
        **GREEDY,
    )
    for a, b in zip(ours.cache.layers, plain.cache.layers, strict=True):
        assert type(a) is type(b)
        assert a.keys.shape == b.keys.shape
        torch.testing.assert_close(a.keys, b.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(a.values, b.values, atol=1e-4, rtol=1e-4)


def test_one_row_is_handed_out_without_a_copy(target):
    from hf_specdec.caches.cache_layers import RaggedLayer

    buffers, update = set(), RaggedLayer.update

    def watch(self, *args, **kwargs):
        result = update(self, *args, **kwargs)
        buffers.add(self.keys.data_ptr())
        return result

    text = user_turn(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RaggedLayer, "update", watch)
        output = target.generate(
            text,
            attention_mask=torch.ones_like(text),
            assistant_model=drafter(text, fresh(target, text)),
            return_dict_in_generate=True,
            **GREEDY,
        )
    assert {layer.keys.data_ptr() for layer in output.cache.layers} == buffers


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt_bigcode"])
def test_a_batch_whose_rows_end_at_different_times_goes_on(family, make_target, prompts):
    """Turn 2 of a batch: the holes behind rows that ended early are masked, as one must."""
    target, inputs = make_target(family), prompts(3)
    width = inputs["input_ids"].shape[1]
    first = fresh(target, inputs["input_ids"], inputs["attention_mask"])
    texts = first[:, width:].tolist()
    eos = next(t for t in texts[0][2:5] if sum(t in row for row in texts) < 3)
    common = {**GREEDY, "return_dict_in_generate": True}
    outputs = []
    for ours in ({}, {"assistant_model": ScriptedDrafter(texts, sometimes_wrong, 3)}):
        outputs.append(target.generate(**inputs, **common, eos_token_id=eos, **ours))
    plain, ours_ = outputs
    assert plain.sequences.tolist() == ours_.sequences.tolist()
    said = plain.sequences[:, width:]
    lengths = [row.tolist().index(eos) + 1 if eos in row else NEW for row in said]
    assert len(set(lengths)) > 1
    mask = torch.arange(said.shape[1]) < torch.tensor(lengths)[:, None]
    more = user_turn(9, rows=3)
    ids = torch.cat([plain.sequences, more], dim=1)
    mask = torch.cat([inputs["attention_mask"], mask.long(), torch.ones_like(more)], dim=1)
    expected = target.generate(ids, attention_mask=mask, **GREEDY)
    answers = expected[:, ids.shape[1] :].tolist()
    for cache in (plain.cache, ours_.cache, None):
        result = target.generate(
            ids,
            attention_mask=mask,
            cache=cache,
            assistant_model=ScriptedDrafter(answers, sometimes_wrong, 3),
            **GREEDY,
        )
        assert result.tolist() == expected.tolist()


def test_eos_inside_a_run_leaves_nothing_behind_it_in_the_cache(target):
    text = user_turn(0)
    reference = fresh(target, text)
    answers = reference[:, text.shape[1] :].tolist()
    eos = answers[0][5]
    stop = answers[0].index(eos) + 1
    output = target.generate(
        text,
        attention_mask=torch.ones_like(text),
        assistant_model=ScriptedDrafter(answers),
        eos_token_id=eos,
        return_dict_in_generate=True,
        **GREEDY,
    )
    assert output.sequences.shape[1] == text.shape[1] + stop
    assert output.cache.get_seq_length() == output.sequences.shape[1] - 1


def test_a_cache_without_a_config_and_the_old_name(target):
    text = user_turn(0)
    reference = fresh(target, text)
    cache = DynamicCache()
    with pytest.warns(FutureWarning, match="past_key_values"):
        target.generate(
            text,
            attention_mask=torch.ones_like(text),
            assistant_model=drafter(text, reference),
            past_key_values=cache,
            **GREEDY,
        )
    assert cache.get_seq_length() == reference.shape[1] - 1


def test_the_passed_cache_is_untouched_when_the_call_fails(target):
    text, cache = user_turn(0), DynamicCache(config=target.config)
    target.generate(text, attention_mask=torch.ones_like(text), cache=cache, **GREEDY)
    layers: list[Any] = cache.layers
    before = [layer.keys.clone() for layer in layers]

    class Breaks(ScriptedDrafter):
        def propose(self, *args):
            raise KeyboardInterrupt

    longer = torch.cat([fresh(target, text), user_turn(1)], dim=1)
    with pytest.raises(KeyboardInterrupt):
        target.generate(
            longer,
            attention_mask=torch.ones_like(longer),
            assistant_model=Breaks([[0]]),
            cache=cache,
            **GREEDY,
        )
    for layer, keys in zip(layers, before, strict=True):
        assert torch.equal(layer.keys, keys)


class TestRefusals:
    def test_a_cache_that_holds_everything(self, target):
        text, cache = user_turn(0), DynamicCache(config=target.config)
        target.generate(text, attention_mask=torch.ones_like(text), cache=cache, **GREEDY)
        with pytest.raises(ValueError, match="holds 16 tokens, but the prompt has 6"):
            target.generate(text, cache=cache, assistant_model=ScriptedDrafter([[0]]), **GREEDY)

    def test_a_static_cache(self, target):
        cache = StaticCache(config=target.config, max_cache_len=64)
        with pytest.raises(ValueError, match="is a StaticCache"):
            target.generate(
                user_turn(0), cache=cache, assistant_model=ScriptedDrafter([[0]]), **GREEDY
            )

    def test_an_offloaded_cache(self, target):
        cache = DynamicCache(config=target.config)
        cache.offloading = True
        with pytest.raises(ValueError, match="offloaded DynamicCache"):
            target.generate(
                user_turn(0), cache=cache, assistant_model=ScriptedDrafter([[0]]), **GREEDY
            )

    def test_a_quantized_cache_object(self, target):
        cache = QuantizedCache.__new__(QuantizedCache)
        cache.layers, cache.offloading = [], False
        with pytest.raises(ValueError, match="is a QuantizedCache"):
            target.generate(
                user_turn(0), cache=cache, assistant_model=ScriptedDrafter([[0]]), **GREEDY
            )

    @pytest.mark.parametrize("name", ["offloaded", "quantized", "offloaded_static"])
    def test_cache_implementations_that_save_memory(self, name, target):
        with pytest.raises(ValueError, match=f"cache_implementation='{name}'"):
            target.generate(
                user_turn(0),
                cache_implementation=name,
                assistant_model=ScriptedDrafter([[0]]),
                **GREEDY,
            )

    def test_a_cache_of_another_batch_size(self, target, prompts):
        cache = DynamicCache(config=target.config)
        text = user_turn(0)
        target.generate(text, attention_mask=torch.ones_like(text), cache=cache, **GREEDY)
        longer = user_turn(1, rows=2, length=30)
        with pytest.raises(ValueError, match="holds 1 rows, but the batch has 2"):
            target.generate(
                longer, cache=cache, assistant_model=ScriptedDrafter([[0]] * 2), **GREEDY
            )
