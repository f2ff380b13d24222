"""What follows the projection in a stage of an MLP speculator, in one pass over its row.

The token's embedding is looked up and added, the sum is normalised, scaled, shifted, and goes
through GELU. In plain torch that is ten launches, each of which reads and writes the state.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from hf_specdec.kernels.rounding import rounded
from hf_specdec.kernels.runtime import interpreted
from hf_specdec.kernels.variants import Variant

_EPS = 1e-6
_LARGEST_INNER = 32768


@triton.jit
def _stage_kernel(
    projected,
    table,
    token_ids,
    weight,
    bias,
    out,
    alpha,
    inverse_size,
    eps,
    stride_projected,
    stride_table,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    CPU: tl.constexpr,
):
    """Grid (rows,): one row a program."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    entry = row if token_ids is None else tl.load(token_ids + row)
    DTYPE: tl.constexpr = projected.dtype.element_ty
    x = tl.load(projected + row * stride_projected + d, mask=inside, other=0.0)
    e = tl.load(table + entry * stride_table + d, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + d, mask=inside, other=0.0).to(tl.float32)
    x = rounded(x.to(tl.float32) + alpha * e, DTYPE, CPU)
    total = tl.sum(rounded(x * x, DTYPE, CPU), 0)
    square = rounded(rounded(total * inverse_size, DTYPE, CPU) + eps, DTYPE, CPU)
    if CPU:  # where torch rounds the root by itself
        scale = rounded(1.0 / rounded(tl.sqrt(square), DTYPE, CPU), DTYPE, CPU)
    else:
        scale = rounded(tl.rsqrt(square), DTYPE, CPU)
    x = rounded(x * scale, DTYPE, CPU)
    x = rounded(w * x, DTYPE, CPU)
    x = rounded(x + b, DTYPE, CPU)
    y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    tl.store(out + row * D + d, rounded(y, DTYPE, CPU), mask=inside)


def finish_stage(
    projected: torch.Tensor,
    table: torch.Tensor,
    token_ids: torch.Tensor | None,
    alpha: float,
    weight: torch.Tensor,
    bias: torch.Tensor,
) -> torch.Tensor:
    """``gelu(weight * rms(projected + alpha * table[token_ids]) + bias)``.

    Args:
        projected: ``[n, D]``, what the stage's projection made of the state before.
        table: ``[V, D]`` embeddings, elements of a row contiguous, of the same dtype.
        token_ids: int64 ``[n]``, contiguous, each in 0..V-1; ``None`` takes row i of the table for
            row i.
        alpha: weight of an embedding.
        weight, bias: ``[D]``, scale and shift behind the norm.

    Returns:
        ``[n, D]``, rounded to the dtype wherever plain torch would round.
    """
    n, inner = projected.shape
    if interpreted():
        alpha = float(torch.tensor(alpha).to(projected.dtype))  # as torch rounds it on CPU alone
    out = torch.empty_like(projected, memory_format=torch.contiguous_format)
    with torch.cuda.device_of(projected):
        _stage_kernel[(n,)](
            projected,
            table,
            token_ids,
            weight,
            bias,
            out,
            alpha,
            1 / inner,
            _EPS,
            projected.stride(0),
            table.stride(0),
            D=inner,
            BLOCK=triton.next_power_of_2(inner),
            CPU=interpreted(),
            num_warps=_warps(inner),
        )
    return out


def fits(inner: int) -> bool:
    """Whether a row of this many elements goes through one program."""
    return inner <= _LARGEST_INNER


def _warps(inner: int) -> int:
    # 16 elements a thread; a row is read five times over by one SM, so latency counts.
    return max(1, min(32, triton.next_power_of_2(inner) // 512))


def finish_stage_twin(
    projected: torch.Tensor,
    table: torch.Tensor,
    token_ids: torch.Tensor | None,
    alpha: float,
    weight: torch.Tensor,
    bias: torch.Tensor,
) -> torch.Tensor:
    """`finish_stage` in plain torch: the arithmetic of the network itself."""
    embedded = table if token_ids is None else F.embedding(token_ids, table)
    x = torch.add(projected, embedded, alpha=alpha)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + _EPS)
    return F.gelu(weight * x + bias)


def agrees(like: torch.Tensor) -> bool:
    """Whether kernel and twin agree in the dtype and on the device of ``like``."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 160), (5, 160), (160,), (160,))
    projected, table, weight, bias = (
        torch.randn(shape, generator=generator).to(like) for shape in shapes
    )
    token_ids = torch.tensor([4, 0, 4], device=like.device)
    arguments = (projected, table, token_ids, 3.7, weight, bias)
    found, expected = finish_stage(*arguments), finish_stage_twin(*arguments)
    # Another order of a sum can move a rounding, and a row's scale with it, by a last place or two.
    places = 32 if like.dtype == torch.float32 else 4
    tolerance = places * torch.finfo(like.dtype).eps * float(expected.abs().max())
    return bool(((found - expected).abs() <= tolerance).all())


def variants() -> list[Variant]:
    """What is compiled ahead of time: the published inner sizes, and one that is odd."""
    found = [
        _variant(dtype, inner, gathers=True)
        for dtype in ("bf16", "fp16", "fp32")
        for inner in (576, 3072, 4096, 8192)
    ]
    return [*found, _variant("bf16", 3071, gathers=True), _variant("bf16", 4096, gathers=False)]


def _variant(dtype: str, inner: int, gathers: bool) -> Variant:
    tensors = ("projected", "table", "weight", "bias", "out")
    strides = ("stride_projected", "stride_table")
    constexprs = {"D": inner, "BLOCK": triton.next_power_of_2(inner), "CPU": False}
    signature = {
        **dict.fromkeys(tensors, f"*{dtype}"),
        **dict.fromkeys(("alpha", "inverse_size", "eps"), "fp32"),
        **dict.fromkeys(strides, "i32"),
    }
    aligned: tuple[str, ...] = tensors if inner % 16 else (*tensors, *strides)
    if gathers:
        signature["token_ids"] = "*i64"
        aligned = (*aligned, "token_ids")
    else:
        constexprs["token_ids"] = None
    return Variant(
        name=f"finish_stage {dtype} D={inner}{'' if gathers else ' given embeddings'}",
        kernel=_stage_kernel,
        signature=signature,
        constexprs=constexprs,
        divisible_by_16=aligned,
        num_warps=_warps(inner),
        bytes_moved="n (5 D s + 8)" if gathers else "n 5 D s",
        floor="(3 n + 2) D s + 8 n" if gathers else "(3 n + 2) D s",
    )
