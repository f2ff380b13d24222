"""Drafters that propose what the target can't run: an error, or wrong drafts like any other."""

from typing import Any

import pytest
import torch
from tiny_models import VOCAB_SIZE, ScriptedDrafter, new_tokens, row_by_row

from hf_specdec.drafters import MLPDrafter
from hf_specdec.proposals import Proposals

NEW = 12
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}


class Spoilt(ScriptedDrafter):
    """Knows the answers, and does something to the tensor that says so."""

    def __init__(self, answers, spoil):
        super().__init__(answers)
        self._spoil = spoil

    def propose(self, token_ids, num_draft_tokens, pick=None):
        return self._spoil(super().propose(token_ids, num_draft_tokens, pick))


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda d: d.tolist(), "returned a list"),
        (lambda d: None, "returned a NoneType"),
        (lambda d: d.float(), r"returned torch\.float32 \[2, 4\] on cpu"),
        (lambda d: d.int(), r"returned torch\.int32 \[2, 4\] on cpu"),
        (lambda d: d.flatten(), r"returned torch\.int64 \[8\] on cpu"),
        (lambda d: d[:1], r"returned torch\.int64 \[1, 4\] on cpu"),
        (lambda d: d[None], r"returned torch\.int64 \[1, 2, 4\] on cpu"),
        (lambda d: d.to("meta"), r"returned torch\.int64 \[2, 4\] on meta"),
        (lambda d: torch.cat([d, d], dim=1), "propose returned 8 tokens a row, .* at most 4"),
    ],
)
def test_something_that_is_no_draft(target, prompts, spoil, found):
    inputs = prompts(2)
    answers = row_by_row(target, inputs, **GREEDY)
    before = dict(target.__dict__)
    hooks = len(target.model.norm._forward_hooks)
    with pytest.raises(ValueError, match=f"assistant_model Spoilt: .*{found}"):
        target.generate(**inputs, **GREEDY, assistant_model=Spoilt(answers, spoil))
    assert target.__dict__ == before and len(target.model.norm._forward_hooks) == hooks
    output = target.generate(**inputs, **GREEDY, assistant_model=ScriptedDrafter(answers))
    assert new_tokens(output, inputs, [NEW] * 2) == answers


OUTSIDE = {
    "negative": lambda d: d - VOCAB_SIZE,
    "far negative": lambda d: torch.full_like(d, -(2**62)),
    "behind the last": lambda d: d + VOCAB_SIZE,
    "far behind": lambda d: torch.full_like(d, 2**62),
    "in the middle": lambda d: d.index_fill(1, torch.tensor([1]), VOCAB_SIZE),
    "nothing": lambda d: d[:, :0],
}


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("spoil", OUTSIDE.values(), ids=OUTSIDE)
def test_ids_outside_the_vocabulary_do_no_harm(target, prompts, spoil, sampled):
    inputs = prompts(3)
    settings = {**GREEDY, "do_sample": sampled}
    reference: dict[str, Any] = {}
    if sampled:
        settings["row_seeds"] = [1, 2, 3]
        blind = ScriptedDrafter([[0]] * 3)
        reference = {"assistant_model": blind, "num_assistant_tokens": 0}
    expected = target.generate(**inputs, **settings, **reference)
    answers = expected[:, inputs["input_ids"].shape[1] :].tolist()
    output = target.generate(
        **inputs, **settings, assistant_model=Spoilt(answers, spoil), return_dict_in_generate=True
    )
    assert output.sequences.tolist() == expected.tolist()
    accepted = output.speculation.accepted_per_position
    if spoil is OUTSIDE["in the middle"]:
        # Of four drafts the first is right; the second counts as the last id.
        assert accepted[0] == output.speculation.num_drafts and sum(accepted[1:]) <= 4
    else:
        assert sum(accepted) <= 4


class Sampling(ScriptedDrafter):
    """Lets the engine choose from given logits; ``change`` is what it makes of the choice."""

    def __init__(self, rows, logits, change=lambda ids: ids, picks=True):
        super().__init__([[0]] * rows)
        self._logits, self._change, self._picks = logits, change, picks

    def observe(self, step) -> None:
        pass

    def propose(self, token_ids, num_draft_tokens, pick=None):
        drafts = []
        for k in range(num_draft_tokens):
            logits = self._logits.expand(len(token_ids), -1)
            if self._picks:
                drafts.append(pick(k, logits, None))
            else:
                drafts.append(logits.argmax(dim=-1))
        return self._change(torch.stack(drafts, dim=1))


def test_rejection_without_the_engines_choice_is_refused(target, prompts):
    with pytest.raises(ValueError, match="verification='rejection'.*Sampling chose 0 of its 4"):
        target.generate(
            **prompts(2),
            max_new_tokens=NEW,
            do_sample=True,
            verification="rejection",
            assistant_model=Sampling(2, torch.zeros(1, VOCAB_SIZE), picks=False),
        )


