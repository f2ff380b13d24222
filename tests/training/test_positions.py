"""What each head reads and predicts, and where acceptance is measured."""

import pytest
import torch

from hf_specdec.training import Corpus, CorpusMetadata, CorpusWriter, Document, HeldOutPositions
from hf_specdec.training.evaluation import is_greedy_document, is_target_choice
from hf_specdec.training.positions import Positions, step_positions


@pytest.fixture
def corpus(tmp_path) -> Corpus:
    """Two documents, 10 11 .. 16 and 20 .. 24; the target always chooses token + 1."""
    with CorpusWriter(tmp_path, CorpusMetadata("t", 1, 64, 2, "self_generated")) as writer:
        for number, length in enumerate((7, 5)):
            tokens = torch.arange(length) + 10 * (number + 1)
            writer.add(
                Document(
                    document_id=number,
                    tokens=tokens,
                    flag=(tokens != 13) & (torch.arange(length) > 0),
                    hidden=tokens[:, None],
                    top_ids=torch.stack([tokens + 1, tokens + 30], 1),
                    top_logprobs=torch.tensor([-0.1, -3.0]).expand(length, 2),
                )
            )
    return Corpus(tmp_path)


def test_heads_read_and_predict_the_right_tokens(corpus):
    positions = Positions(corpus, torch.tensor([True, False]), heads=3)
    # From 10 the first head would predict 12, from 11 the unflagged 13, from 15 nothing.
    assert corpus.tokens[positions.index].tolist() == [10, 12, 13, 14]
    batch = positions.batch(positions.index, top_k=1)
    assert batch.hidden_states.tolist() == [[10.0], [12.0], [13.0], [14.0]]
    assert batch.input_ids[0].tolist() == [11, 12, 13]
    assert batch.labels[0].tolist() == [12, 13, 14]
    assert batch.top_ids[0].tolist() == [[12], [13], [14]]
    assert batch.top_logprobs.shape == (4, 3, 1)
    assert batch.mask.tolist() == [
        [True, False, True],
        [True, True, True],
        [True, True, False],
        [True, False, False],
    ]


def test_the_last_document_ends_the_corpus(corpus):
    positions = Positions(corpus, torch.tensor([False, True]), heads=3)
    assert corpus.tokens[positions.index].tolist() == [20, 21, 22]
    assert positions.batch(positions.index, 1).mask.sum(1).tolist() == [3, 2, 1]


def test_every_position_once_in_each_pass():
    order: dict = {}
    seen = torch.cat([step_positions(order, step, 4, 10, seed=3) for step in range(5)])
    assert sorted(seen[:10].tolist()) == sorted(seen[10:].tolist()) == list(range(10))
    assert seen[:10].tolist() != seen[10:].tolist()
    assert len(order) <= 2
    assert step_positions({}, 3, 4, 10, seed=3).tolist() == seen[12:16].tolist()
    assert step_positions({}, 0, 25, 10, seed=3).tolist() == [
        *seen.tolist(),
        *step_positions({}, 4, 5, 10, seed=3).tolist(),
    ]


def test_target_choice_with_equal_logits(corpus):
    assert is_target_choice(corpus).tolist() == [False, *[True] * 6, False, *[True] * 4]
    corpus.tokens[3] = corpus.tokens[2] + 30
    assert not is_target_choice(corpus)[3]
    # The first document's 13 is not flagged, so it is greedy all the same; its 14 counts.
    assert is_greedy_document(corpus).tolist() == [True, True]
    corpus.tokens[5] = 3
    assert is_greedy_document(corpus).tolist() == [False, True]


def test_tied_logits_are_the_targets_choice(corpus):
    corpus.top_logprobs = corpus.top_logprobs.columns(1)
    tied = corpus.top_logprobs[torch.arange(len(corpus))].expand(-1, 2)

    class Rows:
        def __getitem__(self, index):
            return tied[index]

    corpus.top_logprobs = Rows()  # type: ignore[assignment]
    corpus.tokens[4] = corpus.tokens[3] + 30
    assert is_target_choice(corpus)[4]


class Oracle(torch.nn.Module):
    """Drafts token + 1 each time, except that from 20 the second draft is wrong."""

    device = torch.device("cpu")

    def propose(self, hidden_states, input_ids, count):
        drafts = input_ids[:, None] + 1 + torch.arange(count)
        drafts[hidden_states[:, 0] == 20, 1] = 0
        return drafts


def test_acceptance_counts_prefixes(corpus):
    held_out = HeldOutPositions(corpus, torch.tensor([False, True]), heads=2, most=100)
    assert held_out.greedy_text
    assert sorted(corpus.tokens[held_out.index].tolist()) == [20, 21]
    result = held_out.measure(Oracle(), bf16=False)  # type: ignore[arg-type]
    assert result.per_position == [1.0, 0.5]
    assert result.mean_acceptance_length == 2.5
    assert str(result) == "mean acceptance length 2.500, per position 1.000 0.500"
    longer = HeldOutPositions(corpus, torch.tensor([False, True]), heads=3, most=100)
    assert longer.measure(Oracle(), bf16=False).per_position == [1.0, 0.0, 0.0]  # type: ignore[arg-type]


def test_text_that_is_not_greedy(corpus):
    """Then only places where the text follows the target's choice can tell."""
    corpus.tokens[9] = 5
    held_out = HeldOutPositions(corpus, torch.tensor([False, True]), heads=1, most=100)
    assert not held_out.greedy_text
    assert 9 not in (held_out.index + 2).tolist()


def test_nothing_to_measure(corpus):
    with pytest.raises(ValueError, match="no position followed by 6 tokens"):
        HeldOutPositions(corpus, torch.tensor([False, True]), heads=6, most=100)
