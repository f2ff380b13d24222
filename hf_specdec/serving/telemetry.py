"""What the server did, in the Prometheus text format, under vLLM's names."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from hf_specdec.metrics import SpeculationTotals
from hf_specdec.serving.rows import Row

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


class _Histogram:
    """Counts values in buckets, each up to its bound and one beyond."""

    def __init__(self, bounds: Sequence[float]):
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Suffix, labels and value of every line; buckets are cumulative."""
        bounds = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        for bound, count in zip(bounds, accumulate(self._counts), strict=True):
            yield "_bucket", {"le": bound}, count
        yield "_sum", {}, self._sum
        yield "_count", {}, sum(self._counts)


class Telemetry:
    """Counts for ``/metrics``; every method may be called from any thread.

    Args:
        model_name: the label of every line.
        prefix: of every name; ``"vllm"`` serves dashboards made for vLLM.
    """

    def __init__(self, model_name: str, prefix: str = "hf_specdec"):
        self._model_name = model_name
        self._prefix = prefix
        self._lock = threading.Lock()
        self._speculation = SpeculationTotals()
        self._logged_drafts = 0
        self._finished: dict[str, int] = {"stop": 0, "length": 0, "cancelled": 0}
        self._errors: dict[str, int] = {}
        self._prompt_tokens = 0
        self._batch_sizes = _Histogram(_ROWS)
        self._queue_time = _Histogram(_SECONDS)
        self._first_token = _Histogram(_SECONDS)
        self._latency = _Histogram(_SECONDS)
        self.num_waiting: Callable[[], int] = lambda: 0
        self.num_running: Callable[[], int] = lambda: 0

    def batch_started(self, num_rows: int) -> None:
        """Count a batch."""
        with self._lock:
            self._batch_sizes.observe(num_rows)

    def row_finished(self, row: Row) -> None:
        """Count a row and what it took."""
        assert row.started is not None and row.first_token is not None
        assert row.finished is not None and row.finish_reason is not None
        with self._lock:
            self._speculation.add(row.stats)
            self._finished[row.finish_reason] += 1
            self._prompt_tokens += len(row.prompt_ids)
            self._queue_time.observe(row.started - row.arrived)
            self._first_token.observe(row.first_token - row.arrived)
            self._latency.observe(row.finished - row.arrived)

    def log_line(self) -> str | None:
        """What speculation did since the line before; ``None`` if that is nothing."""
        drafts = self._speculation.snapshot().num_drafts
        if drafts == self._logged_drafts:
            return None
        self._logged_drafts = drafts
        return self._speculation.log_line()

    def request_refused(self, status: int) -> None:
        """Count an answer of 4xx or 5xx."""
        with self._lock:
            self._errors[str(status)] = self._errors.get(str(status), 0) + 1

    def text(self) -> str:
        """The page."""
        with self._lock:
            lines = [line for metric in self._metrics() for line in self._lines(*metric)]
        return "\n".join(lines) + "\n"

    def _metrics(self) -> Iterator[tuple[str, str, str, list[tuple[str, dict[str, str], float]]]]:
        """Name, kind, help and samples of every metric."""

        def one(value: float) -> list[tuple[str, dict[str, str], float]]:
            return [("", {}, value)]

        stats = self._speculation.snapshot()
        counter, gauge, histogram = "counter", "gauge", "histogram"
        yield "spec_decode_num_drafts_total", counter, "Drafts.", one(stats.num_drafts)
        name = "spec_decode_num_draft_tokens_total"
        yield name, counter, "Draft tokens.", one(stats.num_draft_tokens)
        name = "spec_decode_num_accepted_tokens_total"
        yield name, counter, "Accepted draft tokens.", one(stats.num_accepted_tokens)
        name = "spec_decode_num_accepted_tokens_per_pos_total"
        by_position = [
            ("", {"position": str(k)}, float(count))
            for k, count in enumerate(stats.accepted_per_position)
        ]
        yield name, counter, "Accepted draft tokens by position in the draft.", by_position
        yield "prompt_tokens_total", counter, "Tokens of prompts.", one(self._prompt_tokens)
        yield "generation_tokens_total", counter, "New tokens.", one(stats.num_new_tokens)
        finished = [("", {"finished_reason": k}, float(v)) for k, v in self._finished.items()]
        yield "request_success_total", counter, "Finished texts by reason.", finished
        errors = [("", {"status": k}, float(v)) for k, v in sorted(self._errors.items())]
        yield "request_errors_total", counter, "Requests answered with an error.", errors
        yield "num_requests_running", gauge, "Texts being generated.", one(self.num_running())
        yield "num_requests_waiting", gauge, "Texts in the queue.", one(self.num_waiting())
        for name, what, values in (
            ("batch_size", "Texts of a batch when it starts.", self._batch_sizes),
            ("request_queue_time_seconds", "From arrival to start.", self._queue_time),
            ("time_to_first_token_seconds", "From arrival to the first token.", self._first_token),
            ("e2e_request_latency_seconds", "From arrival to the end.", self._latency),
        ):
            yield name, histogram, what, list(values.samples())

    def _lines(
        self, name: str, kind: str, what: str, samples: list[tuple[str, dict[str, str], float]]
    ) -> Iterator[str]:
        name = f"{self._prefix}:{name}"
        yield f"# HELP {name} {what}"
        yield f"# TYPE {name} {kind}"
        for suffix, labels, value in samples:
            pairs = {"model_name": self._model_name, **labels}
            shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in pairs.items())
            yield f"{name}{suffix}{{{shown}}} {value}"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
