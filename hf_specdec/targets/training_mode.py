"""Targets left in training mode: what generate() does with them, and whether it can be repeated."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.utils import logging

logger = logging.get_logger(__name__)

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


def check_mode(target: Any) -> None:
    """Raise ValueError if the target would run without a cache; warn if it would throw dice.

    Args:
        target: the model.
    """
    if not target.training:
        return
    name = type(target).__name__
    if any(m.training and getattr(m, "gradient_checkpointing", False) for m in target.modules()):
        raise ValueError(
            f"The target {name} is in training mode with gradient checkpointing, where "
            "transformers runs it without a cache, and drafts are verified with one. Call "
            "model.eval() before generate(); checkpointing may stay on."
        )
    if _drops(target):
        logger.warning_once(
            f"The target {name} is in training mode, and its dropout changes every forward: the "
            "text is as random as without assistant_model, and drafts are accepted less often. "
            "Call model.eval() before generate()."
        )


def _drops(target: Any) -> bool:
    """Whether dropout is on anywhere."""
    config = target.config.get_text_config(decoder=True)
    # Attention drops with a function, not with a module.
    if getattr(config, "attention_dropout", 0) or getattr(config, "attn_pdrop", 0):
        return True
    return any(isinstance(m, _DROPOUTS) and m.training and m.p > 0 for m in target.modules())
