"""What must hold of a target that is cut over several ranks; run on each of them by `rank_runs`.

Every check compares with the whole target, which each rank has too.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from gemma4_models import gemma4_assistant, gemma4_target, without_eos
from mtp_checkpoints import write
from tiny_models import PAD, VOCAB_SIZE, ScriptedDrafter, _target, row_by_row, sometimes_wrong
from tiny_pairs import random_speculator
from transformers import AutoModel, AutoModelForCausalLM, StoppingCriteria
from transformers.distributed import DistributedConfig
from transformers.generation.streamers import BaseStreamer

import hf_specdec
from hf_specdec.auto_length import AutoDraftLength
from hf_specdec.registry import drafter_for

NEW = 12
FAMILY = "glm4_moe"


def prepare(folder: Path) -> None:
    """Write the checkpoints; ranks don't, as transformers lets only the first of them save."""
    _target("llama").save_pretrained(folder / "llama")
    target = gemma4_target("31B")
    target.save_pretrained(folder / "gemma4")
    gemma4_assistant(target).save_pretrained(folder / "gemma4-assistant")
    (folder / "mtp").symlink_to(write(FAMILY))


def inputs_of(num_rows: int = 3, seed: int = 11) -> dict[str, torch.Tensor]:
    """Left-padded prompts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB_SIZE, (num_rows, 9), generator=generator)
    for row in range(num_rows):
        ids[row, : 2 * row] = PAD
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


@functools.cache
def cut(folder: Path, name: str = "llama") -> Any:
    """The target in `folder` with its part of the weights on this rank."""
    size = torch.distributed.get_world_size()
    config = DistributedConfig(tp_size=size)
    model = AutoModelForCausalLM.from_pretrained(folder / name, distributed_config=config)
    assert model.tp_size == size > 1
    return without_eos(model.eval())


@functools.cache
def expected() -> list[list[int]]:
    return row_by_row(_target("llama"), inputs_of(), max_new_tokens=NEW, do_sample=False)


def scripted(rank: int = 0) -> ScriptedDrafter:
    """Half right; on every rank wrong at other places."""
    return ScriptedDrafter(expected(), lambda row, i: sometimes_wrong(row + 5 * rank, i + rank))


def generate(model: Any, drafter: Any, inputs: Any = None, **kwargs: Any) -> Any:
    kwargs.setdefault("do_sample", False)
    return model.generate(
        **(inputs or inputs_of()),
        assistant_model=drafter,
        max_new_tokens=NEW,
        return_dict_in_generate=True,
        **kwargs,
    )


def recorded(model: Any) -> tuple[Any, list[list[list[int]]]]:
    """A drafter, and where it notes what it proposes."""
    drafter: Any = drafter_for(model)
    proposals: list[list[list[int]]] = []
    propose = drafter.propose

    def note(*args: Any, **kwargs: Any) -> torch.Tensor:
        drafts = propose(*args, **kwargs)
        proposals.append(drafts.tolist())
        return drafts

    drafter.propose = note
    return drafter, proposals


def same_drafts(
    whole: tuple[Any, Any], parts: tuple[Any, Any], of_rank: Any = None, **kwargs: Any
) -> Any:
    """Compare (target, assistant) whole and cut: the tokens, and every proposal on the way.

    A wrong feed to a drafter would show nowhere but in these. ``of_rank`` are this rank's own
    arguments, which shouldn't matter.
    """
    drafter, proposals = recorded(whole[1])
    reference = generate(whole[0], drafter, **kwargs)
    drafter, proposals_of_parts = recorded(parts[1])
    output = generate(parts[0], drafter, **{**kwargs, **(of_rank or {})})
    assert output.sequences.tolist() == reference.sequences.tolist()
    assert proposals_of_parts == proposals
    assert output.speculation == reference.speculation
    return output


def check_ragged_batch_of_half_right_drafts(folder: Path, rank: int) -> None:
    output = generate(cut(folder), scripted())
    assert output.sequences[:, 9:].tolist() == expected()
    assert 0.2 < output.speculation.acceptance_rate < 0.9


def check_seeds_are_those_of_the_first_rank(folder: Path, rank: int) -> None:
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.4, "top_k": 30}
    torch.manual_seed(3)
    speculator = random_speculator(_target("llama"))
    torch.manual_seed(5)
    plain = generate(_target("llama"), speculator, num_assistant_tokens=0, **options)
    torch.manual_seed(5 + rank)
    output = generate(cut(folder), speculator, **options)
    assert output.sequences.tolist() == plain.sequences.tolist()
    assert output.sequences[:, 9:].tolist() != expected()
    # Drafts are sampled with the same seeds, on every rank.
    of_rank = {"row_seeds": [5 + rank, 6 + rank, 7 + rank]}
    pairs = (_target("llama"), speculator), (cut(folder), speculator)
    same_drafts(*pairs, of_rank, row_seeds=[5, 6, 7], **options)


def check_speculator_and_one_that_shares_the_targets_tables(folder: Path, rank: int) -> None:
    target = _target("llama")
    for share in (False, True):
        torch.manual_seed(3)
        config = random_speculator(target).config
        config.share_target_weights = share
        torch.manual_seed(3)
        speculator = hf_specdec.MLPSpeculatorPreTrainedModel(config).eval()
        same_drafts((target, speculator), (cut(folder), speculator))
        same_drafts(
            (target, speculator), (cut(folder), speculator), do_sample=True, row_seeds=[1, 2, 3]
        )


def check_mtp_layers(folder: Path, rank: int) -> None:
    target = without_eos(AutoModelForCausalLM.from_pretrained(folder / "mtp").eval())
    parts = cut(folder, "mtp")
    networks = [hf_specdec.registry.mtp_network(model) for model in (target, parts)]
    pairs = (target, networks[0]), (parts, networks[1])
    plain = row_by_row(target, inputs_of(), max_new_tokens=NEW, do_sample=False)
    output = same_drafts(*pairs, num_assistant_tokens=3)
    assert output.sequences[:, 9:].tolist() == plain
    threshold: dict[str, Any] = {"num_assistant_tokens": 3, "assistant_confidence_threshold": 0.2}
    same_drafts(*pairs, do_sample=True, row_seeds=[1, 2, 3], **threshold)
    hf_specdec.attach(parts, {"method": "mtp"})
    attached = generate(parts, None)
    assert attached.sequences[:, 9:].tolist() == plain
    assert attached.speculation.num_draft_tokens > 0
    hf_specdec.detach(parts)


def check_gemma4_assistant_is_cut_like_its_target(folder: Path, rank: int) -> None:
    target, parts = gemma4_target("31B"), cut(folder, "gemma4")
    whole = AutoModel.from_pretrained(folder / "gemma4-assistant").eval()
    config = DistributedConfig(tp_size=torch.distributed.get_world_size())
    assistant = AutoModel.from_pretrained(
        folder / "gemma4-assistant", distributed_config=config
    ).eval()
    reference = same_drafts((target, whole), (parts, assistant), num_assistant_tokens=3)
    for model, wrong in ((parts, whole), (target, assistant)):
        with pytest.raises(
            ValueError, match=r"spread over \d rank.*its own heads over \d.*tp_size="
        ):
            generate(model, wrong)
    hf_specdec.attach(parts, {"model": str(folder / "gemma4-assistant")})
    output = generate(parts, None, num_assistant_tokens=3)
    assert output.sequences.tolist() == reference.sequences.tolist()
    assert output.speculation == reference.speculation
    hf_specdec.detach(parts)


def check_trees(folder: Path, rank: int) -> None:
    target = _target("llama")
    torch.manual_seed(3)
    # What one rank remembers of other calls must not make its trees others.
    mine = random_speculator(target)
    if rank == 1:
        generate(target, mine, num_tree_nodes=7)
    for options in (
        {},
        {"do_sample": True, "row_seeds": [1, 2, 3]},
        {"repetition_penalty": 1.3},
    ):
        plain = generate(target, scripted(), num_assistant_tokens=0, **options)
        for tree in ({"num_tree_nodes": 7}, {"speculative_token_tree": "checkpoint"}):
            output = generate(cut(folder), mine, **tree, **options)
            assert output.sequences.tolist() == plain.sequences.tolist()


def check_other_ways_to_draft(folder: Path, rank: int) -> None:
    for options in (
        {"prompt_lookup_num_tokens": 3},
        {"num_speculative_tokens_per_batch_size": [[1, 2, 4], [3, 8, 1]]},
        {"prefill_chunk_size": 4},
    ):
        output = generate(cut(folder), scripted(), **options)
        assert output.sequences[:, 9:].tolist() == expected()
    rejection = {"do_sample": True, "verification": "rejection", "row_seeds": [1, 2, 3]}
    torch.manual_seed(3)
    speculator = random_speculator(_target("llama"))
    same_drafts((_target("llama"), speculator), (cut(folder), speculator), **rejection)
    hf_specdec.attach(cut(folder), {"method": "ngram"})
    output = cut(folder).generate(**inputs_of(), max_new_tokens=NEW, do_sample=False)
    hf_specdec.detach(cut(folder))
    assert output[:, 9:].tolist() == expected()


def check_first_ranks_drafts_and_verdicts_count(folder: Path, rank: int) -> None:
    """On the other ranks drafts and logits are wrong, as rounding could make them."""
    model, target = cut(folder), _target("llama")

    def spoil(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.flip(-1) if rank else output

    handle = model.lm_head.register_forward_hook(spoil)
    try:
        output = generate(model, scripted(rank))
        assert output.sequences[:, 9:].tolist() == expected()
        assert 0.2 < output.speculation.acceptance_rate < 0.9
        # On one rank no draft is sure enough, on the other every one.
        torch.manual_seed(3 + rank)
        speculator = random_speculator(target)
        head: Any = speculator.requires_grad_(False).speculator.head[0]
        head.weight.mul_(0 if rank else 100)
        output = generate(model, speculator, assistant_confidence_threshold=0.1)
        assert output.sequences[:, 9:].tolist() == expected()
        for options in (
            {},
            {"repetition_penalty": 1.3},
            {"do_sample": True, "row_seeds": [1, 2, 3]},
        ):
            plain = generate(target, scripted(), num_assistant_tokens=0, **options)
            for tree in ({"num_tree_nodes": 7}, {"speculative_token_tree": "checkpoint"}):
                torch.manual_seed(3 + rank)
                output = generate(model, random_speculator(target), **tree, **options)
                assert output.sequences.tolist() == plain.sequences.tolist()
    finally:
        handle.remove()


def check_auto_is_the_first_ranks_choice(folder: Path, rank: int) -> None:
    choose = AutoDraftLength._choose
    # As if drafts paid on one rank's clock and not on the other's.
    AutoDraftLength._choose = lambda self, allowed: allowed[0] if rank else allowed[-1]  # type: ignore
    try:
        output = generate(cut(folder), scripted(), num_assistant_tokens="auto")
    finally:
        AutoDraftLength._choose = choose  # type: ignore[method-assign]
    assert output.sequences[:, 9:].tolist() == expected()
    assert output.speculation.acceptance_rate > 0.2


def check_what_one_rank_remembers(folder: Path, rank: int) -> None:
    schedule = {"num_assistant_tokens_schedule": "heuristic"}
    drafter = scripted()
    if rank:
        # Where one call's heuristic ends, the next one begins.
        generate(_target("llama"), drafter, **schedule)
    output = generate(cut(folder), drafter, **schedule)
    assert output.sequences[:, 9:].tolist() == expected()


class StopAfter(StoppingCriteria):
    """Ends every row at a length; ranks can disagree, as they do about the time."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> torch.Tensor:
        is_done = input_ids.shape[1] >= self.length
        return torch.full((input_ids.shape[0],), is_done)


