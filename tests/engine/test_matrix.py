"""Every feature of ``generate``, batch 1 and 3, greedy and seeded: the same tokens as without us.

Greedy cells are compared with plain ``generate`` on the same batch. Sampled cells are compared with
our own run without drafts (K = 0), which `test_sampling` compares with plain sampling; the sampled
processors here are compared with it once more, by distribution.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from tiny_models import EOS, VOCAB_SIZE, ScriptedDrafter, sometimes_wrong
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

NEW = 20
# Sometimes right with one draft and with several; always right; never.
DRAFTS = [
    (1, sometimes_wrong), (4, sometimes_wrong), (4, lambda row, index: False),
    (4, lambda row, index: True),
]  # fmt: skip


class EvenAfterOdd(LogitsProcessor):
    """Looks at the last token: behind an odd one only even ones are allowed."""

    def __call__(self, input_ids, scores):
        odd = (input_ids[:, -1] % 2 == 1)[:, None]
        allowed = torch.arange(scores.shape[1])[None] % 2 == 0
        return scores.masked_fill(odd & ~allowed, -torch.inf)


class TakesTurns(LogitsProcessor):
    """A grammar that counts its calls: every third token is below 32, the others are above."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        low = torch.arange(scores.shape[1])[None] < 32
        return scores.masked_fill(low if self.calls % 3 else ~low, -torch.inf)


class RemembersRows(LogitsProcessor):
    """Keeps a state for each row: a token said once is never said again."""

    def __init__(self):
        self.said: dict[int, set[int]] = {}

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row, ids in enumerate(input_ids.tolist()):
            said = self.said.setdefault(row, set())
            said.add(ids[-1])
            scores[row, list(said)] = -torch.inf
        return scores


class UsesTheRowsIndex(LogitsProcessor):
    """Another rule for each row of the batch."""

    def __call__(self, input_ids, scores):
        banned = torch.arange(scores.shape[1])[None] % 5 == torch.arange(len(scores))[:, None]
        return scores.masked_fill(banned, -torch.inf)


