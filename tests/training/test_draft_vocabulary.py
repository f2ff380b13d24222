"""The draft vocabulary: the most frequent ids, and what they cover."""

import pytest
import torch

from hf_specdec.training import choose_draft_token_ids, count_tokens, coverage


def test_counts_are_of_learned_tokens_and_top_choices(markov_corpus):
    corpus = markov_corpus(num_documents=30)
    corpus.flag[corpus.tokens == 3] = False
    documents = corpus.is_held_out(5)
    expected = torch.zeros(12)
    for t in range(1, len(corpus)):
        if corpus.flag[t] and documents[corpus.document[t]]:
            expected[corpus.tokens[t]] += 1
            expected[corpus.top_ids[torch.tensor([t - 1])][0, 0]] += 0.5
    assert count_tokens(corpus, documents).tolist() == expected.tolist()
    assert count_tokens(corpus).sum() > expected.sum()


def test_the_most_frequent_are_taken():
    counts = torch.tensor([5.0, 0, 9, 9, 1, 0])
    assert choose_draft_token_ids(counts, 3).tolist() == [0, 2, 3]
    assert choose_draft_token_ids(counts, 3, always=[5]).tolist() == [2, 3, 5]
    # Equal counts: the lowest id.
    assert choose_draft_token_ids(counts, 5).tolist() == [0, 1, 2, 3, 4]
    assert coverage(counts, torch.tensor([0, 2])) == pytest.approx(14 / 24)


@pytest.mark.parametrize(("size", "always"), [(0, []), (7, []), (1, [2, 3])])
def test_sizes_out_of_range(size, always):
    with pytest.raises(ValueError, match=f"size={size}"):
        choose_draft_token_ids(torch.ones(6), size, always)
