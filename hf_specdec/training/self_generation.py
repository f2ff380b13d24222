"""Stage 2 data: documents that the target writes itself, generated in a continuous batch.

Every row of the batch works through one document's script and takes the next document when it is
done, while the other rows go on. The hidden states and the most probable tokens that training needs
are those of the forwards that generate, so they cost nothing extra.

A document is a function of the seed and its number: scripts and sampling noise depend on nothing
else (up to the rounding of a batched forward). So an interrupted run continues with the documents
that are missing, and the batch size does not change the data.

Boundary: runs the target; what is generated is the script's, where it goes is the writer's.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.caches.ragged_cache import compact_order
from hf_specdec.noise import gumbel
from hf_specdec.targets.layer_types import attention_layers
from hf_specdec.targets.prompt import Prompt
from hf_specdec.targets.target import RaggedTarget
from hf_specdec.training.corpus import CorpusWriter, Document
from hf_specdec.training.corpus_metadata import CorpusMetadata
from hf_specdec.training.documents import DocumentInProgress
from hf_specdec.training.ground_truth import top_log_probs
from hf_specdec.training.progress import progress_bar
from hf_specdec.training.scripts import ScriptSource


def generate_corpus(
    target: PreTrainedModel,
    scripts: ScriptSource,
    directory: str | Path,
    num_tokens: int | None,
    *,
    stop_ids: Sequence[int],
    batch_size: int = 64,
    max_length: int = 512,
    seed: int = 0,
    top_k: int = 32,
    sample_top_k: int | None = None,
    target_name: str | None = None,
    tokens_per_shard: int = 60_000,
    round_size: int | None = None,
    keep_states: bool = True,
    until: float | None = None,
    on_step: Callable[[], None] | None = None,
    progress: bool = True,
) -> int:
    """Write a corpus of the target's own text, or continue one.

    Args:
        target: any causal model with an output head, on any device, in evaluation mode.
        scripts: what to generate.
        directory: the corpus.
        num_tokens: start no document once there are so many; those under way are finished.
            ``None``: go on until the scripts end, or the time.
        stop_ids: tokens that end every free segment: the target's end-of-sequence tokens.
        batch_size: rows of the batch.
        max_length: a document is cut off at this length.
        seed: of scripts and sampling.
        top_k: most probable tokens kept per position; sampling is among these.
        sample_top_k: sampling is among so many, where that is fewer.
        target_name: recorded instead of the name the target was loaded from.
        tokens_per_shard: see `CorpusWriter`.
        round_size: documents that are generated together, without others. A run that is killed
            goes on at the beginning of a round and ends with the same corpus, bit by bit; at the
            end of a round, fewer and fewer rows are at work. ``None``: no rounds, and after an
            interruption order and rounding are others.
        keep_states: see `CorpusMetadata.of_target`.
        until: a time of ``time.monotonic()`` at which documents under way are cut off, and the
            run ends.
        on_step: called after every forward; an exception ends the run.
        progress: show a bar.

    Returns:
        The number of tokens in the corpus.

    Raises:
        ValueError: a setting out of range; a target with recurrent layers; a folder with a corpus
            made with other settings, or that another run writes.
    """
    _check(scripts, num_tokens, batch_size, max_length, top_k, sample_top_k, round_size)
    metadata = CorpusMetadata.of_target(
        target,
        "self_generated",
        top_k,
        _settings(scripts, seed, stop_ids, max_length, sample_top_k),
        target_name,
        keep_states,
    )
    shard = tokens_per_shard if round_size is None else None
    with (
        CorpusWriter(directory, metadata, shard) as writer,
        progress_bar("Generating", num_tokens, writer.num_tokens, progress) as advance,
    ):
        pace = _Pace(writer.num_tokens, until)
        while num_tokens is None or writer.num_tokens < num_tokens:
            batch = _ContinuousBatch(
                target,
                scripts,
                writer,
                num_tokens,
                frozenset(stop_ids),
                batch_size,
                max_length,
                seed,
                sample_top_k,
                round_size,
            )
            if not batch.num_rows:
                break
            for new_tokens in batch.run():
                advance(new_tokens, pace.status(writer.num_tokens, batch.num_rows))
                if on_step is not None:
                    on_step()
                if until is not None and time.monotonic() >= until:
                    batch.cut_off()
            writer.flush()
            if until is not None and time.monotonic() >= until:
                break
        return writer.num_tokens


def _settings(
    scripts: ScriptSource,
    seed: int,
    stop_ids: Sequence[int],
    max_length: int,
    sample_top_k: int | None,
) -> dict[str, Any]:
    """What the documents are a function of, for the metadata."""
    return {
        "seed": seed,
        "stop_ids": list(stop_ids),
        "max_length": max_length,
        "scripts": {"kind": type(scripts).__name__, **scripts.settings()},
        # Absent unless asked for, as in corpora that were made before it could be.
        **({} if sample_top_k is None else {"sample_top_k": sample_top_k}),
    }


def _check(
    scripts: ScriptSource,
    num_tokens: int | None,
    batch_size: int,
    max_length: int,
    top_k: int,
    sample_top_k: int | None,
    round_size: int | None,
) -> None:
    """Raise ValueError for a setting out of range."""
    values = {"batch_size": batch_size, "num_tokens": num_tokens, "top_k": top_k}
    for name, value in {**values, "round_size": round_size}.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if sample_top_k is not None and not 1 <= sample_top_k <= top_k:
        raise ValueError(f"sample_top_k={sample_top_k} must be 1 to top_k={top_k}")
    if max_length <= len(scripts.prefix) + 1:
        raise ValueError(
            f"max_length={max_length} leaves no room behind the {len(scripts.prefix)} tokens that "
            "every document begins with"
        )


class _Pace:
    """What there will be when the time is up, by the pace so far."""

    def __init__(self, num_tokens: int, until: float | None) -> None:
        self._first = num_tokens
        self._until = until
        self._started = time.monotonic()

    def status(self, num_tokens: int, rows: int) -> str:
        """For the progress bar, with so many tokens written."""
        status = f"{rows} documents under way"
        now = time.monotonic()
        if self._until is None or num_tokens == self._first:
            return status
        pace = (num_tokens - self._first) / (now - self._started)
        left = max(self._until - now, 0.0)
        expected = (num_tokens + pace * left) / 1e6
        return f"{status}, {left / 60:.0f} min left, about {expected:.2f} M tokens by then"


class _ContinuousBatch:
    """Rows and their documents; one call of the target per token."""

    def __init__(
        self,
        target: PreTrainedModel,
        scripts: ScriptSource,
        writer: CorpusWriter,
        num_tokens: int | None,
        stop_ids: frozenset[int],
        batch_size: int,
        max_length: int,
        seed: int,
        sample_top_k: int | None,
        round_size: int | None,
    ) -> None:
        self._target = target
        self._scripts = scripts
        self._writer = writer
        self._num_tokens = num_tokens
        self._sample_top_k = sample_top_k
        self._stop_ids = stop_ids
        self._max_length = max_length
        self._seed = seed
        self._top_k = writer.metadata.top_k
        self._next_id = 0
        self._skip_written()
        self._last_id = None if round_size is None else self._next_id + round_size - 1
        embeddings: Any = target.get_input_embeddings()
        self._device: torch.device = embeddings.weight.device
        # A layer with a window forgets the common beginning, so there each row runs it again.
        windows, _ = attention_layers(target)
        keeps_prefix = all(window is None for window in windows)
        self._shared_length = max(len(scripts.prefix) - 1, 0) if keeps_prefix else 0
        self._documents: list[DocumentInProgress] = []
        while len(self._documents) < batch_size and (document := self._next_document()):
            self._documents.append(document)
        rows = len(self._documents)
        zeros = torch.zeros(rows, dtype=torch.int64, device=self._device)
        no_prompt = zeros.new_empty((rows, 0))
        self._runner = RaggedTarget(target, Prompt.plain(no_prompt, zeros), 1, max_length)
        config = writer.metadata
        self._hidden = torch.zeros(
            rows, max_length, config.hidden_size, dtype=torch.bfloat16, device=self._device
        )
        self._top_ids = zeros.new_zeros((rows, max_length, self._top_k), dtype=torch.int32)
        self._top_logprobs = torch.zeros_like(self._top_ids, dtype=torch.bfloat16)

    @property
    def num_rows(self) -> int:
        """Documents under way."""
        return len(self._documents)

    @torch.no_grad()
    def run(self) -> Iterator[int]:
        """Generate until all are finished; after each forward yields the tokens it completed."""
        with self._runner.capture():
            while self._documents:
                before = self._writer.num_tokens
                self._step()
                yield self._writer.num_tokens - before

    def cut_off(self) -> None:
        """Write what has been run of the documents under way, and end."""
        for row, document in enumerate(self._documents):
            del document.tokens[document.position :], document.learn[document.position :]
            if any(document.learn):
                self._write(row)
        self._documents = []

    def _next_document(self) -> DocumentInProgress | None:
        under_way = sum(len(d.tokens) for d in self._documents if not d.finished)
        known = self._writer.num_tokens + under_way
        if self._num_tokens is not None and known >= self._num_tokens:
            return None
        self._skip_written()
        number = self._next_id
        if self._last_id is not None and number > self._last_id:
            return None
        rng = random.Random(f"{self._seed}/{number}")
        row_seed = rng.getrandbits(63)
        script = self._scripts.script(number, rng)
        if script is None:
            return None
        self._next_id += 1
        return DocumentInProgress(
            number, row_seed, self._scripts.prefix, script, self._stop_ids, self._max_length
        )

    def _skip_written(self) -> None:
        while self._next_id in self._writer.document_ids:
            self._next_id += 1

    def _step(self) -> None:
        """Run the newest token of every row, keep what it yields, choose the next tokens."""
        documents = self._documents
        rows = torch.arange(len(documents), device=self._device)
        host_positions = [document.position for document in documents]
        positions = torch.tensor(host_positions, device=self._device)
        tokens = [document.tokens[document.position] for document in documents]
        output = self._runner.verify(torch.tensor(tokens, device=self._device)[:, None])
        self._runner.cache.advance(torch.ones_like(rows), [1] * len(documents))
        logits = output.logits[:, -1].to(self._device)
        top_ids, logprobs = top_log_probs(logits, self._top_k)
        self._hidden[rows, positions] = output.hidden_states[:, -1].to(self._hidden)
        self._top_ids[rows, positions] = top_ids.int()
        self._top_logprobs[rows, positions] = logprobs.bfloat16()
        chosen = self._choose(logits, top_ids, logprobs, positions)
        finished = []
        for row, (document, token) in enumerate(zip(documents, chosen, strict=True)):
            if not document.advance(token):
                finished.append(row)
        if finished:
            self._replace(finished)

    def _choose(
        self, logits: Tensor, top_ids: Tensor, logprobs: Tensor, positions: Tensor
    ) -> list[int]:
        """The target's choice for every row, by the temperature its document has now."""
        temperatures = [document.temperature for document in self._documents]
        # Not the first of the top k: among equal logits argmax takes the lowest id, as generate.
        greedy = logits.argmax(-1)
        if not any(temperatures):
            return greedy.tolist()
        temperature = torch.tensor(temperatures, device=self._device)
        seeds = torch.tensor([d.row_seed for d in self._documents], device=self._device)
        noise = gumbel(seeds[:, None], positions[:, None] + 1, top_ids)
        if self._sample_top_k is not None:
            top_ids, logprobs = top_ids[:, : self._sample_top_k], logprobs[:, : self._sample_top_k]
            noise = noise[:, : self._sample_top_k]
        noisy = logprobs / temperature.clamp(min=1e-6)[:, None] + noise
        sampled = top_ids.gather(1, noisy.argmax(-1, keepdim=True))[:, 0]
        return torch.where(temperature > 0, sampled, greedy).tolist()

    def _replace(self, finished: list[int]) -> None:
        """Write finished documents and give their rows the next ones, or drop the rows."""
        for row in finished:
            self._write(row)
        restarted = []
        for row in finished:
            if document := self._next_document():
                # The common beginning's keys and states are still in this row. Its last token is
                # run again, as the choice that follows it is the new document's own.
                document.position = self._shared_length
                self._documents[row] = document
                restarted.append(row)
        self._runner.cache.restart_rows(restarted, self._shared_length)
        if len(restarted) < len(finished):
            self._drop_finished()

    def _write(self, row: int) -> None:
        document = self._documents[row]
        length = len(document.tokens)
        self._writer.add(
            Document(
                document_id=document.document_id,
                tokens=torch.tensor(document.tokens),
                flag=torch.tensor(document.learn),
                # Copies, as the row's buffers are written again.
                hidden=self._hidden[row, :length].cpu().clone(),
                top_ids=self._top_ids[row, :length].cpu().clone(),
                top_logprobs=self._top_logprobs[row, :length].cpu().clone(),
            )
        )

    def _drop_finished(self) -> None:
        order = compact_order([not document.finished for document in self._documents])
        self._documents = [self._documents[source] for source in order]
        for row, source in enumerate(order):
            if row != source:
                for buffer in (self._hidden, self._top_ids, self._top_logprobs):
                    buffer[row] = buffer[source]
        if order:
            self._runner.keep_rows(order)
