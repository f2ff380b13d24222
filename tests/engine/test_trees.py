"""A tree of drafts changes no token: what it brings is a longer accepted path."""

from typing import Any

import pytest
import torch
from row_watchers import Collect, Limits
from tiny_models import FAMILIES, PAD, VOCAB_SIZE, new_tokens, row_by_row
from tree_drafters import ScriptedTreeDrafter, known_prompts, mixed_rank, trained_speculator

from hf_specdec.caches.ragged_cache import RaggedCache
from hf_specdec.drafting import NodePicker
from hf_specdec.processors import LogitsPipeline

NEW = 24
GIVEN = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 0, 1)]"
TREES: list[dict[str, Any]] = [
    {"speculative_token_tree": GIVEN},
    {"speculative_token_tree": "checkpoint"},
    {"num_tree_nodes": 9},
]
WINDOWED = ["mistral", "gemma2", "gemma3", "qwen2"]
by_tree = pytest.mark.parametrize("tree", TREES, ids=["given", "checkpoint", "measured"])


def speculate(target, inputs, drafter, num_new=NEW, **kwargs):
    return target.generate(
        **inputs,
        assistant_model=drafter,
        max_new_tokens=num_new,
        return_dict_in_generate=True,
        **kwargs,
    )


_texts: dict[Any, list[list[int]]] = {}


def greedy(target, inputs, num_new=NEW):
    """What plain generation says of each prompt alone; found out once."""
    key = (target, num_new, str(inputs["input_ids"].tolist()), str(inputs["attention_mask"]))
    if key not in _texts:
        _texts[key] = row_by_row(target, inputs, max_new_tokens=num_new, do_sample=False)
    return _texts[key]