class StopsAfterPair(StoppingCriteria):
    """Looks at the whole sequence: stops behind two tokens whose sum is divisible by 11."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -1] + input_ids[:, -2]) % 5 == 0


class StopsWhenSure(StoppingCriteria):
    """Looks at the scores of the newest token."""

    def __call__(self, input_ids, scores, **kwargs):
        return scores[-1].softmax(-1).max(-1).values > 0.5


@dataclass(frozen=True)
class Feature:
    """Arguments of generate, made anew for every call."""

    arguments: Callable[[], dict[str, Any]]
    modes: tuple[str, ...] = ("greedy", "sampled")
    batches: tuple[int, ...] = (1, 3)
    changes_the_text: bool = True
    one_token_prompts: bool = False


def say(**arguments) -> Feature:
    return Feature(lambda: dict(arguments))


def sampled(**arguments) -> Feature:
    return Feature(lambda: dict(arguments), modes=("sampled",))


def processor(make, **options) -> Feature:
    return Feature(lambda: {"logits_processor": LogitsProcessorList([make()])}, **options)


def allowed(batch_id, ids):
    return list(range(3 + batch_id, VOCAB_SIZE, 2 + int(ids[-1]) % 2))


FEATURES = {
    "repetition_penalty": say(repetition_penalty=1.8),
    "encoder_repetition_penalty": say(encoder_repetition_penalty=1.8),
    "no_repeat_ngram_size": say(no_repeat_ngram_size=1),
    "encoder_no_repeat_ngram_size": say(encoder_no_repeat_ngram_size=1),
    "bad_words_ids": say(bad_words_ids=[[n] for n in range(3, 40)] + [[41, 44], [50, 51, 52]]),
    "suppress_tokens": say(suppress_tokens=list(range(3, 30))),
    "begin_suppress_tokens": say(begin_suppress_tokens=list(range(3, 50))),
    "forced_bos_token_id": Feature(lambda: {"forced_bos_token_id": 9}, one_token_prompts=True),
    "forced_eos_token_id": say(forced_eos_token_id=7),
    "min_length": say(min_length=18, eos_token_id=list(range(3, 20))),
    "min_new_tokens": say(min_new_tokens=9, eos_token_id=list(range(3, 20))),
    "several_eos": say(eos_token_id=list(range(3, 12))),
    "sequence_bias": say(sequence_bias=[[[5], 20.0], [[6, 7], -30.0], [[5, 5], -90.0]]),
    "exponential_decay": say(
        exponential_decay_length_penalty=(4, 1.4), eos_token_id=list(range(3, 9))
    ),
    "renormalize_logits": say(renormalize_logits=True, repetition_penalty=1.8),
    "remove_invalid_values": Feature(
        lambda: {"remove_invalid_values": True}, changes_the_text=False
    ),
    "prefix_allowed_tokens_fn": say(prefix_allowed_tokens_fn=allowed),
    "watermark": Feature(lambda: {"watermarking_config": WatermarkingConfig(bias=9.0)}),
    "synthid": Feature(
        lambda: {
            "watermarking_config": SynthIDTextWatermarkingConfig(
                ngram_len=4, keys=[3, 14, 15, 92, 65], context_history_size=16
            )
        },
        modes=("sampled",),
    ),
    "guidance_scale": Feature(lambda: {"guidance_scale": 1.7}, batches=(1,)),
    "own_processor": processor(EvenAfterOdd),
    "own_processor_that_counts": processor(TakesTurns),
    "own_processor_with_a_state_per_row": processor(RemembersRows),
    "own_processor_by_row": processor(UsesTheRowsIndex),
    "several_processors": Feature(
        lambda: {
            "logits_processor": LogitsProcessorList([TakesTurns(), UsesTheRowsIndex()]),
            "repetition_penalty": 1.4,
            "no_repeat_ngram_size": 2,
        }
    ),
    "temperature": sampled(temperature=0.6),
    "high_temperature": sampled(temperature=1.7),
    "top_k": sampled(top_k=5),
    "top_p": sampled(top_p=0.6),
    "min_p": sampled(min_p=0.1),
    "typical_p": sampled(typical_p=0.5),
    "epsilon_cutoff": sampled(epsilon_cutoff=0.02),
    "eta_cutoff": sampled(eta_cutoff=0.05),
    "all_filters": sampled(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02),
    "max_length": say(max_length=24, max_new_tokens=None),
    "max_new_tokens_1": say(max_new_tokens=1),
    "max_new_tokens_7": say(max_new_tokens=7),
    "max_time": Feature(lambda: {"max_time": 1000.0}, changes_the_text=False),
    "max_time_is_over": say(max_time=1e-9),
    "own_criterion": Feature(
        lambda: {"stopping_criteria": StoppingCriteriaList([StopsAfterPair()]), "eos_token_id": EOS}
    ),
    "own_criterion_on_scores": Feature(
        lambda: {
            "stopping_criteria": StoppingCriteriaList([StopsWhenSure()]),
            "output_scores": True,
            "eos_token_id": EOS,
        }
    ),
    "static_cache": Feature(lambda: {"cache_implementation": "static"}, changes_the_text=False),
    "prefill_chunk_size": Feature(lambda: {"prefill_chunk_size": 4}, changes_the_text=False),
}
CELLS = [
    pytest.param(name, batch, mode, id=f"{name}-{batch}-{mode}")
    for name, feature in FEATURES.items()
    for batch in feature.batches
    for mode in feature.modes
]


def call(target, inputs, mode, feature, **ours):
    """One generate call; ``ours`` is empty for plain generation."""
    arguments = {"max_new_tokens": NEW, **feature.arguments()}
    if mode == "sampled":
        arguments |= {"do_sample": True}
        arguments.setdefault("top_k", 0)
    else:
        arguments |= {"do_sample": False}
    return target.generate(**inputs, return_dict_in_generate=True, **arguments, **ours).sequences


@pytest.mark.parametrize(("name", "batch", "mode"), CELLS)
def test_the_same_tokens(name, batch, mode, target, prompts):
    feature, inputs = FEATURES[name], prompts(batch)
    if feature.one_token_prompts:
        inputs = {key: value[:, -1:] for key, value in inputs.items()}
    width = inputs["input_ids"].shape[1]
    seeds = [101, 202, 303][:batch]
    if mode == "greedy":
        reference = call(target, inputs, mode, feature)
        unconstrained = call(target, inputs, mode, say())
    else:
        blind = ScriptedDrafter([[0]] * batch)
        ours = {"assistant_model": blind, "row_seeds": seeds, "num_assistant_tokens": 0}
        reference = call(target, inputs, mode, feature, **ours)
        unconstrained = call(target, inputs, mode, say(), **ours)
    if feature.changes_the_text:
        assert not torch.equal(reference, unconstrained), "the feature does nothing here"
    answers = [row.tolist() for row in reference[:, width:]]
    for k, wrong in DRAFTS:
        ours = {"assistant_model": ScriptedDrafter(answers, wrong, k)}
        if mode == "sampled":
            ours["row_seeds"] = seeds
        assert call(target, inputs, mode, feature, **ours).tolist() == reference.tolist()


@pytest.mark.parametrize("name", ["repetition_penalty", "min_p", "all_filters", "own_processor"])
def test_sampled_processors_keep_the_distribution(name, target, make_speculator):
    """The first two tokens of many rows against the exact distribution from plain logits."""
    feature, rows = FEATURES[name], 2500
    ids = torch.tensor([[5, 9, 33]])
    many = {"input_ids": ids.expand(rows, -1), "attention_mask": torch.ones(rows, 3).long()}
    torch.manual_seed(5)
    ours = {"assistant_model": make_speculator(), "num_assistant_tokens": 2}
    drawn = call(target, many, "sampled", _short(feature), **ours)[:, 3:]
    plain = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        max_new_tokens=1,
        output_scores=True,
        return_dict_in_generate=True,
        **{"top_k": 0, **feature.arguments()},
    )
    expected = plain.scores[0][0].softmax(-1).double() * rows
    counts = torch.bincount(drawn[:, 0], minlength=VOCAB_SIZE).double()
    assert counts[expected == 0].sum() == 0, "a token that the processors forbid"
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    predicted = torch.cat([expected[common], expected[~common].sum()[None]])
    keep = predicted > 0
    predicted *= rows / predicted.sum()
    assert chisquare(observed[keep], predicted[keep]).pvalue > 1e-4


def _short(feature):
    return Feature(lambda: {**feature.arguments(), "max_new_tokens": 2})
