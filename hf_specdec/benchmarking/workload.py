"""What is measured, and the batches it is measured on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_specdec.options.schedule import BatchSizeSchedule, NumDraftTokens


@dataclass(frozen=True)
class Workload:
    """What to measure; every combination of set, batch, K and tree is one row of the result.

    Attributes:
        prompts: for each set its prompts.
        ks: draft tokens a step, or ``"auto"``.
        tree_nodes: drafts of a tree, 0 for chains; of K = 0 there are no trees.
        batches: batch sizes.
        max_new_tokens: for each prompt, at least 2.
        repeats: timed runs of each kind for each batch of prompts.
        schedule: K by the rows still active, as in vLLM.
        acceptance: of a synthetic drafter; ``None`` measures the real one.
        draft_seconds: what a synthetic drafter spends on each token.
        seed: of a synthetic drafter.
        compiles: runs with a drafter have static shapes, compiled.
        lookup: what the speculative config says about prompt lookup.
    """

    prompts: Mapping[str, Sequence[str]]
    ks: Sequence[NumDraftTokens]
    tree_nodes: Sequence[int] = (0,)
    batches: Sequence[int] = (1,)
    max_new_tokens: int = 128
    repeats: int = 2
    schedule: BatchSizeSchedule | None = None
    acceptance: float | None = None
    draft_seconds: float = 0.0
    seed: int = 0
    compiles: bool = False
    lookup: Mapping[str, int] = field(default_factory=dict)

    @property
    def draftings(self) -> list[tuple[NumDraftTokens, int]]:
        """Every K with every number of nodes, each pair once."""
        pairs = ((k, n if k else 0) for n in self.tree_nodes for k in self.ks)
        return list(dict.fromkeys(pairs))

    @property
    def num_timed_groups(self) -> int:
        """Batches of prompts times repeats, over all sets and sizes: what progress counts."""
        groups = sum(
            -(-len(prompts) // batch) for prompts in self.prompts.values() for batch in self.batches
        )
        return groups * self.repeats


@dataclass(frozen=True)
class Group:
    """One batch of prompts.

    Attributes:
        numbers: of the prompts in their set, from 1.
        inputs: ``input_ids`` and ``attention_mask``, int64 ``[B, T]``, left-padded.
    """

    numbers: Sequence[int]
    inputs: dict[str, torch.Tensor]

    @property
    def width(self) -> int:
        """T."""
        return self.inputs["input_ids"].shape[1]

    def prompt(self, row: int) -> torch.Tensor:
        """A row without its padding, int64 ``[1, t]``."""
        mask = self.inputs["attention_mask"][row].bool()
        return self.inputs["input_ids"][row][mask][None]


def groups_of(
    tokenizer: Any, prompts: Sequence[str], batch: int, device: torch.device
) -> list[Group]:
    """The prompts in batches of one size; the last batch, if short, is filled from the front.

    Args:
        tokenizer: of the target; its chat template is used if it has one.
        prompts: at least one.
        batch: B; more than there are prompts repeats them.
        device: of the inputs.
    """
    groups = []
    for start in range(0, len(prompts), batch):
        indices = [(start + i) % len(prompts) for i in range(batch)]
        encoded = [_encode(tokenizer, prompts[i]) for i in indices]
        width = max(len(ids) for ids in encoded)
        input_ids = torch.zeros(batch, width, dtype=torch.int64)
        mask = torch.zeros_like(input_ids)
        for row, ids in enumerate(encoded):
            input_ids[row, width - len(ids) :] = torch.tensor(ids)
            mask[row, width - len(ids) :] = 1
        inputs = {"input_ids": input_ids.to(device), "attention_mask": mask.to(device)}
        groups.append(Group([i + 1 for i in indices], inputs))
    return groups


def _encode(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of a prompt, as a user's message where the model chats."""
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        # The template has written the special tokens already.
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    ids: list[int] = tokenizer(prompt)["input_ids"]
    if not ids:
        raise ValueError(f"prompt {prompt!r} has no tokens")
    return ids
