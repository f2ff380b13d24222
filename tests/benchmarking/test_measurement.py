"""Paired runs on a tiny target: what is run in which order, and what is made of it."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import row_by_row
from tiny_pairs import TEMPLATE, make_tokenizer

from hf_specdec import decoding
from hf_specdec.benchmarking import PROMPT_SETS, Pair, Workload, check, measure, prompt_sets
from hf_specdec.benchmarking.calls import Calls
from hf_specdec.benchmarking.clock import Sections, profile
from hf_specdec.benchmarking.memory import PeakMemory
from hf_specdec.benchmarking.workload import groups_of
from hf_specdec.drafters import MLPDrafter
from hf_specdec.verification import Verdict

CPU = torch.device("cpu")
PROMPTS = {"words": ("hello", "a much longer prompt", "bye")}


@pytest.fixture
def pair(target, make_speculator) -> Pair:
    return Pair(target, make_tokenizer(), make_speculator())


@pytest.fixture
def calls(target, monkeypatch) -> list[tuple[int | None, int, int]]:
    """K (None: plain), rows and new tokens of every call of ``generate``."""
    made: list[tuple[int | None, int, int]] = []
    generate = type(target).generate

    def watched(self, **kwargs: Any) -> Any:
        if "assistant_model" not in kwargs:
            assert "num_assistant_tokens" not in kwargs
        rows = kwargs["input_ids"].shape[0]
        made.append((kwargs.get("num_assistant_tokens"), rows, kwargs["max_new_tokens"]))
        return generate(self, **kwargs)

    monkeypatch.setattr(type(target), "generate", watched)
    return made


# The prompts


def test_built_in_sets_are_texts_of_their_own() -> None:
    assert [len(prompts) for prompts in PROMPT_SETS.values()] == [16, 8, 8, 8, 8]
    everything = [prompt for prompts in PROMPT_SETS.values() for prompt in prompts]
    assert len(set(everything)) == len(everything)
    assert all(prompt == prompt.strip() for prompt in everything)


def test_built_in_prompts_are_none_that_drafters_are_trained_on() -> None:
    path = Path(__file__).parents[2] / "examples" / "chat_prompts.py"
    everyday_prompts = runpy.run_path(str(path))["everyday_prompts"]
    trained_on = set(everyday_prompts(20_000))
    assert not [p for prompts in PROMPT_SETS.values() for p in prompts if p in trained_on]


def test_sets_are_chosen_by_name_in_order_and_once() -> None:
    assert list(prompt_sets(["maths", "chat", "maths"])) == ["maths", "chat"]
    with pytest.raises(ValueError, match=r"'math' is no built-in prompt set; choose from \['gen"):
        prompt_sets(["math"])


def test_groups_are_left_padded_and_filled_from_the_front() -> None:
    tokenizer = make_tokenizer()
    groups = groups_of(tokenizer, PROMPTS["words"], 2, CPU)
    assert [group.numbers for group in groups] == [[1, 2], [3, 1]]
    ids, mask = groups[0].inputs["input_ids"], groups[0].inputs["attention_mask"]
    assert ids.shape == mask.shape == (2, groups[0].width)
    assert mask[0].tolist() == sorted(mask[0].tolist())
    for group in groups:
        for row, number in enumerate(group.numbers):
            text = tokenizer.decode(group.prompt(row)[0])
            assert text == PROMPTS["words"][number - 1]
    (whole,) = groups_of(tokenizer, PROMPTS["words"], 7, CPU)
    assert whole.numbers == [1, 2, 3, 1, 2, 3, 1]


def test_prompts_are_a_users_where_the_model_chats() -> None:
    tokenizer = make_tokenizer(TEMPLATE)
    (group,) = groups_of(tokenizer, ["hello"], 1, CPU)
    assert tokenizer.decode(group.prompt(0)[0]) == "u:hello|a:"


def test_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt '' has no tokens"):
        groups_of(make_tokenizer(), [""], 1, CPU)


# The runs


def test_plain_and_every_k_alternate_in_turned_order(pair, calls) -> None:
    workload = Workload(PROMPTS, ks=[1, 3], batches=[2], max_new_tokens=6, repeats=2)
    places: list[str] = []
    rows = list(measure(pair, workload, places.append))
    assert [(row.prompt_set, row.batch, row.k) for row in rows] == [
        ("words", 2, 1),
        ("words", 2, 3),
    ]
    assert places == ["words, batch 2"] * 4
    assert len(places) == workload.num_timed_groups
    of_one_group = calls[: len(calls) // 2]
    assert of_one_group == calls[len(calls) // 2 :]
    first = [(None, 2, 1), (1, 2, 1), (3, 2, 1)]
    assert of_one_group == [
        (None, 2, 8),  # warm-up
        (1, 2, 6),  # statistics
        (3, 2, 6),
        (None, 2, 6),  # the timed runs, with the calls for one token behind them
        (1, 2, 6),
        (3, 2, 6),
        *first,
        (3, 2, 6),
        (1, 2, 6),
        (None, 2, 6),
        *first,
        (1, 2, 6),  # profiled
        (3, 2, 6),
    ]


def test_a_row_has_the_numbers_of_its_runs(pair, monkeypatch) -> None:
    """On a clock on which every plain call takes 6 s and every speculative one 2 s."""
    ticks = {None: 6.0, 3: 2.0}
    monkeypatch.setattr(
        "hf_specdec.benchmarking.measurement.timed",
        lambda call, device: (ticks[call.args[2] if len(call.args) > 2 else None], call()),
    )
    workload = Workload(PROMPTS, ks=[3], max_new_tokens=12, repeats=3)
    (row,) = measure(pair, workload)
    assert row.plain_tokens_per_second == pytest.approx(2.0)
    assert row.speculative_tokens_per_second == pytest.approx(6.0)
    assert (row.speedup.median, row.speedup.min, row.speedup.max) == pytest.approx((3.0, 3.0, 3.0))
    assert (row.texts, row.identical, row.near_ties, row.wrong) == (3, 3, 0, 0)
    # Accepted tokens and one more for each draft, behind the prompt's: 11 for each prompt.
    emitted = row.num_drafts * row.mean_acceptance_length
    assert emitted == pytest.approx(33, abs=3)
    assert len(row.per_position) == 3
    assert row.target_share + row.drafter_share + row.loop_share == pytest.approx(1.0)
    assert min(row.target_share, row.drafter_share, row.loop_share) > 0
    assert min(row.target_step, row.drafter_step, row.loop_step) > 0
    assert min(row.plain_first_token, row.speculative_first_token) > 0


def test_each_timed_run_counts_its_own_tokens(pair, monkeypatch) -> None:
    """As where rounding ends a text earlier in one run than in the one before."""
    monkeypatch.setattr(
        "hf_specdec.benchmarking.measurement.timed", lambda call, device: (2.0, call())
    )
    speculative = Calls.speculative

    def shorter(self, group, assistant, k, max_new_tokens=None, **extra: Any) -> Any:
        tokens = max_new_tokens if "return_dict_in_generate" in extra else 4
        return speculative(self, group, assistant, k, tokens, **extra)

    monkeypatch.setattr(Calls, "speculative", shorter)
    (row,) = measure(pair, Workload(PROMPTS, ks=["auto"], max_new_tokens=12, repeats=1))
    assert row.plain_tokens_per_second == pytest.approx(6.0)
    assert row.speculative_tokens_per_second == pytest.approx(2.0)


def test_statistics_are_those_of_the_calls(pair, target) -> None:
    workload = Workload(PROMPTS, ks=[2], batches=[3], max_new_tokens=20, repeats=1)
    (row,) = measure(pair, workload)
    (group,) = groups_of(pair.tokenizer, PROMPTS["words"], 3, CPU)
    stats = target.generate(
        **group.inputs,
        max_new_tokens=20,
        do_sample=False,
        assistant_model=pair.assistant,
        num_assistant_tokens=2,
        return_dict_in_generate=True,
    ).speculation
    assert row.num_drafts == stats.num_drafts
    assert row.per_position == stats.per_position
    assert row.acceptance_rate == stats.acceptance_rate
    assert row.mean_acceptance_length == stats.mean_acceptance_length


def test_synthetic_drafter_sets_the_acceptance(target) -> None:
    pair = Pair(target, make_tokenizer())
    for acceptance in (0.0, 1.0):
        workload = Workload(PROMPTS, ks=[2], max_new_tokens=60, repeats=1, acceptance=acceptance)
        check(pair, workload)
        (row,) = measure(pair, workload)
        assert row.identical == row.texts
        assert row.acceptance_rate == pytest.approx(acceptance, abs=0.05)


def test_a_wrong_text_is_found_and_placed(pair, monkeypatch) -> None:
    """A verifier that takes every draft."""

    def take_all(draft_ids: torch.Tensor, scores: torch.Tensor, *_: Any) -> Verdict:
        chosen = scores.argmax(dim=-1)
        tokens = torch.cat([draft_ids, chosen[:, -1:]], dim=1)
        return Verdict(tokens, torch.full((len(tokens),), draft_ids.shape[1]))

    monkeypatch.setattr(decoding, "verify_match", take_all)
    workload = Workload(PROMPTS, ks=[1], batches=[3], max_new_tokens=12, repeats=1)
    (row,) = measure(pair, workload)
    assert row.wrong == row.texts == 3
    assert [found.prompt for found in row.disagreements] == [1, 2, 3]
    # The prompt's own token is right, and no draft of random weights is behind it.
    assert {found.position for found in row.disagreements} <= {1, 2, 3}


def test_schedule_limits_k(pair) -> None:
    workload = Workload(
        PROMPTS, ks=[3], max_new_tokens=10, repeats=1, schedule=[[1, 1, 1], [2, 8, 2]]
    )
    (row,) = measure(pair, workload)
    assert len(row.per_position) == 1


def test_tokens_behind_the_end_are_padding(target, prompts) -> None:
    inputs = prompts(1)
    (plain,) = row_by_row(target, inputs, max_new_tokens=10, do_sample=False)
    calls = Calls(target, 10, None)
    calls._ends = {plain[4]}
    (group,) = groups_of(make_tokenizer(), ["hello"], 1, CPU)
    padded = torch.tensor([[9] * group.width + plain])
    assert calls.new_tokens(padded, group) == [plain[: plain.index(plain[4]) + 1]]


def test_a_models_own_penalty_is_left_out(target, monkeypatch) -> None:
    (group,) = groups_of(make_tokenizer(), ["hello"], 1, CPU)
    calls = Calls(target, 20, None)
    free = calls.plain(group)
    monkeypatch.setattr(target.generation_config, "repetition_penalty", 5.0)
    assert not torch.equal(target.generate(**group.inputs, max_new_tokens=20), free)
    assert torch.equal(calls.plain(group), free)


def test_what_cannot_be_drafted_is_refused_before_anything_runs(pair, make_speculator) -> None:
    workload = Workload(PROMPTS, ks=[1, 5])
    with pytest.raises(ValueError, match="--k=5 must be an integer from 0 to 4"):
        check(pair, workload)
    wrong = Pair(pair.target, pair.tokenizer, make_speculator(emb_dim=8))
    with pytest.raises(ValueError, match="emb_dim=8"):
        check(wrong, Workload(PROMPTS, ks=[1]))
    with pytest.raises(ValueError, match="Linear is no drafter"):
        check(Pair(pair.target, pair.tokenizer, torch.nn.Linear(1, 1)), Workload(PROMPTS, ks=[1]))


# The clock and the memory


def test_parts_of_several_calls_add_up() -> None:
    one, two = Sections(10.0, 1.0, 5.0, 2.0, 4), Sections(20.0, 3.0, 7.0, 2.0, 6)
    assert one + two == Sections(30.0, 4.0, 12.0, 4.0, 10)
    assert (one + two).target == 16.0
    assert (one + two).loop == 10.0


def test_parts_of_a_call_do_not_overlap(target, make_speculator, prompts, monkeypatch) -> None:
    """On a clock that ticks once for every look; a forward inside a proposal is the target's."""
    drafter = MLPDrafter(make_speculator())
    inputs = prompts(1)
    now = iter(range(1000))
    monkeypatch.setattr("hf_specdec.benchmarking.clock.time.perf_counter", lambda: next(now))

    def propose(token_ids: torch.Tensor, *_: Any) -> torch.Tensor:
        target(inputs["input_ids"])
        return token_ids

    monkeypatch.setattr(drafter, "propose", propose)
    sections = profile(target, drafter, lambda: drafter.propose(torch.tensor([1]), 1))
    # total: looks 0 and 5; the proposal: 1 and 4; the forward: 2 and 3.
    assert (sections.total, sections.prompt, sections.drafter, sections.loop) == (5, 1, 2, 2)


