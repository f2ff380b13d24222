"""What trees are made of: how they are asked for, chosen, drafted, verified and moved."""

import math

import pytest
import torch
from tree_drafters import trained_speculator

from hf_specdec.auto_length import TREE, AutoDraftLength, Measurements
from hf_specdec.cache_moves import move_accepted
from hf_specdec.caches.ragged_cache import RaggedCache
from hf_specdec.drafters.mlp_tree import draft_candidates, draft_shape, largest
from hf_specdec.options.tree_words import MOST_NODES, read_tree, tree_wish
from hf_specdec.tree import TreeShape, merge_chains
from hf_specdec.tree_shape import AcceptanceRates, MeasuredTree, best_shape
from hf_specdec.tree_verification import accepted_nodes, deepest_path, verdict_of

CPU = torch.device("cpu")
SHAPE = TreeShape.of([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)])


def as_they_are(k, logits, token_ids):
    return logits, token_ids


class TestStructure:
    def test_nodes_are_numbered_first_children_first(self):
        tree = SHAPE.on(CPU)
        assert SHAPE.paths == ((0,), (0, 0), (0, 0, 0), (0, 1), (1,), (1, 0), (1, 0, 0))
        assert tree.parents.tolist() == [[0, 0, 1, 2, 1, 0, 5, 6]]
        assert tree.depths.tolist() == [[0, 1, 2, 3, 2, 1, 2, 3]]
        ways = [way.nonzero()[:, 0].tolist() for way in tree.ancestors[0]]
        assert ways == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [0, 5], [0, 5, 6],
                        [0, 5, 6, 7]]  # fmt: skip
        assert tree.paths[0, 3].tolist() == [0, 1, 2, 3]
        assert tree.paths[0, 6].tolist() == [0, 5, 6, 3]
        assert SHAPE.on(CPU) is tree

    def test_a_shallower_tree_is_the_same_without_its_depths(self):
        assert SHAPE.up_to(2).paths == ((0,), (0, 0), (0, 1), (1,), (1, 0))
        assert SHAPE.up_to(3) is SHAPE

    def test_chains_share_their_beginnings(self):
        chains = torch.tensor(
            [[[5, 6, 7], [5, 6, 8], [4, 6, 7], [5, 6, 7]], [[1, 2, 3], [1, 2, 3]] * 2]
        )
        tokens, tree = merge_chains(chains)
        assert tokens.tolist()[0] == [5, 6, 7, 8, 4, 6, 7]
        assert tokens.tolist()[1][:3] == [1, 2, 3]
        assert tree.parents.tolist()[0] == [0, 0, 1, 2, 2, 0, 5, 6]
        assert tree.depths.tolist() == [[0, 1, 2, 3, 3, 1, 2, 3], [0, 1, 2, 3, 0, 0, 0, 0]]
        assert tree.paths[0, 4].tolist() == [0, 1, 2, 4]
        assert tree.paths[0, 6].tolist() == [0, 5, 6, 3]
        # What fills up the smaller tree is on nobody's way.
        assert tree.ancestors[1, :4, 4:].sum() == 0

    @pytest.mark.parametrize("rows", [1, 4])
    def test_merged_chains_are_their_own_prefix_tree(self, rows):
        generator = torch.Generator().manual_seed(3)
        for _ in range(50):
            chains = torch.randint(0, 3, (rows, 6, 4), generator=generator)
            tokens, tree = merge_chains(chains)
            for b in range(rows):
                found = set()
                for q in range(1, tree.size):
                    depth = int(tree.depths[b, q])
                    if depth == 0:
                        continue
                    way = tree.paths[b, q, 1 : depth + 1]
                    assert int(way[-1]) == q
                    on_way = sorted({0, *way.tolist()})
                    assert tree.ancestors[b, q].nonzero()[:, 0].tolist() == on_way
                    prefix = tuple(tokens[b][way - 1].tolist())
                    assert prefix not in found
                    found.add(prefix)
                listed = chains[b].tolist()
                assert found == {tuple(c[:k]) for c in listed for k in range(1, 5)}


