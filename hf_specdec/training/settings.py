"""Settings of a training run, and presets with published or tested numbers.

The learning rate of a stage rises for its warm-up and then falls with half a cosine:

    factor(x) = peak * min(rise(x), f + (1 - f) (1 + cos(pi x / steps)) / 2),   f = final / peak
    rise(x) = x / w (linear), or 1 - (1 - x / w)^2 (parabolic), for x < w = the warm-up steps

Boundary: numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True)
class StageSettings:
    """One stage.

    Attributes:
        steps: optimiser steps; ``None`` derives them from ``epochs``.
        epochs: passes over the examples, used without ``steps``.
        batch_size: examples per step: positions of an MLP speculator, windows of an MTP layer.
        peak, final: learning rates after the warm-up and at the end, relative to the run's.
        warmup_share: warm-up as a share of the steps, but at most ``warmup_most`` steps.
        warmup_shape: how the rate rises.
    """

    steps: int | None = None
    epochs: float = 1.0
    batch_size: int = 2048
    peak: float = 1.0
    final: float = 0.05
    warmup_share: float = 0.1
    warmup_most: int = 200
    warmup_shape: Literal["linear", "parabolic"] = "linear"

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps={self.steps} must be at least 1, or None to use epochs")
        if self.epochs <= 0:
            raise ValueError(f"epochs={self.epochs} must be positive")
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} must be at least 1")
        if not 0 <= self.final <= self.peak:
            raise ValueError(f"final={self.final} must be 0 to peak={self.peak}")
        if self.warmup_shape not in ("linear", "parabolic"):
            raise ValueError(f"warmup_shape={self.warmup_shape!r} must be 'linear' or 'parabolic'")

    def num_steps(self, num_examples: int) -> int:
        """Optimiser steps over so many examples, at least one."""
        if self.steps is not None:
            return self.steps
        return max(1, round(self.epochs * num_examples / self.batch_size))

    def warmup_steps(self, steps: int) -> int:
        """Steps of the warm-up of a stage of ``steps``."""
        return min(self.warmup_most, int(steps * self.warmup_share))

    def factor(self, step: int, steps: int) -> float:
        """Learning rate at ``step``, 0 .. steps - 1, as a multiple of the run's."""
        # Counted from 1, as a step of rate 0 would be wasted.
        done, warmup = step + 1, self.warmup_steps(steps)
        rise = 1.0
        if done < warmup:
            rise = done / warmup
            if self.warmup_shape == "parabolic":
                rise = 1 - (1 - rise) ** 2
        floor = self.final / self.peak if self.peak else 0.0
        fall = floor + (1 - floor) * (1 + math.cos(math.pi * done / steps)) / 2
        return self.peak * min(rise, fall)


