"""A whole run: data, corpora, training, and the folder with the drafter.

    run = TrainingRun("mlp", Path("my-drafter"), data=DataChoice(("prompts.jsonl",)))
    train_drafter(run, target, tokenizer)

Started again with the same arguments it continues where it was interrupted. In the folder, besides
the drafter: ``corpora/`` (unless they are elsewhere), ``training/`` with log, checkpoint, plan, the
picture `plot` draws and the numbers that `result` describes.

Boundary: the order of things, and what is decided from the time there is.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from hf_specdec.training.corpora import (
    CorpusMaker,
    StageCorpora,
    count_shards,
    open_corpora,
    stop_ids,
)
from hf_specdec.training.corpus_metadata import fingerprint
from hf_specdec.training.data_sources import DataChoice
from hf_specdec.training.drafter_kinds import KINDS, DrafterKind
from hf_specdec.training.loop import TrainingLoop
from hf_specdec.training.parallel import Processes
from hf_specdec.training.plot import plot_log
from hf_specdec.training.recipes import Kind, Recipe, recipe
from hf_specdec.training.result import describe_hardware, write_result
from hf_specdec.training.settings import TrainingSettings
from hf_specdec.training.sole_run import sole_run
from hf_specdec.training.stages import TrainingResult
from hf_specdec.training.time_budget import RunPlan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Of the time for training: evaluations get less than this, and the plan leaves this unused, as a
# machine is not always as fast as it was when it was measured.
_EVALUATION_SHARE = 0.1
_SLACK = 0.08
# Of a short budget, measuring takes this part.
_MEASURING_SHARE = 0.02
# Evaluations of a run whose interval was not chosen.
_EVALUATIONS = 40


@dataclass(frozen=True)
class TrainingRun:
    """What to do.

    Attributes:
        kind: ``"mlp"``, an MLP speculator, or ``"mtp"``, an MTP layer.
        out: folder of the drafter.
        recipe: all numbers; ``None``: the preset ``"small"``.
        data: texts or prompts; ``None``: a chat model writes its own prompts.
        corpus: folder of the corpora; ``None``: ``corpora/`` in ``out``.
        target_name: Hub id or path that the drafter names as its target; ``None``: where the
            target was loaded from.
        continue_from: folder or Hub id of a drafter to begin with.
        time_budget: minutes for all of it; ``None``: as long as it takes.
        evaluate_every: steps between evaluations; ``None``: about forty evaluations.
        started: when the time budget begins, a time of ``time.monotonic()``; ``None``: now.
        progress: show bars.
    """

    kind: Kind
    out: Path
    recipe: Recipe | None = None
    data: DataChoice | None = None
    corpus: Path | None = None
    target_name: str | None = None
    continue_from: str | None = None
    time_budget: float | None = None
    evaluate_every: int | None = None
    started: float | None = None
    progress: bool = True


def train_drafter(
    run: TrainingRun,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    processes: Processes | None = None,
) -> TrainingResult:
    """Make the corpora, train, and leave the best drafter in ``run.out``.

    Until it is done no other run can train in that folder.

    Args:
        run: what to do.
        target: frozen, in evaluation mode, on its device; it is loaded once and only read.
        tokenizer: the target's; saved with the drafter.
        processes: which train together; ``None``: as they were launched.

    Raises:
        ValueError: an argument, the data or a folder doesn't fit; the message says which.
        OSError: no space for the corpora or a checkpoint.
        RuntimeError: the loss is not finite.
    """
    processes = processes or Processes(str(target.device))
    with sole_run(run.out, processes):
        return train_alone(run, target, tokenizer, processes)


def train_alone(
    run: TrainingRun,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    processes: Processes,
) -> TrainingResult:
    """`train_drafter`, for whoever is inside of `sole_run` already."""
    chosen = run.recipe or recipe("small", run.kind)
    chosen.training.check_parts(processes.count)
    plan = RunPlan(run.out, run.time_budget, processes.is_main, run.started)
    kind = KINDS[run.kind](
        target,
        chosen.network,
        target_name=run.target_name,
        continue_from=run.continue_from,
        always_drafted=stop_ids(target, tokenizer),
        seed=chosen.training.seed,
    )
    _check_heads(chosen, kind.network.heads)
    folder = run.corpus or run.out / "corpora"
    maker = CorpusMaker(
        target,
        tokenizer,
        folder,
        chosen.corpus,
        run.data,
        run.target_name,
        plan,
        processes,
        run.progress,
    )
    about = {
        "kind": run.kind,
        "target": fingerprint(target),
        "continue_from": run.continue_from,
        "time_budget": run.time_budget,
        "data": None if run.data is None else asdict(run.data),
        **{f"corpus.{name}": value for name, value in asdict(chosen.corpus).items()},
    }
    plan.check(about)
    maker.make(chosen.generation_share)
    # What is generated for other runs from now on would change this one.
    shards = plan.decided.get("shards") or processes.from_main(count_shards(folder))
    corpora = open_corpora(folder, target, shards)
    with plan.spending("training"):
        trial = kind.trainer(chosen.training, run.out, corpora, processes, progress=False)
        plan.decide(about=about, shards=shards)
        settings = _settings(run, chosen.training, trial, corpora, plan, processes)
        trainer = kind.trainer(settings, run.out, corpora, processes, run.progress)
        # Saving is part of the budget, too.
        result = trainer.train(until=plan.end(0.98), on_step=lambda _: plan.tick())
    if processes.is_main:
        kind.save(trainer, run.out, corpora)
        tokenizer.save_pretrained(run.out)
        _report(run, chosen, settings, kind, trainer, corpora, plan, processes, result)
    processes.wait()
    return result


def _check_heads(chosen: Recipe, heads: int) -> None:
    chosen.training.weights_of(heads)
    if chosen.corpus.tokens != 0 and heads >= chosen.corpus.answer_tokens:
        raise ValueError(
            f"heads={heads} can't learn from answers of answer_tokens="
            f"{chosen.corpus.answer_tokens}: an answer must have more tokens than there are heads"
        )


def _settings(
    run: TrainingRun,
    settings: TrainingSettings,
    trial: TrainingLoop,
    corpora: StageCorpora,
    plan: RunPlan,
    processes: Processes,
) -> TrainingSettings:
    """The settings, with as many steps as the time allows; what was decided before stays."""
    stage = settings.self_generated if corpora.self_generated else settings.ground_truth
    name = "self_generated" if corpora.self_generated else "ground_truth"
    steps, every = trial.total_steps, run.evaluate_every
    if plan.minutes is not None:
        if "steps" not in plan.decided:
            plan.decide(**processes.from_main(_plan_steps(trial, plan)))
        wanted = plan.decided["steps"]
        if wanted < steps:
            last = max(1, wanted - (steps - trial.steps_of(name)))
            shorter: dict[str, Any] = {name: replace(stage, steps=last)}
            settings = replace(settings, **shorter)
            steps = wanted
        every = every or plan.decided["evaluate_every"]
    every = every or max(1, steps // _EVALUATIONS)
    return replace(settings, evaluate_every=every)


def _plan_steps(trial: TrainingLoop, plan: RunPlan) -> dict[str, Any]:
    """Steps and evaluation interval that fit into the rest of the budget."""
    assert plan.minutes is not None
    of_step, of_evaluation = trial.measure_speed(min(5.0, plan.minutes * 60 * _MEASURING_SHARE))
    left = max(plan.minutes * 60 - plan.total_seconds, 0) * (1 - _SLACK)
    steps = max(1, int(left * (1 - _EVALUATION_SHARE) / of_step))
    steps = min(steps, trial.total_steps)
    evaluations = max(
        1, min(_EVALUATIONS, int(steps * of_step * _EVALUATION_SHARE / of_evaluation))
    )
    return {"steps": steps, "evaluate_every": max(1, steps // evaluations)}


def _report(
    run: TrainingRun,
    chosen: Recipe,
    settings: TrainingSettings,
    kind: DrafterKind,
    trainer: TrainingLoop,
    corpora: StageCorpora,
    plan: RunPlan,
    processes: Processes,
    result: TrainingResult,
) -> None:
    """Write the picture and the numbers."""
    target = kind.target
    name = run.target_name or target.config._name_or_path or type(target).__name__
    length = f"{result.best.mean_acceptance_length:.2f}"
    plot_log(run.out, f"{run.kind} drafter for {Path(name).name}: {length} tokens a step")
    stopped = "finished"
    if result.out_of_time:
        stopped = "time budget"
    elif result.stopped_early:
        stopped = "no improvement"
    trained = sum(p.numel() for p in kind.trained_module(trainer).parameters())
    write_result(
        run.out,
        {
            "kind": run.kind,
            "target": {
                "name": name,
                "model_type": target.config.model_type,
                "num_parameters": sum(p.numel() for p in target.parameters()),
                "dtype": str(target.dtype).removeprefix("torch."),
            },
            "acceptance": {
                "per_position": result.best.per_position,
                "mean_acceptance_length": result.best.mean_acceptance_length,
                "num_positions": result.best.num_positions,
                "greedy_text": trainer.held_out.greedy_text,
                "step": result.best_step,
                "tokens_trained": result.best_tokens_trained,
            },
            "training": {
                "steps": result.steps,
                "tokens_trained": result.tokens_trained,
                "stopped": stopped,
                "seconds": {**plan.seconds, "total": plan.total_seconds},
                "time_budget_minutes": plan.minutes,
                "continued_from": run.continue_from,
            },
            "hardware": describe_hardware(target.device, processes.count),
            "preset": chosen.preset,
            "settings": asdict(settings),
            "network": {"num_parameters": trained, **asdict(kind.network)},
            "data": {
                "description": _describe(run.data, corpora),
                "datasets": run.data.datasets if run.data else [],
                "files": run.data.files if run.data else [],
                "corpora": corpora.description,
            },
        },
    )


def _describe(data: DataChoice | None, corpora: StageCorpora) -> str:
    what = {
        "text": "given texts",
        "prompts": "the target's own answers to given prompts",
        "chat": "conversations of which the target wrote both sides",
    }
    parts: dict[str, int] = {}
    for entry in corpora.description:
        parts[entry["name"]] = parts.get(entry["name"], 0) + entry["tokens"]
    listed = ", ".join(f"{tokens:,} tokens of {what[name]}" for name, tokens in parts.items())
    source = f" ({', '.join(data.datasets + data.files)})" if data else ""
    return listed + source
