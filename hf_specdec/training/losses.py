"""The loss of every head on a batch of positions.

Boundary: joins network, batch and objective. The sum over heads and the update are the trainer's.
"""

from __future__ import annotations

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


class HeadLosses:
    """Teacher-forced losses.

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
        self._distil = settings.objective == "distillation"
        self.top_k = settings.distill_top_k if self._distil else 1
        size = model.config.head_size
        ids = model.speculator.draft_token_ids
        # Column of every target id in the logits, -1 where the heads do not cover it.
        self._column = torch.full((model.config.vocab_size,), -1, device=model.device)
        self._column[torch.arange(size, device=model.device) if ids is None else ids] = (
            torch.arange(size, device=model.device)
        )
        self._sampled: SampledSoftmax | None = None
        if settings.num_sampled:
            counts = count_tokens(corpus, documents)
            frequent = counts.topk(min(settings.num_frequent, len(counts))).indices
            columns = self._column[frequent.to(model.device)]
            columns = columns[columns >= 0]
            self._sampled = SampledSoftmax(size, settings.num_sampled, columns)

    def __call__(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Mean loss of each head over its positions, float32 ``[n]``.

        Args:
            batch: on the model's device.
            generator: on CPU, of the ids a sampled softmax draws (the same for all heads).
        """
        model, heads = self._model, batch.input_ids.shape[1]
        targets = batch.top_ids if self._distil else batch.labels[..., None]
        columns = self._column[targets]
        covered = (columns >= 0) & batch.mask[..., None]
        logprobs = batch.top_logprobs if self._distil else torch.zeros_like(columns).float()
        weights = target_weights(logprobs, covered)
        columns = columns.clamp(min=0)
        drawn = None if self._sampled is None else self._sampled.draw(generator).to(model.device)
        losses = []
        state = model.initial_state(batch.hidden_states)
        for i in range(heads):
            state = model.stage(i, state, batch.input_ids[:, i])
            if self._sampled is None or drawn is None:
                logits = model.head_logits(i, state)
                loss = soft_cross_entropy(logits, columns[:, i], weights[:, i])
            else:
                layer = OutputLayer.of(model, i, state)
                loss = self._sampled(layer, drawn, columns[:, i], weights[:, i])
            # Positions of nothing but uncovered targets have loss 0 and no gradient.
            counted = covered[:, i].any(-1).sum().clamp(min=1)
            losses.append(loss.sum() / counted)
        return torch.stack(losses)
