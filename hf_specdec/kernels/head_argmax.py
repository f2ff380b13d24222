"""The largest logits of a head and where they stand, without writing the logits.

A chain of drafts needs the argmax of ``states @ head.T``, a tree the few largest. A first pass over
the head leaves the best of every block of the vocabulary, a second picks among those. The head is
read once for up to `MOST_ROWS` states.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from hf_specdec.kernels.rounding import rounded
from hf_specdec.kernels.runtime import interpreted
from hf_specdec.kernels.variants import Variant

MOST_ROWS = 16
"""More states than this are better served by a matrix product."""

LARGEST_K = 8
"""The most logits of a state that are worth finding this way."""

# One state is multiplied and summed; more go through the tensor cores, whose narrow side has 16.
_ONE_STATE = {"BLOCK_V": 16, "BLOCK_D": 256}
_MORE_STATES = {"BLOCK_V": 64, "BLOCK_D": 64}
_MORE_STATES_LARGE = {"BLOCK_V": 128, "BLOCK_D": 64}
# Rows that don't start at multiples of 16 elements are loaded one by one, into many registers.
_UNALIGNED = {"BLOCK_V": 32, "BLOCK_D": 32}
_LARGE_VOCABULARY = 32768
_MERGE_BLOCK = 2048
_NOWHERE = tl.constexpr(2147483647)


@triton.jit
def _keep_best(logits, v, V, m, n, values, indices, K: tl.constexpr):
    """Write the K largest of ``[BLOCK_V, M]`` logits, the lowest index first among equals."""
    chunk = tl.program_id(0)
    left = (v < V)[:, None] & (m >= 0)[None, :]
    # NaN never wins, and then there is always an index to return.
    logits = tl.where(logits == logits, logits, -float("inf"))
    place = (m.to(tl.int64) * tl.num_programs(0) + chunk) * K
    for j in tl.static_range(K):
        best = tl.max(tl.where(left, logits, -float("inf")), 0)
        index = tl.min(tl.where(left & (logits == best[None, :]), v[:, None], _NOWHERE), 0)
        tl.store(values + place + j, best, mask=m < n)
        tl.store(indices + place + j, index, mask=m < n)
        left = left & (v[:, None] != index[None, :])


@triton.jit
def _one_state_kernel(
    states,
    head,
    values,
    indices,
    V,
    D,
    stride_head,
    K: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CPU: tl.constexpr,
):
    """Grid (blocks of the vocabulary,)."""
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    d = tl.arange(0, BLOCK_D)
    known = v < V
    # A head can have more than 2^31 elements; rows behind the last are read as the first.
    row = head + tl.where(known, v, 0).to(tl.int64)[:, None] * stride_head + d[None, :]
    total = tl.zeros([BLOCK_V, BLOCK_D], tl.float32)
    for start in range(0, D, BLOCK_D):
        if EVEN:
            w = tl.load(row + start)
            s = tl.load(states + start + d)
        else:
            inside = start + d < D
            w = tl.load(row + start, mask=inside[None, :], other=0.0)
            s = tl.load(states + start + d, mask=inside, other=0.0)
        total += w.to(tl.float32) * s.to(tl.float32)[None, :]
    logits = rounded(tl.sum(total, 1), head.dtype.element_ty, CPU)[:, None]
    _keep_best(logits, v, V, tl.arange(0, 1), 1, values, indices, K)


@triton.jit(do_not_specialize=["n"])
def _more_states_kernel(
    states,
    head,
    values,
    indices,
    n,
    V,
    D,
    stride_states,
    stride_head,
    K: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CPU: tl.constexpr,
):
    """Grid (blocks of the vocabulary,); up to 16 states."""
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    d = tl.arange(0, BLOCK_D)
    m = tl.arange(0, 16)
    row = head + tl.where(v < V, v, 0).to(tl.int64)[:, None] * stride_head + d[None, :]
    state = states + m[None, :] * stride_states + d[:, None]
    logits = tl.zeros([BLOCK_V, 16], tl.float32)
    for start in range(0, D, BLOCK_D):
        if EVEN:
            w = tl.load(row + start)
            s = tl.load(state + start, mask=(m < n)[None, :], other=0.0)
        else:
            inside = start + d < D
            w = tl.load(row + start, mask=inside[None, :], other=0.0)
            s = tl.load(state + start, mask=inside[:, None] & (m < n)[None, :], other=0.0)
        if CPU:  # where products of bfloat16 are wrong; of float32 they are the same numbers
            logits += tl.dot(w.to(tl.float32), s.to(tl.float32), input_precision="ieee")
        else:
            logits = tl.dot(w, s, logits, input_precision="ieee")
    logits = rounded(logits, head.dtype.element_ty, CPU)
    _keep_best(logits, v, V, m, n, values, indices, K)


@triton.jit
def _merge_kernel(
    part_values,
    part_indices,
    values,
    indices,
    total,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (states,): the K best of all blocks' best, one after the other."""
    m = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    last_value = float("inf")
    last_index = -1
    for j in tl.static_range(K):
        best = tl.full([BLOCK], -float("inf"), tl.float32)
        index = tl.full([BLOCK], _NOWHERE, tl.int32)
        for start in range(0, total, BLOCK):
            entry = start + lane
            value = tl.load(
                part_values + m * total + entry, mask=entry < total, other=-float("inf")
            )
            i = tl.load(part_indices + m * total + entry, mask=entry < total, other=_NOWHERE)
            follows = (value < last_value) | ((value == last_value) & (i > last_index))
            better = follows & ((value > best) | ((value == best) & (i < index)))
            best = tl.where(better, value, best)
            index = tl.where(better, i, index)
        last_value = tl.max(best, 0)
        last_index = tl.min(tl.where(best == last_value, index, _NOWHERE), 0)
        tl.store(values + m * K + j, last_value)
        tl.store(indices + m * K + j, last_index.to(tl.int64))