class TestWords:
    def test_vllms_text_and_lists_are_read(self):
        expected = ((0,), (0, 0), (1,))
        assert read_tree("[(0,), (1,), (0, 0)]") == expected
        assert read_tree([[1], [0], [0, 0], (0,)]) == expected

    @pytest.mark.parametrize(
        "value", ["chckpoint", "[(0,), 1]", "(0,", [], [()], [(-1,)], [(True,)], 3, [["a"]]]
    )
    def test_anything_else_is_refused(self, value):
        with pytest.raises(ValueError, match=r"speculative_token_tree=.* must be a list of nodes"):
            read_tree(value)

    @pytest.mark.parametrize(
        ("value", "missing"), [("[(0,), (1, 0)]", r"\(1,\)"), ("[(0,), (2,)]", r"\(1,\)")]
    )
    def test_a_gap_is_named(self, value, missing):
        with pytest.raises(ValueError, match=f"without {missing}; add that node"):
            read_tree(value)

    def test_too_many_nodes(self):
        with pytest.raises(ValueError, match="has 257 nodes; at most 256"):
            read_tree([(k,) for k in range(MOST_NODES + 1)])

    @pytest.mark.parametrize("value", [-1, 2.0, True, "8", MOST_NODES + 1])
    def test_a_number_of_nodes_that_does_not_work(self, value):
        with pytest.raises(ValueError, match=r"num_tree_nodes=.* must be an integer from 0 to 256"):
            tree_wish(None, value)

    def test_two_wishes_contradict_each_other(self):
        with pytest.raises(ValueError, match="both say which tree to draft; give one"):
            tree_wish("checkpoint", 4)
        assert tree_wish("checkpoint", 0) is None
        assert str(tree_wish("[(0,)]", None)) == "speculative_token_tree='[(0,)]'"


class TestChoice:
    def rates(self, *of_depth):
        rates = AcceptanceRates()
        for depth, by_rank in enumerate(of_depth):
            for rank, rate in enumerate(by_rank):
                rates.record(depth, rank, 400 * rate, 400)
        return rates

    def test_nodes_with_the_largest_chances_are_taken(self):
        rates = self.rates([0.6, 0.3, 0.05], [0.5, 0.2, 0.01], [0.4, 0.1, 0.01])
        # Chances: 0: .6, 1: .3, 00: .3, 10: .15, 01: .12, 000: .12, 11 and 100: .06.
        assert set(best_shape(rates, 4, 3, 3).paths) == {(0,), (1,), (0, 0), (1, 0)}
        assert set(best_shape(rates, 6, 3, 3).paths[:4]) == {(0,), (0, 0), (0, 0, 0), (0, 1)}

    def test_a_sure_drafter_gets_a_chain_and_an_unsure_one_breadth(self):
        sure = self.rates([0.95, 0.02], [0.95, 0.02], [0.95, 0.02])
        assert best_shape(sure, 3, 3, 4).paths == ((0,), (0, 0), (0, 0, 0))
        unsure = self.rates([0.2, 0.19, 0.18, 0.17], [0.01] * 4)
        assert best_shape(unsure, 4, 3, 4).paths == ((0,), (1,), (2,), (3,))

    def test_limits(self):
        rates = self.rates([0.9, 0.1], [0.9, 0.1], [0.9, 0.1])
        shape = best_shape(rates, 50, 2, 3)
        assert (shape.depth, shape.width, shape.num_nodes) == (2, 3, 12)

    def test_what_is_accepted_changes_the_shape(self):
        plan = MeasuredTree(4, width=4)
        before = plan.shape(3)
        assert before.depth > 1
        # The third child of the root is right whenever there is one, and nothing else ever is.
        for _ in range(400):
            shape = plan.shape(3)
            accepted = torch.zeros(2, shape.num_nodes + 1, dtype=torch.bool)
            accepted[:, 0] = True
            if (2,) in shape.paths:
                accepted[:, 1 + shape.paths.index((2,))] = True
            plan.record(shape, accepted, shape.on(CPU).parents)
        assert (2,) in plan.shape(3).paths
        # The next call begins where this one ended.
        plan.finish()
        assert MeasuredTree(4, width=4, rates=plan.rates).shape(3) == plan.shape(3)

    def test_offered_are_children_of_accepted_nodes_alone(self):
        plan = MeasuredTree(7)
        accepted = torch.zeros(1, 8, dtype=torch.bool)
        accepted[0, [0, 5, 6]] = True
        plan.record(SHAPE, accepted, SHAPE.on(CPU).parents)
        plan.finish()
        counts = {place: tuple(map(round, c)) for place, c in plan.rates._counts.items()}
        assert counts == {(0, 0): (0, 1), (0, 1): (1, 1), (1, 0): (1, 1), (2, 0): (0, 1)}


