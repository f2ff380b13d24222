"""Training an MLP speculator on corpora, in up to two stages.

Stage 1 reads ground-truth text, stage 2 the target's own generations; both with AdamW and a
learning rate that `settings` describes. Recipe: Wertheimer et al. 2024 (arXiv 2404.19124).

What a step does depends only on the settings, the corpora and the step's number, so a run that is
continued from a checkpoint ends with the weights of one that was never interrupted.

Files in the output folder: the best speculator so far as ``save_pretrained`` writes it, and under
``training/`` the log (one JSON object a line) and the newest checkpoint.

Boundary: a speculator with initial weights and corpora in, a saved speculator out. The target is
not run here.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils.logging import (
    disable_progress_bar,
    enable_progress_bar,
    is_progress_bar_enabled,
)

from hf_specdec.modeling.mlp_speculator import MLPSpeculatorPreTrainedModel
from hf_specdec.training.corpus import Corpus
from hf_specdec.training.evaluation import Acceptance, HeldOutPositions
from hf_specdec.training.losses import HeadLosses
from hf_specdec.training.positions import Positions, step_positions
from hf_specdec.training.progress import progress_bar
from hf_specdec.training.settings import StageSettings, TrainingSettings

_CHECKPOINT = "checkpoint.pt"
_LOG = "log.jsonl"


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended.

    Attributes:
        best: acceptance of the saved speculator on held-out documents.
        best_step: the step after which it was measured.
        steps: steps done, over all stages.
        stopped_early: ``patience`` ran out.
    """

    best: Acceptance
    best_step: int
    steps: int
    stopped_early: bool


@dataclass(frozen=True)
class _Stage:
    """A stage with its data; ``first`` is the number of its first step in the run."""

    name: str
    settings: StageSettings
    positions: Positions
    losses: HeadLosses
    first: int
    steps: int