class Collected(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        pass


def check_criteria_and_streamers_of_the_first_rank(folder: Path, rank: int) -> None:
    # The first rank alone has one; both have one and disagree; only another rank has one.
    for lengths, new in (((15, None), 6), ((17, 12), 8), ((None, 12), NEW)):
        length = lengths[min(rank, 1)]
        criteria = [] if length is None else [StopAfter(length)]
        output = generate(cut(folder), scripted(), stopping_criteria=criteria)
        assert output.sequences[:, 9:].tolist() == [row[:new] for row in expected()]
    one = {name: value[:1] for name, value in inputs_of().items()}
    streamer = None if rank else Collected()
    generate(cut(folder), random_speculator(_target("llama")), one, streamer=streamer)
    if streamer is not None:
        assert streamer.tokens[-NEW:] == expected()[0]


def check_conversations_go_on(folder: Path, rank: int) -> None:
    first = generate(cut(folder), scripted())
    ids = torch.cat([first.sequences, inputs_of()["input_ids"][:, :4].clamp(min=3)], dim=1)
    mask = torch.nn.functional.pad(inputs_of()["attention_mask"], (0, NEW + 4), value=1)
    turn = {"input_ids": ids, "attention_mask": mask}
    plain = row_by_row(_target("llama"), turn, max_new_tokens=NEW, do_sample=False)
    output = generate(cut(folder), ScriptedDrafter(plain, sometimes_wrong), turn, cache=first.cache)
    assert output.sequences[:, ids.shape[1] :].tolist() == plain


def check_different_calls_are_refused_on_every_rank(folder: Path, rank: int) -> None:
    model, speculator = cut(folder), random_speculator(_target("llama"))
    for mine, message in (
        ({"inputs": inputs_of(2 + rank)}, r"shape of input_ids is \(2, 9\) on the first"),
        ({"inputs": inputs_of(seed=rank)}, "sum of input_ids is"),
        ({"num_assistant_tokens": 1 + (rank > 0)}, r"num_assistant_tokens is \('constant', 1\)"),
        ({"do_sample": rank == 0}, "do_sample is True on the first of them and False on number 1"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(model, speculator, **mine)
    assert generate(model, speculator).sequences[:, 9:].tolist() == expected()


def check_cut_weights_are_not_packed(folder: Path, rank: int) -> None:
    with pytest.raises(ValueError, match="cut over several ranks"):
        hf_specdec.pack_weights(cut(folder))