def test_rejection_of_ids_outside_keeps_the_distribution(target):
    """Half of the drafts are moved outside: what is emitted is still the target's own."""
    draws = 1500
    ids = torch.tensor([[5, 6, 7]]).expand(draws, -1)
    half = torch.arange(draws)[:, None] % 2 == 0
    drafter = Sampling(
        draws, torch.randn(1, VOCAB_SIZE), lambda drafts: torch.where(half, drafts + 2**40, drafts)
    )
    output = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        # The first token of a call is never drafted, nor is the last one: look at the second.
        max_new_tokens=3,
        do_sample=True,
        temperature=3.0,
        top_k=0,
        verification="rejection",
        num_assistant_tokens=1,
        assistant_model=drafter,
        return_dict_in_generate=True,
    )
    assert output.speculation.num_drafts >= draws
    firsts, seconds = output.sequences[:, 3], output.sequences[:, 4]
    with torch.no_grad():
        logits = target(output.sequences[:, :4]).logits[:, -1]
    expected = (logits / 3.0).softmax(-1)
    for rows in (half[:, 0], ~half[:, 0]):
        observed = torch.bincount(seconds[rows], minlength=VOCAB_SIZE).float()
        mean = expected[rows].sum(0)
        common = mean > 5
        chi2 = ((observed - mean)[common] ** 2 / mean[common]).sum() / common.sum()
        assert 0.5 < chi2 < 1.7, chi2
    assert len(firsts.unique()) > 5


def test_our_own_drafters_are_not_looked_at(make_speculator, target):
    """The ordinary path pays nothing for it: what ours returns is handed on as it is."""
    drafts = torch.zeros(1, 2, dtype=torch.int64)

    class Ours(MLPDrafter):
        __module__ = "hf_specdec.drafters.mlp"

        def propose(self, *args, **kwargs):
            return drafts

    taken, _ = Proposals(Ours(make_speculator()), VOCAB_SIZE).chain(drafts[:, 0], 2)
    assert taken is drafts
    Ours.__module__ = "somebody.elses"
    taken, _ = Proposals(Ours(make_speculator()), VOCAB_SIZE).chain(drafts[:, 0], 2)
    assert taken is not drafts


class TestVocabularies:
    """Reduced draft vocabularies, and targets with fewer ids than the drafter knows."""

    @pytest.mark.parametrize(
        ("settings", "tree"),
        [
            *((settings, None) for settings in ("greedy", "match", "rejection", "confidence")),
            # Trees are verified by matching.
            ("greedy", 6),
            ("match", 6),
        ],
    )
    def test_draft_ids_beyond_the_target(self, target, make_speculator, prompts, settings, tree):
        speculator = make_speculator(vocab_size=VOCAB_SIZE + 40, draft_vocab_size=24)
        speculator.set_draft_token_ids(torch.arange(24) * 4 + 3)
        self._same_text(target, speculator, prompts(3), settings, tree)

    def test_a_tree_with_more_nodes_than_ids_that_count(self, target, make_speculator, prompts):
        """What is left over for its nodes are ids that the target has no row for."""
        speculator = make_speculator(vocab_size=VOCAB_SIZE + 40, draft_vocab_size=8)
        speculator.set_draft_token_ids(torch.arange(8) + VOCAB_SIZE - 1)
        self._same_text(target, speculator, prompts(3), "greedy", 6)

    @pytest.mark.parametrize("settings", ["greedy", "match", "rejection"])
    def test_a_target_with_more_ids(self, target, make_speculator, prompts, settings):
        speculator = make_speculator(vocab_size=VOCAB_SIZE - 20, draft_vocab_size=16)
        self._same_text(target, speculator, prompts(3), settings, None)
        if settings != "rejection":
            self._same_text(target, speculator, prompts(3), settings, 6)

    def test_no_id_that_the_target_has(self, target, make_speculator, prompts):
        speculator = make_speculator(vocab_size=VOCAB_SIZE + 40, draft_vocab_size=8)
        speculator.set_draft_token_ids(torch.arange(8) + VOCAB_SIZE)
        with pytest.raises(ValueError, match="drafts 8 ids of 64 and above.*only 64 ids"):
            target.generate(**prompts(1), **GREEDY, assistant_model=speculator)

    @staticmethod
    def _same_text(target, speculator, inputs, settings, tree):
        options: dict[str, Any] = dict(GREEDY)
        if settings in ("match", "rejection"):
            options = {"do_sample": True, "max_new_tokens": NEW, "row_seeds": [4, 5, 6]}
        if settings == "rejection":
            options["verification"] = "rejection"
        if tree:
            options["num_tree_nodes"] = tree
        if settings == "confidence":
            options["assistant_confidence_threshold"] = 0.3
        output = target.generate(**inputs, **options, assistant_model=speculator)
        assert output.max() < VOCAB_SIZE
        if settings != "rejection":
            extra = ("num_tree_nodes", "assistant_confidence_threshold")
            plain = {k: v for k, v in options.items() if k not in extra}
            blind = {"assistant_model": speculator, "num_assistant_tokens": 0}
            assert target.generate(**inputs, **plain, **blind).tolist() == output.tolist()
