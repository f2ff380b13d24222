"""Configuration of MiMo-7B.

Boundary: reads and checks what a checkpoint's ``config.json`` says; builds no tensor.
"""

from collections.abc import Sequence
from typing import Any

from transformers import Qwen2Config

_FEEDS = ("pre_norm", "post_norm")


class MiMoConfig(Qwen2Config):
    """Configuration of [`MiMoForCausalLM`]: that of Qwen2, and the MTP layers.

    Published checkpoints (``XiaomiMiMo/MiMo-7B-*``) say ``num_nextn_predict_layers: 1``. How the
    layer is to be fed they don't say: the code they come with never calls it, and runtimes
    disagree. The two switches are therefore fields of this config; compare acceptance before
    changing them.

    Args:
        num_nextn_predict_layers: MTP layers in the checkpoint.
        mtp_feed: which state of the target the MTP layer reads: ``"pre_norm"``, the sum before the
            final norm (vLLM, whose code came from the model's authors), or ``"post_norm"``, what
            ``lm_head`` reads (SGLang).
        mtp_mask_position_0: zero the embedding at position 0, as vLLM does.
        mtp_draft_token_ids: ids the MTP layers can draft, ascending; ``None`` means all. Published
            checkpoints don't have it. Where the vocabulary is a large part of a small model, rows
            of the head for the ids that occur make a draft much cheaper; what the model says stays
            the same.
        kwargs: see [`~transformers.Qwen2Config`].

    Raises:
        ValueError: a negative number of layers, a feed that isn't one, or draft ids that are not
            ascending ids of the vocabulary.
    """

    model_type = "mimo"

    num_nextn_predict_layers: int = 1
    mtp_feed: str = "pre_norm"
    mtp_mask_position_0: bool = True
    mtp_draft_token_ids: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_nextn_predict_layers < 0:
            raise ValueError(
                f"num_nextn_predict_layers={self.num_nextn_predict_layers} must be at least 0"
            )
        if self.mtp_feed not in _FEEDS:
            raise ValueError(f"mtp_feed={self.mtp_feed!r} must be one of {list(_FEEDS)}")
        if self.mtp_draft_token_ids is not None:
            check_draft_token_ids(self.mtp_draft_token_ids, self.vocab_size)
        super().__post_init__(**kwargs)


def check_draft_token_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raise ValueError unless ``ids`` are one or more ascending ids below ``vocab_size``."""
    ascending = all(a < b for a, b in zip(ids, ids[1:], strict=False))
    if not ids or not ascending or ids[0] < 0 or ids[-1] >= vocab_size:
        shown = list(ids[:4])
        raise ValueError(
            f"mtp_draft_token_ids ({len(ids)} ids, {shown} ...) must be at least one ascending, "
            f"distinct ids of 0 to {vocab_size - 1}; use None for all"
        )