class TestGreedy:
    @pytest.mark.parametrize(
        ("batch", "tree"),
        [(1, TREES[0]), (3, TREES[1]), (8, TREES[2]), (3, TREES[0]), (8, TREES[1])],
        ids=["1-given", "3-checkpoint", "8-measured", "3-given", "8-checkpoint"],
    )
    @pytest.mark.parametrize("family", FAMILIES)
    def test_the_text_is_plain_generations(self, family, batch, tree, make_target, prompts):
        target, inputs = make_target(family), prompts(batch)
        expected = greedy(target, inputs)
        drafter = ScriptedTreeDrafter(expected, mixed_rank)
        output = speculate(target, inputs, drafter, do_sample=False, **tree)
        assert new_tokens(output.sequences, inputs, [NEW] * batch) == expected
        # Paths of every length, so that something is moved and something is rejected.
        assert output.speculation.accepted_per_position[1] > 0
        assert output.speculation.acceptance_rate < 0.8

    @by_tree
    @pytest.mark.parametrize("batch", [1, 3, 8])
    def test_a_trained_speculators_second_choices_are_accepted(self, batch, tree, target):
        inputs = {name: tensor[:batch] for name, tensor in known_prompts().items()}
        expected = greedy(target, inputs, 40)
        stats = []
        chain: dict[str, Any] = {}
        for how in (chain, tree):
            output = speculate(target, inputs, trained_speculator(), 40, do_sample=False, **how)
            assert new_tokens(output.sequences, inputs, [40] * batch) == expected
            stats.append(output.speculation)
        assert stats[0].mean_acceptance_length > 1.8
        assert stats[1].mean_acceptance_length > stats[0].mean_acceptance_length + 0.25
        assert stats[1].num_target_forwards < stats[0].num_target_forwards

    @pytest.mark.parametrize("implementation", ["eager", "sdpa"])
    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    def test_attention_implementations(self, family, implementation, make_target, prompts):
        target, inputs = make_target(family), prompts(3)
        expected = greedy(target, inputs)
        target.set_attn_implementation(implementation)
        try:
            drafter = ScriptedTreeDrafter(expected, mixed_rank)
            output = speculate(target, inputs, drafter, do_sample=False, **TREES[0])
        finally:
            target.set_attn_implementation("sdpa")
        assert new_tokens(output.sequences, inputs, [NEW] * 3) == expected

    @pytest.mark.parametrize(
        ("prompt_length", "tree"),
        [(7, TREES[2]), (9, TREES[1]), (30, TREES[0])],
        ids=["7-measured", "9-checkpoint", "30-given"],
    )
    @pytest.mark.parametrize("family", WINDOWED)
    def test_windows(self, family, prompt_length, tree, make_target):
        # Trees larger than the window of 8 that they are verified behind.
        target = make_target(family)
        ids = torch.randint(3, VOCAB_SIZE, (3, prompt_length))
        ids[1, :4] = PAD
        inputs = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
        expected = greedy(target, inputs, 40)
        drafter = ScriptedTreeDrafter(expected, mixed_rank, 6)
        output = speculate(target, inputs, drafter, 40, do_sample=False, **tree)
        assert new_tokens(output.sequences, inputs, [40] * 3) == expected

    def test_a_tree_deeper_than_the_window(self, make_target, prompts):
        # Its lower nodes no longer see the root, nor the first of their ancestors.
        target, inputs = make_target("mistral"), prompts(3)
        expected = greedy(target, inputs, 40)
        paths = [(0,) * k for k in range(1, 13)] + [(0,) * k + (1,) for k in range(12)]
        drafter = ScriptedTreeDrafter(expected, lambda row, i: (row + i) % 7 == 0, 12)
        output = speculate(
            target, inputs, drafter, 40, do_sample=False, speculative_token_tree=paths
        )
        assert new_tokens(output.sequences, inputs, [40] * 3) == expected

    @by_tree
    @pytest.mark.parametrize("family", ["gpt_bigcode", "llama"])
    def test_the_last_position_of_the_model_is_reached(self, family, tree, make_target):
        target = make_target(family)
        ids = torch.randint(3, VOCAB_SIZE, (3, 235))
        mask = torch.ones_like(ids)
        expected = target.generate(ids, attention_mask=mask, max_length=256, do_sample=False)
        drafter = ScriptedTreeDrafter(expected[:, 235:].tolist(), mixed_rank)
        output = target.generate(
            ids,
            attention_mask=mask,
            max_length=256,
            do_sample=False,
            assistant_model=drafter,
            **tree,
        )
        assert torch.equal(output, expected)

    @by_tree
    def test_holes_in_the_mask(self, tree, target, prompts):
        inputs = prompts(3)
        inputs["attention_mask"][2, -4] = 0
        expected = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        width = inputs["input_ids"].shape[1]
        drafter = ScriptedTreeDrafter(expected[:, width:].tolist(), mixed_rank)
        output = speculate(target, inputs, drafter, do_sample=False, **tree)
        assert torch.equal(output.sequences, expected)


def _nothing_moves(self, path):
    pass


def _moves_the_first_layer_alone(self, path):
    layers = self.ragged_layers
    self.ragged_layers = layers[:1]
    keep_path(self, path)
    self.ragged_layers = layers


def _chain_masks(self, tree, slots, end):
    return self._masks(slots, slots, end)


def _windows_by_slot(self, tree, slots, end):
    masks = tree_masks(self, tree, slots, end)
    return {name: mask & self._masks(slots, slots, end)[name] for name, mask in masks.items()}


def _positions_by_slot(self, query_length, prompt=False, tree=None):
    positions = begin(self, query_length, prompt, tree)
    return positions if tree is None else positions[:, :1] + torch.arange(query_length)


