"""What a head is trained for: cross-entropy with weighted targets, exact or sampled.

For one position, with l the head's logits over the draft vocabulary, targets j = 1 .. k and weights
w_j that sum to 1 (or to less, where the draft vocabulary does not cover a target):

    loss = sum_j w_j (log Z - l_j),    Z = sum over the vocabulary of exp(l)

One target of weight 1 is the usual cross-entropy on the text (IBM's recipe); the target's k most
probable tokens with their probabilities make it a distillation.

With a vocabulary of 50 000 to 260 000 tokens nearly all time goes into Z. `SampledSoftmax`
estimates it: the frequent ids F and a position's own targets count exactly, and m of the other ids
are drawn without replacement, shared by the batch, each standing for 1 / pi of its kind, where
pi = m / (V - |F|) is its chance to be drawn:

    Z' = sum_{F and targets} exp(l) + sum_{drawn, not a target} exp(l - log pi)

Z' is unbiased (Horvitz & Thompson 1952) and log Z' tends to log Z; with pi = 1 it is log Z. The
logarithmic correction is that of Bengio & Senecal 2008 and Jean et al. 2015 (arXiv 1412.2007).

Boundary: tensors in, losses per position out. No data, no optimiser.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_specdec.modeling.mlp_speculator import MLPSpeculatorPreTrainedModel


def soft_cross_entropy(logits: Tensor, columns: Tensor, weights: Tensor) -> Tensor:
    """Cross-entropy with weighted targets, over all columns.

    Args:
        logits: ``[B, Vd]``, any float dtype; computed in float32.
        columns: int64 ``[B, k]``, the targets' columns of the logits. A target that has none is
            given as any valid column with weight 0.
        weights: float32 ``[B, k]``.

    Returns:
        float32 ``[B]``.
    """
    return _SoftCrossEntropy.apply(logits, columns, weights)


class _SoftCrossEntropy(torch.autograd.Function):
    """The same in two passes over the logits instead of the eight that autograd derives."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, columns: Tensor, weights: Tensor) -> Tensor:
        exact = logits.float()
        log_partition = exact.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(logits, log_partition, columns, weights)
        return (weights * (log_partition - exact.gather(-1, columns))).sum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """``softmax(logits) * sum_j w_j - w``, for each position times its own gradient."""
        logits, log_partition, columns, weights = ctx.saved_tensors
        weights = weights * grads[0][:, None]
        grad = (logits.float() - log_partition).exp_().mul_(weights.sum(-1, keepdim=True))
        grad.scatter_add_(-1, columns, -weights)
        return grad.to(logits.dtype), None, None


