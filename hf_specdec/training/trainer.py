"""Training an MLP speculator on corpora, in up to two stages.

The output folder holds the best speculator so far as ``save_pretrained`` writes it, and what
`TrainingLoop` keeps there.

Boundary: a speculator with initial weights and corpora in, a saved speculator out. The target is
not run here.
"""

from __future__ import annotations

import copy
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
from hf_specdec.training.checkpoint import write_folder
from hf_specdec.training.corpus import Corpus
from hf_specdec.training.evaluation import Acceptance, HeldOutPositions
from hf_specdec.training.loop import TrainingLoop
from hf_specdec.training.losses import HeadLosses
from hf_specdec.training.parallel import Processes
from hf_specdec.training.positions import Positions
from hf_specdec.training.settings import TrainingSettings


class PositionExamples:
    """Every position is an example of its own.

    Args:
        model: the speculator.
        settings: objective and sampling.
        corpus: the data.
        documents: bool ``[num_documents]``, the documents to take.
    """

    def __init__(
        self,
        model: MLPSpeculatorPreTrainedModel,
        settings: TrainingSettings,
        corpus: Corpus,
        documents: Tensor,
    ) -> None:
        self._positions = Positions(corpus, documents, model.config.n_predict)
        self._losses = HeadLosses(model, settings, corpus, documents)
        self._device = model.device

    @property
    def tokens_per_example(self) -> int:
        """See `Examples`."""
        return 1

    @property
    def blocks(self) -> Tensor | None:
        """See `Examples`."""
        blocks = self._positions.corpus.blocks
        return None if blocks is None else blocks[self._positions.index]

    def __len__(self) -> int:
        return len(self._positions)

    def losses(self, numbers: Tensor, generator: torch.Generator) -> Tensor:
        """See `Examples.losses`."""
        index = self._positions.index[numbers]
        batch = self._positions.batch(index, self._losses.top_k)
        return self._losses(batch.to(self._device), generator)


class Trainer(TrainingLoop):
    """Trains ``model`` in place.

    Args:
        model: a float32 speculator, bound to its target if it shares weights.
        settings: see `TrainingSettings`.
        output_dir: see the module.
        ground_truth: corpus of stage 1; ``None`` leaves the stage out.
        self_generated: corpus of stage 2; ``None`` leaves the stage out.
        progress: show a bar.
        processes: which train together; ``None``: this one alone.

    Raises:
        ValueError: no corpus, one of another target, a model that is not float32, or a
            ``distill_top_k`` the corpus does not have.
    """

    held_out: HeldOutPositions

    def __init__(
        self,
        model: MLPSpeculatorPreTrainedModel,
        settings: TrainingSettings,
        output_dir: str | Path,
        ground_truth: Corpus | None = None,
        self_generated: Corpus | None = None,
        progress: bool = True,
        processes: Processes | None = None,
    ) -> None:
        self.model = model
        super().__init__(
            model, settings, output_dir, ground_truth, self_generated, progress, processes
        )

    def _check_corpus(self, name: str, corpus: Corpus) -> None:
        metadata, config = corpus.metadata, self.model.config
        if metadata.hidden_size != config.emb_dim or metadata.vocab_size > config.vocab_size:
            raise ValueError(
                f"{name} has hidden_size={metadata.hidden_size} and vocab_size="
                f"{metadata.vocab_size}, the model emb_dim={config.emb_dim} and vocab_size="
                f"{config.vocab_size}; it was made with another target, {metadata.target!r}"
            )

    def _examples(self, corpus: Corpus, documents: Tensor) -> PositionExamples:
        return PositionExamples(self.model, self.settings, corpus, documents)

    def _hold_out(self, corpus: Corpus, documents: Tensor) -> HeldOutPositions:
        heads, most = self.model.config.n_predict, self.settings.evaluate_positions
        return HeldOutPositions(corpus, documents, heads, most)

    def _measure(self) -> Acceptance:
        return self.held_out.measure(self.model, self.settings.precision == "bf16")

    def _save_best(self) -> None:
        save_speculator(self.model, self.output_dir, self.settings.save_dtype)

    def _model_values(self) -> dict[str, Any]:
        ignored = ("transformers_version", "dtype", "_name_or_path", "architectures")
        values = self.model.config.to_dict()
        return {key: value for key, value in values.items() if key not in ignored}


def save_speculator(
    model: MLPSpeculatorPreTrainedModel, directory: str | Path, dtype: str = "bfloat16"
) -> None:
    """Save a copy in ``dtype`` (``"bfloat16"``, ``"float16"``, ``"float32"``); the model stays.

    A folder that holds an older one keeps it until the new one is complete.

    Args:
        model: the speculator. ``config.base_model_name_or_path`` should name its target.
        directory: for ``save_pretrained``.
        dtype: of the weights on disk.
    """
    was_enabled = is_progress_bar_enabled()
    # A bar for every save would tear up the one of the training.
    disable_progress_bar()
    try:
        saved = copy.deepcopy(model).to(getattr(torch, dtype))
        write_folder(Path(directory), saved.save_pretrained)
    finally:
        if was_enabled:
            enable_progress_bar()
