"""Configuration of MiMo-7B.

Boundary: reads and checks what a checkpoint's ``config.json`` says; builds no tensor.
"""

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
        kwargs: see [`~transformers.Qwen2Config`].

    Raises:
        ValueError: a negative number of layers, or a feed that isn't one.
    """

    model_type = "mimo"

    num_nextn_predict_layers: int = 1
    mtp_feed: str = "pre_norm"
    mtp_mask_position_0: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_nextn_predict_layers < 0:
            raise ValueError(
                f"num_nextn_predict_layers={self.num_nextn_predict_layers} must be at least 0"
            )
        if self.mtp_feed not in _FEEDS:
            raise ValueError(f"mtp_feed={self.mtp_feed!r} must be one of {list(_FEEDS)}")
        super().__post_init__(**kwargs)
