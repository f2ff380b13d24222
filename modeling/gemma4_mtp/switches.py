"""How a Gemma 4 assistant is fed, where implementations disagree: fields that can be turned.

Boundary: names and values; what they do is the drafter's business.
"""

from dataclasses import dataclass

from hf_specdec.modeling.mtp import Feed


@dataclass(frozen=True)
class Gemma4MTPSwitches:
    """The choices behind a proposal. None of them ever changes what is generated.

    Attributes:
        feed: which state of the target the first step reads: ``"post_norm"``, what ``lm_head``
            reads, or ``"pre_norm"``, the sum before the final norm.
        position_offset: the assistant's one position, counted from that of the last token whose
            keys exist. 0 is vLLM's choice, with which the published acceptance lengths were
            measured; transformers' is 1, the position of the token being continued.
    """

    feed: Feed = "post_norm"
    position_offset: int = 0
