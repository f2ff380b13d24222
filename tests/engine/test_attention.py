"""Grouped attention: transformers' numbers without its copies, and nothing left switched."""

import threading

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_specdec.targets import attention
from hf_specdec.targets.attention import grouped_attention, grouped_sdpa


class Layer(torch.nn.Module):
    num_key_value_groups = 3
    is_causal = True


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("key_heads", [1, 2])
def test_equals_transformers_sdpa(length, key_heads):
    query = torch.randn(3, 3 * key_heads, length, 8)
    key, value = torch.randn(2, 3, key_heads, 11, 8)
    mask = torch.zeros(3, 1, length, 11)
    mask[torch.rand_like(mask) < 0.4] = torch.finfo(torch.float32).min
    mask[..., 0] = 0.0
    arguments = (Layer(), query, key, value, mask)
    ours, _ = grouped_sdpa(*arguments, scaling=0.3)
    theirs, _ = sdpa_attention_forward(*arguments, scaling=0.3)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    # Queries of one head must not meet the mask of another position.
    if length > 1:
        shuffled = (*arguments[:4], mask.flip(2))
        assert not torch.allclose(grouped_sdpa(*shuffled, scaling=0.3)[0], theirs, atol=1e-3)


def test_runs_in_the_verifying_forwards_and_is_switched_back(
    target, make_speculator, prompts, monkeypatch
):
    seen = []
    scaled = torch.nn.functional.scaled_dot_product_attention

    def watch(query, key, *args, **kwargs):
        seen.append((query.shape[1], key.shape[1], query.shape[2]))
        return scaled(query, key, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watch)
    target.generate(
        **prompts(3),
        assistant_model=make_speculator(),
        num_assistant_tokens=2,
        max_new_tokens=6,
        do_sample=False,
    )
    # Two key heads, the two query heads of each stacked: nothing is repeated.
    assert (2, 2, 2 * 3) in seen
    assert target.config._attn_implementation == "sdpa"


def test_an_error_switches_back(target):
    with pytest.raises(RuntimeError, match="inside"), grouped_attention(target):
        assert target.config._attn_implementation == attention.NAME
        raise RuntimeError("inside")
    assert target.config._attn_implementation == "sdpa"


def test_the_last_of_several_threads_switches_back(target):
    inside, leave = threading.Barrier(3), [threading.Event(), threading.Event()]

    def use(event):
        with grouped_attention(target):
            inside.wait()
            event.wait()

    threads = [threading.Thread(target=use, args=(event,)) for event in leave]
    for thread in threads:
        thread.start()
    inside.wait()
    leave[0].set()
    threads[0].join()
    assert target.config._attn_implementation == attention.NAME
    leave[1].set()
    threads[1].join()
    assert target.config._attn_implementation == "sdpa"


def test_eager_targets_are_left_alone(make_target):
    target = make_target("gemma2")
    assert target.config._attn_implementation == "eager"
    with grouped_attention(target):
        assert target.config._attn_implementation == "eager"
