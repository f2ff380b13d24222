"""The usage block of an answer: tokens, and what speculation did for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_specdec.metrics import SpeculationStats
from hf_specdec.serving.rows import Row


def speculation(stats: SpeculationStats) -> dict[str, Any]:
    """The statistics of one answer, under vLLM's names."""
    return {
        "num_drafts": stats.num_drafts,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "num_accepted_tokens_per_pos": stats.accepted_per_position,
        "acceptance_rate": round(stats.acceptance_rate, 6),
        "mean_acceptance_length": round(stats.mean_acceptance_length, 6),
    }


def _sum(rows: Sequence[Row]) -> SpeculationStats:
    return sum((row.stats for row in rows), SpeculationStats())


def of_completion(prompt_tokens: int, rows: Sequence[Row]) -> dict[str, Any]:
    """``usage`` of chat and text completions.

    Args:
        prompt_tokens: of all prompts, each counted once.
        rows: finished ones, all of the request.
    """
    stats = _sum(rows)
    completion_tokens = sum(row.num_tokens for row in rows)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens_details": {
            "accepted_prediction_tokens": stats.num_accepted_tokens,
            "rejected_prediction_tokens": stats.num_draft_tokens - stats.num_accepted_tokens,
        },
        "speculation": speculation(stats),
    }


def of_response(prompt_tokens: int, rows: Sequence[Row]) -> dict[str, Any]:
    """``usage`` of ``/v1/responses``, whose fields have other names."""
    output_tokens = sum(row.num_tokens for row in rows)
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + output_tokens,
        "speculation": speculation(_sum(rows)),
    }