class TestDrafting:
    def test_largest_is_topk(self):
        generator = torch.Generator().manual_seed(1)
        for vocabulary in (64, 1000, 1024, 12800):
            logits = torch.randn(2, 3, vocabulary, generator=generator)
            for count in (1, 2, 5):
                assert torch.equal(largest(logits, count), logits.topk(count).indices)
                half = logits.bfloat16()
                found = half.gather(-1, largest(half, count))
                assert torch.equal(found, half.topk(count).values)

    def test_the_nodes_are_what_the_heads_say(self):
        """Every node against the speculator run along its own path alone."""
        model = trained_speculator()
        hidden, tokens = torch.randn(3, 32), torch.tensor([5, 9, 30])
        drafts = draft_shape(model, hidden, tokens, SHAPE, as_they_are)
        for b in range(3):
            drafted = dict(zip(SHAPE.paths, drafts[b].tolist(), strict=True))
            for path in SHAPE.paths:
                state, token = model.initial_state(hidden[b]), tokens[b]
                for i, rank in enumerate(path):
                    state = model.stage(i, state, token)
                    token = model.head_logits(i, state).topk(rank + 1).indices[-1]
                assert drafted[path] == int(token), path

    def test_a_chain_of_first_children_is_the_chain(self):
        model = trained_speculator()
        hidden, tokens = torch.randn(4, 32), torch.tensor([5, 9, 30, 3])
        shape = TreeShape.of([(0,), (0, 0), (0, 0, 0)])
        drafts = draft_shape(model, hidden, tokens, shape, as_they_are)
        assert torch.equal(drafts, model.propose(hidden, tokens))

    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_candidates_are_the_models_own(self, depth):
        model = trained_speculator()
        hidden, tokens = torch.randn(3, 32), torch.tensor([5, 9, 30])
        top_k = model.config.top_k_tokens_per_head[:depth]
        count = min(4, math.prod(top_k))
        chains = model.propose_candidates(hidden, tokens, top_k, count)
        drafts, tree = draft_candidates(model, hidden, tokens, depth, as_they_are)
        expected, expected_tree = merge_chains(chains)
        assert torch.equal(drafts, expected)
        assert torch.equal(tree.parents, expected_tree.parents)


class TestVerification:
    TOKENS = torch.tensor([[1, 10, 11, 12, 13, 20, 21, 22]])

    def verify(self, *choices):
        """``choices``: what the target says behind each node."""
        tree, chosen = SHAPE.on(CPU), torch.tensor([choices])
        accepted = accepted_nodes(self.TOKENS, chosen, tree)
        depth, path = deepest_path(accepted, tree)
        verdict = verdict_of(chosen, depth, path)
        count = int(depth)
        return path[0, : count + 1].tolist(), verdict.tokens[0, : count + 1].tolist()

    def test_the_choices_are_followed(self):
        assert self.verify(10, 11, 12, 99, 0, 0, 0, 0) == ([0, 1, 2, 3], [10, 11, 12, 99])
        assert self.verify(20, 0, 0, 0, 0, 21, 98, 0) == ([0, 5, 6], [20, 21, 98])
        assert self.verify(10, 13, 0, 0, 97, 0, 0, 0) == ([0, 1, 4], [10, 13, 97])

    def test_a_right_node_behind_a_wrong_one_is_not_accepted(self):
        assert self.verify(96, 11, 12, 99, 0, 21, 22, 0) == ([0], [96])

    def test_the_same_token_twice_among_siblings(self):
        tree = SHAPE.on(CPU)
        tokens = self.TOKENS.clone()
        tokens[0, 5] = 10
        chosen = torch.tensor([[10, 0, 0, 0, 0, 21, 98, 0]])
        depth, path = deepest_path(accepted_nodes(tokens, chosen, tree), tree)
        assert (depth.tolist(), path.tolist()) == ([2], [[0, 5, 6, 3]])


