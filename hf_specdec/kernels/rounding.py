"""Rounding to a dtype, as plain torch does after every operator."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded(x, dtype: tl.constexpr, CPU: tl.constexpr):
    """The nearest number to float32 ``x`` of ``dtype``, in float32.

    With ``CPU`` as Triton's interpreter must do it, which cuts bfloat16 off.
    """
    if dtype == tl.float32:
        return x
    elif CPU and dtype == tl.bfloat16:
        # Half of the last place is added, a little less where that place is even.
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 32767 + ((bits >> 16) & 1)) & -65536
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        return x.to(dtype).to(tl.float32)
