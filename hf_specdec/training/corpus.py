"""Training data on disk: documents with the target's hidden state at every token.

A corpus is a folder of ``metadata.json`` and shards ``part-0000.safetensors``, each a few dozen
megabytes and written whole or not at all. An MLP speculator has no attention, so every position is
a training example of its own, and the tensors of a shard are simply its documents end to end:

    tokens        int32 [T]
    flag          int8 [T]       1: the drafter learns to predict this token
    hidden        bf16 [T, d]    the target's state after its final norm, what lm_head reads;
                                 left out where it is to be computed again (`recomputed_states`)
    top_ids       int32 [T, k]   most probable next tokens, by descending probability
    top_logprobs  bf16 [T, k]    their log-probabilities under the target (over all of V)
    offsets       int64 [n + 1]  document j is rows offsets[j] .. offsets[j + 1]
    document_ids  int64 [n]      which documents they are, so that a writer can resume (optional)

``hidden[t]``, ``top_ids[t]`` and ``top_logprobs[t]`` are computed *from* the tokens up to and
including ``tokens[t]``: they predict ``tokens[t + 1]``.

Boundary: files and tensors. What is generated, and what is trained on it, is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_specdec.training.checkpoint import write_whole
from hf_specdec.training.corpus_metadata import (
    METADATA_FILE,
    CorpusMetadata,
    check_same_metadata,
)
from hf_specdec.training.corpus_shards import check_positions, check_shard
from hf_specdec.writer_lock import WriterLock

_SHARDS = "part-*.safetensors"
_DTYPES = {
    "tokens": torch.int32,
    "flag": torch.int8,
    "hidden": torch.bfloat16,
    "top_ids": torch.int32,
    "top_logprobs": torch.bfloat16,
}


@dataclass(frozen=True)
class Document:
    """One text of T tokens; the fields are the tensors of a shard without ``offsets``."""

    document_id: int
    tokens: Tensor
    flag: Tensor
    hidden: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


class CorpusWriter:
    """Appends documents to a corpus; a context manager that writes the last shard at the end.

    Opening a folder that already holds documents continues it: `document_ids` tells which are
    there, and a shard that was being written when a run died is discarded. Until it is left, no
    other process can open it.

    Args:
        directory: created if it is missing.
        metadata: must equal that of the documents already there.
        tokens_per_shard: a shard is written once it has so many tokens; that much can be lost.
            ``None``: only `flush` writes, at the end of documents that were made together, and an
            error discards the others. What is continued is then what would have been written
            without the interruption, bit by bit.

    Raises:
        ValueError: the folder holds a corpus with other metadata, or another run writes it.
    """

    def __init__(
        self,
        directory: str | Path,
        metadata: CorpusMetadata,
        tokens_per_shard: int | None = 60_000,
    ) -> None:
        self.directory = Path(directory)
        self.metadata = metadata
        self._tokens_per_shard = tokens_per_shard
        self._pending: list[Document] = []
        self._pending_tokens = 0
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = WriterLock(
            self.directory / "corpus",
            f"corpus={str(self.directory)!r}",
            "name another folder for the corpora",
        )
        self._lock.acquire()
        try:
            self._open()
        except BaseException:
            self._lock.release()
            raise

    def _open(self) -> None:
        """Find what is there, or begin."""
        metadata = self.metadata
        if (self.directory / METADATA_FILE).exists():
            check_same_metadata(self.directory, metadata)
        else:
            metadata.write(self.directory)
        for partial in self.directory.glob("*.tmp"):
            partial.unlink()
        self.document_ids: set[int] = set()
        self.num_tokens = 0
        self._next_shard = 0
        for path in shard_paths(self.directory):
            self._next_shard = int(path.stem.split("-")[1]) + 1
            check_shard(path, ("tokens",))
            with safe_open(path, framework="pt") as shard:
                self.num_tokens += shard.get_slice("tokens").get_shape()[0]
                if "document_ids" in shard.keys():  # noqa: SIM118  not a dict
                    self.document_ids.update(shard.get_tensor("document_ids").tolist())

    def __enter__(self) -> CorpusWriter:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            # After an interruption too, where documents stand for themselves: they are complete.
            if exc_type is None or self._tokens_per_shard is not None:
                self.flush()
        finally:
            self._lock.release()

    def add(self, document: Document) -> None:
        """Append one document; ``ValueError`` if its tensors do not fit the corpus."""
        _check_document(document, self.metadata)
        self.document_ids.add(document.document_id)
        self.num_tokens += len(document.tokens)
        self._pending.append(document)
        self._pending_tokens += len(document.tokens)
        if self._tokens_per_shard is not None and self._pending_tokens >= self._tokens_per_shard:
            self.flush()

    def flush(self) -> None:
        """Write what was added since the last shard."""
        if not self._pending:
            return
        tensors = {
            name: torch.cat([getattr(d, name).to("cpu", dtype) for d in self._pending]).contiguous()
            for name, dtype in _DTYPES.items()
            if name != "hidden" or self.metadata.has_states
        }
        lengths = torch.tensor([0, *(len(d.tokens) for d in self._pending)])
        tensors["offsets"] = lengths.cumsum(0)
        tensors["document_ids"] = torch.tensor([d.document_id for d in self._pending])
        path = self.directory / f"part-{self._next_shard:04d}.safetensors"
        write_whole(path, lambda partial: save_file(tensors, partial))
        self._next_shard += 1
        self._pending, self._pending_tokens = [], 0


class ShardedRows:
    """Rows ``[T, ..]`` that lie in several memory-mapped tensors, read by index."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._parts = list(parts)
        lengths = torch.tensor([len(part) for part in self._parts])
        self._ends = lengths.cumsum(0)
        self._starts = self._ends - lengths

    def __len__(self) -> int:
        return int(self._ends[-1])

    def pin(self, index: Tensor) -> None:
        """Nothing to do: the rows are read where they lie."""

    def columns(self, first: int) -> ShardedRows:
        """The same rows with only their first columns; nothing is read."""
        return ShardedRows([part[:, :first] for part in self._parts])

    def __getitem__(self, index: Tensor) -> Tensor:
        """The rows at ``index``, int64 of any shape ``[..]``; a new tensor ``[.., *row shape]``."""
        flat = index.flatten()
        which = torch.bucketize(flat, self._ends, right=True)
        first = self._parts[0]
        rows = first.new_empty((len(flat), *first.shape[1:]))
        for number in which.unique().tolist():
            here = (which == number).nonzero()[:, 0]
            rows[here] = self._parts[number][flat[here] - self._starts[number]]
        return rows.view(*index.shape, *first.shape[1:])


