"""RaggedCache: no copies between steps, exact masks, bounded windows, rows that leave."""

import pytest
import torch
from tiny_models import ScriptedDrafter, row_by_row, sometimes_wrong

from hf_specdec.caches.cache_layers import RaggedLayer
from hf_specdec.caches.ragged_cache import RaggedCache, compact_order
from hf_specdec.targets.target import TargetRunner


def make_cache(windows=(None,), padding=(0, 0), max_query_length=4, num_slots=64):
    types = ["full_attention" if w is None else "sliding_attention" for w in windows]
    return RaggedCache(windows, types, torch.tensor(padding), max_query_length, num_slots)


def forward(cache, length, starts=None):
    """One forward: every row's keys are its slots; returns the last layer's view."""
    cache.begin(length)
    slots = cache.current_write.slots.float()
    keys = slots[:, None, :, None].expand(-1, 1, -1, 2)
    return [cache.update(keys, keys, layer)[0] for layer in range(len(cache.layers))][-1]


def test_rows_write_at_their_own_slots_and_roll_back():
    cache = make_cache()
    forward(cache, 5)
    cache.advance(torch.tensor([5, 5]), [5, 5])
    forward(cache, 4)
    cache.advance(torch.tensor([1, 3]), [1, 3])
    view = forward(cache, 2)
    assert cache.lengths.tolist() == [6, 8]
    assert view.shape[2] == 10
    assert view[0, 0, :8, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert view[1, 0, :10, 0].tolist() == list(range(10))


def test_the_mask_hides_padding_rejected_and_future_tokens():
    cache = make_cache(padding=(2, 0))
    forward(cache, 5)
    cache.advance(torch.tensor([5, 5]), [5, 5])
    forward(cache, 4)
    cache.advance(torch.tensor([1, 4]), [1, 4])
    positions = cache.begin(2)
    assert positions.tolist() == [[4, 5], [9, 10]]
    mask = cache.attention_masks()["full_attention"][:, 0]
    assert mask.shape == (2, 2, 11)
    assert mask[0, 0].nonzero()[:, 0].tolist() == [2, 3, 4, 5, 6]
    assert mask[0, 1].nonzero()[:, 0].tolist() == [2, 3, 4, 5, 6, 7]
    assert mask[1, 1].nonzero()[:, 0].tolist() == list(range(11))


@pytest.mark.parametrize("prompt_length", [1, 3, 7, 9, 30])
def test_a_window_layer_shows_exactly_the_window(prompt_length):
    # Every key carries its slot: what the mask lets through must be the newest slots, all of them.
    window, max_query = 5, 4
    cache = make_cache((window,), (0, 0), max_query, num_slots=200)
    forward(cache, prompt_length)
    cache.advance(torch.tensor([prompt_length] * 2), [prompt_length] * 2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        query_length = int(torch.randint(1, max_query + 1, (1,), generator=generator))
        view = forward(cache, query_length)
        assert view.shape[2] <= window + max_query
        mask = cache.attention_masks()["sliding_attention"][:, 0]
        for row in range(2):
            length = int(cache.lengths[row])
            for q in range(query_length):
                seen = sorted(view[row, 0, mask[row, q], 0].tolist())
                query = length + q
                assert seen == list(range(max(0, query - window + 1), query + 1))
        kept = torch.randint(1, query_length + 1, (2,), generator=generator)
        cache.advance(kept, kept.tolist())


def test_buffers_grow_by_doubling_and_keep_their_content():
    cache = make_cache((None, 200), num_slots=8)
    forward(cache, 6)
    cache.advance(torch.tensor([6, 6]), [6, 6])
    view = forward(cache, 4)
    assert cache.num_slots == 16
    assert view[0, 0, :, 0].tolist() == list(range(10))


def test_rows_leave_without_moving_the_others():
    cache = make_cache(padding=(0, 1, 2, 3))
    forward(cache, 6)
    cache.advance(torch.full((4,), 6), [6] * 4)
    layer = cache.layers[0]
    layer.keys += torch.arange(4)[:, None, None, None] * 100
    pointer = layer.keys.data_ptr()
    order = compact_order([True, False, True, True])
    assert order == [0, 3, 2]
    cache.keep_rows(order)
    view = forward(cache, 1)
    assert view.shape[0] == cache.num_rows == 3
    assert view[:, 0, 0, 0].tolist() == [0, 300, 200]
    assert cache.padding.tolist() == [0, 3, 2]
    assert view.data_ptr() == pointer


@pytest.mark.parametrize("keep", [[True], [False, True], [True, True, False], [False] * 3])
def test_compact_order_keeps_every_row_once(keep):
    order = compact_order(keep)
    assert sorted(order) == [i for i, k in enumerate(keep) if k]


def test_no_buffer_is_copied_between_steps(target, prompts, monkeypatch):
    """The same memory from the first step to the last, and views of it in every forward."""
    inputs = prompts(3)
    answers = row_by_row(target, inputs, max_new_tokens=40, do_sample=False)
    buffers: list[tuple[int, int]] = []
    update = RaggedLayer.update

    def watch(self, key_states, value_states, *args, **kwargs):
        keys, values = update(self, key_states, value_states, *args, **kwargs)
        if not self._shared.current_write.first:
            assert keys.data_ptr() == self.keys.data_ptr(), "attention reads a copy"
            assert values.data_ptr() == self.values.data_ptr(), "attention reads a copy"
        buffers.append((self.keys.data_ptr(), self.values.data_ptr()))
        return keys, values

    monkeypatch.setattr(RaggedLayer, "update", watch)
    target.generate(
        **inputs,
        assistant_model=ScriptedDrafter(answers, sometimes_wrong),
        max_new_tokens=40,
        do_sample=False,
    )
    assert len(buffers) > 10 * target.config.num_hidden_layers
    assert len(set(buffers)) == target.config.num_hidden_layers, "a buffer was reallocated"


@pytest.mark.parametrize("window", [None, 3000])
def test_writing_at_the_rows_own_slots_allocates_nothing_of_the_buffers_size(window):
    """A copy inside an operator (``scatter_`` makes one) is seen by the profiler alone."""
    cache = make_cache((window,), num_slots=4096)
    forward(cache, 3200)
    cache.advance(torch.tensor([3200, 3199]), [3200, 3199])
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        forward(cache, 3)
    buffer = cache.layers[0].keys
    largest = max(event.self_cpu_memory_usage for event in profiler.events())
    assert 0 < largest < buffer.nbytes / 10


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_window_layers_hold_window_plus_k_plus_1_slots(family, make_target, make_speculator):
    target = make_target(family)
    ids = torch.randint(3, 64, (2, 50))
    caches = []
    begin = RaggedCache.begin

    def watch(self, query_length, prompt=False, **kwargs):
        caches.append(self)
        return begin(self, query_length, prompt, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RaggedCache, "begin", watch)
        target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=make_speculator(),
            num_assistant_tokens=3,
            max_new_tokens=20,
            do_sample=False,
        )
    sliding = [layer for layer in caches[0].layers if layer.is_sliding]
    assert sliding
    assert {layer.keys.shape[2] for layer in sliding} == {8 + 3 + 1}


def test_only_the_last_hidden_states_are_kept(target, make_speculator, prompts):
    """No all-layer hidden states, and of a prompt one position."""
    inputs = prompts(3)
    seen = []
    call = TargetRunner._call

    def watch(self, arguments):
        assert not arguments.get("output_hidden_states")
        output = call(self, arguments)
        seen.append(tuple(output.hidden_states.shape))
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TargetRunner, "_call", watch)
        target.generate(
            **inputs,
            assistant_model=make_speculator(),
            num_assistant_tokens=2,
            max_new_tokens=10,
            do_sample=False,
        )
    assert seen[0] == (3, 1, 32)
    assert all(s[1] <= 3 for s in seen[1:])