keep_path, tree_masks, begin = RaggedCache.keep_path, RaggedCache._tree_masks, RaggedCache.begin


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@pytest.mark.parametrize(
    ("part", "broken"),
    [
        ("keep_path", RaggedCache.keep_path),
        ("keep_path", _nothing_moves),
        ("keep_path", _moves_the_first_layer_alone),
        ("_tree_masks", _chain_masks),
        ("_tree_masks", _windows_by_slot),
        ("begin", _positions_by_slot),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_every_part_matters(part, broken, family, make_target, prompts, monkeypatch):
    """With a part broken on purpose the texts differ (and don't with the part as it is)."""
    target, inputs = make_target(family), prompts(3)
    expected = greedy(target, inputs, 40)
    monkeypatch.setattr(RaggedCache, part, broken)
    paths = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (0, 1, 0), (1, 0, 0)]
    try:
        drafter = ScriptedTreeDrafter(expected, lambda row, i: (row + i) % 2)
        output = speculate(
            target, inputs, drafter, 40, do_sample=False, speculative_token_tree=paths
        )
        astray = new_tokens(output.sequences, inputs, [40] * 3) != expected
    except AssertionError:
        # The drafter noticed that the text isn't the one it knows.
        astray = True
    assert astray == (broken is not keep_path)


class TestSampling:
    @by_tree
    @pytest.mark.parametrize("verification", ["match", "rejection"])
    @pytest.mark.parametrize(
        "settings", [{}, {"temperature": 0.7, "top_k": 8}, {"top_p": 0.8, "top_k": 0}], ids=str
    )
    def test_a_seed_gives_the_text_of_plain_decoding(
        self, settings, verification, tree, target, prompts
    ):
        # Under both rules: a tree is verified by sampling from the target and following the child.
        inputs, seeds = prompts(3), [3, 2**40 + 1, 77]
        arguments = {"do_sample": True, "row_seeds": seeds, **settings}
        plain = speculate(target, inputs, trained_speculator(), num_assistant_tokens=0, **arguments)
        texts = new_tokens(plain.sequences, inputs, [NEW] * 3)
        arguments["verification"] = verification
        for drafter in (trained_speculator(), ScriptedTreeDrafter(texts, mixed_rank)):
            output = speculate(target, inputs, drafter, **arguments, **tree)
            assert torch.equal(output.sequences, plain.sequences)
            assert output.speculation.num_accepted_tokens > 0

    def test_drafts_share_the_targets_noise(self, target, prompts, monkeypatch):
        inputs = prompts(8)
        arguments = {"do_sample": True, "row_seeds": list(range(8)), "top_k": 0, **TREES[0]}
        coupled = speculate(target, inputs, trained_speculator(), 40, **arguments)
        init = NodePicker.__init__

        def without_noise(self, pipeline, row_seeds, positions, vocabulary):
            init(self, pipeline, None, positions, vocabulary)

        monkeypatch.setattr(NodePicker, "__init__", without_noise)
        independent = speculate(target, inputs, trained_speculator(), 40, **arguments)
        assert torch.equal(coupled.sequences, independent.sequences)
        rates = [o.speculation.per_position[0] for o in (coupled, independent)]
        assert rates[0] > rates[1] + 0.1


class TestStopping:
    @by_tree
    def test_rows_stop_at_their_own_eos(self, tree, target, prompts):
        inputs = prompts(8)
        texts = greedy(target, inputs, 40)
        eos = max(range(3, 64), key=lambda t: len({r.index(t) for r in texts if t in r}))
        expected = [r[: r.index(eos) + 1] if eos in r else r for r in texts]
        lengths = [len(r) for r in expected]
        assert len(set(lengths)) >= 3
        # The end token is on an accepted path of some row, with more behind it.
        drafter = ScriptedTreeDrafter(texts, lambda row, i: (row + i) % 2)
        output = speculate(target, inputs, drafter, 40, do_sample=False, eos_token_id=eos, **tree)
        assert new_tokens(output.sequences, inputs, lengths) == expected
        assert [r.num_new_tokens for r in output.speculation.rows] == lengths

    @by_tree
    @pytest.mark.parametrize("num_new", [1, 2, 3, 4, 5])
    def test_length_limit_inside_a_path(self, num_new, tree, target, prompts):
        inputs = prompts(3)
        texts = greedy(target, inputs)
        drafter = ScriptedTreeDrafter(texts, lambda row, i: row % 2)
        output = speculate(target, inputs, drafter, num_new, do_sample=False, **tree)
        assert output.sequences.shape[1] == inputs["input_ids"].shape[1] + num_new
        assert new_tokens(output.sequences, inputs, [num_new] * 3) == [t[:num_new] for t in texts]

    @by_tree
    def test_criteria_and_streamers_of_rows(self, tree, target, prompts):
        inputs, limits, streamer = prompts(3), [5, 9, 14], Collect()
        texts = greedy(target, inputs)
        output = speculate(
            target,
            inputs,
            ScriptedTreeDrafter(texts, mixed_rank),
            do_sample=False,
            stopping_criteria=[Limits(limits)],
            streamer=streamer,
            **tree,
        )
        expected = [t[:n] for t, n in zip(texts, limits, strict=True)]
        assert new_tokens(output.sequences, inputs, limits) == expected
        assert [streamer.text(row) for row in range(3)] == expected
        assert streamer.ended
        stats = output.speculation.rows[1]
        accepted = sum(step.num_accepted_tokens for step in streamer.of_row(1))
        assert accepted == stats.num_accepted_tokens

    def test_a_criterion_that_looks_at_scores(self, target, prompts):
        inputs = prompts(1)
        common: dict[str, Any] = {"do_sample": False, "output_scores": True}

        def stop(input_ids, scores, **kwargs):
            assert len(scores) == input_ids.shape[1] - 9
            return torch.tensor([len(scores) > 5 and bool(scores[-1].max() > scores[0].max())])

        texts = greedy(target, inputs)
        plain = target.generate(
            **inputs,
            max_new_tokens=NEW,
            stopping_criteria=[stop],
            return_dict_in_generate=True,
            **common,
        )
        output = speculate(
            target,
            inputs,
            ScriptedTreeDrafter(texts, mixed_rank),
            stopping_criteria=[stop],
            **common,
            **TREES[0],
        )
        assert torch.equal(output.sequences, plain.sequences)
        assert plain.sequences.shape[1] < 9 + NEW


@by_tree
@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 12, "eos_token_id": 17},
        {"prefix_allowed_tokens_fn": lambda b, ids: range(3 + b, 50 - len(ids))},
    ],
    ids=lambda s: next(iter(s)),
)
def test_processors_that_look_at_the_prefix(settings, tree, target, prompts, monkeypatch):
    batch, inputs = 3, prompts(3)
    plain = target.generate(**inputs, max_new_tokens=NEW, do_sample=False, **settings)
    answers = plain[:, inputs["input_ids"].shape[1] :].tolist()
    seen = []
    at = LogitsPipeline._at

    def watch(self, row, prefix, logits):
        seen.append(len(prefix))
        return at(self, row, prefix, logits)

    monkeypatch.setattr(LogitsPipeline, "_at", watch)
    drafter = ScriptedTreeDrafter(answers, mixed_rank)
    output = speculate(target, inputs, drafter, do_sample=False, **settings, **tree)
    assert torch.equal(plain, output.sequences)
    assert output.speculation.num_accepted_tokens > 0
    # Asked once for every token of the path, never about a rejected draft.
    stats = output.speculation
    emitted = stats.num_accepted_tokens + stats.num_drafts + batch
    assert abs(len(seen) - emitted) <= 4 * batch


