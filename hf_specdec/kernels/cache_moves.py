"""Writes into a cache whose rows have different lengths, and moves inside it.

`write_ragged` puts the keys and values of a forward at every row's own slots; `move_accepted`
brings the accepted path of a tree of drafts together. Keys and values go in one launch, and nothing
is computed: bytes are copied. Each has a twin in plain torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_specdec.cache_moves import move_accepted as move_accepted_twin
from hf_specdec.kernels.variants import Variant

# Query positions that one program writes.
_BLOCK_Q = 16


@triton.jit(do_not_specialize=["Q"])
def _write_kernel(
    keys,
    values,
    new_keys,
    new_values,
    base,
    stride_base,
    size,
    Q,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_nkb,
    stride_nkh,
    stride_nkq,
    stride_nvb,
    stride_nvh,
    stride_nvq,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DK_BLOCK: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Grid (rows, heads, blocks of queries)."""
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    q = tl.program_id(2) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    slot = (tl.load(base + b * stride_base).to(tl.int32) + q) % size
    # A row of the buffer can have more than 2^31 elements.
    from_q = q.to(tl.int64)[:, None]
    to_slot = slot.to(tl.int64)[:, None]
    dk = tl.arange(0, DK_BLOCK)[None, :]
    dv = tl.arange(0, DV_BLOCK)[None, :]
    k_mask = (q < Q)[:, None] & (dk < DK)
    v_mask = (q < Q)[:, None] & (dv < DV)
    k_from = new_keys + b * stride_nkb + h * stride_nkh + from_q * stride_nkq + dk
    v_from = new_values + b * stride_nvb + h * stride_nvh + from_q * stride_nvq + dv
    key = tl.load(k_from, mask=k_mask)
    value = tl.load(v_from, mask=v_mask)
    tl.store(keys + b * stride_kb + h * stride_kh + to_slot * stride_ks + dk, key, mask=k_mask)
    tl.store(values + b * stride_vb + h * stride_vh + to_slot * stride_vs + dv, value, mask=v_mask)


def write_ragged(
    keys: torch.Tensor,
    values: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    base: torch.Tensor,
    size: int,
) -> None:
    """Write Q tokens of every row at its slots ``(base[b] + q) % size``, in place.

    Args:
        keys, values: buffers ``[B, H, S, D]`` and ``[B, H, S, Dv]``; elements of a slot contiguous.
        new_keys, new_values: ``[n, H, Q, D]`` and ``[n, H, Q, Dv]``, n <= B, Q <= size, of the
            buffers' dtype.
        base: int64 ``[n]``, slot of each row's first token.
        size: of the ring, or S.
    """
    n, heads, length, dim = new_keys.shape
    if new_keys.stride(-1) != 1:
        new_keys = new_keys.contiguous()
    if new_values.stride(-1) != 1:
        new_values = new_values.contiguous()
    value_dim = values.shape[-1]
    block_q = min(_BLOCK_Q, triton.next_power_of_2(length))
    grid = (n, heads, triton.cdiv(length, block_q))
    with torch.cuda.device_of(keys):
        _write_kernel[grid](
            keys,
            values,
            new_keys,
            new_values,
            base,
            base.stride(0),
            size,
            length,
            *keys.stride()[:3],
            *values.stride()[:3],
            *new_keys.stride()[:3],
            *new_values.stride()[:3],
            DK=dim,
            DV=value_dim,
            DK_BLOCK=triton.next_power_of_2(dim),
            DV_BLOCK=triton.next_power_of_2(value_dim),
            BLOCK_Q=block_q,
            num_warps=_write_warps(block_q, dim),
        )


