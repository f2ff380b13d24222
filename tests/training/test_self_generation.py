"""The target's own text: equal to `generate`, aligned, and a function of seed and number."""

import pytest
import torch
from tiny_models import EOS

from hf_specdec.caches.ragged_cache import RaggedCache
from hf_specdec.training import ChatScripts, Corpus, PromptScripts, Temperatures, generate_corpus
from hf_specdec.training.evaluation import is_greedy_document

GREEDY = Temperatures(greedy_share=1.0)


def prompts(count: int = 9) -> list[list[int]]:
    generator = torch.Generator().manual_seed(8)
    lengths = [4, 1, 7, 3, 5, 2, 6, 9, 3][:count]
    return [torch.randint(3, 64, (n,), generator=generator).tolist() for n in lengths]


def generate(target, scripts, directory, num_tokens=10**6, **kwargs) -> Corpus:
    settings = {"stop_ids": [EOS], "batch_size": 3, "max_length": 40, "top_k": 6, **kwargs}
    generate_corpus(target, scripts, directory, num_tokens, progress=False, **settings)
    return Corpus(directory)


def by_id(corpus: Corpus) -> dict[int, list[int]]:
    from safetensors.torch import load_file

    paths = sorted(corpus.directories[0].glob("part-*"))
    ids = torch.cat([load_file(path)["document_ids"] for path in paths]).tolist()
    return {number: corpus.tokens[corpus.document == i].tolist() for i, number in enumerate(ids)}


@pytest.mark.parametrize("shared", [[], [7, 8, 9]], ids=["", "shared beginning"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_greedy_text_is_that_of_generate(family, shared, make_target, tmp_path):
    target = make_target(family)
    given = [shared + prompt for prompt in prompts()]
    scripts = PromptScripts(given, 20, GREEDY)
    assert list(scripts.prefix) == shared
    found = by_id(corpus := generate(target, scripts, tmp_path))
    assert sorted(found) == list(range(len(given)))
    lengths = set()
    for number, prompt in enumerate(given):
        ids = torch.tensor([prompt])
        expected = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=EOS,
        )
        assert found[number] == expected[0].tolist()
        lengths.add(len(expected[0]) - len(prompt))
    assert len(lengths) > 1, "rows that all end together test no restart"
    assert is_greedy_document(corpus).all()


@pytest.mark.parametrize("family", ["llama", "mistral", "granite"])
def test_aligned_with_a_plain_forward(family, make_target, check_alignment, tokenizer, tmp_path):
    """Restarted rows and the beginning they share included."""
    target = make_target(family)
    scripts = ChatScripts(tokenizer, ["", "Why"], max_user_tokens=5, max_new_tokens=9)
    corpus = generate(target, scripts, tmp_path, 400)
    assert corpus.num_documents > 10
    check_alignment(target, corpus)
    first = [corpus.tokens[corpus.document == i][:5].tolist() for i in range(10)]
    assert first == [list(scripts.prefix)] * 10
    assert 0 < is_greedy_document(corpus).sum() < corpus.num_documents


def test_documents_do_not_depend_on_the_batch(target, tokenizer, tmp_path):
    scripts = ChatScripts(tokenizer, max_user_tokens=5, max_new_tokens=9)
    one = by_id(generate(target, scripts, tmp_path / "1", 200, batch_size=1))
    many = by_id(generate(target, scripts, tmp_path / "4", 200, batch_size=4))
    common = one.keys() & many.keys()
    assert len(common) > 5
    assert all(one[number] == many[number] for number in common)
    assert len({tuple(tokens) for tokens in one.values()}) > 3
    other = by_id(generate(target, scripts, tmp_path / "seed", 200, seed=1))
    assert any(other[number] != one[number] for number in other.keys() & one.keys())


def test_an_interrupted_run_continues(target, tokenizer, tmp_path, monkeypatch):
    scripts = ChatScripts(tokenizer, max_user_tokens=5, max_new_tokens=9)
    whole = by_id(generate(target, scripts, tmp_path / "whole", 300))

    from hf_specdec.targets.target import RaggedTarget

    verify, calls = RaggedTarget.verify, []

    def interrupted(self, tokens):
        calls.append(1)
        if len(calls) > 60:
            raise KeyboardInterrupt
        return verify(self, tokens)

    monkeypatch.setattr(RaggedTarget, "verify", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(target, scripts, tmp_path / "cut", 300)
    assert 0 < Corpus(tmp_path / "cut").num_documents < len(whole)
    monkeypatch.undo()
    continued = by_id(generate(target, scripts, tmp_path / "cut", 300))
    common = continued.keys() & whole.keys()
    assert len(common) > len(whole) / 2
    assert all(continued[number] == whole[number] for number in common)
    # Enough already: nothing is added.
    assert by_id(generate(target, scripts, tmp_path / "cut", 100)) == continued


def test_every_document_that_was_begun_is_finished(target, tmp_path):
    """Dropping the unfinished ones would leave too many short documents."""
    corpus = generate(target, PromptScripts(prompts() * 9, 20, GREEDY), tmp_path, 150, stop_ids=[])
    whole = [len(prompt) + 20 for prompt in prompts() * 9]
    found = by_id(corpus)
    assert [len(found[i]) for i in sorted(found)] == whole[: len(found)]
    assert 150 <= len(corpus) < 150 + 2 * 30


def test_sampling_follows_the_temperature(target, tmp_path):
    """At almost no temperature a sample is greedy; at a very high one hardly ever."""
    for name, temperature, low, high in (("cold", 1e-3, 0.95, 1.0), ("hot", 50.0, 0.0, 0.4)):
        scripts = PromptScripts(prompts(), 20, Temperatures(0.0, temperature, temperature))
        corpus = generate(target, scripts, tmp_path / name, stop_ids=[])
        previous = corpus.flag.nonzero()[:, 0] - 1
        follows = corpus.top_ids[previous][:, 0] == corpus.tokens[previous + 1]
        assert low <= follows.float().mean() <= high
        among = (corpus.top_ids[previous] == corpus.tokens[previous + 1][:, None]).any(1)
        assert among.all()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"num_tokens": 0}, "num_tokens=0"),
        ({"top_k": 0}, "top_k=0"),
        ({"max_length": 6}, "max_length=6 leaves no room"),
    ],
)
def test_refusals(target, tokenizer, tmp_path, change, match):
    with pytest.raises(ValueError, match=match):
        generate(target, ChatScripts(tokenizer), tmp_path, **change)


def test_rows_of_a_cache_restart():
    padding = torch.zeros(2, dtype=torch.int64)
    cache = RaggedCache([None], ["full_attention"], padding, 1, 8)
    for value in range(3):
        cache.begin(1)
        states = torch.full((2, 1, 1, 1), float(value))
        cache.update(states, states, 0)
        cache.advance(torch.ones(2, dtype=torch.int64), [1, 1])
    cache.restart_rows([1], 2)
    cache.begin(1)
    keys, _ = cache.update(torch.full((2, 1, 1, 1), 9.0), torch.zeros(2, 1, 1, 1), 0)
    visible = cache.attention_masks()["full_attention"][:, 0, 0]
    assert keys[0, 0, visible[0], 0].tolist() == [0, 1, 2, 9]
    assert keys[1, 0, visible[1], 0].tolist() == [0, 1, 9]
    with pytest.raises(ValueError, match="length=4 is more"):
        cache.restart_rows([0, 1], 4)
    windowed = RaggedCache([4], ["sliding_attention"], padding, 1, 8)
    windowed.advance(padding + 3, [3, 3])
    with pytest.raises(ValueError, match="attend to a window"):
        windowed.restart_rows([0], 2)
