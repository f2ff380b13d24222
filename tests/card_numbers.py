"""What a training run and a benchmark could have written, for model cards."""

from typing import Any

RESULT: dict[str, Any] = {
    "format_version": 1,
    "created": "2026-01-31T12:00:00+00:00",
    "kind": "mlp",
    "target": {"name": "owner/target", "model_type": "llama", "dtype": "bfloat16"},
    "acceptance": {
        "per_position": [0.6123, 0.4, 0.25],
        "mean_acceptance_length": 2.26,
        "num_positions": 4096,
        "greedy_text": True,
    },
    "training": {
        "steps": 1500, "tokens_trained": 2_000_000, "stopped": "finished",
        "seconds": {"generation": 1200.0, "training": 600.0, "total": 1800.0},
        "continued_from": None,
    },
    "hardware": {
        "device": "cpu", "name": "Fast CPU | model 9", "processes": 2, "threads": 4,
        "torch": "2.13.0", "transformers": "5.24.0", "hf_specdec": "0.1.0",
    },
    "preset": "small",
    "settings": {"learning_rate": 0.001, "head_decay": 0.8},
    "data": {
        "description": "conversations that the target wrote",
        "datasets": ["owner/chats"],
        "corpora": [{"stage": "self_generated", "name": "c", "tokens": 1_000_000,
                     "documents": 4000}],
    },
}  # fmt: skip
SPEED: dict[str, Any] = {
    "machine": {"dtype": "bfloat16", "device": "cpu", "threads": 2},
    "rows": [
        {
            "batch": 1, "k": 3, "schedule": None, "plain_tokens_per_second": 48.01,
            "speculative_tokens_per_second": 78.15, "speedup_median": 1.636,
            "speedup_min": 1.257, "speedup_max": 2.139, "mean_acceptance_length": 1.816,
            "per_position": [0.476, 0.216, 0.124],
        }
    ],
}  # fmt: skip