def head_top_k(
    states: torch.Tensor, head: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of ``states @ head.T`` and their columns, the lowest first among equals.

    Args:
        states: ``[n, D]``, n <= `MOST_ROWS`, elements of a row contiguous.
        head: ``[V, D]`` of the same dtype, elements of a row contiguous.
        k: 1 to `LARGEST_K`, at most V.

    Returns:
        Logits ``[n, k]``, summed in float32 and rounded to the dtype, and int64 ``[n, k]``. A NaN
        counts as -inf.
    """
    vocabulary = head.shape[0]
    blocks = _blocks(len(states), head)
    chunks = triton.cdiv(vocabulary, blocks["BLOCK_V"])
    part_values = states.new_empty(len(states), chunks * k, dtype=torch.float32)
    part_indices = states.new_empty(len(states), chunks * k, dtype=torch.int32)
    values = states.new_empty(len(states), k)
    indices = states.new_empty(len(states), k, dtype=torch.int64)
    with torch.cuda.device_of(states):
        _first_pass(states, head, part_values, part_indices, k, blocks)
        block = min(_MERGE_BLOCK, triton.next_power_of_2(chunks * k))
        _merge_kernel[(len(states),)](
            part_values, part_indices, values, indices, chunks * k, K=k, BLOCK=block, num_warps=4
        )
    return values, indices


def _first_pass(
    states: torch.Tensor,
    head: torch.Tensor,
    part_values: torch.Tensor,
    part_indices: torch.Tensor,
    k: int,
    blocks: dict[str, int],
) -> None:
    n, inner = states.shape
    vocabulary = head.shape[0]
    grid = (triton.cdiv(vocabulary, blocks["BLOCK_V"]),)
    tensors = (states, head, part_values, part_indices)
    constants = {"K": k, "EVEN": inner % blocks["BLOCK_D"] == 0, "CPU": interpreted(), **blocks}
    if n == 1:
        _one_state_kernel[grid](*tensors, vocabulary, inner, head.stride(0), **constants)
    else:
        strides = (states.stride(0), head.stride(0))
        _more_states_kernel[grid](*tensors, n, vocabulary, inner, *strides, **constants)


def head_argmax(states: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """Column of the largest of ``states @ head.T``, int64 ``[n]``; see `head_top_k`."""
    return head_top_k(states, head, 1)[1][:, 0]


def _blocks(n: int, head: torch.Tensor) -> dict[str, int]:
    if head.stride(0) % 16:
        return _UNALIGNED
    if n == 1:
        return _ONE_STATE
    large = len(head) >= _LARGE_VOCABULARY and head.dtype != torch.float32
    return _MORE_STATES_LARGE if large else _MORE_STATES


def head_top_k_twin(
    states: torch.Tensor, head: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`head_top_k` in plain torch."""
    values, indices = F.linear(states, head).sort(dim=-1, descending=True, stable=True)
    return values[:, :k], indices[:, :k]


def head_argmax_twin(states: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """`head_argmax` in plain torch."""
    return F.linear(states, head).max(-1).indices


def agrees(like: torch.Tensor) -> bool:
    """Whether kernels and twins agree in the dtype and on the device of ``like``."""
    generator = torch.Generator().manual_seed(0)
    # Small whole numbers: every sum is exact in any order, and equal logits abound.
    states, head = (
        torch.randint(-2, 3, shape, generator=generator).to(like) for shape in ((3, 80), (150, 80))
    )
    for rows in (states[:1], states):
        if not torch.equal(head_argmax(rows, head), head_argmax_twin(rows, head)):
            return False
        found, expected = head_top_k(rows, head, 3), head_top_k_twin(rows, head, 3)
        if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
            return False
    return True


def variants() -> list[Variant]:
    """What is compiled ahead of time: argmax and the most logits, even and odd inner sizes."""
    found = []
    for dtype in ("bf16", "fp16", "fp32"):
        # The list of the best grows in the same way for every dtype.
        for k in (1, LARGEST_K) if dtype == "bf16" else (1,):
            found.append(_variant(dtype, k, _ONE_STATE, one=True))
            found.append(_variant(dtype, k, _MORE_STATES))
            if dtype != "fp32":
                found.append(_variant(dtype, k, _MORE_STATES_LARGE))
            found.append(_merge_variant(dtype, k))
        for one in (True, False):
            found.append(_variant(dtype, 1, _UNALIGNED, one, even=False))
    found.append(_variant("bf16", 1, _ONE_STATE, one=True, even=False))
    found.append(_variant("bf16", 1, _MORE_STATES_LARGE, even=False))
    return found


def _variant(
    dtype: str, k: int, blocks: dict[str, int], one: bool = False, even: bool = True
) -> Variant:
    tensors = {"states": f"*{dtype}", "head": f"*{dtype}", "values": "*fp32", "indices": "*i32"}
    sizes = ("V", "D", "stride_head") if one else ("n", "V", "D", "stride_states", "stride_head")
    aligned = {*tensors}
    if blocks is not _UNALIGNED:
        aligned |= {*sizes} - {"n", "V"}
    words = [dtype, "one state" if one else "<= 16 states", f"blocks of {blocks['BLOCK_V']}"]
    words += [f"top {k}"] + ([] if even else ["masked"])
    rows = "" if one else "n "
    return Variant(
        name=f"head_top_k {', '.join(words)}",
        kernel=_one_state_kernel if one else _more_states_kernel,
        signature={**tensors, **dict.fromkeys(sizes, "i32")},
        constexprs={"K": k, "EVEN": even, "CPU": False, **blocks},
        divisible_by_16=tuple(sorted(aligned)),
        num_warps=4,
        bytes_moved=f"V D s + {rows}D s + {rows}V {k} / {blocks['BLOCK_V']} 8",
        floor=f"V D s + {rows}D s",
    )


def _merge_variant(dtype: str, k: int) -> Variant:
    return Variant(
        name=f"head_top_k merge {dtype}, top {k}",
        kernel=_merge_kernel,
        signature={
            "part_values": "*fp32",
            "part_indices": "*i32",
            "values": f"*{dtype}",
            "indices": "*i64",
            "total": "i32",
        },
        constexprs={"K": k, "BLOCK": _MERGE_BLOCK},
        divisible_by_16=("part_values", "part_indices", "values", "indices"),
        num_warps=4,
        bytes_moved=f"{k} n blocks {k} 8",
        floor=f"n blocks {k} 8",
    )
