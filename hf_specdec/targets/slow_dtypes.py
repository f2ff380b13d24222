"""Dtypes that a CPU multiplies without instructions for them: what speculation is worth there."""

from __future__ import annotations

from typing import Any

import torch
from transformers.utils import logging

from hf_specdec.modeling.placement import is_offloaded
from hf_specdec.modeling.quantized import compute_dtype

logger = logging.get_logger(__name__)

_QUERIES = {
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}


def has_kernels_for(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies a dtype with instructions of this processor.

    Without them torch multiplies token by token: a forward over four tokens takes about three
    times as long as one over a single token, and drafts hardly pay. True where torch was built
    without oneDNN and can't tell, and for all but the two floats of 16 bits.
    """
    if dtype not in _QUERIES:
        return True
    supported = getattr(torch.ops.mkldnn, _QUERIES[dtype], None)
    return supported is None or bool(supported())


def warn_if_slow(target: Any, num_draft_tokens: int, schedule: str) -> None:
    """Warn, once a process, if drafts hardly pay with this target on this processor.

    Args:
        target: the model.
        num_draft_tokens: most drafts of a step; nothing is said without any.
        schedule: of K; ``"auto"`` finds out for itself.
    """
    if num_draft_tokens == 0 or schedule == "auto" or target.device.type != "cpu":
        return
    dtype = compute_dtype(target)
    if has_kernels_for(dtype):
        return
    # Layers that unpack their weights, or wait for them, spend their time otherwise.
    if getattr(target, "hf_quantizer", None) is not None or is_offloaded(target):
        return
    name = str(dtype).removeprefix("torch.")
    logger.warning_once(
        f"The target {type(target).__name__} is in {name}, for which this processor has no "
        "instructions: every further token of a forward costs more than half as much as the first, "
        "and drafts hardly pay. Pass num_assistant_tokens='auto', which drafts where that is "
        "faster; for long prompts and batches load it with dtype=torch.float32. The tokens are "
        "the target's own either way."
    )
