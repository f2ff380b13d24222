"""Hidden states of a corpus that was written without them, computed again when they are read.

The states are the largest part of a corpus: 8 KB a token for a hidden size of 4096. Without them a
corpus takes little more than its tokens, and training runs the frozen target over its documents in
every pass, as IBM's trainer does.

Training draws positions at random, and a state needs the whole document before it. So documents are
run in blocks, of which the newest few are kept in memory; `positions` orders the examples of a pass
block by block, at random within one.

Boundary: a target and tokens in, states out. The order of reading is decided elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.training.corpus import Corpus
from hf_specdec.training.ground_truth import length_batches, run_texts

# A step can read the end of one block and the beginning of the next; a window can lie across two.
_BLOCKS_KEPT = 3


def recompute_states(corpus: Corpus, target: PreTrainedModel, block_tokens: int = 100_000) -> None:
    """Let ``corpus.hidden`` run the target again, for a corpus without stored states.

    Args:
        corpus: its ``hidden`` and ``blocks`` are set.
        target: the one the corpus was made with, in evaluation mode.
        block_tokens: see `RecomputedStates`.
    """
    states = RecomputedStates(target, corpus, block_tokens)
    corpus.hidden, corpus.blocks = states, states.block


class RecomputedStates:
    """Stands in for the stored states of a corpus; read by index, as those are.

    Args:
        target: the one the corpus was made with, in evaluation mode.
        corpus: its documents.
        block_tokens: tokens of a block at least. So many states, a few times, must fit in memory.
        tokens_per_batch: tokens of one forward, padding included.

    Attributes:
        block: int64 ``[T]``, the block of each position.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        corpus: Corpus,
        block_tokens: int = 100_000,
        tokens_per_batch: int = 4096,
    ) -> None:
        self._target = target
        self._tokens = corpus.tokens
        self._document = corpus.document
        self._tokens_per_batch = tokens_per_batch
        self._size = corpus.metadata.hidden_size
        ends = torch.searchsorted(corpus.document, torch.arange(corpus.num_documents), right=True)
        self._bounds = torch.cat([ends.new_zeros(1), ends])
        # A document begins in the block that its first position would fall into.
        self.block = (self._bounds[:-1] // block_tokens)[corpus.document]
        self._starts = torch.searchsorted(self.block, torch.arange(int(self.block[-1]) + 2))
        self._kept: OrderedDict[int, Tensor] = OrderedDict()
        self._pinned = torch.full((len(corpus),), -1)
        self._pinned_rows = torch.empty((0, self._size), dtype=torch.bfloat16)

    def __len__(self) -> int:
        return len(self._tokens)

    def pin(self, index: Tensor) -> None:
        """Compute the states at ``index`` (int64 ``[N]``) now, and keep them for good."""
        documents = self._document[index].unique()
        rows = []
        places = []
        for number in documents.tolist():
            start, end = self._bounds[number : number + 2].tolist()
            here = index[self._document[index] == number].unique()
            rows.append(self._run([number])[here - start])
            places.append(here)
        self._pinned_rows = torch.cat(rows)
        kept = torch.cat(places)
        self._pinned[kept] = torch.arange(len(kept))

    def __getitem__(self, index: Tensor) -> Tensor:
        """States ``[.., d]`` in bfloat16 at ``index``, int64 of any shape ``[..]``."""
        flat = index.flatten()
        rows = torch.empty((len(flat), self._size), dtype=torch.bfloat16)
        pinned = self._pinned[flat]
        rows[pinned >= 0] = self._pinned_rows[pinned[pinned >= 0]]
        others = (pinned < 0).nonzero()[:, 0]
        blocks = self.block[flat[others]]
        for block in blocks.unique().tolist():
            here = others[blocks == block]
            rows[here] = self._block(block)[flat[here] - self._starts[block]]
        return rows.view(*index.shape, self._size)

    def _block(self, block: int) -> Tensor:
        """States of a whole block ``[.., d]``; always run alike, so that they are the same bits."""
        if block not in self._kept:
            first, last = self._starts[block : block + 2].tolist()
            numbers = self._document[first:last].unique().tolist()
            self._kept[block] = self._run(numbers)
            while len(self._kept) > _BLOCKS_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(block)
        return self._kept[block]

    @torch.no_grad()
    def _run(self, numbers: list[int]) -> Tensor:
        """States of consecutive documents, end to end."""
        first = int(self._bounds[numbers[0]])
        states = torch.empty(
            (int(self._bounds[numbers[-1] + 1]) - first, self._size), dtype=torch.bfloat16
        )
        documents: list[tuple[int, Sequence[int]]] = [
            (number, self._tokens[self._bounds[number] : self._bounds[number + 1]].tolist())
            for number in numbers
        ]
        for batch in length_batches(documents, self._tokens_per_batch):
            hidden = run_texts(self._target, [tokens for _, tokens in batch]).hidden_states
            for row, (number, tokens) in enumerate(batch):
                start = int(self._bounds[number]) - first
                states[start : start + len(tokens)] = hidden[row, : len(tokens)].bfloat16().cpu()
        return states
