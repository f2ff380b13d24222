"""Gemma 4 assistants as drafters: the target's own text, in batches, greedy and sampled."""

import pytest
from gemma4_models import TARGETS, WINDOW, gemma4_assistant, gemma4_target
from test_gemma4_targets import prompts_of
from tiny_models import new_tokens, row_by_row

NEW = 18


def speculate(target, inputs, assistant, k, **kwargs):
    return target.generate(
        **inputs,
        assistant_model=assistant,
        num_assistant_tokens=k,
        max_new_tokens=NEW,
        return_dict_in_generate=True,
        **kwargs,
    )


class TestSameText:
    @pytest.mark.parametrize("length", [WINDOW - 3, WINDOW, 30])
    @pytest.mark.parametrize("rows", [1, 3, 8])
    @pytest.mark.parametrize("name", TARGETS)
    def test_greedy(self, name, rows, length):
        target, inputs = gemma4_target(name), prompts_of(length, rows)
        expected = row_by_row(target, inputs, max_new_tokens=NEW, do_sample=False)
        for k in range(1, 7):
            assistant = gemma4_assistant(target, centroids=k % 2 == 0)
            output = speculate(target, inputs, assistant, k, do_sample=False)
            assert new_tokens(output.sequences, inputs, [NEW] * rows) == expected
            assert output.speculation.num_drafts > 0