@dataclass(frozen=True)
class TrainingSettings:
    """A run of up to two stages: ground-truth text, then the target's own generations.

    Attributes:
        learning_rate: of AdamW; the stages scale it.
        betas, weight_decay: of AdamW.
        clip_norm: gradients are scaled down to this norm.
        head_decay: head i counts ``head_decay ** i`` in the loss.
        head_weights: what each head counts instead, one number for each; ``None``: by head_decay.
        accumulation: a step's examples are run in so many parts, each on its own, which takes less
            memory. The examples of a step are ``batch_size`` in any case.
        objective: ``"distillation"`` towards the target's probabilities, or ``"cross_entropy"`` on
            the tokens of the text.
        distill_top_k: most probable tokens of the target that are distilled.
        num_sampled: draw so many ids per step for a sampled softmax; 0 computes the full one, as
            does a vocabulary that has no more ids than are drawn and frequent.
        num_frequent: ids that are part of every sampled softmax, by frequency.
        precision: ``"bf16"`` runs the forward under autocast, ``"fp32"`` does not.
        held_out_every: one document in so many is for evaluation only.
        evaluate_every, evaluate_positions: how often, and on how many positions at most.
        checkpoint_every: steps between resumable checkpoints.
        patience: stop after so many evaluations without a better one; ``None`` never does.
        seed: of the order of the positions and of the sampled softmax.
        save_dtype: dtype of the saved weights.
        ground_truth, self_generated: the two stages.
    """

    learning_rate: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    head_decay: float = 0.8
    head_weights: tuple[float, ...] | None = None
    accumulation: int = 1
    objective: Literal["distillation", "cross_entropy"] = "distillation"
    distill_top_k: int = 8
    num_sampled: int = 0
    num_frequent: int = 4096
    precision: Literal["bf16", "fp32"] = "bf16"
    held_out_every: int = 20
    evaluate_every: int = 200
    evaluate_positions: int = 4096
    checkpoint_every: int = 500
    patience: int | None = None
    seed: int = 0
    save_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    ground_truth: StageSettings = field(default_factory=StageSettings)
    self_generated: StageSettings = field(default_factory=lambda: StageSettings(epochs=3.0))

    def __post_init__(self) -> None:
        choices = {
            "objective": ("distillation", "cross_entropy"),
            "precision": ("bf16", "fp32"),
            "save_dtype": ("bfloat16", "float16", "float32"),
        }
        for name, allowed in choices.items():
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name}={value!r} must be one of {', '.join(allowed)}")
        counts = ("distill_top_k", "evaluate_every", "evaluate_positions", "checkpoint_every")
        for name in (*counts, "accumulation"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.head_weights is not None and not (
            self.head_weights and min(self.head_weights) >= 0 and max(self.head_weights) > 0
        ):
            raise ValueError(
                f"head_weights={self.head_weights} must be one number for each head, none of them "
                "negative and not all 0"
            )
        for name in ("num_sampled", "num_frequent"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name}={value} must not be negative")

    def weights_of(self, heads: int) -> tuple[float, ...]:
        """What each of ``heads`` heads counts in the loss.

        Raises:
            ValueError: ``head_weights`` is of another length.
        """
        if self.head_weights is None:
            return tuple(self.head_decay**i for i in range(heads))
        if len(self.head_weights) != heads:
            raise ValueError(
                f"head_weights has {len(self.head_weights)} numbers, but there are {heads} heads"
            )
        return self.head_weights

    def check_parts(self, processes: int) -> None:
        """Raise ValueError unless a step can be divided among processes and ``accumulation``."""
        parts = self.accumulation * processes
        for name in ("ground_truth", "self_generated"):
            if (size := getattr(self, name).batch_size) % parts:
                raise ValueError(
                    f"{name}.batch_size={size} can't be divided among {processes} processes with "
                    f"accumulation={self.accumulation}; choose a multiple of {parts}"
                )


def ibm_settings() -> TrainingSettings:
    """IBM's recipe, ``scripts/train_speculator.sh`` of fms-fsdp (arXiv 2404.19124).

    15000 steps of 8 GPUs x 8 texts x 4096 tokens, then 6000 of 8 x 96 generations x 256 tokens;
    cross-entropy on the text, all heads alike. The positions of a step are drawn over all texts.
    """
    warmup = {"warmup_share": 0.05, "warmup_most": 2000, "warmup_shape": "parabolic"}
    return TrainingSettings(
        learning_rate=1e-3,
        weight_decay=0.1,
        head_decay=1.0,
        objective="cross_entropy",
        evaluate_every=500,
        checkpoint_every=3000,
        seed=42,
        ground_truth=StageSettings(
            steps=15_000,
            batch_size=8 * 8 * 4096,
            peak=1.0,
            final=0.1,
            **warmup,  # type: ignore[arg-type]
        ),
        self_generated=StageSettings(
            steps=6_000,
            batch_size=8 * 96 * 256,
            peak=0.1,
            final=0.01,
            **warmup,  # type: ignore[arg-type]
        ),
    )


def small_settings() -> TrainingSettings:
    """For a small target and two CPU cores: distillation, three passes over its generations."""
    return TrainingSettings()


PRESETS: dict[str, Callable[[], TrainingSettings]] = {"ibm": ibm_settings, "small": small_settings}


def preset(name: str, **changes: object) -> TrainingSettings:
    """Settings by name, ``"ibm"`` or ``"small"``, with some fields replaced.

    Raises:
        ValueError: no preset has that name.
    """
    if name not in PRESETS:
        raise ValueError(f"name={name!r} is no preset; there are {', '.join(sorted(PRESETS))}")
    return replace(PRESETS[name](), **changes)  # type: ignore[arg-type]