class _LogSumExp(torch.autograd.Function):
    """``logsumexp(logits - correction)`` without some entries, in as few passes as it takes."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, correction: Tensor, rows: Tensor, columns: Tensor
    ) -> Tensor:
        """Of ``[B, M]`` float32 ``[B]``; entries (rows[i], columns[i]) are left out."""
        exact = logits.float() - correction
        exact[rows, columns] = -torch.inf
        result = exact.logsumexp(-1)
        ctx.save_for_backward(logits, correction, rows, columns, result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """The softmax of what was summed, for each row times its own gradient."""
        logits, correction, rows, columns, result = ctx.saved_tensors
        grad = (logits.float() - correction).sub_(result[:, None]).exp_()
        grad[rows, columns] = 0
        return grad.mul_(grads[0][:, None]).to(logits.dtype), None, None, None


def target_weights(logprobs: Tensor, covered: Tensor) -> Tensor:
    """Weights of the targets a head can express: their probabilities, scaled to sum to 1.

    Args:
        logprobs: ``[.., k]`` log-probabilities under the target.
        covered: bool ``[.., k]``, False where the draft vocabulary lacks the token.

    Returns:
        float32 ``[.., k]``; all 0 where nothing is covered.
    """
    probs = logprobs.float().exp() * covered
    return probs / probs.sum(-1, keepdim=True).clamp(min=1e-9)


@dataclass(frozen=True)
class OutputLayer:
    """The linear layer at the end of one head: ``logits = features @ table.T``.

    Attributes:
        features: ``[B, D]``, or ``[B, d]`` with shared target weights.
        table: ``[Vd, same]``.
    """

    features: Tensor
    table: Tensor

    @classmethod
    def of(cls, model: MLPSpeculatorPreTrainedModel, index: int, state: Tensor) -> OutputLayer:
        """Take head ``index`` apart at its state ``[B, D]``."""
        network = model.speculator
        if not model.config.share_target_weights:
            return cls(state, cast(Tensor, network.head[index].weight))
        if network.target_tables is None:
            raise RuntimeError("call bind_target(...) before training a speculator that shares")
        return cls(network.head_proj[index](state), network.target_tables.head)

    def logits(self) -> Tensor:
        """``[B, Vd]``."""
        return F.linear(self.features, self.table.to(self.features.dtype))


class SampledSoftmax:
    """Cross-entropy with an estimated partition function; see the module.

    Args:
        vocab_size: V, the number of columns.
        num_sampled: m, columns drawn per batch from those that are not in ``always``.
        always: int64 ``[F]``, distinct columns that are part of every batch: the frequent ones.

    Raises:
        ValueError: ``num_sampled`` is not 1 .. V - F.
    """

    def __init__(self, vocab_size: int, num_sampled: int, always: Tensor | None = None) -> None:
        always = torch.empty(0, dtype=torch.int64) if always is None else always
        is_rare = torch.ones(vocab_size, dtype=torch.bool)
        is_rare[always.cpu()] = False
        self._rare = is_rare.nonzero()[:, 0]
        if not 1 <= num_sampled <= len(self._rare):
            raise ValueError(
                f"num_sampled={num_sampled} must be 1 to {len(self._rare)}, the vocab_size="
                f"{vocab_size} columns without the {len(always)} of always"
            )
        self._vocab_size = vocab_size
        self._always = always
        self._num_sampled = num_sampled
        self._log_inclusion = math.log(num_sampled / len(self._rare))

    def draw(self, generator: torch.Generator) -> Tensor:
        """Columns for one batch, int64 ``[F + m]`` on CPU: the frequent ones, then the drawn."""
        drawn = torch.randperm(len(self._rare), generator=generator)[: self._num_sampled]
        return torch.cat([self._always.cpu(), self._rare[drawn]])

    def __call__(
        self, layer: OutputLayer, drawn: Tensor, columns: Tensor, weights: Tensor
    ) -> Tensor:
        """Loss of one head.

        Args:
            layer: features ``[B, D]`` and table ``[V, D]``.
            drawn: int64 ``[F + m]`` from `draw`, on the device of the features.
            columns: int64 ``[B, k]`` distinct targets of each position.
            weights: float32 ``[B, k]``; a target without weight is no target.

        Returns:
            float32 ``[B]``.
        """
        rows = layer.table[columns].to(layer.features.dtype)
        at_targets = torch.einsum("bd,bkd->bk", layer.features, rows).float()
        negatives = layer.features @ layer.table[drawn].to(layer.features.dtype).T
        correction = rows.new_zeros(len(drawn), dtype=torch.float32)
        correction[len(self._always) :] = self._log_inclusion
        is_target = weights > 0
        # A target among the negatives would be counted twice.
        position = torch.full((self._vocab_size,), -1, device=drawn.device)
        position[drawn] = torch.arange(len(drawn), device=drawn.device)
        where = position[columns]
        twice = is_target & (where >= 0)
        left_out = twice.nonzero()[:, 0], where[twice]
        others = _LogSumExp.apply(negatives, correction, *left_out)
        # Not -inf: where there is no target at all, its gradient would be nan.
        absent = torch.finfo(at_targets.dtype).min
        counted = at_targets.masked_fill(~is_target, absent).logsumexp(-1)
        log_partition = torch.logaddexp(others, counted)[:, None]
        return (weights * (log_partition - at_targets)).sum(-1)