class States(Protocol):
    """Hidden states of a corpus, wherever they come from."""

    def __getitem__(self, index: Tensor) -> Tensor:
        """States ``[.., d]`` at ``index``, int64 of any shape ``[..]``."""

    def pin(self, index: Tensor) -> None:
        """Have the states at ``index`` (int64 ``[N]``) at hand: they are read again and again."""


class _NoStates:
    """In place of states that are not there."""

    def __getitem__(self, index: Tensor) -> Tensor:
        raise ValueError(
            "the corpus was written without hidden states; call recompute_states(corpus, target)"
        )

    def pin(self, index: Tensor) -> None:
        """Nothing to keep."""


class Corpus:
    """One or more corpora opened for reading, as if they were one.

    Tokens are in memory, everything wide is memory-mapped.

    Args:
        *directories: folders that a `CorpusWriter` filled, all for the same target.
        num_shards: read only the first so many shards of each folder, as they may have grown since
            a run began; ``None``: all.

    Attributes:
        metadata: of the first folder.
        tokens: int64 ``[T]``, all documents end to end.
        flag: bool ``[T]``, True where the drafter learns to predict the token.
        document: int64 ``[T]``, number of the document each token is in, 0 .. num_documents - 1.
        hidden, top_ids, top_logprobs: see the module; read by index.
        has_states: whether ``hidden`` is stored.
        blocks: int64 ``[T]``, which positions' states are computed together, where states are
            not stored; ``None`` where they are.

    Raises:
        FileNotFoundError: no corpus, or one without a shard, in a folder.
        ValueError: no folder, folders that do not fit together, or a shard that does not fit its
            metadata.
    """

    def __init__(self, *directories: str | Path, num_shards: Sequence[int] | None = None) -> None:
        if not directories:
            raise ValueError("directories is empty; name at least one folder with a corpus")
        self.directories = [Path(directory) for directory in directories]
        self.metadata = CorpusMetadata.read(self.directories[0])
        # On the CPU these are views of the mapped files.
        counts: Sequence[int | None] = num_shards or [None] * len(directories)
        shards = [
            shard
            for directory, count in zip(self.directories, counts, strict=True)
            for shard in _shards(directory, self.metadata, count)
        ]
        self.tokens = torch.cat([shard["tokens"] for shard in shards]).long()
        self.flag = torch.cat([shard["flag"] for shard in shards]) > 0
        lengths = torch.cat([shard["offsets"].diff() for shard in shards])
        self.num_documents = len(lengths)
        self.document = torch.arange(self.num_documents).repeat_interleave(lengths)
        self.has_states = all("hidden" in shard for shard in shards)
        self.hidden: States = _NoStates()
        if self.has_states:
            self.hidden = ShardedRows([shard["hidden"] for shard in shards])
        self.blocks: Tensor | None = None
        self.top_ids = ShardedRows([shard["top_ids"] for shard in shards])
        self.top_logprobs = ShardedRows([shard["top_logprobs"] for shard in shards])

    def __len__(self) -> int:
        return len(self.tokens)

    def is_held_out(self, every: int) -> Tensor:
        """Which documents are kept for evaluation: bool ``[num_documents]``, one in ``every``.

        A document stays on its side when the last of the folders grows.

        Raises:
            ValueError: the corpus has fewer documents than ``every``, so that none is held out.
        """
        if not 2 <= every <= self.num_documents:
            raise ValueError(
                f"every={every} holds out no document of {self.num_documents} or leaves none to "
                f"train on; it must be 2 to {self.num_documents}, so make more documents"
            )
        return torch.arange(self.num_documents) % every == every - 1


