"""Acceptance of an MTP layer on held-out documents, without generating anything.

See `evaluation` for what is compared and why, and `mtp_passes` for how all drafts of a document are
made at once. Documents are run whole, as a prompt and its continuation are when drafting.

Boundary: a corpus and MTP layers in, rates out.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hf_specdec.modeling.mimo import MiMoMTP
from hf_specdec.training.corpus import Corpus
from hf_specdec.training.evaluation import Acceptance, comparable_positions
from hf_specdec.training.mtp_passes import run_passes


class HeldOutDocuments:
    """Documents on which acceptance is measured, the same at every evaluation.

    Args:
        corpus: the data.
        documents: bool ``[num_documents]``, the held-out documents.
        heads: n.
        most: positions to compare; documents are added, in random order, until there are so many.
        seed: of that order.

    Attributes:
        greedy_text: see `HeldOutPositions`.

    Raises:
        ValueError: no position is left.
    """

    def __init__(
        self, corpus: Corpus, documents: Tensor, heads: int, most: int, seed: int = 0
    ) -> None:
        self.corpus = corpus
        self.heads = heads
        index, self.greedy_text = comparable_positions(corpus, documents, heads)
        numbers, counts = corpus.document[index].unique(return_counts=True)
        order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))
        before = counts[order].cumsum(0) - counts[order]
        chosen = numbers[order[before < most]]
        self._compared = torch.zeros(len(corpus), dtype=torch.bool)
        self._compared[index[torch.isin(corpus.document[index], chosen)]] = True
        corpus.hidden.pin(torch.isin(corpus.document, chosen).nonzero()[:, 0])
        ends = torch.searchsorted(corpus.document, chosen, right=True)
        starts = torch.searchsorted(corpus.document, chosen)
        by_length = (ends - starts).argsort(stable=True)
        self._bounds = torch.stack([starts, ends], dim=1)[by_length].tolist()

    @torch.no_grad()
    def measure(self, network: MiMoMTP, bf16: bool, tokens_per_batch: int = 4096) -> Acceptance:
        """Draft behind every token and compare.

        Args:
            network: the layers, made of a model in evaluation or training mode.
            bf16: run under autocast.
            tokens_per_batch: tokens of one forward, padding included.
        """
        device = network.target.device
        layers = network.target.model.mtp_layers
        was_training = layers.training
        layers.eval()
        ids = network.draft_token_ids
        right, total = torch.zeros(self.heads), 0
        for index, compared in self._batches(tokens_per_batch):
            ahead = index[..., None] + 1 + torch.arange(self.heads + 1)
            text = self.corpus.tokens[ahead.clamp(max=len(self.corpus) - 1)]
            places = torch.arange(index.shape[1], device=device).expand(index.shape)
            passes = run_passes(
                network,
                self.corpus.hidden[index].to(device).float(),
                text[..., :-1].to(device),
                places,
                torch.zeros_like(places),
            )
            drafts = []
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                for state in passes:
                    draft = network.logits(state[compared.to(device)]).max(-1).indices
                    drafts.append((draft if ids is None else ids[draft]).cpu())
            matches = torch.stack(drafts, dim=1) == text[compared][:, 1:]
            right += matches.long().cumprod(1).sum(0)
            total += len(matches)
        layers.train(was_training)
        return Acceptance((right / total).tolist(), total)

    def _batches(self, tokens_per_batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Documents of similar length: positions int64 ``[B, N]``, and bool, where to compare.

        A short one is followed by its last position again, which nothing before it can see.
        """
        rows: list[tuple[int, int]] = []
        for start, end in self._bounds:
            # The newest is the longest.
            if rows and (len(rows) + 1) * (end - start) > tokens_per_batch:
                yield self._pad(rows)
                rows = []
            rows.append((start, end))
        yield self._pad(rows)

    def _pad(self, rows: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        starts, ends = torch.tensor(rows).T
        index = starts[:, None] + torch.arange(int((ends - starts).max()))
        inside = index < ends[:, None]
        index = index.minimum(ends[:, None] - 1)
        return index, inside & self._compared[index]