def test_profiling_leaves_nothing_behind(target, make_speculator, prompts) -> None:
    drafter = MLPDrafter(make_speculator())
    before = dict(drafter.__dict__)

    def fail() -> None:
        assert "propose" in drafter.__dict__
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        profile(target, drafter, fail)
    assert drafter.__dict__ == before
    assert not target._forward_hooks
    assert not target._forward_pre_hooks


def test_every_part_of_a_real_call_is_counted(target, make_speculator, prompts) -> None:
    drafter = MLPDrafter(make_speculator())
    common = {"max_new_tokens": 12, "do_sample": False, "assistant_model": drafter}
    output = target.generate(**prompts(2), **common, return_dict_in_generate=True)
    sections = profile(target, drafter, lambda: target.generate(**prompts(2), **common))
    assert sections.steps == output.speculation.num_target_forwards - 1
    assert min(sections.prompt, sections.verification, sections.drafter, sections.loop) > 0


def test_peak_is_that_of_the_call() -> None:
    memory = PeakMemory(CPU)
    if memory.kind != "resident":
        pytest.skip("this system doesn't let a process reset its peak")
    size = 64 * 2**20

    def touch() -> int:
        return int(torch.ones(size, dtype=torch.uint8)[0])

    small, _ = memory.of(lambda: None)
    large, result = memory.of(touch)
    again, _ = memory.of(lambda: None)
    assert small is not None
    assert large is not None
    assert again is not None
    assert result == 1
    assert large - small > 0.9 * size
    assert large - again > 0.9 * size


@pytest.mark.gpu
def test_peak_on_a_gpu_is_the_allocators() -> None:
    memory = PeakMemory(torch.device("cuda"))
    size = 64 * 2**20
    small, _ = memory.of(lambda: None)
    large, _ = memory.of(lambda: torch.ones(size, dtype=torch.uint8, device="cuda"))
    assert memory.kind == "cuda allocated"
    assert large is not None
    assert small is not None
    assert large - small == size