def shard_paths(directory: Path) -> list[Path]:
    """The shards of a corpus, in their order."""
    return sorted(directory.glob(_SHARDS))


def shard_tokens(path: Path) -> int:
    """Tokens of a shard; only its header is read."""
    with safe_open(path, framework="pt") as shard:
        return shard.get_slice("tokens").get_shape()[0]


def _shards(directory: Path, first: CorpusMetadata, count: int | None) -> list[dict[str, Tensor]]:
    metadata = CorpusMetadata.read(directory)
    for name in ("target", "hidden_size", "vocab_size", "top_k"):
        if getattr(metadata, name) != getattr(first, name):
            raise ValueError(
                f"directories: {str(directory)!r} has {name}={getattr(metadata, name)!r}, the "
                f"first has {getattr(first, name)!r}; train on corpora of one target together"
            )
    paths = shard_paths(directory)[:count]
    if not paths:
        raise FileNotFoundError(
            f"directory={str(directory)!r} holds a corpus without any document yet"
        )
    return [_open_shard(path, metadata) for path in paths]


def _open_shard(path: Path, metadata: CorpusMetadata) -> dict[str, Tensor]:
    names = [name for name in _DTYPES if name != "hidden" or metadata.has_states]
    check_shard(path, (*names, "offsets"))
    with safe_open(path, framework="pt") as shard:
        tensors = {name: shard.get_tensor(name) for name in (*names, "offsets")}
    check_positions(path, tensors, metadata.vocab_size)
    hidden_size, top_k = metadata.hidden_size, tensors["top_ids"].shape[1]
    if "hidden" in tensors:
        hidden_size = tensors["hidden"].shape[1]
    if (hidden_size, top_k) != (metadata.hidden_size, metadata.top_k):
        raise ValueError(
            f"{path} has hidden_size={hidden_size} and top_k={top_k}, but {METADATA_FILE} says "
            f"{metadata.hidden_size} and {metadata.top_k}; the folder mixes two corpora"
        )
    return tensors


def _check_document(document: Document, metadata: CorpusMetadata) -> None:
    length = len(document.tokens)
    shapes = {
        "tokens": (length,),
        "flag": (length,),
        "hidden": (length, metadata.hidden_size),
        "top_ids": (length, metadata.top_k),
        "top_logprobs": (length, metadata.top_k),
    }
    for name, shape in shapes.items():
        found = tuple(getattr(document, name).shape)
        if found != shape:
            raise ValueError(
                f"document {document.document_id}: {name} must be {list(shape)}, got {list(found)}"
            )
