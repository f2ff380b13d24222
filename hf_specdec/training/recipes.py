"""What a run of `hf-specdec train` consists of, by preset and kind of drafter.

``"ibm"`` has the numbers of IBM's published recipe (``scripts/train_speculator.sh`` of fms-fsdp,
arXiv 2404.19124): text, then prompts of 64 tokens from the same texts continued by 256 sampled
among the 10 most probable tokens; heads of their own, all weights drawn from N(0, 1/sqrt(D)).

``"small"`` trains a useful drafter for a target of 0.1 to 1 billion parameters on one machine: on
the target's own text alone, by distillation; an MLP speculator reads the target's token tables.

Boundary: numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from hf_specdec.training.scripts import Temperatures
from hf_specdec.training.settings import StageSettings, TrainingSettings, preset

Kind = Literal["mlp", "mtp"]

# Left alone, a small model asks much the same questions; most documents begin freely all the same.
OPENINGS = [""] * 20 + [
    *("What", "How", "Why", "Who", "Where", "When", "Is it", "What is the difference between"),
    *("Write", "Write a short story", "Write a Python function", "Write an email", "Write a poem"),
    *("Explain", "Give me", "Tell me", "List", "Describe", "Create", "Summarize", "Translate"),
    *("Can you", "Help me", "Suggest", "Solve", "I"),
]


@dataclass(frozen=True)
class CorpusSettings:
    """How the training data is made.

    Attributes:
        text_tokens: tokens of stage 1; 0 leaves the stage out.
        tokens: tokens the target generates for stage 2; 0 generates none, and trains on what an
            earlier run has generated; ``None``: as many as the time allows.
        prompt_tokens: length of a prompt that is cut from a text.
        answer_tokens: tokens of an answer at most.
        max_length: tokens of a document at most, of both stages.
        temperatures: of the answers.
        sample_top_k: sampling is among so many most probable tokens; ``None``: among ``top_k``.
        top_k: most probable tokens kept at each position.
        keep_states: whether the target's hidden states are written, too; else it is run again in
            training. ``None``: where they fit on the disk.
        rows: documents generated side by side.
        seed: of scripts and sampling.
    """

    text_tokens: int = 0
    tokens: int | None = 2_000_000
    prompt_tokens: int = 64
    answer_tokens: int = 240
    max_length: int = 480
    temperatures: Temperatures = field(default_factory=lambda: Temperatures(greedy_share=0.7))
    sample_top_k: int | None = None
    top_k: int = 32
    keep_states: bool | None = None
    rows: int = 112
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("text_tokens", "tokens"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ValueError(f"{name}={value} must not be negative")
        for name in ("prompt_tokens", "answer_tokens", "max_length", "top_k", "rows"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}={value} must be at least 1")


@dataclass(frozen=True)
class NetworkSettings:
    """The drafter's shape.

    Attributes:
        heads: draft tokens that are trained for: heads of an MLP speculator, passes of an MTP
            layer.
        inner_dim: width of an MLP speculator's state; 0: the target's.
        share_target_weights, tie_weights, scale_input: see `MLPSpeculatorConfig`.
        draft_vocab_size: ids that can be drafted, the most frequent ones; 0: all.
        initialize: ``"target"`` begins with the target's token tables, ``"random"`` with noise.
        window_length: tokens of a window an MTP layer is trained on.
        evaluated_drafts: draft tokens that an MTP layer's acceptance is measured for.
    """

    heads: int = 3
    inner_dim: int = 1024
    share_target_weights: bool = True
    tie_weights: bool = False
    scale_input: bool = True
    draft_vocab_size: int = 4096
    initialize: Literal["target", "random"] = "target"
    window_length: int = 256
    evaluated_drafts: int = 3

    def __post_init__(self) -> None:
        if self.heads < 1:
            raise ValueError(f"heads={self.heads} must be at least 1")
        if self.draft_vocab_size < 0:
            raise ValueError(f"draft_vocab_size={self.draft_vocab_size} must not be negative")
        if self.initialize not in ("target", "random"):
            raise ValueError(f"initialize={self.initialize!r} must be 'target' or 'random'")


@dataclass(frozen=True)
class Recipe:
    """A preset for one kind of drafter.

    Attributes:
        preset: its name.
        kind: of drafter.
        training, network, corpus: its numbers.
        generation_share: part of a time budget for generating; training takes the rest.
    """

    preset: str
    kind: Kind
    training: TrainingSettings
    network: NetworkSettings
    corpus: CorpusSettings
    generation_share: float


def recipe(name: str, kind: Kind) -> Recipe:
    """The preset ``"ibm"`` or ``"small"`` for a kind of drafter, ``"mlp"`` or ``"mtp"``.

    Raises:
        ValueError: no such preset or kind, or IBM's recipe for an MTP layer.
    """
    if kind not in ("mlp", "mtp"):
        raise ValueError(f"kind={kind!r} must be 'mlp' or 'mtp'")
    if name == "ibm" and kind == "mtp":
        raise ValueError(
            "preset='ibm' is the recipe of an MLP speculator; for kind='mtp' use preset='small'"
        )
    training = preset(name)
    if name == "ibm":
        return _ibm(training)
    return _small_mlp(training) if kind == "mlp" else _small_mtp(training)


def _ibm(training: TrainingSettings) -> Recipe:
    text, own = training.ground_truth, training.self_generated
    assert text.steps is not None and own.steps is not None
    corpus = CorpusSettings(
        text_tokens=text.steps * text.batch_size,
        tokens=own.steps * own.batch_size,
        prompt_tokens=64,
        answer_tokens=256,
        max_length=4096,
        temperatures=Temperatures(greedy_share=0.0, low=1.0, high=1.0),
        sample_top_k=10,
        top_k=10,
        rows=96,
        seed=training.seed,
    )
    network = NetworkSettings(
        heads=3,
        inner_dim=4096,
        share_target_weights=False,
        tie_weights=True,
        scale_input=True,
        draft_vocab_size=0,
        initialize="random",
    )
    return Recipe("ibm", "mlp", training, network, corpus, generation_share=0.7)


def _small_mlp(training: TrainingSettings) -> Recipe:
    stage = replace(training.self_generated, epochs=3.0, batch_size=256)
    settings = replace(
        training,
        learning_rate=1e-3,
        weight_decay=0.05,
        ground_truth=replace(training.ground_truth, batch_size=256),
        self_generated=stage,
    )
    return Recipe("small", "mlp", settings, NetworkSettings(), CorpusSettings(), 0.78)


def _small_mtp(training: TrainingSettings) -> Recipe:
    settings = replace(
        training,
        learning_rate=2e-3,
        num_sampled=1024,
        ground_truth=StageSettings(epochs=1.0, batch_size=4),
        self_generated=StageSettings(epochs=4.0, batch_size=4),
    )
    network = NetworkSettings(heads=2, draft_vocab_size=8192)
    return Recipe("small", "mtp", settings, network, CorpusSettings(), 0.6)
