"""The training loss of one head.

Boundary: logits and labels in, a scalar out; which labels belong to which head is the model's.
"""

import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100


def mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy over the labels that are not ``IGNORE_INDEX``, in float32.

    Args:
        logits: [B, N, V].
        labels: int64 [B, N].

    Returns:
        Scalar; 0 where no label counts.
    """
    total = F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    return total / (labels != IGNORE_INDEX).sum().clamp(min=1)
