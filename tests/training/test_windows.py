"""Windows: every token once, in order, with its place and its document."""

import pytest
import torch

from hf_specdec.training import Corpus
from hf_specdec.training.positions import Positions
from hf_specdec.training.windows import Windows


def some_documents(corpus: Corpus) -> torch.Tensor:
    return torch.arange(corpus.num_documents) % 3 != 1


def test_windows_cover_the_documents(markov_corpus):
    corpus = markov_corpus(num_documents=12)  # of 24 tokens
    windows = Windows(corpus, some_documents(corpus), heads=2, window_length=20)
    expected = some_documents(corpus)[corpus.document].nonzero()[:, 0]
    assert windows.index.flatten().tolist() == expected[: len(expected) // 20 * 20].tolist()
    assert len(windows) == 8 * 24 // 20


def test_a_batch(markov_corpus):
    corpus = markov_corpus(num_documents=12)
    documents = some_documents(corpus)
    windows = Windows(corpus, documents, heads=2, window_length=20)
    index = windows.index[[0, 3]]
    batch = windows.batch(index, top_k=2)
    assert batch.document.tolist() == corpus.document[index].tolist()
    # Documents have 24 tokens; the places are theirs, not the window's.
    assert batch.position_ids.tolist() == (index % 24).tolist()
    alone = Positions(corpus, documents, 2).batch(index.flatten(), 2)
    for name, tensor in vars(batch.entries).items():
        assert torch.equal(tensor, getattr(alone, name)), name


def test_documents_that_fill_no_window(markov_corpus):
    corpus = markov_corpus(num_documents=12)
    with pytest.raises(ValueError, match="window_length=200 is more than the 192 tokens"):
        Windows(corpus, some_documents(corpus), heads=1, window_length=200)


def test_windows_without_anything_to_learn_are_left_out(markov_corpus):
    corpus = markov_corpus(num_documents=12)
    everything = torch.ones(12, dtype=torch.bool)
    corpus.flag[: 5 * 24] = False
    windows = Windows(corpus, everything, heads=1, window_length=24)
    assert windows.index[:, 0].tolist() == [24 * i for i in range(5, 12)]
