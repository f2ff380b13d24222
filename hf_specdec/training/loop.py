"""The training loop that every kind of drafter shares.

Stage 1 reads ground-truth text, stage 2 the target's own generations; both with AdamW and a
learning rate that `settings` describes. Recipe: Wertheimer et al. 2024 (arXiv 2404.19124).

What a step does depends only on the settings, the corpora and the step's number, so a run that is
continued from a checkpoint ends with the weights of one that was never interrupted.

Files in the output folder: under ``training/`` the log (one JSON object a line) and the newest
checkpoint; the best weights so far as the subclass saves them.

Boundary: order of steps, learning rate, checkpoints, log. What is trained, on what and how it is
measured, is a subclass's business.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_specdec.training.checkpoint import damage_named, load_run, save_tensors
from hf_specdec.training.corpus import Corpus
from hf_specdec.training.evaluation import Acceptance
from hf_specdec.training.parallel import Processes
from hf_specdec.training.positions import step_positions
from hf_specdec.training.progress import progress_bar
from hf_specdec.training.settings import StageSettings, TrainingSettings
from hf_specdec.training.stages import Examples, HeldOut, Stage, TrainingResult
from hf_specdec.training.training_log import TrainingLog

_CHECKPOINT = "checkpoint.pt"
# Steps between looks at the main process' clock, where there are several processes.
_ASK_EVERY = 10


class TrainingLoop(ABC):
    """Trains ``trained`` in place. A subclass sets what its methods need before this constructor.

    Args:
        trained: float32 parameters, and nothing that is not to be trained.
        settings: see `TrainingSettings`.
        output_dir: see the module.
        ground_truth: corpus of stage 1; ``None`` leaves the stage out.
        self_generated: corpus of stage 2; ``None`` leaves the stage out.
        progress: show a bar.
        processes: which train together; ``None``: this one alone.

    Raises:
        ValueError: no corpus, one of another target, parameters that are not float32, a
            ``distill_top_k`` the corpus does not have, or a ``batch_size`` that processes and
            ``accumulation`` don't divide.
    """

    held_out: HeldOut

    def __init__(
        self,
        trained: nn.Module,
        settings: TrainingSettings,
        output_dir: str | Path,
        ground_truth: Corpus | None,
        self_generated: Corpus | None,
        progress: bool,
        processes: Processes | None = None,
    ) -> None:
        self._processes = processes or Processes(str(next(trained.parameters()).device))
        settings.check_parts(self._processes.count)
        corpora = {"ground_truth": ground_truth, "self_generated": self_generated}
        given = {name: corpus for name, corpus in corpora.items() if corpus is not None}
        if not given:
            raise ValueError("give a corpus: ground_truth, self_generated, or both")
        self.settings = settings
        self.output_dir = Path(output_dir)
        for name, corpus in given.items():
            self._check_corpus(name, corpus)
            _check_top_k(name, corpus, settings)
        parameter = next(trained.parameters())
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"model must be float32, got {parameter.dtype}; small updates vanish in lower "
                "precision. Load it with dtype=torch.float32; settings.save_dtype decides how it "
                "is saved"
            )
        self._trained = trained
        self._device = parameter.device
        self._progress = progress and self._processes.is_main
        self._log = TrainingLog(self.output_dir, writes=self._processes.is_main)
        self._parts = settings.accumulation * self._processes.count
        self._stages: list[Stage] = []
        for name, corpus in given.items():
            self._add_stage(name, corpus, getattr(settings, name))
        # Drafts are for the target's own text, so that is what counts where there is any.
        evaluated = given.get("self_generated", ground_truth)
        assert evaluated is not None
        self.held_out = self._hold_out(evaluated, evaluated.is_held_out(settings.held_out_every))
        self._optimizer = self._new_optimizer()
        self._step = 0
        self._best: Acceptance | None = None
        self._best_step = 0
        self._evaluations_since_best = 0

    @abstractmethod
    def _check_corpus(self, name: str, corpus: Corpus) -> None:
        """Raise ValueError if a corpus is of another target."""

    @abstractmethod
    def _examples(self, corpus: Corpus, documents: Tensor) -> Examples:
        """The examples of some documents, bool ``[num_documents]``."""

    @abstractmethod
    def _hold_out(self, corpus: Corpus, documents: Tensor) -> HeldOut:
        """Where acceptance is measured, in these documents, bool ``[num_documents]``."""

    @abstractmethod
    def _measure(self) -> Acceptance:
        """Acceptance on what is held out."""

    @abstractmethod
    def _save_best(self) -> None:
        """Save the weights as they are now; they are the best so far."""

    @abstractmethod
    def _model_values(self) -> dict[str, Any]:
        """What of the model must be the same for a run to be continued; fit for JSON."""

    def _new_optimizer(self) -> torch.optim.AdamW:
        settings = self.settings
        return torch.optim.AdamW(
            self._trained.parameters(),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    @property
    def total_steps(self) -> int:
        """Steps of all stages."""
        return sum(stage.steps for stage in self._stages)

    def steps_of(self, name: str) -> int:
        """Steps of the stage ``"ground_truth"`` or ``"self_generated"``; 0 if it is left out."""
        return sum(stage.steps for stage in self._stages if stage.name == name)

    def _add_stage(self, name: str, corpus: Corpus, settings: StageSettings) -> None:
        examples = self._examples(corpus, ~corpus.is_held_out(self.settings.held_out_every))
        if not len(examples):
            raise ValueError(
                f"{name} has no flagged token to train on that is followed by enough others"
            )
        steps = settings.num_steps(len(examples))
        self._stages.append(Stage(name, settings, examples, self.total_steps, steps))

    def train(
        self,
        resume: bool = True,
        on_step: Callable[[int], None] | None = None,
        until: float | None = None,
    ) -> TrainingResult:
        """Run to the end, or until ``patience`` runs out, and leave the best weights saved.

        Args:
            resume: continue from the output folder's checkpoint, if there is one; else start anew.
            on_step: called with the number of steps done after each; an exception ends the run.
            until: a time of ``time.monotonic()`` at which the run is evaluated and ends.

        Raises:
            ValueError: the checkpoint was made with other settings or data.
            RuntimeError: the loss is not finite.
        """
        if self._processes.is_main:
            (self.output_dir / "training").mkdir(parents=True, exist_ok=True)
        if resume and (self.output_dir / "training" / _CHECKPOINT).exists():
            self._load_checkpoint()
        else:
            self._log.clear()
        self._processes.wait()
        stopped_early = out_of_time = False
        self._trained.train()
        with progress_bar("Training", self.total_steps, self._step, self._progress) as advance:
            for stage in self._stages:
                order: dict[int, Tensor] = {}
                while stage.first <= self._step < stage.first + stage.steps:
                    head_losses, grad_norm = self._train_step(stage, order)
                    self._step += 1
                    out_of_time = self._is_over(until)
                    if out_of_time or self._is_due(self.settings.evaluate_every):
                        stopped_early = self._evaluate(stage, head_losses, grad_norm)
                    if out_of_time or self._is_due(self.settings.checkpoint_every):
                        self._save_checkpoint()
                    advance(1, self._status(head_losses))
                    if on_step is not None:
                        on_step(self._step)
                    if stopped_early or out_of_time:
                        break
                if stopped_early or out_of_time:
                    break
        if self._best is None:
            raise RuntimeError("the run ended before its first evaluation")
        return TrainingResult(
            self._best,
            self._best_step,
            self._step,
            stopped_early,
            out_of_time,
            self._tokens_trained(self._step),
            self._tokens_trained(self._best_step),
        )

    def _is_over(self, until: float | None) -> bool:
        """Whether the time is up, by the main process' clock."""
        if until is None or self._step == self.total_steps:
            return False
        # Asking the others takes time, too.
        if self._processes.count > 1 and self._step % _ASK_EVERY:
            return False
        return self._processes.from_main(time.monotonic() >= until)

    def _tokens_trained(self, steps: int) -> int:
        """Positions run through the drafter in the first so many steps of the run."""
        return sum(
            min(max(steps - stage.first, 0), stage.steps)
            * stage.settings.batch_size
            * stage.examples.tokens_per_example
            for stage in self._stages
        )

    def _is_due(self, every: int) -> bool:
        return self._step % every == 0 or self._step == self.total_steps

    def _train_step(self, stage: Stage, order: dict[int, Tensor]) -> tuple[Tensor, float]:
        """One update; mean loss of each head, float32 ``[n]``, and the gradient's norm."""
        settings, local = self.settings, self._step - stage.first
        rate = settings.learning_rate * stage.settings.factor(local, stage.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        numbers = step_positions(
            order,
            local,
            stage.settings.batch_size,
            len(stage.examples),
            settings.seed,
            stage.examples.blocks,
        )
        self._optimizer.zero_grad(set_to_none=True)
        parts = numbers.chunk(self._parts)
        mine = range(self._processes.index, self._parts, self._processes.count)
        head_losses = torch.stack([self._run_part(stage, parts[i], i) for i in mine]).mean(0)
        parameters = list(self._trained.parameters())
        self._processes.average_gradients(parameters)
        norm = torch.nn.utils.clip_grad_norm_(parameters, settings.clip_norm)
        self._optimizer.step()
        return head_losses, float(norm)

    def _run_part(self, stage: Stage, numbers: Tensor, part: int) -> Tensor:
        """Add a part's share of the gradient; mean loss of each head, float32 ``[n]``."""
        settings, device = self.settings, self._device
        generator = torch.Generator().manual_seed(
            settings.seed * 1_000_003 + self._step + part * 1_000_000_007
        )
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16"):
            head_losses = stage.examples.losses(numbers, generator)
        weights = torch.tensor(settings.weights_of(len(head_losses)), device=device)
        loss = (weights * head_losses).sum()
        if not torch.isfinite(loss):
            raise RuntimeError(
                f"the loss at step {self._step} is {loss.item()}; lower learning_rate="
                f"{settings.learning_rate}, or look for non-finite hidden states in the corpus"
            )
        # Of this process' parts; the mean over processes comes on top.
        (loss / settings.accumulation).backward()
        return head_losses.detach()

    def measure_speed(self, seconds: float = 5.0) -> tuple[float, float]:
        """Try out how long a step of the last stage and an evaluation take; nothing changes.

        Args:
            seconds: for the steps, at least two of them.

        Returns:
            Seconds of a step, and of an evaluation.
        """
        # The first of them sets up much that the others don't.
        before = {name: value.clone() for name, value in self._trained.state_dict().items()}
        stage = self._stages[-1]
        order: dict[int, Tensor] = {}
        self._trained.train()
        self._train_step(stage, order)
        started = time.monotonic()
        self._train_step(stage, order)
        once = time.monotonic() - started
        # As many in every process, as they wait for each other.
        steps = self._processes.from_main(max(2, int(seconds / max(once, 1e-3))))
        started = time.monotonic()
        for _ in range(steps):
            self._train_step(stage, order)
        stepped = time.monotonic()
        self._measure()
        evaluated = time.monotonic()
        self._trained.load_state_dict(before)
        self._optimizer = self._new_optimizer()
        return (stepped - started) / steps, evaluated - stepped

    def _evaluate(self, stage: Stage, head_losses: Tensor, grad_norm: float) -> bool:
        """Measure, log, keep the best; True if ``patience`` ran out."""
        # Measured once, so that all processes go on in the same way.
        acceptance = self._processes.from_main(self._measure() if self._processes.is_main else None)
        head_losses = self._processes.average(head_losses)
        best = self._best
        if best is None or acceptance.mean_acceptance_length > best.mean_acceptance_length:
            self._best, self._best_step, self._evaluations_since_best = acceptance, self._step, 0
            if self._processes.is_main:
                self._save_best()
        else:
            self._evaluations_since_best += 1
        self._log.add(
            step=self._step,
            tokens_trained=self._tokens_trained(self._step),
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

    def _fingerprint(self) -> dict[str, Any]:
        """What must be the same for a run to be continued; JSON turns tuples into lists."""
        stages = {stage.name: [len(stage.examples), stage.steps] for stage in self._stages}
        values = {
            "settings": asdict(self.settings),
            "stages": stages,
            "model": self._model_values(),
        }
        return json.loads(json.dumps(values))

    def _save_checkpoint(self) -> None:
        if not self._processes.is_main:
            return
        state = {
            "fingerprint": self._fingerprint(),
            "step": self._step,
            "model": self._trained.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "best": None if self._best is None else asdict(self._best),
            "best_step": self._best_step,
            "evaluations_since_best": self._evaluations_since_best,
        }
        save_tensors(state, self.output_dir / "training" / _CHECKPOINT)

    def _load_checkpoint(self) -> None:
        path = self.output_dir / "training" / _CHECKPOINT
        state = load_run(path, self._fingerprint())
        with damage_named(path):
            self._trained.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
            self._best = None if state["best"] is None else Acceptance(**state["best"])
        self._step = state["step"]
        self._best_step = state["best_step"]
        self._evaluations_since_best = state["evaluations_since_best"]
        # What was logged after the checkpoint will be done again.
        self._log.forget_after(self._step)


def _check_top_k(name: str, corpus: Corpus, settings: TrainingSettings) -> None:
    top_k = corpus.metadata.top_k
    if settings.objective == "distillation" and settings.distill_top_k > top_k:
        raise ValueError(
            f"distill_top_k={settings.distill_top_k}, but {name} keeps top_k={top_k} "
            "tokens per position; lower it or generate the corpus again"
        )
