"""What must hold of ranks that decode rows of their own, and may run no forward alone (FSDP).

Run on two ranks by `rank_runs`. Each has other prompts, and is done at another time.
"""

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_checkpoints import FAMILIES, config_of
from tensor_parallel_checks import inputs_of, recorded
from tiny_models import ScriptedDrafter, _target, row_by_row, sometimes_wrong
from tiny_pairs import random_speculator
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, CompileConfig
from transformers.distributed import DistributedConfig

import hf_specdec

# Tokens of each rank: the first one is done long before the other.
NEW = (5, 18)


def mine(rank: int) -> dict[str, torch.Tensor]:
    return inputs_of(2 + rank, seed=20 + rank)


def fully_sharded(model: Any) -> Any:
    """Every layer and the rest, as torch's own FSDP cuts them."""
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


@functools.cache
def sharded_llama() -> Any:
    return fully_sharded(_target("llama"))


@contextmanager
def count_forwards(model: Any) -> Iterator[list[int]]:
    """Tokens of every row in the model's forwards."""
    lengths: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda _module, _args, kwargs: lengths.append(kwargs["input_ids"].shape[1]),
        with_kwargs=True,
    )
    try:
        yield lengths
    finally:
        handle.remove()


def on_all_ranks(value: Any) -> list[Any]:
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def generate(model: Any, rank: int, drafter: Any, **kwargs: Any) -> Any:
    kwargs.setdefault("do_sample", False)
    return model.generate(
        **mine(rank),
        assistant_model=drafter,
        max_new_tokens=NEW[rank],
        return_dict_in_generate=True,
        **kwargs,
    )


def plain(rank: int) -> list[list[int]]:
    return row_by_row(_target("llama"), mine(rank), max_new_tokens=NEW[rank], do_sample=False)


def check_ranks_that_are_done_go_on(folder: Path, rank: int) -> None:
    drafter = ScriptedDrafter(plain(rank), sometimes_wrong)
    with count_forwards(sharded_llama()) as lengths:
        output = generate(sharded_llama(), rank, drafter, synced_gpus=True)
    assert output.sequences[:, 9:].tolist() == plain(rank)
    assert 0.2 < output.speculation.acceptance_rate < 0.9
    counts, own = on_all_ranks(len(lengths)), output.speculation.num_target_forwards
    needed = on_all_ranks(own)
    assert counts[0] == counts[1] == max(needed) > min(needed)
    # Of one token: nobody reads them.
    assert lengths[own:] == [1] * (counts[rank] - own)


def check_speculators_and_seeds_of_every_rank(folder: Path, rank: int) -> None:
    target, cut = _target("llama"), sharded_llama()
    for share in (False, True):
        torch.manual_seed(3)
        config = random_speculator(target).config
        config.share_target_weights = share
        torch.manual_seed(3)
        speculator = hf_specdec.MLPSpeculatorPreTrainedModel(config).eval()
        for options in ({}, {"do_sample": True}, {"num_tree_nodes": 5}):
            drafter, proposals = recorded(speculator)
            torch.manual_seed(8 + rank)
            reference = generate(target, rank, drafter, **options)
            drafter, proposals_of_cut = recorded(speculator)
            torch.manual_seed(8 + rank)
            output = generate(cut, rank, drafter, synced_gpus=True, **options)
            assert output.sequences.tolist() == reference.sequences.tolist()
            assert proposals_of_cut == proposals


def check_prompts_in_chunks_and_caches_handed_out(folder: Path, rank: int) -> None:
    cut, rows = sharded_llama(), plain(rank)
    # One rank has five forwards over its prompt, the other one.
    chunks = {"prefill_chunk_size": (2, 9)[rank]}
    with count_forwards(cut) as lengths:
        output = generate(
            cut, rank, ScriptedDrafter(rows, sometimes_wrong), synced_gpus=True, **chunks
        )
    assert output.sequences[:, 9:].tolist() == rows
    assert len(set(on_all_ranks(len(lengths)))) == 1
    # Rows of the second rank end at different times, so that it runs one forward more at the end.
    eos = rows[0][3]
    ended = [row[: row.index(eos) + 1] if eos in row else row for row in rows]
    assert len(set(map(len, ended))) > 1 or rank == 0
    stops = {"eos_token_id": eos} if rank else {}
    with count_forwards(cut) as lengths:
        output = generate(
            cut, rank, ScriptedDrafter(rows, sometimes_wrong), synced_gpus=True, **stops
        )
    assert len(set(on_all_ranks(len(lengths)))) == 1
    assert output.cache.get_seq_length() == output.sequences.shape[1] - 1