@pytest.mark.parametrize("seeds", [None, [5, 6, 7]], ids=["greedy", "sampled"])
def test_a_processor_of_the_prefix_and_sampling(seeds, target, prompts):
    inputs = prompts(3)
    arguments: dict[str, Any] = {"do_sample": seeds is not None, "repetition_penalty": 1.3}
    if seeds:
        arguments["row_seeds"] = seeds
    plain = speculate(target, inputs, trained_speculator(), num_assistant_tokens=0, **arguments)
    texts = new_tokens(plain.sequences, inputs, [NEW] * 3)
    for tree in TREES:
        drafter = ScriptedTreeDrafter(texts, mixed_rank)
        output = speculate(target, inputs, drafter, **arguments, **tree)
        assert torch.equal(output.sequences, plain.sequences)


class TestLength:
    @by_tree
    def test_no_draft_is_longer_than_k(self, tree, target, prompts):
        inputs = prompts(3)
        texts = greedy(target, inputs)
        for k in (1, 2):
            drafter = ScriptedTreeDrafter(texts, lambda row, i: 0)
            output = speculate(
                target, inputs, drafter, do_sample=False, num_assistant_tokens=k, **tree
            )
            assert new_tokens(output.sequences, inputs, [NEW] * 3) == texts
            assert len(output.speculation.accepted_per_position) == k

    @by_tree
    @pytest.mark.parametrize(
        "how",
        [
            {"num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 2, 0], [3, 64, 1]]},
            {"num_assistant_tokens_schedule": "heuristic_transient", "num_assistant_tokens": 1},
            {"num_assistant_tokens": "auto"},
            {"num_assistant_tokens": 0},
        ],
        ids=lambda how: next(iter(how.values())),
    )
    def test_k_that_changes(self, how, tree, target, prompts):
        inputs = prompts(3)
        texts = greedy(target, inputs, 40)
        eos = texts[1][7]
        expected = [r[: r.index(eos) + 1] if eos in r else r for r in texts]
        drafter = ScriptedTreeDrafter(texts, mixed_rank)
        output = speculate(
            target, inputs, drafter, 40, do_sample=False, eos_token_id=eos, **how, **tree
        )
        lengths = [len(r) for r in expected]
        assert new_tokens(output.sequences, inputs, lengths) == expected
        assert (output.speculation.num_tree_nodes == 0) == (how == {"num_assistant_tokens": 0})

    def test_zero_nodes_draft_chains(self, target, prompts):
        inputs = prompts(1)
        config = {"num_tree_nodes": 8}
        for asked, has_trees in (({}, True), ({"num_tree_nodes": 0}, False)):
            output = speculate(
                target,
                inputs,
                trained_speculator(),
                do_sample=False,
                speculative_config=config,
                **asked,
            )
            assert (output.speculation.num_tree_nodes > 0) == has_trees


def test_statistics_count_depths_and_nodes(target, prompts):
    inputs = prompts(3)
    texts = greedy(target, inputs)
    drafter = ScriptedTreeDrafter(texts, lambda row, i: row)
    output = speculate(target, inputs, drafter, 10, do_sample=False, **TREES[0])
    stats = output.speculation
    for row in stats.rows:
        # Near the end the tree has fewer nodes.
        assert row.num_draft_tokens <= 3 * row.num_drafts
        assert 3 * row.num_drafts < row.num_tree_nodes <= 10 * row.num_drafts
    assert stats.num_tree_nodes == sum(row.num_tree_nodes for row in stats.rows)
    # Right are the first, second and third child: of the last there is one at depth 1 only.
    assert stats.rows[2].accepted_per_position[1:] == [0, 0]
    assert stats.rows[2].per_position[0] == 1.0
    assert stats.rows[0].mean_acceptance_length > 3
    assert (stats + stats - stats).num_tree_nodes == stats.num_tree_nodes
    assert stats.as_dict()["num_tree_nodes"] == stats.num_tree_nodes


@by_tree
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_the_cache_handed_out_goes_on(family, tree, make_target, prompts):
    """What is moved is moved for good: the next turn reads it."""
    target, inputs = make_target(family), prompts(3)
    texts = greedy(target, inputs)
    output = speculate(
        target, inputs, ScriptedTreeDrafter(texts, mixed_rank), do_sample=False, **tree
    )
    more = torch.tensor([[5, 9], [11, 4], [8, 8]])
    ids = torch.cat([output.sequences, more], dim=1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, NEW + 2, dtype=torch.long)], dim=1)
    arguments: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    fresh = target.generate(ids, attention_mask=mask, **arguments)
    ours = target.generate(ids, attention_mask=mask, cache=output.cache, **arguments)
    assert torch.equal(fresh, ours)
