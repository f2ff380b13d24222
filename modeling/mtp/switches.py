"""How MTP layers are fed, where implementations disagree: fields that can be turned.

Boundary: names and values; what they do is the networks' business.
"""

from dataclasses import dataclass
from typing import Literal

Feed = Literal["post_norm", "pre_norm"]


@dataclass(frozen=True)
class MTPSwitches:
    """The choices behind one pass of an MTP layer. None of them ever changes what is generated.

    Attributes:
        feed: which state of the target it reads: ``"post_norm"``, what ``lm_head`` reads, or
            ``"pre_norm"``, the sum before the final norm.
        hidden_first: join as ``[state, embedding]`` instead of ``[embedding, state]``.
        mask_position_0: zero the embedding that is paired with the state at position 0.
        token_shift: the token paired with the state at position i is the one at i + this; 1 is how
            every family is trained.
        position_offset: added to the positions of the target's states. With rotary positions, which
            are relative, it makes no difference; transformers counts one further than vLLM.
    """

    feed: Feed = "post_norm"
    hidden_first: bool = False
    mask_position_0: bool = False
    token_shift: int = 1
    position_offset: int = 0