class Trainer:
    """Trains ``model`` in place.

    Args:
        model: a float32 speculator, bound to its target if it shares weights.
        settings: see `TrainingSettings`.
        output_dir: see the module.
        ground_truth: corpus of stage 1; ``None`` leaves the stage out.
        self_generated: corpus of stage 2; ``None`` leaves the stage out.
        progress: show a bar.

    Raises:
        ValueError: no corpus, one of another target, a model that is not float32, or a
            ``distill_top_k`` the corpus does not have.
    """

    def __init__(
        self,
        model: MLPSpeculatorPreTrainedModel,
        settings: TrainingSettings,
        output_dir: str | Path,
        ground_truth: Corpus | None = None,
        self_generated: Corpus | None = None,
        progress: bool = True,
    ) -> None:
        corpora = {"ground_truth": ground_truth, "self_generated": self_generated}
        given = {name: corpus for name, corpus in corpora.items() if corpus is not None}
        if not given:
            raise ValueError("give a corpus: ground_truth, self_generated, or both")
        for name, corpus in given.items():
            _check_corpus(name, corpus, model, settings)
        if model.dtype != torch.float32:
            raise ValueError(
                f"model must be float32, got {model.dtype}; small updates vanish in lower "
                "precision. Load it with dtype=torch.float32; settings.save_dtype decides how it "
                "is saved"
            )
        self.model = model
        self.settings = settings
        self.output_dir = Path(output_dir)
        self._progress = progress
        self._stages: list[_Stage] = []
        for name, corpus in given.items():
            self._add_stage(name, corpus, getattr(settings, name))
        # Drafts are for the target's own text, so that is what counts where there is any.
        evaluated = given.get("self_generated", ground_truth)
        assert evaluated is not None
        self.held_out = HeldOutPositions(
            evaluated,
            evaluated.is_held_out(settings.held_out_every),
            model.config.n_predict,
            settings.evaluate_positions,
        )
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._step = 0
        self._best: Acceptance | None = None
        self._best_step = 0
        self._evaluations_since_best = 0

    @property
    def total_steps(self) -> int:
        """Steps of all stages."""
        return sum(stage.steps for stage in self._stages)

    def _add_stage(self, name: str, corpus: Corpus, settings: StageSettings) -> None:
        training = ~corpus.is_held_out(self.settings.held_out_every)
        positions = Positions(corpus, training, self.model.config.n_predict)
        if not len(positions):
            raise ValueError(f"{name} has no flagged token to train on")
        losses = HeadLosses(self.model, self.settings, corpus, training)
        steps = settings.num_steps(len(positions))
        self._stages.append(_Stage(name, settings, positions, losses, self.total_steps, steps))

    def train(
        self, resume: bool = True, on_step: Callable[[int], None] | None = None
    ) -> TrainingResult:
        """Run to the end, or until ``patience`` runs out, and leave the best speculator saved.

        Args:
            resume: continue from the output folder's checkpoint, if there is one; else start anew.
            on_step: called with the number of steps done after each; an exception ends the run.

        Raises:
            ValueError: the checkpoint was made with other settings or data.
            RuntimeError: the loss is not finite.
        """
        (self.output_dir / "training").mkdir(parents=True, exist_ok=True)
        if resume and (self.output_dir / "training" / _CHECKPOINT).exists():
            self._load_checkpoint()
        else:
            (self.output_dir / "training" / _LOG).unlink(missing_ok=True)
        stopped_early = False
        self.model.train()
        with progress_bar("Training", self.total_steps, self._step, self._progress) as advance:
            for stage in self._stages:
                order: dict[int, Tensor] = {}
                while stage.first <= self._step < stage.first + stage.steps and not stopped_early:
                    head_losses, grad_norm = self._train_step(stage, order)
                    self._step += 1
                    if self._is_due(self.settings.evaluate_every):
                        stopped_early = self._evaluate(stage, head_losses, grad_norm)
                    if self._is_due(self.settings.checkpoint_every):
                        self._save_checkpoint()
                    advance(1, self._status(head_losses))
                    if on_step is not None:
                        on_step(self._step)
        if self._best is None:
            raise RuntimeError("the run ended before its first evaluation")
        return TrainingResult(self._best, self._best_step, self._step, stopped_early)

    def _is_due(self, every: int) -> bool:
        return self._step % every == 0 or self._step == self.total_steps

    def _train_step(self, stage: _Stage, order: dict[int, Tensor]) -> tuple[Tensor, float]:
        """One update; mean loss of each head, float32 ``[n]``, and the gradient's norm."""
        settings, local = self.settings, self._step - stage.first
        rate = settings.learning_rate * stage.settings.factor(local, stage.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        numbers = step_positions(
            order, local, stage.settings.batch_size, len(stage.positions), settings.seed
        )
        batch = stage.positions.batch(stage.positions.index[numbers], stage.losses.top_k)
        device = self.model.device
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + self._step)
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16"):
            head_losses = stage.losses(batch.to(device), generator)
        weights = settings.head_decay ** torch.arange(len(head_losses), device=device)
        loss = (weights * head_losses).sum()
        if not torch.isfinite(loss):
            raise RuntimeError(
                f"the loss at step {self._step} is {loss.item()}; lower learning_rate="
                f"{settings.learning_rate}, or look for non-finite hidden states in the corpus"
            )
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip_norm)
        self._optimizer.step()
        return head_losses.detach(), float(norm)

    def _evaluate(self, stage: _Stage, head_losses: Tensor, grad_norm: float) -> bool:
        """Measure, log, keep the best; True if ``patience`` ran out."""
        acceptance = self.held_out.measure(self.model, self.settings.precision == "bf16")
        best = self._best
        if best is None or acceptance.mean_acceptance_length > best.mean_acceptance_length:
            self._best, self._best_step, self._evaluations_since_best = acceptance, self._step, 0
            save_speculator(self.model, self.output_dir, self.settings.save_dtype)
        else:
            self._evaluations_since_best += 1
        self._log(
            step=self._step,
            stage=stage.name,
            learning_rate=self._optimizer.param_groups[0]["lr"],
            head_losses=[round(value, 5) for value in head_losses.tolist()],
            grad_norm=round(grad_norm, 5),
            acceptance=[round(rate, 5) for rate in acceptance.per_position],
            mean_acceptance_length=round(acceptance.mean_acceptance_length, 5),
            held_out_positions=acceptance.num_positions,
            held_out_text_is_greedy=self.held_out.greedy_text,
            best_step=self._best_step,
        )
        patience = self.settings.patience
        return patience is not None and self._evaluations_since_best >= patience

    def _status(self, head_losses: Tensor) -> str:
        status = f"loss {float(head_losses.sum()):.3f}"
        if self._best is not None:
            status += f", acceptance length {self._best.mean_acceptance_length:.3f}"
        return status

    def _log(self, **values: Any) -> None:
        with open(self.output_dir / "training" / _LOG, "a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def _fingerprint(self) -> dict[str, Any]:
        """What must be the same for a run to be continued; JSON turns tuples into lists."""
        stages = {stage.name: [len(stage.positions), stage.steps] for stage in self._stages}
        values = {
            "settings": asdict(self.settings),
            "stages": stages,
            "model": {
                key: value
                for key, value in self.model.config.to_dict().items()
                if key not in ("transformers_version", "dtype", "_name_or_path", "architectures")
            },
        }
        return json.loads(json.dumps(values))

    def _save_checkpoint(self) -> None:
        path = self.output_dir / "training" / _CHECKPOINT
        partial = path.with_suffix(".tmp")
        state = {
            "fingerprint": self._fingerprint(),
            "step": self._step,
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "best": None if self._best is None else asdict(self._best),
            "best_step": self._best_step,
            "evaluations_since_best": self._evaluations_since_best,
        }
        torch.save(state, partial)
        os.replace(partial, path)

    def _load_checkpoint(self) -> None:
        path = self.output_dir / "training" / _CHECKPOINT
        state = torch.load(path, map_location="cpu", weights_only=True)
        wanted, present = self._fingerprint(), state["fingerprint"]
        if different := sorted(key for key in wanted if wanted[key] != present[key]):
            raise ValueError(
                f"{path} was made with other {', '.join(different)}; continue with the same, use "
                "another output_dir, or call train(resume=False) to start anew"
            )
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._step = state["step"]
        self._best = None if state["best"] is None else Acceptance(**state["best"])
        self._best_step = state["best_step"]
        self._evaluations_since_best = state["evaluations_since_best"]
        # What was logged after the checkpoint will be done again.
        log = self.output_dir / "training" / _LOG
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= self._step]
        log.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def save_speculator(
    model: MLPSpeculatorPreTrainedModel, directory: str | Path, dtype: str = "bfloat16"
) -> None:
    """Save a copy in ``dtype`` (``"bfloat16"``, ``"float16"``, ``"float32"``); the model stays.

    Args:
        model: the speculator. ``config.base_model_name_or_path`` should name its target.
        directory: for ``save_pretrained``.
        dtype: of the weights on disk.
    """
    was_enabled = is_progress_bar_enabled()
    # A bar for every save would tear up the one of the training.
    disable_progress_bar()
    try:
        copy.deepcopy(model).to(getattr(torch, dtype)).save_pretrained(directory)
    finally:
        if was_enabled:
            enable_progress_bar()


def _check_corpus(
    name: str, corpus: Corpus, model: MLPSpeculatorPreTrainedModel, settings: TrainingSettings
) -> None:
    metadata, config = corpus.metadata, model.config
    if metadata.hidden_size != config.emb_dim or metadata.vocab_size > config.vocab_size:
        raise ValueError(
            f"{name} has hidden_size={metadata.hidden_size} and vocab_size={metadata.vocab_size}, "
            f"the model emb_dim={config.emb_dim} and vocab_size={config.vocab_size}; it was made "
            f"with another target, {metadata.target!r}"
        )
    if settings.objective == "distillation" and settings.distill_top_k > metadata.top_k:
        raise ValueError(
            f"distill_top_k={settings.distill_top_k}, but {name} keeps top_k={metadata.top_k} "
            "tokens per position; lower it or generate the corpus again"
        )
