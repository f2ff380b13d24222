"""The counter-based noise of `hf_specdec.noise`, computed inside kernels.

The hash is exact: the twin's int64 values hold 32 bits each, and uint32 arithmetic yields the same
ones. The two logarithms behind it are those of the device's mathematics library, as in torch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

_LARGEST_UNIT = tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def _mix(x):
    """Hash uint32 values, as `hf_specdec.noise._mix`."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def hash_keys(row_seeds, positions, STREAM: tl.constexpr):
    """The two uint32 keys of int64 seeds and positions; both scalars or both of one shape."""
    low = row_seeds.to(tl.uint32)
    high = (row_seeds >> 32).to(tl.uint32)
    position = positions.to(tl.uint32)
    first = _mix(low ^ _mix(high ^ _mix(position * 0x9E3779B9 + (STREAM + 1))))
    second = _mix(first + _mix(position + 0x9E3779B9) + high)
    return first, second


@triton.jit
def unit_interval(first, second, token_ids):
    """float32 in (0, 1) for keys and int32 token ids."""
    bits = _mix(_mix((token_ids.to(tl.uint32) * 0x9E3779B9) ^ first) ^ second)
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2**-32
    return tl.minimum(u, _LARGEST_UNIT)


@triton.jit
def _log1p(x, LIBDEVICE: tl.constexpr):
    """log(1 + x) for -1 < x < 0.

    The interpreter has no libdevice. There the rounding of ``1 + x`` is cancelled by dividing by
    what was really added (Kahan), right to a few units in the last place.
    """
    if LIBDEVICE:
        return libdevice.log1p(x)
    else:
        shifted = 1.0 + x
        added = shifted - 1.0
        return tl.where(added == 0.0, x, tl.log(shifted) * x / tl.where(added == 0.0, 1.0, added))


@triton.jit
def gumbel(first, second, token_ids, LIBDEVICE: tl.constexpr):
    """Standard Gumbel noise, float32, for keys and int32 token ids."""
    u = unit_interval(first, second, token_ids)
    return -tl.log(-_log1p(-u, LIBDEVICE))
