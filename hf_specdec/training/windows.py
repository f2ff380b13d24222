"""Training examples of a drafter with attention: windows of N consecutive tokens.

The documents stand end to end and are cut every N tokens, so that no place is padding; a window
holds parts of several documents, and an entry must not attend to another document's. What is read
and predicted at an entry is what an MLP speculator reads and predicts at that position
(`positions`).

Boundary: reads a corpus; order, loss and model are elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_specdec.training.corpus import Corpus
from hf_specdec.training.positions import Batch, Positions


@dataclass(frozen=True)
class WindowBatch:
    """B windows of N entries, for n draft positions.

    Attributes:
        entries: of all windows, one after the other: its tensors begin ``[B * N, ..]``.
        position_ids: int64 ``[B, N]``, places in the documents.
        document: int64 ``[B, N]``, number of the document each entry belongs to.
    """

    entries: Batch
    position_ids: Tensor
    document: Tensor

    def to(self, device: torch.device) -> WindowBatch:
        """The same on another device."""
        return WindowBatch(
            self.entries.to(device), self.position_ids.to(device), self.document.to(device)
        )


class Windows:
    """The windows of some documents; what is left at the end of the last one is not used.

    Args:
        corpus: the data.
        documents: bool ``[num_documents]``, the documents to take.
        heads: n.
        window_length: N.

    Attributes:
        index: int64 ``[W, N]``, positions in the corpus. Windows without a trained entry are left
            out.

    Raises:
        ValueError: the documents don't fill a window.
    """

    def __init__(self, corpus: Corpus, documents: Tensor, heads: int, window_length: int) -> None:
        self.corpus = corpus
        self._positions = Positions(corpus, documents, heads)
        first = torch.searchsorted(corpus.document, torch.arange(corpus.num_documents))
        self._place = torch.arange(len(corpus)) - first[corpus.document]
        index = documents[corpus.document].nonzero()[:, 0]
        if len(index) < window_length:
            raise ValueError(
                f"window_length={window_length} is more than the {len(index)} tokens of the "
                "documents to train on; choose shorter windows or generate more documents"
            )
        index = index[: len(index) // window_length * window_length].view(-1, window_length)
        trained = torch.zeros(len(corpus), dtype=torch.bool)
        trained[self._positions.index] = True
        self.index = index[trained[index].any(1)]

    def __len__(self) -> int:
        return len(self.index)

    def batch(self, index: Tensor, top_k: int) -> WindowBatch:
        """The windows at corpus positions ``index``, int64 ``[B, N]``, with ``top_k`` targets."""
        entries = self._positions.batch(index.flatten(), top_k)
        return WindowBatch(entries, self._place[index], self.corpus.document[index])
