"""A tiny tokenizer, and corpora whose right answers are known."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_specdec.training import Corpus, CorpusMetadata, CorpusWriter, Document

MARKOV_VOCAB = 12
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if loop.first %}B S E {% endif %}{{ 'B ' + m.role + ' ' + m.content + ' E ' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'B assistant ' }}{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Words separated by spaces, ids below 64, E (id 2) ends a turn."""
    words = ["?", "B", "E", "S", "user", "assistant", "Why", "USERTEXT", "ASSISTANTTEXT"]
    words += [f"w{i}" for i in range(64 - len(words))]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="E", unk_token="?")
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def markov_documents(num_documents: int, length: int, greedy: bool) -> list[Document]:
    """Texts of a target whose next token depends on the last two, and which its state names.

    Token ``x[t + 1]`` is ``rule[x[t - 1], x[t]]``, except that it is any token half of the time;
    with ``greedy`` the documents of even number follow the rule throughout.
    """
    generator = torch.Generator().manual_seed(5)
    size = MARKOV_VOCAB
    rule = torch.randint(size, (size, size), generator=generator)
    documents = []
    for number in range(num_documents):
        tokens = torch.randint(size, (2,), generator=generator).tolist()
        wild = torch.rand(length, generator=generator) < (
            0.0 if greedy and number % 2 == 0 else 0.5
        )
        other = torch.randint(size, (length,), generator=generator)
        for t in range(1, length - 1):
            tokens.append(int(other[t] if wild[t] else rule[tokens[t - 1], tokens[t]]))
        x = torch.tensor(tokens)
        before = torch.cat([x[:1], x[:-1]])
        hidden = torch.cat([torch.eye(size)[before], torch.eye(size)[x]], dim=1)
        choice = rule[before, x]
        documents.append(
            Document(
                document_id=number,
                tokens=x,
                # The first two are the prompt.
                flag=torch.arange(length) > 1,
                hidden=hidden,
                top_ids=torch.stack([choice, (choice + 1) % size], dim=1),
                top_logprobs=torch.tensor([0.9, 0.05]).log().expand(length, 2),
            )
        )
    return documents


@pytest.fixture
def markov_corpus(tmp_path: Path) -> Callable[..., Corpus]:
    """``markov_corpus(shift=0)``: the corpus, with hidden states of ``shift`` tokens before."""

    def make(
        shift: int = 0,
        num_documents: int = 120,
        source: str = "self_generated",
        greedy: bool = True,
    ) -> Corpus:
        directory = tmp_path / f"markov-{source}-{shift}-{num_documents}"
        metadata = CorpusMetadata("markov", 2 * MARKOV_VOCAB, MARKOV_VOCAB, 2, source)
        with CorpusWriter(directory, metadata, tokens_per_shard=700) as writer:
            for document in markov_documents(num_documents, 24, greedy):
                fields = vars(document)
                fields = {**fields, "hidden": document.hidden.roll(shift, dims=0)}
                writer.add(Document(**fields))
        return Corpus(directory)

    return make


def _check_alignment(target, corpus: Corpus) -> None:
    """``hidden[t]`` and the top tokens are what the target computes from ``tokens[: t + 1]``."""
    head = target.get_output_embeddings()
    seen = []
    handle = head.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    for number in range(corpus.num_documents):
        rows = (corpus.document == number).nonzero()[:, 0]
        seen.clear()
        with torch.no_grad():
            logits = target(corpus.tokens[rows][None]).logits[0]
        logprobs = logits.float().log_softmax(-1)
        torch.testing.assert_close(corpus.hidden[rows].float(), seen[0][0], rtol=0.01, atol=0.02)
        assert corpus.top_ids[rows][:, 0].tolist() == logprobs.argmax(-1).tolist()
        top = logprobs.gather(1, corpus.top_ids[rows].long())
        torch.testing.assert_close(corpus.top_logprobs[rows].float(), top, rtol=0.01, atol=0.02)
    handle.remove()


@pytest.fixture
def check_alignment() -> Callable:
    """``check_alignment(target, corpus)`` fails unless states belong to their tokens."""
    return _check_alignment
