"""How many tokens a step drafts: by batch size, by success, by confidence."""

from typing import Any

import pytest
import torch
from tiny_models import ScriptedDrafter, new_tokens, row_by_row, sometimes_wrong
from transformers import LogitsProcessorList

import hf_specdec
from hf_specdec import SpeculativeConfig
from hf_specdec.options.schedule import DraftLength, check_per_batch_size

NEW = 24
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}


class Recorder(ScriptedDrafter):
    """Notes (rows, K) of every proposal."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.asked = []

    def propose(self, token_ids, num_draft_tokens, pick=None):
        self.asked.append((len(token_ids), num_draft_tokens))
        return super().propose(token_ids, num_draft_tokens, pick)


class TestByBatchSize:
    def test_gaps_keep_the_k_before_and_the_end_keeps_the_last(self):
        length = DraftLength(5, 5, [[1, 2, 4], [6, 8, 2], [9, 10, 0]])
        assert [length.next(n, 9) for n in range(1, 13)] == [4, 4, 4, 4, 4, 2, 2, 2, 0, 0, 0, 0]

    def test_k_never_exceeds_the_calls_own(self):
        assert DraftLength(2, 8, [[1, 8, 7]]).next(3, 9) == 2
        assert DraftLength(2, 8, [[1, 8, 7]]).next(3, 1) == 1

    def test_k_follows_the_rows_that_are_left(self, target, prompts):
        inputs = prompts(8)
        texts = row_by_row(target, inputs, **GREEDY)
        eos = max(range(3, 64), key=lambda t: len({r.index(t) for r in texts if t in r}))
        expected = [r[: r.index(eos) + 1] if eos in r else r for r in texts]
        assert len({len(r) for r in expected}) >= 3
        drafter = Recorder(expected, sometimes_wrong)
        output = target.generate(
            **inputs,
            **GREEDY,
            eos_token_id=eos,
            assistant_model=drafter,
            num_speculative_tokens_per_batch_size=[[1, 3, 4], [4, 6, 2], [7, 8, 1]],
        )
        assert new_tokens(output, inputs, [len(r) for r in expected]) == expected
        for rows, k in drafter.asked[:-2]:
            assert k == (4 if rows <= 3 else 2 if rows <= 6 else 1)
        assert {k for _, k in drafter.asked} >= {1, 2}

    def test_zero_drafts_nothing(self, target, prompts):
        inputs = prompts(3)
        drafter = Recorder(row_by_row(target, inputs, **GREEDY))
        target.generate(
            **inputs,
            **GREEDY,
            assistant_model=drafter,
            num_speculative_tokens_per_batch_size=[[1, 2, 3], [3, 9, 0]],
        )
        assert all(rows < 3 for rows, _ in drafter.asked)

    def test_it_can_be_attached(self, target, prompts, make_speculator):
        inputs = prompts(3)
        config = {
            "model": make_speculator(),
            "num_speculative_tokens_per_batch_size": [[1, 8, 2]],
        }
        hf_specdec.attach(target, config)
        try:
            output = target.generate(**inputs, **GREEDY, return_dict_in_generate=True)
        finally:
            hf_specdec.detach(target)
        assert len(output.speculation.per_position) == 2

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ([], "must be a list"),
            ("1,2,3", "must be a list"),
            ([[1, 2]], "not three integers"),
            ([[1, 2, 1.5]], "not three integers"),
            ([[1, 2, True]], "not three integers"),
            ([[0, 2, 1]], "1 <= start <= end"),
            ([[3, 2, 1]], "1 <= start <= end"),
            ([[1, 2, -1]], "K of at least 0"),
            ([[2, 4, 1]], "must begin at 1"),
            ([[1, 4, 3], [4, 8, 1]], "overlaps"),
            ([[1, 4, 3], [9, 10, 1], [5, 8, 2]], "overlaps"),
        ],
    )
    def test_bad_schedules(self, value, message, target, prompts, make_speculator):
        with pytest.raises(ValueError, match=message):
            check_per_batch_size(value)
        with pytest.raises(ValueError, match="num_speculative_tokens_per_batch_size"):
            SpeculativeConfig(num_speculative_tokens_per_batch_size=value)
        with pytest.raises(ValueError, match="num_speculative_tokens_per_batch_size"):
            target.generate(
                **prompts(1),
                assistant_model=make_speculator(),
                num_speculative_tokens_per_batch_size=value,
            )


class TestHeuristic:
    def test_two_more_after_success_one_less_after_failure(self):
        length = DraftLength(2, 6, None, "heuristic")
        seen = []
        for accepted in ([2], [4], [6], [5], [0], [0], [0], [0], [0], [0]):
            k = length.next(1, 99)
            seen.append(k)
            length.update(k, accepted)
        assert seen == [2, 4, 6, 6, 5, 4, 3, 2, 1, 1]

    def test_half_of_the_rows_decide(self):
        length = DraftLength(2, 6, None, "heuristic")
        length.update(2, [2, 0, 2, 1])
        assert length.current == 4
        length.update(4, [4, 0, 3, 1])
        assert length.current == 3

    @pytest.mark.parametrize("schedule", ["heuristic", "heuristic_transient"])
    def test_the_output_stays_the_same(self, schedule, target, prompts):
        inputs = prompts(3)
        answers = row_by_row(target, inputs, **GREEDY)
        drafter = Recorder(answers, lambda row, index: index > 12, 8)
        output = target.generate(
            **inputs,
            **GREEDY,
            assistant_model=drafter,
            num_assistant_tokens=1,
            num_assistant_tokens_schedule=schedule,
        )
        assert new_tokens(output, inputs, [NEW] * 3) == answers
        ks = [k for _, k in drafter.asked]
        assert ks[:3] == [1, 3, 5] and ks[-1] < max(ks)

    def test_only_the_lasting_one_is_remembered(self, target, prompts):
        inputs = prompts(1)
        answers = row_by_row(target, inputs, **GREEDY)
        first: dict[str, list[int]] = {}
        for schedule in ("heuristic", "heuristic_transient"):
            drafter = Recorder(answers, lambda row, index: True, 6)
            for _ in range(2):
                drafter.asked.clear()
                target.generate(
                    **inputs,
                    **GREEDY,
                    assistant_model=drafter,
                    num_assistant_tokens_schedule=schedule,
                )
                first.setdefault(schedule, []).append(drafter.asked[0][1])
        assert first == {"heuristic": [6, 1], "heuristic_transient": [6, 6]}

    def test_the_assistants_generation_config_counts(self, target, prompts):
        from transformers import GenerationConfig

        inputs = prompts(1)
        drafter: Any = Recorder(row_by_row(target, inputs, **GREEDY), num_draft_tokens=6)
        drafter.generation_config = GenerationConfig(
            num_assistant_tokens=2, num_assistant_tokens_schedule="heuristic_transient"
        )
        target.generate(**inputs, **GREEDY, assistant_model=drafter)
        assert [k for _, k in drafter.asked][:3] == [2, 4, 6]

    def test_unknown_names(self, target, prompts):
        with pytest.raises(ValueError, match="num_assistant_tokens_schedule='linear'"):
            target.generate(
                **prompts(1),
                assistant_model=ScriptedDrafter([[0]]),
                num_assistant_tokens_schedule="linear",
            )


class TestConfidence:
    def run(self, target, inputs, speculator, threshold, **kwargs):
        return target.generate(
            **inputs,
            max_new_tokens=NEW,
            assistant_model=speculator,
            assistant_confidence_threshold=threshold,
            return_dict_in_generate=True,
            **kwargs,
        )

    @pytest.mark.parametrize("batch", [1, 3])
    @pytest.mark.parametrize("verification", ["match", "rejection"])
    def test_an_unsure_drafter_drafts_one(
        self, batch, verification, target, prompts, make_speculator
    ):
        # A random speculator is never sure: each proposal ends behind its first token.
        inputs, speculator = prompts(batch), make_speculator()
        stats = self.run(target, inputs, speculator, 0.9, do_sample=False).speculation
        assert stats.num_draft_tokens == stats.num_drafts > 0
        sampled = {"do_sample": True, "verification": verification, "row_seeds": list(range(batch))}
        output = self.run(target, inputs, speculator, 0.9, **sampled)
        assert output.speculation.num_draft_tokens == output.speculation.num_drafts
        if verification == "match":
            patient = self.run(target, inputs, speculator, 0.0, **sampled)
            assert patient.sequences.tolist() == output.sequences.tolist()

    def test_one_sure_row_goes_on(self):
        from hf_specdec.drafting import DraftPicker
        from hf_specdec.processors import LogitsPipeline

        pick = DraftPicker(
            LogitsPipeline(LogitsProcessorList(), 2), None, torch.zeros(2, 4).long(), 3, False, 0.6
        )
        sure, unsure = [9.0, 0.0, 0.0], [0.1, 0.0, 0.2]
        assert pick(0, torch.tensor([sure, unsure]), None).tolist() == [0, 2]
        assert not pick.done
        pick(1, torch.tensor([unsure, unsure]), None)
        assert pick.done

    def test_greedy_text_is_unchanged(self, target, prompts, make_speculator):
        inputs = prompts(3)
        expected = row_by_row(target, inputs, **GREEDY)
        output = self.run(target, inputs, make_speculator(), 0.03, do_sample=False)
        assert new_tokens(output.sequences, inputs, [NEW] * 3) == expected
        stats = output.speculation
        assert stats.num_drafts < stats.num_draft_tokens < 4 * stats.num_drafts

    @pytest.mark.parametrize("value", [-0.1, 1.5, "high", True])
    def test_bad_thresholds(self, value, target, prompts, make_speculator):
        with pytest.raises(ValueError, match="assistant_confidence_threshold="):
            self.run(target, prompts(1), make_speculator(), value)
