"""Which of the target's tokens the drafter can propose at all.

Most of a large vocabulary is hardly ever generated. A head that covers only the ids that occur
costs a fraction, and the coverage says how many tokens can no longer be drafted: an upper bound
for the acceptance rate of every head.

Boundary: counts in, ids out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_specdec.training.corpus import Corpus

# Tokens the target considered most probable but did not emit: likely elsewhere, seen once here.
_WEIGHT_OF_TOP_CHOICE = 0.5


def count_tokens(corpus: Corpus, documents: Tensor | None = None) -> Tensor:
    """How often every id is to be predicted.

    A token that the drafter learns to predict counts 1, and the target's most probable token at
    the same place counts 0.5, so that ids of sampled texts' other possibilities are seen too.

    Args:
        corpus: the data.
        documents: bool ``[num_documents]``, the documents to count; all if ``None``.

    Returns:
        float64 ``[V]``.
    """
    size = corpus.metadata.vocab_size
    learned = corpus.flag.clone()
    learned[0] = False
    if documents is not None:
        learned &= documents[corpus.document]
    index = learned.nonzero()[:, 0]
    counts = torch.bincount(corpus.tokens[index], minlength=size).double()
    top_choice = corpus.top_ids[index - 1][:, 0].long()
    return counts + _WEIGHT_OF_TOP_CHOICE * torch.bincount(top_choice, minlength=size)


def choose_draft_token_ids(counts: Tensor, size: int, always: Sequence[int] = ()) -> Tensor:
    """The ``size`` most frequent ids, ascending.

    Args:
        counts: ``[V]``, see `count_tokens`.
        size: Vd, 1 .. V.
        always: ids to take whatever their count, such as those that end a text.

    Returns:
        int64 ``[size]``, distinct, ascending.

    Raises:
        ValueError: ``size`` is out of range, or less than the number of ids in ``always``.
    """
    if not max(1, len(set(always))) <= size <= len(counts):
        raise ValueError(
            f"size={size} must be at least 1 and the {len(set(always))} ids of always, and at "
            f"most the {len(counts)} ids of the vocabulary"
        )
    counts = counts.clone()
    counts[list(always)] = torch.inf
    # Stable, so that ids of equal count are chosen the same way everywhere: lowest first.
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def coverage(counts: Tensor, token_ids: Tensor) -> float:
    """Share of the counted tokens that ``token_ids`` can express."""
    return float(counts[token_ids].sum() / counts.sum())
