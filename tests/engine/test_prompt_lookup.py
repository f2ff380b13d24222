"""Drafts looked up in the text: the search, what is used of it, and that it changes no token."""

from typing import Any

import pytest
import torch
from tiny_models import PAD, new_tokens, row_by_row

import hf_specdec
from hf_specdec import SpeculativeConfig
from hf_specdec.drafters import NGramDrafter
from hf_specdec.options.lookup_options import PromptLookup
from hf_specdec.prompt_lookup import LookupDrafts, find

NEW = 40
LOOKUP = {"prompt_lookup_num_tokens": 6}


def slow_find(tokens, max_ngram):
    """The same by definition: the longest match, of those the newest."""
    best, start = 0, None
    for end in range(max_ngram - 1, len(tokens) - 1):
        run = 0
        while run < max_ngram and tokens[end - run] == tokens[len(tokens) - 1 - run]:
            run += 1
        if run and run >= best:
            best, start = run, end + 1
    return best, start


@pytest.mark.parametrize("max_ngram", [1, 2, 4])
def test_the_longest_newest_match_is_found(max_ngram):
    lengths = torch.randint(5, 40, (200,))
    # Few different tokens, so that there are matches of every length.
    sequences = torch.randint(0, 4, (200, 44))
    matched, starts = find(sequences, lengths, max_ngram)
    seen = set()
    for row, length in enumerate(lengths.tolist()):
        expected, start = slow_find(sequences[row, :length].tolist(), max_ngram)
        assert matched[row] == expected
        if expected:
            assert starts[row] == start
        seen.add(expected)
    assert seen >= set(range(1, max_ngram + 1))


def test_a_text_shorter_than_the_match_has_none():
    for width in (1, 2, 3):
        sequences = torch.full((2, width), 7)
        matched, _ = find(sequences, torch.tensor([1, 1]), 4)
        assert matched.tolist() == [0, 0]


def searched(rows, options, used=True):
    """A `LookupDrafts` that has searched rows of one length, and its arguments."""
    sequences = torch.tensor(rows)
    lengths = torch.full((len(rows),), sequences.shape[1])
    found = LookupDrafts(options)
    found.settle(found.search(sequences, lengths).tolist())
    return found, sequences, lengths


class TestDrafts:
    def test_what_followed_is_drafted(self):
        found, *text = searched([[0, 1, 2, 3, 4, 5, 6, 1, 2, 3]], PromptLookup(3, 3, 2))
        assert found.serves_all
        assert found.fill(*text, 3, None).tolist() == [[4, 5, 6]]

    def test_a_repeating_text_goes_on(self):
        found, *text = searched([[9, 9, 1, 2, 1, 2, 1, 2]], PromptLookup(5, 3, 2))
        assert found.fill(*text, 5, None).tolist() == [[1, 2, 1, 2, 1]]

    def test_short_matches_are_not_used(self):
        found, *_ = searched([[1, 2, 3, 4, 1]], PromptLookup(3, 3, 2))
        assert not found.serves_all
        assert not found.applies(everywhere=False)

    def test_other_rows_keep_what_the_drafter_proposes(self):
        rows = [[0, 1, 2, 3, 4, 1, 2], [0, 1, 2, 3, 4, 5, 6]]
        found, *text = searched(rows, PromptLookup(4, 3, 2))
        assert found.applies(everywhere=False)
        assert not found.applies(everywhere=True)
        drafts = found.fill(*text, 4, torch.tensor([[50, 51], [60, 61]])).tolist()
        assert drafts[0] == [3, 4, 1, 2]
        assert drafts[1][:2] == [60, 61]

    def test_fewer_than_half_of_the_rows_are_not_enough(self):
        rows = [[0, 1, 2, 3, 4, 1, 2], [0, 1, 2, 3, 4, 5, 6], [0, 6, 5, 4, 3, 2, 1]]
        found, *_ = searched(rows, PromptLookup(4, 3, 2))
        assert not found.applies(everywhere=False)

    def test_rows_that_leave_take_their_matches_along(self):
        rows = [[0, 1, 2, 3, 4, 1, 2], [0, 5, 6, 7, 8, 5, 6]]
        found, sequences, lengths = searched(rows, PromptLookup(2, 3, 2))
        found.keep_rows([1], torch.tensor([1]))
        assert found.fill(sequences[1:], lengths[1:], 2, None).tolist() == [[7, 8]]


class TestWhatPays:
    def make(self):
        return searched([[0, 1, 2, 3, 4, 1, 2, 3]], PromptLookup(4, 3, 2))[0]

    def test_matches_that_bring_less_than_the_drafter_are_dropped(self):
        found = self.make()
        for _ in range(30):
            found.learn([2], looked_up=False)
        assert found.serves_all, "expected to bring 3"
        for _ in range(3):
            found.learn([0], looked_up=True)
        found.settle([3])
        assert not found.serves_all
        found.settle([2])
        assert not found.serves_all, "two tokens promise less than three from the start"

    def test_matches_that_bring_more_stay(self):
        found = self.make()
        for _ in range(30):
            found.learn([2], looked_up=False)
            found.learn([4], looked_up=True)
        found.settle([3])
        assert found.serves_all