def check_transformers_own_fsdp_keeps_step_by_itself(folder: Path, rank: int) -> None:
    """Its embedding is put together for each forward: MTP layers need it in between."""
    target = AutoModelForCausalLM.from_pretrained(folder / "mtp").eval()
    config = DistributedConfig(fsdp_size=2)
    cut = AutoModelForCausalLM.from_pretrained(folder / "mtp", distributed_config=config).eval()
    for model in (target, cut):
        model.generation_config.eos_token_id = None
    ends = cut.get_input_embeddings(), cut.get_output_embeddings()
    cut(**mine(rank))
    freed = [isinstance(end.weight, DTensor) for end in ends]
    assert freed[0]
    options = {"use_mtp": True, "num_assistant_tokens": 2}
    for seeds in ({}, {"do_sample": True, "row_seeds": list(range(2 + rank))}):
        reference = generate(target, rank, None, **options, **seeds)
        with count_forwards(cut) as lengths:
            output = generate(cut, rank, None, **options, **seeds)
        assert output.sequences.tolist() == reference.sequences.tolist()
        assert output.speculation == reference.speculation
        assert len(set(on_all_ranks(len(lengths)))) == 1
        assert [isinstance(end.weight, DTensor) for end in ends] == freed
    # After an error, too.
    with pytest.raises(RuntimeError, match="stop"):
        generate(cut, rank, None, logits_processor=[_stop], **options)
    assert [isinstance(end.weight, DTensor) for end in ends] == freed


def _stop(input_ids: Any, scores: Any) -> Any:
    raise RuntimeError("stop")


def check_torchs_first_fsdp(folder: Path, rank: int) -> None:
    policy = ModuleWrapPolicy({type(_target("llama").model.layers[0])})
    cut: Any = FullyShardedDataParallel(
        copy.deepcopy(_target("llama")), auto_wrap_policy=policy, device_id=torch.device("cpu")
    )
    drafter = ScriptedDrafter(plain(rank), sometimes_wrong)
    with FullyShardedDataParallel.summon_full_params(cut, writeback=False, recurse=False):
        output = generate(cut, rank, drafter, synced_gpus=True)
    assert output.sequences[:, 9:].tolist() == plain(rank)
    with pytest.raises(ValueError, match=r"summon_full_params"):
        generate(cut, rank, drafter, synced_gpus=True)


def check_what_cant_keep_step_is_refused(folder: Path, rank: int) -> None:
    speculator = random_speculator(_target("llama"))
    static = {"cache_implementation": "static", "compile_config": CompileConfig(backend="eager")}
    with pytest.raises(ValueError, match=r"synced_gpus=True: .*disable_compile=True"):
        generate(sharded_llama(), rank, speculator, synced_gpus=True, **static)
    cut, emptied = fully_shard(copy.deepcopy(speculator)), copy.deepcopy(speculator)
    for weight in emptied.parameters():
        # As ZeRO-3 leaves them.
        weight.data = weight.data.new_empty(0)
    for drafter in (cut, emptied):
        with pytest.raises(ValueError, match=r"assistant_model, .*, is cut between the ranks"):
            generate(sharded_llama(), rank, drafter, synced_gpus=True)
    recurrent = AutoModelForCausalLM.from_config(config_of(FAMILIES["qwen3_next"]))
    with pytest.raises(ValueError, match="synced_gpus=True: .*Qwen3NextForCausalLM has recurrent"):
        generate(recurrent, rank, speculator, synced_gpus=True)
