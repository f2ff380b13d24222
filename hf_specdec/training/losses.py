"""The loss at every draft position of a batch.

`DraftLoss` is the same for every kind of drafter: targets, draft vocabulary, exact or sampled
softmax. `HeadLosses` runs an MLP speculator's heads for it.

Boundary: joins network, batch and objective. The sum over positions and the update are the
trainer's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_specdec.modeling.mlp_speculator import MLPSpeculatorPreTrainedModel
from hf_specdec.training.corpus import Corpus
from hf_specdec.training.draft_vocabulary import count_tokens
from hf_specdec.training.objectives import (
    OutputLayer,
    SampledSoftmax,
    soft_cross_entropy,
    target_weights,
)
from hf_specdec.training.positions import Batch
from hf_specdec.training.settings import TrainingSettings


@dataclass(frozen=True)
class Targets:
    """What B examples are trained for at n draft positions.

    Attributes:
        columns: int64 ``[B, n, k]``, columns of the logits; any where the weight is 0.
        weights: float32 ``[B, n, k]``, of sum 1, or 0 where no target is covered.
        covered: bool ``[B, n]``, whether there is a target to train for.
    """

    columns: Tensor
    weights: Tensor
    covered: Tensor


class DraftLoss:
    """The loss of one draft position, and what it is computed from.

    Args:
        settings: objective and sampling.
        corpus: gives the frequent ids of a sampled softmax.
        documents: bool ``[num_documents]``, the documents those are counted in.
        vocab_size: V, of the target.
        draft_token_ids: int64 ``[Vd]``, the ids of the columns; ``None``: 0 .. V - 1.
        device: where batches are.

    Attributes:
        top_k: targets per position that batches need.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        corpus: Corpus,
        documents: Tensor,
        vocab_size: int,
        draft_token_ids: Tensor | None,
        device: torch.device,
    ) -> None:
        self._distil = settings.objective == "distillation"
        self.top_k = settings.distill_top_k if self._distil else 1
        ids = draft_token_ids
        size = vocab_size if ids is None else len(ids)
        # Column of every target id in the logits, -1 where they do not cover it.
        self._column = torch.full((vocab_size,), -1, device=device)
        self._column[torch.arange(size, device=device) if ids is None else ids] = torch.arange(
            size, device=device
        )
        self._sampled: SampledSoftmax | None = None
        # Of a small vocabulary nothing would be left to draw from; all of it is no more work.
        if settings.num_sampled and settings.num_sampled + settings.num_frequent < size:
            counts = count_tokens(corpus, documents)
            frequent = counts.topk(min(settings.num_frequent, len(counts))).indices
            columns = self._column[frequent.to(device)]
            columns = columns[columns >= 0]
            self._sampled = SampledSoftmax(size, settings.num_sampled, columns)

    def draw(self, generator: torch.Generator) -> Tensor | None:
        """The columns of a sampled softmax, the same for a whole batch; ``None`` for all."""
        if self._sampled is None:
            return None
        return self._sampled.draw(generator).to(self._column.device)

    def targets(self, batch: Batch) -> Targets:
        """What a batch is trained for."""
        ids = batch.top_ids if self._distil else batch.labels[..., None]
        columns = self._column[ids]
        covered = (columns >= 0) & batch.mask[..., None]
        logprobs = batch.top_logprobs if self._distil else torch.zeros_like(columns).float()
        weights = target_weights(logprobs, covered)
        return Targets(columns.clamp(min=0), weights, covered.any(-1))

    def __call__(
        self, layer: OutputLayer, columns: Tensor, weights: Tensor, drawn: Tensor | None
    ) -> Tensor:
        """Loss of B examples at one position, float32 ``[B]``.

        Args:
            layer: their features ``[B, D]`` and the output table ``[Vd, D]``.
            columns: int64 ``[B, k]``.
            weights: float32 ``[B, k]``.
            drawn: from `draw`.
        """
        if self._sampled is None or drawn is None:
            return soft_cross_entropy(layer.logits(), columns, weights)
        return self._sampled(layer, drawn, columns, weights)


class HeadLosses:
    """Teacher-forced losses of an MLP speculator.

    Args:
        model: the speculator.
        settings: objective and sampling.
        corpus: gives the frequent ids of a sampled softmax.
        documents: bool ``[num_documents]``, the documents those are counted in.

    Attributes:
        top_k: targets per position that batches need.
    """

    def __init__(
        self,
        model: MLPSpeculatorPreTrainedModel,
        settings: TrainingSettings,
        corpus: Corpus,
        documents: Tensor,
    ) -> None:
        self._model = model
        ids, vocab_size = model.speculator.draft_token_ids, model.config.vocab_size
        self._loss = DraftLoss(settings, corpus, documents, vocab_size, ids, model.device)
        self.top_k = self._loss.top_k

    def __call__(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Mean loss of each head over its positions, float32 ``[n]``.

        Args:
            batch: on the model's device.
            generator: on CPU, of the ids a sampled softmax draws (the same for all heads).
        """
        model, targets = self._model, self._loss.targets(batch)
        drawn = self._loss.draw(generator)
        losses = []
        state = model.initial_state(batch.hidden_states)
        for i in range(batch.input_ids.shape[1]):
            state = model.stage(i, state, batch.input_ids[:, i])
            layer = OutputLayer.of(model, i, state)
            loss = self._loss(layer, targets.columns[:, i], targets.weights[:, i], drawn)
            # Positions of nothing but uncovered targets have loss 0 and no gradient.
            losses.append(loss.sum() / targets.covered[:, i].sum().clamp(min=1))
        return torch.stack(losses)
