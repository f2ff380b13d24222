"""Acceptance on held-out documents, without generating anything.

Where a document is the target's own greedy text, the tokens that follow a position are exactly what
the target would choose after any accepted draft. So drafting freely at the position and comparing
with the text gives the acceptance of greedy speculative decoding, at the price of the drafter
alone. In other text a position only tells this while the text happens to follow the target's
choice; there the result is optimistic, as those are the easy places.

Boundary: a corpus and a speculator in, rates out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_specdec.modeling.mlp_speculator import MLPSpeculatorPreTrainedModel
from hf_specdec.training.corpus import Corpus


@dataclass(frozen=True)
class Acceptance:
    """Rates over ``num_positions`` drafts.

    Attributes:
        per_position: share of drafts whose tokens 1 .. k were all right, for k = 1 .. n.
        num_positions: drafts compared.
    """

    per_position: list[float]
    num_positions: int

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per draft, the bonus token included."""
        return 1.0 + sum(self.per_position)

    def __str__(self) -> str:
        rates = " ".join(f"{rate:.3f}" for rate in self.per_position)
        return f"mean acceptance length {self.mean_acceptance_length:.3f}, per position {rates}"


class HeldOutPositions:
    """Positions on which acceptance is measured, the same at every evaluation.

    Args:
        corpus: the data.
        documents: bool ``[num_documents]``, the held-out documents.
        heads: n.
        most: positions to use at most, chosen at random.
        seed: of that choice.

    Attributes:
        index: int64 ``[N]``.
        greedy_text: whether all are in documents that the target generated greedily; otherwise
            there are none, and the positions are those where the text follows the target.

    Raises:
        ValueError: no position is left.
    """

    def __init__(
        self, corpus: Corpus, documents: Tensor, heads: int, most: int, seed: int = 0
    ) -> None:
        self.corpus = corpus
        self.heads = heads
        index, self.greedy_text = comparable_positions(corpus, documents, heads)
        generator = torch.Generator().manual_seed(seed)
        self.index = index[torch.randperm(len(index), generator=generator)[:most]]
        corpus.hidden.pin(self.index)

    @torch.no_grad()
    def measure(
        self, model: MLPSpeculatorPreTrainedModel, bf16: bool, batch_size: int = 1024
    ) -> Acceptance:
        """Draft at every position and compare.

        Args:
            model: the speculator, bound to its target if it shares weights.
            bf16: run under autocast.
            batch_size: positions per forward.
        """
        device = model.device
        was_training = model.training
        model.eval()
        right = torch.zeros(self.heads)
        for index in self.index.split(batch_size):
            hidden_states = self.corpus.hidden[index].to(device).float()
            last = self.corpus.tokens[index + 1].to(device)
            text = self.corpus.tokens[index[:, None] + 2 + torch.arange(self.heads)]
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                drafts = model.propose(hidden_states, last, self.heads).cpu()
            right += (drafts == text).long().cumprod(1).sum(0)
        model.train(was_training)
        return Acceptance((right / len(self.index)).tolist(), len(self.index))


def comparable_positions(corpus: Corpus, documents: Tensor, heads: int) -> tuple[Tensor, bool]:
    """Positions followed by ``heads`` tokens that the target would choose; see the module.

    Args:
        corpus: the data.
        documents: bool ``[num_documents]``, the documents to look in.
        heads: n.

    Returns:
        int64 ``[N]``, ascending, and whether all are in documents generated greedily.

    Raises:
        ValueError: there is none.
    """
    follows = is_target_choice(corpus)
    greedy = documents & is_greedy_document(corpus, follows)
    greedy_text = bool(greedy.any())
    chosen = greedy if greedy_text else documents
    index = torch.arange(max(len(corpus) - heads - 1, 0))
    index = index[chosen[corpus.document[index]]]
    drafted = index[:, None] + 2 + torch.arange(heads)
    usable = (corpus.document[drafted] == corpus.document[index][:, None]).all(1)
    usable &= (corpus.flag[drafted] & follows[drafted]).all(1)
    index = index[usable]
    if not len(index):
        raise ValueError(
            f"the {int(documents.sum())} held-out documents have no "
            f"position followed by {heads} tokens that the target would choose; generate "
            "more or longer documents, some of them greedily"
        )
    return index, greedy_text


def is_target_choice(corpus: Corpus) -> Tensor:
    """Where the text is a most probable token of the target: bool ``[T]``.

    Tokens of equal probability, which bfloat16 logits often have, all count.
    """
    previous = torch.arange(len(corpus) - 1)
    top_ids, logprobs = corpus.top_ids[previous], corpus.top_logprobs[previous]
    best = logprobs == logprobs[:, :1]
    matches = ((top_ids == corpus.tokens[1:, None]) & best).any(1)
    return torch.cat([matches.new_zeros(1), matches])


def is_greedy_document(corpus: Corpus, follows: Tensor | None = None) -> Tensor:
    """Documents whose flagged tokens are all the target's choice: bool ``[num_documents]``."""
    follows = is_target_choice(corpus) if follows is None else follows
    departs = torch.zeros(corpus.num_documents, dtype=torch.bool)
    departs[corpus.document[corpus.flag & ~follows]] = True
    return ~departs