@pytest.fixture
def repetitive(prompts):
    """``repetitive(n)``: prompts that say themselves twice, padded on the left."""

    def make(n):
        inputs = prompts(n)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        rows = [row[keep.bool()].repeat(2) for row, keep in zip(ids, mask, strict=True)]
        width = max(len(row) for row in rows)
        ids = torch.stack(
            [torch.nn.functional.pad(r, (width - len(r), 0), value=PAD) for r in rows]
        )
        mask = torch.stack(
            [torch.nn.functional.pad(torch.ones_like(r), (width - len(r), 0)) for r in rows]
        )
        return {"input_ids": ids, "attention_mask": mask}

    return make


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
class TestEquality:
    def test_greedy(self, family, batch, make_target, make_speculator, repetitive):
        target, inputs = make_target(family), repetitive(batch)
        expected = row_by_row(target, inputs, max_new_tokens=NEW, do_sample=False)
        for drafter in (make_speculator(), NGramDrafter()):
            output = target.generate(
                **inputs,
                assistant_model=drafter,
                max_new_tokens=NEW,
                do_sample=False,
                return_dict_in_generate=True,
                **LOOKUP,
            )
            assert new_tokens(output.sequences, inputs, [NEW] * batch) == expected
            # In a large batch it is rare that half of the rows repeat themselves at once.
            assert output.speculation.num_draft_tokens > 0 or batch == 8

    def test_sampled(self, family, batch, make_target, make_speculator, repetitive):
        target, inputs = make_target(family), repetitive(batch)
        settings = {
            "max_new_tokens": NEW,
            "do_sample": True,
            "temperature": 0.4,
            "row_seeds": list(range(batch)),
        }
        plain = target.generate(
            **inputs, assistant_model=make_speculator(), num_assistant_tokens=0, **settings
        )
        for drafter in (make_speculator(), NGramDrafter()):
            tokens = target.generate(**inputs, assistant_model=drafter, **LOOKUP, **settings)
            assert tokens.tolist() == plain.tolist()


class TestCalls:
    def test_a_text_that_repeats_itself_needs_fewer_forwards(self, target, prompts):
        inputs = prompts(1)
        texts = row_by_row(target, inputs, max_new_tokens=64, do_sample=False)
        longer = torch.cat([inputs["input_ids"], torch.tensor(texts)], dim=1).repeat(1, 2)
        output = target.generate(
            longer,
            attention_mask=torch.ones_like(longer),
            assistant_model=NGramDrafter(),
            max_new_tokens=64,
            do_sample=False,
            return_dict_in_generate=True,
        )
        assert output.speculation.num_target_forwards < 64

    @pytest.mark.parametrize("batch", [1, 3])
    def test_processors_that_read_the_text(self, batch, target, make_speculator, repetitive):
        inputs, rules = repetitive(batch), {"repetition_penalty": 1.2, "do_sample": False}
        expected = row_by_row(target, inputs, max_new_tokens=NEW, **rules)
        output = target.generate(
            **inputs, assistant_model=make_speculator(), max_new_tokens=NEW, **rules, **LOOKUP
        )
        assert new_tokens(output, inputs, [NEW] * batch) == expected

    def test_rows_end_on_their_own(self, target, make_speculator, repetitive):
        inputs = repetitive(8)
        texts = row_by_row(target, inputs, max_new_tokens=NEW, do_sample=False)
        eos = max(range(3, 64), key=lambda t: len({r.index(t) for r in texts if t in r}))
        expected = [r[: r.index(eos) + 1] if eos in r else r for r in texts]
        output = target.generate(
            **inputs,
            assistant_model=make_speculator(),
            max_new_tokens=NEW,
            eos_token_id=eos,
            do_sample=False,
            **LOOKUP,
        )
        assert new_tokens(output, inputs, [len(r) for r in expected]) == expected

    def test_rejection_never_mixes_looked_up_and_sampled_drafts(
        self, target, make_speculator, repetitive
    ):
        for batch in (1, 3):
            output = target.generate(
                **repetitive(batch),
                assistant_model=make_speculator(),
                max_new_tokens=NEW,
                do_sample=True,
                temperature=0.4,
                verification="rejection",
                return_dict_in_generate=True,
                **LOOKUP,
            )
            assert output.sequences.shape[0] == batch
            assert output.speculation.num_draft_tokens > 0

    def test_automatic_length_learns_from_the_drafters_steps_alone(
        self, target, make_speculator, repetitive
    ):
        inputs = repetitive(1)
        expected = row_by_row(target, inputs, max_new_tokens=NEW, do_sample=False)
        tokens = target.generate(
            **inputs,
            assistant_model=make_speculator(),
            num_assistant_tokens="auto",
            max_new_tokens=NEW,
            do_sample=False,
            **LOOKUP,
        )
        assert new_tokens(tokens, inputs, [NEW]) == expected

    @pytest.mark.parametrize("batch", [1, 3])
    def test_beside_trees(self, batch, target, make_speculator, repetitive):
        inputs = repetitive(batch)
        expected = row_by_row(target, inputs, max_new_tokens=NEW, do_sample=False)
        output = target.generate(
            **inputs,
            assistant_model=make_speculator(),
            num_tree_nodes=5,
            max_new_tokens=NEW,
            do_sample=False,
            return_dict_in_generate=True,
            **LOOKUP,
        )
        assert new_tokens(output.sequences, inputs, [NEW] * batch) == expected
        assert output.speculation.num_tree_nodes > 0

    def test_zero_draft_tokens_means_none_of_any_kind(self, target, make_speculator, repetitive):
        output = target.generate(
            **repetitive(1),
            assistant_model=make_speculator(),
            num_assistant_tokens=0,
            max_new_tokens=NEW,
            return_dict_in_generate=True,
            **LOOKUP,
        )
        assert output.speculation.num_drafts == 0

    def test_limits_by_batch_size_hold_for_looked_up_drafts(self, target, repetitive):
        output = target.generate(
            **repetitive(1),
            assistant_model=NGramDrafter(),
            num_speculative_tokens_per_batch_size=[[1, 1, 0]],
            max_new_tokens=NEW,
            return_dict_in_generate=True,
        )
        assert output.speculation.num_drafts == 0


