"""States computed again are those that would have been stored, in any order of reading."""

import pytest
import torch

from hf_specdec.training import Corpus, PromptScripts, generate_corpus
from hf_specdec.training.positions import epoch_order, step_positions
from hf_specdec.training.recomputed_states import RecomputedStates, recompute_states


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """The same documents with and without states."""
    from tiny_models import _target

    target = _target("llama")
    prompts = [[1, 3 + i, 9 + i % 7] for i in range(30)]
    folders = []
    for keep in (True, False):
        folder = tmp_path_factory.mktemp(f"states-{keep}")
        generate_corpus(
            target, PromptScripts(prompts, 25), folder, 600, stop_ids=[2], batch_size=4,
            top_k=3, keep_states=keep, progress=False,
        )  # fmt: skip
        folders.append(folder)
    return target, Corpus(folders[0]), folders[1]


def test_equal_to_what_is_stored(corpora):
    target, stored, folder = corpora
    corpus = Corpus(folder)
    assert torch.equal(corpus.tokens, stored.tokens) and not corpus.has_states
    with pytest.raises(ValueError, match="written without hidden states; call recompute_states"):
        corpus.hidden[torch.tensor([0])]
    recompute_states(corpus, target, block_tokens=100)
    assert corpus.blocks is not None and int(corpus.blocks.max()) >= 3
    # No document is in two blocks.
    for number in range(corpus.num_documents):
        assert len(corpus.blocks[corpus.document == number].unique()) == 1
    index = torch.randperm(len(corpus))[:200].view(2, -1)
    torch.testing.assert_close(corpus.hidden[index], stored.hidden[index], rtol=0.01, atol=0.02)


def test_the_same_bits_however_they_are_read(corpora):
    target, _, folder = corpora
    first, second = (RecomputedStates(target, Corpus(folder), block_tokens=60) for _ in range(2))
    everything = first[torch.arange(len(first))]
    for index in torch.randperm(len(first)).split(50):
        assert torch.equal(second[index], everything[index])


def test_blocks_are_run_once_in_a_pass(corpora, count_forwards):
    target, _, folder = corpora
    corpus = Corpus(folder)
    recompute_states(corpus, target, block_tokens=100)
    assert corpus.blocks is not None
    # Positions in the order that training reads them.
    order: dict[int, torch.Tensor] = {}
    with count_forwards(target) as forwards:
        for step in range(len(corpus) // 20):
            corpus.hidden[step_positions(order, step, 20, len(corpus), 0, corpus.blocks)]
    assert len(forwards) == int(corpus.blocks.max()) + 1
    # A pinned position is not computed again.
    index = torch.tensor([3, 200, 300])
    corpus.hidden.pin(index)
    with count_forwards(target) as forwards:
        corpus.hidden[index.flip(0)]
    assert forwards == []


def test_blocks_are_shuffled_and_stay_together():
    blocks = torch.arange(40) // 10
    order = epoch_order(40, 0, 0, blocks)
    assert sorted(order.tolist()) == list(range(40))
    runs = blocks[order].unique_consecutive().tolist()
    assert sorted(runs) == [0, 1, 2, 3] and runs != [0, 1, 2, 3]
    assert order[:10].tolist() != sorted(order[:10].tolist())
    assert order.tolist() != epoch_order(40, 1, 0, blocks).tolist()
