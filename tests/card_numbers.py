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
    "environment": {
        "dtype": "bfloat16", "device": "cpu", "processor": "Fast CPU", "threads": 2,
        "memory": "resident", "torch": "2.13.0",
    },
    "settings": {"target": "owner/target", "drafter": "drafter", "max_new_tokens": 128},
    "rows": [
        {
            "prompt_set": "chat", "batch": 1, "k": 3, "plain_tokens_per_second": 48.01,
            "speculative_tokens_per_second": 78.15,
            "speedup": {"median": 1.636, "min": 1.257, "max": 2.139},
            "mean_acceptance_length": 1.816, "per_position": [0.476, 0.216, 0.124],
            "texts": 16, "identical": 16, "near_ties": 0, "wrong": 0,
        }
    ],
}  # fmt: skip