class TestNGramDrafter:
    def test_attached_in_vllms_words(self, target, repetitive):
        inputs = repetitive(3)
        expected = row_by_row(target, inputs, max_new_tokens=NEW, do_sample=False)
        config = {"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": 10}
        hf_specdec.attach(target, config)
        try:
            output = target.generate(
                **inputs, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True
            )
        finally:
            hf_specdec.detach(target)
        assert new_tokens(output.sequences, inputs, [NEW] * 3) == expected
        assert output.speculation.num_draft_tokens > 0
        assert len(output.speculation.accepted_per_position) == 10

    def test_in_transformers_own_loop(self, target, repetitive, monkeypatch):
        inputs = repetitive(1)
        expected = row_by_row(target, inputs, max_new_tokens=NEW, do_sample=False)
        generators = []

        def ours(self, *args, **kwargs):
            generators.append(NGramDrafter())
            return generators[-1]

        hf_specdec.disable()
        monkeypatch.setattr(type(target), "_get_candidate_generator", ours)
        try:
            tokens = target.generate(
                **inputs, prompt_lookup_num_tokens=6, max_new_tokens=NEW, do_sample=False
            )
        finally:
            hf_specdec.enable()
        assert generators
        assert new_tokens(tokens, inputs, [NEW]) == expected

    def test_candidates_are_the_text_and_what_followed(self):
        text: Any = torch.tensor([[0, 1, 2, 3, 4, 5, 1, 2, 3]])
        ids, logits = NGramDrafter(PromptLookup(3)).get_candidates(text)
        assert logits is None
        assert ids.tolist() == [[*text[0].tolist(), 4, 5, 1]]
        other: Any = torch.arange(3, 20)[None]
        assert NGramDrafter().get_candidates(other)[0] is other


class TestRefusals:
    @pytest.mark.parametrize("value", [-1, 1.5, True, "4"])
    def test_numbers_of_a_call(self, value, target, make_speculator, prompts):
        for name in ("prompt_lookup_num_tokens", "max_matching_ngram_size"):
            arguments = {**LOOKUP, name: value}
            with pytest.raises(ValueError, match=name):
                target.generate(
                    **prompts(1), assistant_model=make_speculator(), max_new_tokens=2, **arguments
                )

    @pytest.mark.parametrize(
        ("fields", "match"),
        [
            ({"prompt_lookup_max": 0}, "prompt_lookup_max=0 must be an integer of at least 1"),
            ({"prompt_lookup_min": True}, "prompt_lookup_min=True must be an integer"),
            (
                {"prompt_lookup_min": 5, "prompt_lookup_max": 2},
                "prompt_lookup_min=5 must not be more than prompt_lookup_max=2",
            ),
            ({"prompt_lookup_num_tokens": 4}, "num_speculative_tokens says how many"),
            ({"model": object()}, "drafts from the text alone, but model is given"),
        ],
    )
    def test_configs(self, fields, match):
        with pytest.raises(ValueError, match=match):
            SpeculativeConfig(method="ngram", **fields)

    def test_lengths_that_nothing_uses(self):
        with pytest.raises(ValueError, match="prompt_lookup_max=3 is of method='ngram', but"):
            SpeculativeConfig(method="mtp", prompt_lookup_max=3)

    def test_options(self):
        with pytest.raises(ValueError, match="min_ngram=3 must not be more than max_ngram=2"):
            PromptLookup(4, 2, 3)
        with pytest.raises(ValueError, match="num_tokens=0 must be an integer of at least 1"):
            PromptLookup(0)
