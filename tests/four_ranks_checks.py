"""Targets that are cut over four ranks, one head on each; run by `rank_runs`."""

from pathlib import Path

import torch
from gemma4_models import without_eos
from mtp_checkpoints import write
from tensor_parallel_checks import NEW, cut, generate, inputs_of, same_drafts
from tiny_models import CONFIGS, ScriptedDrafter, row_by_row, sometimes_wrong
from tiny_pairs import random_speculator
from transformers import AutoModelForCausalLM

from hf_specdec.registry import mtp_network

# With latent attention: every rank expands the keys of its own heads.
FAMILY = "deepseek_v3"


def prepare(folder: Path) -> None:
    """Write the checkpoints."""
    config = CONFIGS["llama"]()
    config.num_key_value_heads = 4
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "four-heads")
    (folder / "latent").symlink_to(write(FAMILY))


def check_four_ranks_say_what_one_says(folder: Path, rank: int) -> None:
    target = without_eos(AutoModelForCausalLM.from_pretrained(folder / "four-heads").eval())
    parts = cut(folder, "four-heads")
    expected = row_by_row(target, inputs_of(), max_new_tokens=NEW, do_sample=False)
    drafter = ScriptedDrafter(expected, lambda row, i: sometimes_wrong(row + rank, i))
    output = generate(parts, drafter)
    assert output.sequences[:, 9:].tolist() == expected
    assert 0.2 < output.speculation.acceptance_rate < 0.9
    torch.manual_seed(3)
    speculator = random_speculator(target)
    torch.manual_seed(5)
    plain = generate(target, speculator, num_assistant_tokens=0, do_sample=True)
    torch.manual_seed(5 + rank)
    output = generate(parts, speculator, do_sample=True)
    assert output.sequences.tolist() == plain.sequences.tolist()


def check_mtp_layers_of_a_target_with_latent_attention(folder: Path, rank: int) -> None:
    target = without_eos(AutoModelForCausalLM.from_pretrained(folder / "latent").eval())
    pairs = [(model, mtp_network(model)) for model in (target, cut(folder, "latent"))]
    plain = row_by_row(target, inputs_of(), max_new_tokens=NEW, do_sample=False)
    output = same_drafts(*pairs, num_assistant_tokens=2)
    assert output.sequences[:, 9:].tolist() == plain
    same_drafts(*pairs, num_assistant_tokens=2, do_sample=True, row_seeds=[1, 2, 3])
