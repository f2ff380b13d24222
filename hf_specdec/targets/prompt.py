"""Where the prompt's tokens stand: their slots in the cache, their positions, what is hidden.

Slot and position differ by the padding, and the tokens of ``input_ids`` need not be all there is: a
given cache or ``inputs_embeds`` can hold more. Everything that follows from the arguments of one
call is worked out here once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Prompt:
    """The prompts of one call.

    Attributes:
        input_ids: int64 ``[B, T_ids]``, what the result begins with.
        num_slots: T, the slots that the prompts take: ids, embeddings and given cache together.
        padding: int64 ``[B]``, leading slots that hold no token.
        offsets: int64 ``[B]``, slot minus position behind the prompt.
        hidden: bool ``[B, T]``, slots that nobody may see, or ``None`` if these are the padding.
        embeds: ``[B, T, d]``, embeddings in place of ids, or ``None``.
        given_on: where the caller's ids were, and so what belongs to the call besides; ``None``:
            where these are.
        shifts: int64 ``[C, B]``, how far each of C axes is ahead of the position behind the prompt,
            for models that rotate by time, height and width (Qwen-VL, GLM-V); else ``None``.
    """

    input_ids: torch.Tensor
    num_slots: int
    padding: torch.Tensor
    offsets: torch.Tensor
    hidden: torch.Tensor | None = None
    embeds: torch.Tensor | None = None
    given_on: torch.device | None = None
    shifts: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """B."""
        return self.input_ids.shape[0]

    @property
    def slots_before(self) -> int:
        """Slots in front of the first of ``input_ids``: slot = index in the result + this."""
        return self.num_slots - self.input_ids.shape[1]

    @classmethod
    def plain(cls, input_ids: torch.Tensor, padding: torch.Tensor) -> Prompt:
        """Left-padded ids and nothing else; ``padding`` is int64 ``[B]``."""
        return cls(input_ids, input_ids.shape[1], padding, padding)

    @classmethod
    def of_call(
        cls,
        input_ids: torch.Tensor,
        num_slots: int,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        embeds: torch.Tensor | None,
        device: torch.device,
    ) -> Prompt:
        """From the arguments that ``generate`` prepared.

        Args:
            input_ids: int64 ``[B, T_ids]``; empty or a part where a cache or embeddings hold more.
            num_slots: T.
            attention_mask: ``[B, T]``, zero where there is no token; ``None`` means all ones.
            position_ids: ``[B or 1, ...]``, or ``[C, B or 1, ...]`` for C axes; the last column
                belongs to slot T - 1. Or ``None``.
            embeds: ``[B, T, d]`` or ``None``.
            device: where the target's output head is.
        """
        rows = input_ids.shape[0]
        padding = torch.zeros(rows, dtype=torch.long, device=device)
        offsets, hidden, shifts = padding, None, None
        if attention_mask is not None:
            is_hidden = (attention_mask == 0).to(device)
            padding = is_hidden.long().cumprod(dim=1).sum(dim=1)
            offsets = is_hidden.sum(dim=1)
            if not torch.equal(padding, offsets):
                hidden = is_hidden
        if position_ids is not None and position_ids.dim() == 2:
            offsets = num_slots - 1 - position_ids[:, -1].to(device).expand(rows)
        elif position_ids is not None and position_ids.dim() == 3:
            # An image takes fewer positions than tokens, and every axis goes on where it ended.
            ends = position_ids[..., -1].to(device).expand(-1, rows)
            shifts = ends - (num_slots - 1 - offsets)
        ids, given_on = input_ids.to(device), input_ids.device
        return cls(ids, num_slots, padding, offsets, hidden, embeds, given_on, shifts)
