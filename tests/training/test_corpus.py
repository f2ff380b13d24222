"""Corpora on disk: what is written is read, nothing half-written counts, runs continue."""

import pytest
import torch

from hf_specdec.training import Corpus, CorpusMetadata, CorpusWriter, Document
from hf_specdec.training.corpus import ShardedRows

METADATA = CorpusMetadata("a/target", 4, 50, 3, "self_generated", {"lengths": (1, 2)})


def document(number: int, length: int = 5, hidden_size: int = 4) -> Document:
    generator = torch.Generator().manual_seed(number)
    return Document(
        document_id=number,
        tokens=torch.randint(50, (length,), generator=generator),
        flag=torch.arange(length) % 2,
        hidden=torch.randn(length, hidden_size, generator=generator).bfloat16(),
        top_ids=torch.randint(50, (length, 3), generator=generator),
        top_logprobs=-torch.rand(length, 3, generator=generator).bfloat16(),
    )


def write(directory, numbers, **kwargs) -> None:
    with CorpusWriter(directory, METADATA, **kwargs) as writer:
        for number in numbers:
            writer.add(document(number, length=3 + number))


def test_documents_come_back_across_shards(tmp_path):
    write(tmp_path, range(7), tokens_per_shard=10)
    assert len(list(tmp_path.glob("part-*.safetensors"))) > 2
    corpus = Corpus(tmp_path)
    assert corpus.num_documents == 7
    for number in range(7):
        expected = document(number, length=3 + number)
        rows = (corpus.document == number).nonzero()[:, 0].flip(0)
        assert corpus.tokens[rows].tolist() == expected.tokens.flip(0).tolist()
        assert corpus.flag[rows].tolist() == expected.flag.flip(0).bool().tolist()
        assert torch.equal(corpus.hidden[rows], expected.hidden.flip(0))
        assert torch.equal(corpus.top_ids[rows].long(), expected.top_ids.flip(0))
        assert torch.equal(corpus.top_logprobs[rows], expected.top_logprobs.flip(0))


def test_rows_of_several_shards_in_any_shape(tmp_path):
    write(tmp_path, range(7), tokens_per_shard=10)
    hidden = Corpus(tmp_path).hidden
    assert isinstance(hidden, ShardedRows)
    everything = hidden[torch.arange(len(hidden))]
    index = torch.tensor([[len(hidden) - 1, 0, 11], [10, 9, 30]])
    assert torch.equal(hidden[index], everything[index])
    assert torch.equal(hidden.columns(2)[index], everything[index][..., :2])


def test_wide_tensors_are_mapped_not_read(tmp_path):
    """Changing the file changes what is read: nothing was copied to memory."""
    write(tmp_path, range(3))
    corpus = Corpus(tmp_path)
    path = next(tmp_path.glob("part-*"))
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    before = corpus.hidden[torch.arange(len(corpus))]
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(bytes(len(content) - start))
    assert before.any()
    assert not corpus.hidden[torch.arange(len(corpus))].any()


def test_an_interrupted_corpus_continues(tmp_path):
    with pytest.raises(KeyboardInterrupt), CorpusWriter(tmp_path, METADATA) as writer:
        writer.add(document(0))
        writer.add(document(3))
        raise KeyboardInterrupt
    (tmp_path / "part-0001.tmp").write_bytes(b"half a shard")
    with CorpusWriter(tmp_path, METADATA) as writer:
        assert writer.document_ids == {0, 3}
        assert writer.num_tokens == 10
        writer.add(document(1))
    assert not list(tmp_path.glob("*.tmp"))
    corpus = Corpus(tmp_path)
    assert corpus.tokens.tolist() == sum((document(i).tokens.tolist() for i in (0, 3, 1)), [])


def test_several_corpora_are_read_as_one(tmp_path):
    write(tmp_path / "a", [0, 1])
    write(tmp_path / "b", [2])
    corpus = Corpus(tmp_path / "a", tmp_path / "b")
    assert corpus.document.bincount().tolist() == [3, 4, 5]
    expected = [document(i, length=3 + i).hidden for i in range(3)]
    assert torch.equal(corpus.hidden[torch.arange(12)], torch.cat(expected))
    CorpusMetadata("another/target", 4, 50, 3, "self_generated").write(tmp_path / "b")
    with pytest.raises(ValueError, match="target='another/target', the first has 'a/target'"):
        Corpus(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ValueError, match="directories is empty"):
        Corpus()


def test_other_settings_are_refused(tmp_path):
    write(tmp_path, range(2))
    other = CorpusMetadata("a/target", 4, 50, 3, "self_generated", {"lengths": (1, 3)})
    with pytest.raises(ValueError, match=r"settings .*\[1, 2\]"):
        CorpusWriter(tmp_path, other)


def test_a_document_that_does_not_fit_is_refused(tmp_path):
    with (
        CorpusWriter(tmp_path, METADATA) as writer,
        pytest.raises(ValueError, match=r"document 8: hidden must be \[5, 4\], got \[5, 6\]"),
    ):
        writer.add(document(8, hidden_size=6))


def test_folders_without_a_corpus(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"metadata\.json is missing"):
        Corpus(tmp_path)
    METADATA.write(tmp_path)
    with pytest.raises(FileNotFoundError, match="without any document"):
        Corpus(tmp_path)


def test_shards_of_another_corpus_are_refused(tmp_path):
    write(tmp_path, range(2))
    CorpusMetadata("a/target", 8, 50, 3, "self_generated").write(tmp_path)
    with pytest.raises(ValueError, match=r"hidden_size=4.* says 8"):
        Corpus(tmp_path)


def test_another_version_is_refused(tmp_path):
    CorpusMetadata("a/target", 8, 50, 3, "self_generated", format_version=9).write(tmp_path)
    with pytest.raises(ValueError, match="format_version=9"):
        CorpusMetadata.read(tmp_path)


def test_held_out_documents_stay_held_out(tmp_path):
    write(tmp_path, range(6))
    few = Corpus(tmp_path).is_held_out(3)
    write(tmp_path, range(6, 12))
    more = Corpus(tmp_path).is_held_out(3)
    assert few.sum() == 2
    assert more[:6].tolist() == few.tolist()
    with pytest.raises(ValueError, match="every=50"):
        Corpus(tmp_path).is_held_out(50)
