"""Sampling: one seed gives one text whatever drafts it, and its distribution is the target's."""

import pytest
import torch
from scipy import stats
from tiny_models import ScriptedDrafter, new_tokens, sometimes_wrong

NEW = 20
SETTINGS = [
    {},
    {"temperature": 0.7, "top_k": 8},
    {"temperature": 1.3, "top_p": 0.8, "top_k": 0},
    {"min_p": 0.05, "top_k": 0},
]


def sample(target, inputs, drafter, **kwargs):
    return target.generate(
        **inputs,
        assistant_model=drafter,
        do_sample=True,
        max_new_tokens=NEW,
        return_dict_in_generate=True,
        **kwargs,
    )


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_seed_gives_one_text_for_every_drafter_and_k(target, make_speculator, prompts, settings):
    inputs = prompts(3)
    torch.manual_seed(5)
    expected = sample(target, inputs, make_speculator(), num_assistant_tokens=0, **settings)
    texts = new_tokens(expected.sequences, inputs, [NEW] * 3)
    drafters = {
        "random": make_speculator(),
        "another": make_speculator(seed=8, scale_input=True),
        "perfect": ScriptedDrafter(texts),
        "mixed": ScriptedDrafter(texts, sometimes_wrong),
    }
    for name, drafter in drafters.items():
        for k in (1, 2, 4):
            torch.manual_seed(5)
            output = sample(target, inputs, drafter, num_assistant_tokens=k, **settings)
            assert torch.equal(output.sequences, expected.sequences), (name, k)
            if name == "perfect":
                assert output.speculation.acceptance_rate == 1.0
    torch.manual_seed(6)
    other = sample(target, inputs, make_speculator(), num_assistant_tokens=0, **settings)
    assert not torch.equal(other.sequences, expected.sequences)


def test_a_row_seed_gives_one_text_in_any_batch(target, make_speculator, prompts):
    inputs, seeds = prompts(8), [11, 12, 13, 14, 15, 16, 17, 18]
    together = sample(target, inputs, make_speculator(), row_seeds=seeds)
    rows = new_tokens(together.sequences, inputs, [NEW] * 8)
    for b in (0, 3, 7):
        mask = inputs["attention_mask"][b].bool()
        alone = {
            "input_ids": inputs["input_ids"][b][mask][None],
            "attention_mask": torch.ones(1, int(mask.sum()), dtype=torch.long),
        }
        output = sample(
            target, alone, make_speculator(), row_seeds=[seeds[b]], num_assistant_tokens=1
        )
        assert new_tokens(output.sequences, alone, [NEW]) == [rows[b]]


def test_drafts_that_share_the_noise_agree_more_often(target, prompts):
    # A drafter that knows the target's logits exactly agrees always if it picks with the same
    # noise, and only as often as sampling hits the most probable token if it picks greedily.
    inputs = prompts(1)
    width = inputs["input_ids"].shape[1]

    class KnowsTheTarget(ScriptedDrafter):
        shares_noise = True

        def start(self, target, prompt=None, num_draft_tokens=None):
            super().start(target, prompt)
            self._ids = inputs["input_ids"]

        def observe(self, step):
            if step.input_ids.shape[1] > 1:
                kept = step.input_ids[:, 1 : int(step.num_accepted[0]) + 1]
                self._ids = torch.cat([self._ids, kept], dim=1)

        def propose(self, token_ids, num_draft_tokens, pick=None):
            self._ids = torch.cat([self._ids, token_ids[:, None]], dim=1)
            ids, draft = self._ids, []
            for k in range(num_draft_tokens):
                logits = target(ids).logits[:, -1]
                token = pick(k, logits, None) if self.shares_noise else logits.argmax(-1)
                draft.append(token)
                ids = torch.cat([ids, token[:, None]], dim=1)
            return torch.stack(draft, dim=1)

    drafter = KnowsTheTarget([[]])
    shared = sample(target, inputs, drafter, temperature=2.0, row_seeds=[3])
    drafter.shares_noise = False
    greedy = sample(target, inputs, drafter, temperature=2.0, row_seeds=[3])
    assert torch.equal(shared.sequences, greedy.sequences)
    assert shared.sequences.shape[1] == width + NEW
    assert shared.speculation.acceptance_rate == 1.0
    assert greedy.speculation.acceptance_rate < 0.8


class TestDistribution:
    """Two tokens after a fixed prompt, 6,000 rows, against the exact joint distribution."""

    ROWS = 6000
    PROMPT = torch.tensor([[5, 9, 11]])
    # The tail of ids is cut off so that every cell of the table is well filled.
    KEPT = 6

    def exact(self, target, temperature):
        def next_probs(ids):
            logits = target(ids).logits[:, -1].double() / temperature
            top = logits.topk(self.KEPT)
            return (
                torch.full_like(logits, -torch.inf).scatter(1, top.indices, top.values).softmax(1)
            )

        first = next_probs(self.PROMPT)[0]
        joint = {}
        for a in first.nonzero()[:, 0].tolist():
            second = next_probs(torch.cat([self.PROMPT, torch.tensor([[a]])], dim=1))[0]
            for b in second.nonzero()[:, 0].tolist():
                joint[a, b] = float(first[a] * second[b])
        return joint

    def chi_square_p_value(self, joint, pairs):
        assert set(pairs) <= set(joint)
        counts = [pairs.count(pair) for pair in joint]
        expected = [p * len(pairs) for p in joint.values()]
        # Rare pairs go into one cell, as the test needs a few expected hits in each.
        rare = [e < 6 for e in expected]
        observed = [c for c, r in zip(counts, rare, strict=True) if not r]
        wanted = [e for e, r in zip(expected, rare, strict=True) if not r]
        if any(rare):
            observed.append(sum(c for c, r in zip(counts, rare, strict=True) if r))
            wanted.append(sum(e for e, r in zip(expected, rare, strict=True) if r))
        return stats.chisquare(observed, wanted, sum_check=False).pvalue

    @torch.no_grad()
    @pytest.mark.parametrize("verification", ["match", "rejection"])
    @pytest.mark.parametrize("temperature", [1.0, 3.0])
    def test_joint_distribution_is_the_targets(
        self, target, make_speculator, verification, temperature
    ):
        joint = self.exact(target, temperature)
        torch.manual_seed(1)
        output = target.generate(
            self.PROMPT.repeat(self.ROWS, 1),
            attention_mask=torch.ones(self.ROWS, 3, dtype=torch.long),
            assistant_model=make_speculator(),
            num_assistant_tokens=2,
            do_sample=True,
            temperature=temperature,
            top_k=self.KEPT,
            verification=verification,
            max_new_tokens=3,
            return_dict_in_generate=True,
        )
        assert output.speculation.num_accepted_tokens > 50, "no draft was ever accepted"
        pairs = [tuple(row) for row in output.sequences[:, 3:5].tolist()]
        assert self.chi_square_p_value(joint, pairs) > 1e-3
        # The test has power: the same table refuses a cooler distribution.
        cooler = self.exact(target, temperature * 0.6)
        assert self.chi_square_p_value(cooler, pairs) < 1e-3
