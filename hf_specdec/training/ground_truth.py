"""Stage 1 data: given text, and what the target thinks at each of its tokens.

Boundary: token lists in, a corpus out. Reading and tokenising text is the caller's, except for
`tokenize_dataset`, which does it with the library ``datasets``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.targets.prompt import Prompt
from hf_specdec.targets.target import RaggedTarget, TargetOutput
from hf_specdec.training.corpus import CorpusWriter, Document
from hf_specdec.training.corpus_metadata import CorpusMetadata
from hf_specdec.training.progress import progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@torch.no_grad()
def extract_ground_truth(
    target: PreTrainedModel,
    texts: Iterable[Sequence[int]],
    directory: str | Path,
    *,
    num_tokens: int | None = None,
    max_length: int = 1024,
    tokens_per_batch: int = 4096,
    top_k: int = 32,
    target_name: str | None = None,
    tokens_per_shard: int = 60_000,
    keep_states: bool = True,
    until: float | None = None,
    on_batch: Callable[[], None] | None = None,
    progress: bool = True,
) -> int:
    """Run the target over texts and write what it yields, or continue such a corpus.

    Args:
        target: any causal model with an output head, on any device, in evaluation mode.
        texts: token lists, in the same order every time. Long ones are cut into documents of
            ``max_length``; a remainder of one token is left out.
        directory: the corpus.
        num_tokens: stop once there are so many; ``None`` takes all texts.
        max_length: tokens per document at most.
        tokens_per_batch: tokens of one forward, padding included. Its logits, so many times V,
            must fit into memory.
        top_k: most probable tokens kept per position.
        target_name: recorded instead of the name the target was loaded from.
        tokens_per_shard: documents of so many tokens are sorted by length together, so that a
            batch has little padding, and written together. A run that is killed goes on behind
            them and ends with the same corpus, bit by bit.
        keep_states: see `CorpusMetadata.of_target`.
        until: a time of ``time.monotonic()`` after which no batch is run.
        on_batch: called after every forward; an exception ends the run.
        progress: show a bar.

    Returns:
        The number of tokens in the corpus.

    Raises:
        ValueError: a setting out of range, or a folder with a corpus made with other settings.
    """
    if not 2 <= max_length <= tokens_per_batch:
        raise ValueError(
            f"max_length={max_length} must be 2 to tokens_per_batch={tokens_per_batch}"
        )
    metadata = CorpusMetadata.of_target(
        target, "ground_truth", top_k, {"max_length": max_length}, target_name, keep_states
    )
    with (
        CorpusWriter(directory, metadata, tokens_per_shard=None) as writer,
        progress_bar("Reading", num_tokens, writer.num_tokens, progress) as advance,
    ):
        missing = (
            (number, document)
            for number, document in enumerate(_documents(texts, max_length))
            if number not in writer.document_ids
        )
        for group in _groups(missing, tokens_per_shard):
            for batch in length_batches(group, tokens_per_batch):
                if num_tokens is not None and writer.num_tokens >= num_tokens:
                    return writer.num_tokens
                if until is not None and time.monotonic() >= until:
                    return writer.num_tokens
                before = writer.num_tokens
                for document in _run(target, batch, top_k):
                    writer.add(document)
                advance(writer.num_tokens - before, "")
                if on_batch is not None:
                    on_batch()
            writer.flush()
        return writer.num_tokens


def _documents(texts: Iterable[Sequence[int]], max_length: int) -> Iterator[Sequence[int]]:
    for text in texts:
        for start in range(0, len(text), max_length):
            if len(piece := text[start : start + max_length]) > 1:
                yield piece


def _groups(
    documents: Iterator[tuple[int, Sequence[int]]], tokens: int
) -> Iterator[list[tuple[int, Sequence[int]]]]:
    """Consecutive documents of at least so many tokens together."""
    group: list[tuple[int, Sequence[int]]] = []
    length = 0
    for numbered in documents:
        group.append(numbered)
        length += len(numbered[1])
        if length >= tokens:
            yield group
            group, length = [], 0
    if group:
        yield group


def length_batches(
    group: list[tuple[int, Sequence[int]]], tokens_per_batch: int
) -> Iterator[list[tuple[int, Sequence[int]]]]:
    """Batches of documents of similar length, at most ``tokens_per_batch`` with their padding."""
    batch: list[tuple[int, Sequence[int]]] = []
    for numbered in sorted(group, key=lambda numbered: len(numbered[1])):
        # The newest is the longest, so it sets the padded length.
        if batch and (len(batch) + 1) * len(numbered[1]) > tokens_per_batch:
            yield batch
            batch = []
        batch.append(numbered)
    yield batch


def run_texts(target: PreTrainedModel, texts: Sequence[Sequence[int]]) -> TargetOutput:
    """One forward over right-padded texts. Padding comes last, so no token sees any.

    Returns:
        ``logits [B, N, V]`` and ``hidden_states [B, N, d]`` after the final norm, with N the
        length of the longest text.
    """
    embeddings: Any = target.get_input_embeddings()
    device = embeddings.weight.device
    longest = max(map(len, texts))
    input_ids = torch.zeros((len(texts), longest), dtype=torch.int64)
    for row, tokens in enumerate(texts):
        input_ids[row, : len(tokens)] = torch.as_tensor(tokens)
    padding = torch.zeros(len(texts), dtype=torch.int64, device=device)
    prompt = Prompt.plain(padding.new_empty((len(texts), 0)), padding)
    runner = RaggedTarget(target, prompt, longest, longest)
    with runner.capture():
        return runner.verify(input_ids.to(device))


def _run(
    target: PreTrainedModel, batch: list[tuple[int, Sequence[int]]], top_k: int
) -> Iterator[Document]:
    """The documents of one forward."""
    output = run_texts(target, [tokens for _, tokens in batch])
    top_ids, top_logprobs = top_log_probs(output.logits, top_k)
    hidden = output.hidden_states.bfloat16().cpu()
    top_ids, top_logprobs = top_ids.cpu(), top_logprobs.cpu()
    for row, (number, tokens) in enumerate(batch):
        length = len(tokens)
        yield Document(
            document_id=number,
            tokens=torch.as_tensor(tokens),
            flag=torch.ones(length),
            hidden=hidden[row, :length],
            top_ids=top_ids[row, :length],
            top_logprobs=top_logprobs[row, :length],
        )


def top_log_probs(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The most probable ids and their log-probabilities over all of V.

    Args:
        logits: ``[.., V]``, any float dtype.
        top_k: k.

    Returns:
        int64 ``[.., k]`` and float32 ``[.., k]``, by descending probability.
    """
    top_logits, top_ids = logits.topk(top_k, dim=-1)
    log_partition = torch.logsumexp(logits.float(), dim=-1, keepdim=True)
    return top_ids, top_logits.float() - log_partition


def tokenize_dataset(
    tokenizer: PreTrainedTokenizerBase, column: str = "text", **load_arguments: Any
) -> Iterator[list[int]]:
    """Token lists of a data set of texts, streamed by ``datasets.load_dataset``.

    Args:
        tokenizer: the target's.
        column: where the text is.
        **load_arguments: for ``load_dataset``, for example ``path="text", data_files="*.txt",
            split="train"``; ``streaming=True`` unless given.

    Raises:
        ImportError: the library ``datasets`` is not installed.
    """
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise ImportError(
            'reading data sets needs the library datasets: pip install "hf-specdec[train]"'
        ) from error
    for example in load_dataset(**{"streaming": True, **load_arguments}):
        if tokens := tokenizer.encode(example[column]):
            yield list(tokens)
