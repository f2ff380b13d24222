"""Given text: state and opinions at every token are those of a plain forward of the target."""

import sys

import pytest
import torch

from hf_specdec.training import Corpus, extract_ground_truth, tokenize_dataset


def texts(count: int = 9) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    lengths = [14, 3, 8, 1, 11, 6, 2, 13, 5][:count]
    return [torch.randint(3, 64, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("family", ["llama", "mistral", "granite", "gemma2", "gpt_bigcode"])
def test_aligned_with_a_plain_forward(family, make_target, check_alignment, tmp_path):
    target = make_target(family)
    num_tokens = extract_ground_truth(
        target, texts(), tmp_path, tokens_per_batch=40, max_length=16, top_k=6, progress=False
    )
    corpus = Corpus(tmp_path)
    # The text of one token has nothing to predict.
    assert num_tokens == len(corpus) == sum(len(text) for text in texts()) - 1
    assert corpus.flag.all()
    check_alignment(target, corpus)


def test_long_texts_are_cut(target, tmp_path):
    text = texts()[0] * 2
    extract_ground_truth(target, [text], tmp_path, max_length=10, top_k=2, progress=False)
    corpus = Corpus(tmp_path)
    assert corpus.document.bincount().tolist() == [8, 10, 10]
    assert sorted(corpus.tokens.tolist()) == sorted(text)


def test_continues_where_it_stopped(target, tmp_path):
    settings: dict = {"max_length": 16, "tokens_per_batch": 16, "top_k": 2, "progress": False}
    first = extract_ground_truth(target, texts(), tmp_path, num_tokens=10, **settings)
    assert 10 <= first < 40
    extract_ground_truth(target, texts(), tmp_path, **settings)
    corpus = Corpus(tmp_path)
    found = [corpus.tokens[corpus.document == i].tolist() for i in range(corpus.num_documents)]
    assert sorted(found) == sorted(text for text in texts() if len(text) > 1)


def test_batch_smaller_than_a_document(target, tmp_path):
    with pytest.raises(ValueError, match="max_length=16 must be 2 to tokens_per_batch=8"):
        extract_ground_truth(target, texts(), tmp_path, max_length=16, tokens_per_batch=8)


def test_text_files(tokenizer, tmp_path):
    pytest.importorskip("datasets")
    file = tmp_path / "a.txt"
    file.write_text("w1 w2\n\nw3 w4 w5\n")
    source = {"path": "text", "data_files": str(file), "split": "train"}
    found = list(tokenize_dataset(tokenizer, **source))
    assert [tokenizer.decode(tokens) for tokens in found] == ["w1 w2", "w3 w4 w5"]


def test_without_datasets(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"hf-specdec\[train\]"):
        next(tokenize_dataset(tokenizer, path="text"))