def _write_warps(block_q: int, dim: int) -> int:
    # 16 bytes a thread and load, as far as there is that much.
    return max(1, min(4, block_q * dim // 256))


def write_ragged_twin(
    keys: torch.Tensor,
    values: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    base: torch.Tensor,
    size: int,
) -> None:
    """`write_ragged` in plain torch."""
    n, heads, length, _ = new_keys.shape
    slots = (base[:, None] + torch.arange(length, device=base.device)) % size
    rows = torch.arange(n * heads, device=base.device).view(n, heads, 1) * keys.shape[2]
    places = (rows + slots[:, None]).flatten()
    for buffer, new in ((keys, new_keys), (values, new_values)):
        dim = buffer.shape[-1]
        buffer.view(-1, dim).index_copy_(0, places, new.reshape(-1, dim))


def agrees(like: torch.Tensor) -> bool:
    """Whether kernels and twins agree in the dtype and on the device of ``like``."""
    return _writes_agree(like) and _moves_agree(like)


def _writes_agree(like: torch.Tensor) -> bool:
    base = torch.tensor([3, 6], device=like.device)
    new = _numbered(2, 2, 3, 24, like=like)
    outcomes = []
    for write in (write_ragged, write_ragged_twin):
        keys, values = like.new_zeros(3, 2, 8, 16), like.new_zeros(3, 2, 8, 8)
        write(keys, values, new[..., :16], new[..., 16:], base, 8)
        outcomes.append((keys, values))
    return all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


@triton.jit(do_not_specialize=["A"])
def _move_kernel(
    keys,
    values,
    base,
    path,
    stride_base,
    stride_path_row,
    stride_path,
    size,
    A,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DK_BLOCK: tl.constexpr,
    DV_BLOCK: tl.constexpr,
):
    """Grid (rows, heads).

    In place without a barrier: a path increases, so a slot is overwritten after it was read or
    never; and a column belongs to the same thread in every round, so that it sees its own order.
    """
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    first = tl.load(base + b * stride_base).to(tl.int32)
    k_row = keys + b * stride_kb + h * stride_kh
    v_row = values + b * stride_vb + h * stride_vh
    dk = tl.arange(0, DK_BLOCK)
    dv = tl.arange(0, DV_BLOCK)
    for j in range(0, A):
        offset = tl.load(path + b * stride_path_row + j * stride_path).to(tl.int32)
        if offset != j:
            source = ((first + offset) % size).to(tl.int64)
            target = ((first + j) % size).to(tl.int64)
            key = tl.load(k_row + source * stride_ks + dk, mask=dk < DK)
            value = tl.load(v_row + source * stride_vs + dv, mask=dv < DV)
            tl.store(k_row + target * stride_ks + dk, key, mask=dk < DK)
            tl.store(v_row + target * stride_vs + dv, value, mask=dv < DV)


def move_accepted(
    keys: torch.Tensor,
    values: torch.Tensor,
    base: torch.Tensor,
    path: torch.Tensor,
    size: int,
) -> None:
    """Move what is at slot ``base[b] + path[b, j]`` to slot ``base[b] + j``, for every j, in place.

    Slots count modulo ``size``.

    Args:
        keys, values: buffers ``[B, H, S, D]`` and ``[B, H, S, Dv]``, two different ones; elements
            of a slot contiguous.
        base: int64 ``[n]``, n <= B: slot of the tree's first node in each row.
        path: int64 ``[n, A]``: which node was accepted at each depth, increasing along a row; j
            itself where nothing is to be moved.
        size: of the ring, or S.
    """
    n, depth = path.shape
    dim, value_dim = keys.shape[-1], values.shape[-1]
    with torch.cuda.device_of(keys):
        _move_kernel[(n, keys.shape[1])](
            keys,
            values,
            base,
            path,
            base.stride(0),
            *path.stride(),
            size,
            depth,
            *keys.stride()[:3],
            *values.stride()[:3],
            DK=dim,
            DV=value_dim,
            DK_BLOCK=triton.next_power_of_2(dim),
            DV_BLOCK=triton.next_power_of_2(value_dim),
            num_warps=1,  # a head has a few hundred columns, and the rounds follow one another
        )


def _moves_agree(like: torch.Tensor) -> bool:
    base = torch.tensor([1, 6], device=like.device)
    path = torch.tensor([[0, 2, 3, 6], [1, 2, 4, 5]], device=like.device)
    outcomes = []
    for move in (move_accepted, move_accepted_twin):
        states = _numbered(3, 2, 9, 24, like=like)
        keys, values = states[..., :16].contiguous(), states[..., 16:].contiguous()
        move(keys, values, base, path, 9)
        outcomes.append((keys, values))
    return all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def _numbered(*shape: int, like: torch.Tensor) -> torch.Tensor:
    """Numbers that differ within a head, exact in every dtype."""
    size = torch.Size(shape).numel()
    numbers = torch.arange(size, device=like.device) % 251
    return numbers.to(like.dtype).view(shape)


def variants() -> list[Variant]:
    """What is compiled ahead of time: heads of 64, 128 and latent attention's 192 + 128."""
    found = []
    for dtype in ("bf16", "fp16", "fp32"):
        for dim, value_dim in ((64, 64), (128, 128), (192, 128)):
            found.append(_write_variant(dtype, dim, value_dim, _BLOCK_Q))
            found.append(_move_variant(dtype, dim, value_dim))
    found.append(_write_variant("bf16", 80, 80, 4))
    return found


def _dims(dim: int, value_dim: int) -> dict[str, int]:
    return {
        "DK": dim,
        "DV": value_dim,
        "DK_BLOCK": triton.next_power_of_2(dim),
        "DV_BLOCK": triton.next_power_of_2(value_dim),
    }


def _write_variant(dtype: str, dim: int, value_dim: int, block_q: int) -> Variant:
    buffers = ("keys", "values", "new_keys", "new_values")
    strides = [f"stride_{t}{a}" for t in ("k", "v") for a in "bhs"]
    strides += [f"stride_{t}{a}" for t in ("nk", "nv") for a in "bhq"]
    return Variant(
        name=f"write_ragged {dtype} {dim}+{value_dim} Q<={block_q}",
        kernel=_write_kernel,
        signature={
            **dict.fromkeys(buffers, f"*{dtype}"),
            "base": "*i64",
            **dict.fromkeys(("stride_base", "size", "Q", *strides), "i32"),
        },
        constexprs={**_dims(dim, value_dim), "BLOCK_Q": block_q},
        divisible_by_16=(*buffers, "base", *strides),
        num_warps=_write_warps(block_q, dim),
        bytes_moved="2 n H Q (D + Dv) s",
        floor="2 n H Q (D + Dv) s",
    )


def _move_variant(dtype: str, dim: int, value_dim: int) -> Variant:
    strides = [f"stride_{t}{a}" for t in ("k", "v") for a in "bhs"]
    integers = ("stride_base", "stride_path_row", "stride_path", "size", "A", *strides)
    return Variant(
        name=f"move_accepted {dtype} {dim}+{value_dim}",
        kernel=_move_kernel,
        signature={
            "keys": f"*{dtype}",
            "values": f"*{dtype}",
            "base": "*i64",
            "path": "*i64",
            **dict.fromkeys(integers, "i32"),
        },
        constexprs=_dims(dim, value_dim),
        divisible_by_16=("keys", "values", "base", "path", *strides),
        num_warps=1,
        bytes_moved="2 moved H (D + Dv) s",
        floor="2 moved H (D + Dv) s",
    )
