"""Trees on more targets, and everything that a call returns besides its tokens."""

from collections.abc import Callable
from functools import partial
from typing import Any

import mtp_checkpoints
import pytest
import torch
from gemma4_models import gemma4_target
from test_outputs import ALL, assert_same, eager  # noqa: F401 (a fixture)
from tiny_models import PAD, VOCAB_SIZE, new_tokens, row_by_row
from tree_drafters import ScriptedTreeDrafter, mixed_rank

NEW = 14
GIVEN = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 0, 1)]"
TREES: list[dict[str, Any]] = [
    {"speculative_token_tree": GIVEN},
    {"speculative_token_tree": "checkpoint"},
]
by_tree = pytest.mark.parametrize("tree", TREES, ids=["given", "checkpoint"])


@by_tree
@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.2}], ids=["block", "prefix"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_all_outputs_equal_those_of_plain_generate(
    family,
    settings,
    tree,
    eager,  # noqa: F811
    prompts,
):
    target, inputs = eager(family), prompts(3)
    common = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "return_dict_in_generate": True,
        **settings,
        **ALL,
    }
    plain = target.generate(**inputs, **common)
    answers = plain.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    drafter = ScriptedTreeDrafter(answers, mixed_rank)
    ours = target.generate(**inputs, **common, assistant_model=drafter, **tree)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    # Somewhere the path was not the first children's.
    assert ours.speculation.num_accepted_tokens > 0
    assert_same(ours, plain, [NEW] * 3)


# Layers that share keys, windows beside full attention, keys of an indexer, two caches a layer.
TARGETS: dict[str, Callable[[], Any]] = {
    "gemma4": lambda: gemma4_target("E2B"),
    "gemma3n": lambda: gemma4_target("3n"),
    **{
        name: partial(mtp_checkpoints.load, name)
        for name in ("deepseek_v32", "longcat_flash", "mimo_v2_flash", "exaone4_5")
    },
}


@pytest.mark.parametrize("name", TARGETS)
def test_targets_of_other_kinds(name):
    target = TARGETS[name]()
    target.generation_config.eos_token_id = None
    target.generation_config.pad_token_id = PAD
    ids = torch.randint(3, VOCAB_SIZE, (3, 14), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4], mask[2, :9] = 0, 0
    inputs = {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}
    expected = row_by_row(target, inputs, max_new_tokens=24, do_sample=False)
    for tree in TREES:
        output = target.generate(
            **inputs,
            assistant_model=ScriptedTreeDrafter(expected, mixed_rank),
            max_new_tokens=24,
            do_sample=False,
            return_dict_in_generate=True,
            **tree,
        )
        assert new_tokens(output.sequences, inputs, [24] * 3) == expected
        assert output.speculation.mean_acceptance_length > 2