class TestMoves:
    def test_entries_move_to_consecutive_slots(self):
        keys = torch.arange(2 * 3 * 10).view(2, 3, 10, 1).repeat(1, 1, 1, 4).float()
        values, before = -keys, keys.clone()
        base, path = torch.tensor([2, 4]), torch.tensor([[0, 2, 3, 3], [0, 1, 3, 5]])
        move_accepted(keys, values, base, path, 10)
        expected = before.clone()
        expected[0, :, 3], expected[0, :, 4] = before[0, :, 4], before[0, :, 5]
        expected[1, :, 6], expected[1, :, 7] = before[1, :, 7], before[1, :, 9]
        assert torch.equal(keys, expected) and torch.equal(values, -expected)

    def test_slots_of_a_ring(self):
        keys = torch.arange(8).view(1, 1, 8, 1).float()
        move_accepted(keys, keys.clone(), torch.tensor([6]), torch.tensor([[0, 3, 4]]), 8)
        # 9 and 10, at 1 and 2, to 7 and 8, at 7 and 0.
        assert keys.flatten().tolist() == [2, 1, 2, 3, 4, 5, 6, 1]

    @pytest.mark.parametrize("window", [None, 5])
    def test_the_mask_shows_kept_tokens_and_ancestors(self, window):
        """Every key carries its slot; a window counts positions, whatever slots nodes are at."""
        types = ["full_attention" if window is None else "sliding_attention"]
        cache = RaggedCache([window], types, torch.tensor([1, 0]), 8, num_slots=100)
        generator = torch.Generator().manual_seed(0)

        def forward(length, tree=None):
            positions = cache.begin(length, tree=tree)
            slots = cache.current_write.slots
            keys = slots.float()[:, None, :, None].expand(-1, 1, -1, 2)
            return positions, cache.update(keys, keys, 0)[0]

        forward(7)
        cache.advance(torch.tensor([7, 7]), [7, 7])
        tree = SHAPE.on(CPU)
        for _ in range(12):
            positions, view = forward(8, tree)
            mask = cache.attention_masks()[types[0]][:, 0]
            for row in range(2):
                length, padding = int(cache.lengths[row]), [1, 0][row]
                for q in range(8):
                    depth = int(tree.depths[0, q])
                    assert int(positions[row, q]) == length + depth - padding
                    first = padding if window is None else max(padding, length + depth - window + 1)
                    expected = [*range(first, length)]
                    for node in tree.ancestors[0, q].nonzero()[:, 0].tolist():
                        if length + int(tree.depths[0, node]) >= first:
                            expected.append(length + node)
                    assert sorted(view[row, 0, mask[row, q], 0].tolist()) == expected
            kept = torch.randint(1, 4, (2,), generator=generator)
            cache.advance(kept, kept.tolist())

    def test_a_ring_holds_the_window_after_moves(self):
        """Keys that carry their position, of tree after tree, are read again in order."""
        cache = RaggedCache([5], ["sliding_attention"], torch.tensor([0, 0]), 8, num_slots=100)
        generator = torch.Generator().manual_seed(0)

        def forward(length, tree=None):
            positions = cache.begin(length, tree=tree)
            keys = positions.float()[:, None, :, None].expand(-1, 1, -1, 2)
            return cache.update(keys, keys, 0)[0]

        forward(3)
        cache.advance(torch.tensor([3, 3]), [3, 3])
        tree = SHAPE.on(CPU)
        for _ in range(30):
            forward(8, tree)
            node = torch.randint(0, 8, (2,), generator=generator)
            path = tree.paths[0, node]
            cache.keep_path(path)
            kept = tree.depths[0, node] + 1
            cache.advance(kept, kept.tolist())
            view = forward(1)
            mask = cache.attention_masks()["sliding_attention"][:, 0, 0]
            for row in range(2):
                length = int(cache.lengths[row])
                seen = sorted(view[row, 0, mask[row], 0].tolist())
                assert seen == list(range(max(0, length - 4), length + 1))


class TestAuto:
    def choose(self, tree_seconds, tree_accepts, steps=400):
        """Which choices a simulated drafter ends up with; chains accept 0.6 tokens a step."""
        now = [0.0]
        length = AutoDraftLength(
            2, 2, None, "auto", measurements=Measurements(), choices=[0, 1, 2, TREE + 6],
            clock=lambda: now[0],
        )  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        used = []
        for _ in range(steps):
            k = length.next(1, 10)
            used.append(length.current)
            chance = tree_accepts if length.drafts_tree else 0.4
            now[0] += tree_seconds if length.drafts_tree else 1.0 + 0.05 * k
            accepted = 0
            while accepted < k and float(torch.rand((), generator=generator)) < chance:
                accepted += 1
            length.update(k, [accepted])
        return used[-100:]

    def test_a_tree_that_pays_is_used(self):
        assert self.choose(1.2, 0.7).count(TREE + 6) > 80

    @pytest.mark.parametrize(("seconds", "accepts"), [(3.0, 0.7), (1.2, 0.4)])
    def test_a_tree_that_does_not_pay_is_not(self, seconds, accepts):
        assert self.choose(seconds, accepts).count(TREE + 6) < 8
