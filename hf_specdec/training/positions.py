"""Training examples: positions of a corpus, and what each head reads and is trained for there.

At position t the speculator reads ``hidden[t]`` and the token the target chose from it, and head i
is trained for the token after the one it reads:

    head                 0         1         ...   i
    reads                tokens[t+1]  tokens[t+2]  ...   tokens[t+1+i]
    predicts             tokens[t+2]  tokens[t+3]  ...   tokens[t+2+i]
    target's opinion     top[t+1]     top[t+2]     ...   top[t+1+i]

A head takes part where the predicted token belongs to the same document and is flagged.

Boundary: reads a corpus; order, loss and model are elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_specdec.training.corpus import Corpus


@dataclass(frozen=True)
class Batch:
    """B positions for n heads.

    Attributes:
        hidden_states: float32 ``[B, d]``.
        input_ids: int64 ``[B, n]``, what each head reads.
        labels: int64 ``[B, n]``, what follows in the text.
        top_ids: int64 ``[B, n, k]``, the target's most probable tokens in place of the label.
        top_logprobs: float32 ``[B, n, k]``.
        mask: bool ``[B, n]``, which heads are trained here.
    """

    hidden_states: Tensor
    input_ids: Tensor
    labels: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    mask: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same on another device."""
        return Batch(*(tensor.to(device) for tensor in vars(self).values()))


class Positions:
    """The examples of some documents.

    Args:
        corpus: the data.
        documents: bool ``[num_documents]``, the documents to take.
        heads: n.

    Attributes:
        index: int64 ``[N]``, positions t at which at least head 0 is trained.
    """

    def __init__(self, corpus: Corpus, documents: Tensor, heads: int) -> None:
        self.corpus = corpus
        self.heads = heads
        index = torch.arange(len(corpus) - 2)
        index = index[documents[corpus.document[index]]]
        self.index = index[self._mask(index, 1)[:, 0]]

    def __len__(self) -> int:
        return len(self.index)

    def _mask(self, index: Tensor, heads: int) -> Tensor:
        """bool ``[B, heads]``: the token a head predicts is flagged and in the same document."""
        predicted = index[:, None] + 2 + torch.arange(heads)
        inside = predicted < len(self.corpus)
        predicted = predicted.clamp(max=len(self.corpus) - 1)
        same = self.corpus.document[predicted] == self.corpus.document[index][:, None]
        return inside & same & self.corpus.flag[predicted]

    def batch(self, index: Tensor, top_k: int) -> Batch:
        """The examples at corpus positions ``index`` (int64 ``[B]``), with ``top_k`` targets."""
        corpus = self.corpus
        reads = index[:, None] + 1 + torch.arange(self.heads)
        reads = reads.clamp(max=len(corpus) - 1)
        predicts = (reads + 1).clamp(max=len(corpus) - 1)
        return Batch(
            hidden_states=corpus.hidden[index].float(),
            input_ids=corpus.tokens[reads],
            labels=corpus.tokens[predicts],
            top_ids=corpus.top_ids.columns(top_k)[reads].long(),
            top_logprobs=corpus.top_logprobs.columns(top_k)[reads].float(),
            mask=self._mask(index, self.heads),
        )


def epoch_order(num_positions: int, epoch: int, seed: int, blocks: Tensor | None = None) -> Tensor:
    """The order of one pass, int64 ``[num_positions]``: a function of its arguments alone.

    Args:
        num_positions: N.
        epoch: number of the pass.
        seed: of the order.
        blocks: int64 ``[N]``; examples of one block stay together, the blocks in random order.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(num_positions, generator=generator)
    if blocks is None:
        return order
    rank = torch.randperm(int(blocks.max()) + 1, generator=generator)
    return order[rank[blocks[order]].argsort(stable=True)]


def step_positions(
    order: dict[int, Tensor],
    step: int,
    size: int,
    total: int,
    seed: int,
    blocks: Tensor | None = None,
) -> Tensor:
    """Numbers 0 .. total - 1 of the examples of one step, int64 ``[size]``.

    Passes follow each other without a gap, so a step can end one and begin the next. Because the
    result depends on nothing but the step, a resumed run sees what an uninterrupted one sees.

    Args:
        order: cache of the passes under way, kept by the caller.
        step: counted from 0 within the stage.
        size: examples per step.
        total: number of examples.
        seed: of the orders.
        blocks: see `epoch_order`.
    """
    first, last = step * size, (step + 1) * size
    pieces = []
    for epoch in range(first // total, (last - 1) // total + 1):
        if epoch not in order:
            order[epoch] = epoch_order(total, epoch, seed, blocks)
        start = epoch * total
        pieces.append(order[epoch][max(first - start, 0) : min(last - start, total)])
    for old in [epoch for epoch in order if epoch < first // total]:
        del order[old]
    return torch.cat(pieces)
