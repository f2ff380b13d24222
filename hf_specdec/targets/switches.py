"""What is different in a target while a call speculates; everything is put back at its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from hf_specdec.targets.attention import grouped_attention
from hf_specdec.targets.masked_attention import row_masks
from hf_specdec.targets.uncompiled import uncompiled


@contextmanager
def switched(model: Any) -> Iterator[None]:
    """Attention that takes a mask for every row and repeats no keys, in an uncompiled forward."""
    with ExitStack() as stack:
        for switch in (grouped_attention, row_masks, uncompiled):
            stack.enter_context(switch(model))
        yield
