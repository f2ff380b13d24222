"""Ragged writes and moves of an accepted path: every bit arrives, nothing else is touched."""

import pytest
import torch

from hf_specdec.kernels import cache_moves

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WRITES = [cache_moves.write_ragged, cache_moves.write_ragged_twin]
MOVES = [cache_moves.move_accepted, cache_moves.move_accepted_twin]
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(_BITS[tensor.dtype])


def extreme(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Random numbers, with infinities, NaN, the largest and the smallest among them."""
    numbers = torch.randn(shape)
    kinds = torch.randint(0, 12, shape)
    info = torch.finfo(dtype)
    for kind, value in enumerate([float("inf"), -float("inf"), float("nan"), info.max, info.tiny]):
        numbers[kinds == kind] = value
    return numbers.to(device, dtype)


def buffers(rows, heads, slots, dim, value_dim, dtype, device):
    """Buffers in which every bit of every entry differs from a write's, mostly: NaN."""
    return (
        torch.full((rows, heads, slots, dim), float("nan"), dtype=dtype, device=device),
        torch.full((rows, heads, slots, value_dim), float("nan"), dtype=dtype, device=device),
    )


def check_written(write, base, size, new, slots, device, rows=4):
    new_keys, new_values = new
    n, heads, length, dim = new_keys.shape
    keys, values = buffers(rows, heads, slots, dim, new_values.shape[-1], new_keys.dtype, device)
    expected = keys.clone(), values.clone()
    for b in range(n):
        for q in range(length):
            slot = (int(base[b]) + q) % size
            expected[0][b, :, slot] = new_keys[b, :, q]
            expected[1][b, :, slot] = new_values[b, :, q]
    write(keys, values, new_keys, new_values, base, size)
    assert torch.equal(bits(keys), bits(expected[0]))
    assert torch.equal(bits(values), bits(expected[1]))


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("length", "heads", "dim", "value_dim"),
    [(1, 2, 64, 64), (3, 1, 80, 24), (4, 2, 1, 7), (5, 3, 128, 96), (17, 1, 8, 16), (35, 2, 9, 5)],
)
def test_rows_are_written_at_their_own_slots(
    write, dtype, length, heads, dim, value_dim, device
) -> None:
    base = torch.tensor([0, 29, 7], device=device)
    new = [extreme(3, heads, length, d, dtype=dtype, device=device) for d in (dim, value_dim)]
    check_written(write, base, 64, new, 64, device)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("length", [1, 4, 11])
def test_a_ring_is_written_modulo_its_size(write, length, device) -> None:
    base = torch.tensor([9, 10, 2000], device=device)
    new = [extreme(3, 2, length, 16, dtype=torch.bfloat16, device=device) for _ in range(2)]
    check_written(write, base, 11, new, 11, device)


@pytest.mark.parametrize("write", WRITES)
def test_states_and_slots_may_be_views(write, device) -> None:
    """As models hand them over: heads and queries swapped, values that are part of a projection."""
    joint = extreme(2, 5, 3, 40, dtype=torch.float16, device=device)
    new_keys, new_values = joint.transpose(1, 2)[..., :24], joint.transpose(1, 2)[..., 24:]
    slots = torch.tensor([[4, 5, 6, 7, 8], [0, 1, 2, 3, 4]], device=device)
    check_written(write, slots[:, 0], 16, (new_keys, new_values), 16, device)
    spread = extreme(2, 3, 5, 24, dtype=torch.float16, device=device).transpose(2, 3).contiguous()
    new = spread.transpose(2, 3), new_values.flip(-1)
    assert new[0].stride(-1) != 1
    check_written(write, slots[:, 0], 16, new, 16, device)


def test_rows_beyond_two_billion_elements_are_written(device) -> None:
    """Bytes stand for elements; only the pages that are touched take memory."""
    stride, slots, dim = 2**30 + 64, 8, 16
    memory = torch.empty(3 * stride, dtype=torch.int8, device=device)
    keys = memory.as_strided((3, 1, slots, dim), (stride, slots * dim, dim, 1))
    values = torch.zeros(3, 1, slots, dim, dtype=torch.int8, device=device)
    new = torch.arange(3 * 2 * dim, dtype=torch.int8, device=device).view(3, 1, 2, dim)
    base = torch.tensor([1, 2, 3], device=device)
    cache_moves.write_ragged(keys, values, new, new, base, slots)
    for b in range(3):
        assert torch.equal(keys[b, 0, b + 1 : b + 3], new[b, 0])
    path = torch.tensor([[0, 1], [0, 1], [1, 1]], device=device)
    cache_moves.move_accepted(keys, values, base, path, slots)
    assert torch.equal(keys[2, 0, 3], new[2, 0, 1])


def random_path(depth: int, nodes: int, accepted: int) -> list[int]:
    """An increasing path of ``accepted`` nodes, then the identity."""
    chosen = sorted(torch.randperm(nodes)[:accepted].tolist())
    # Node j stands at depth j or deeper, and the identity behind is no smaller than the path.
    return chosen + list(range(accepted, depth))


def check_moved(move, base, path, size, slots, dims, dtype, device, rows=4):
    keys, values = (extreme(rows, 2, slots, d, dtype=dtype, device=device) for d in dims)
    expected = keys.clone(), values.clone()
    for buffer, before in zip(expected, (keys.clone(), values.clone()), strict=True):
        for b in range(len(base)):
            for j, offset in enumerate(path[b].tolist()):
                target, source = (int(base[b]) + j) % size, (int(base[b]) + offset) % size
                buffer[b, :, target] = before[b, :, source]
    move(keys, values, base, path, size)
    assert torch.equal(bits(keys), bits(expected[0]))
    assert torch.equal(bits(values), bits(expected[1]))


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(64, 64), (80, 24), (1, 7), (192, 128)])
def test_accepted_paths_are_moved_together(move, dtype, dims, device) -> None:
    base = torch.tensor([0, 13, 5], device=device)
    path = torch.tensor([random_path(6, 20, a) for a in (6, 3, 0)], device=device)
    check_moved(move, base, path, 40, 40, dims, dtype, device)


@pytest.mark.parametrize("move", MOVES)
def test_a_source_may_be_overwritten_later(move, device) -> None:
    """Node j + 1 goes to j for every j: each source but the last is the next round's target."""
    base = torch.tensor([3], device=device)
    path = torch.arange(1, 9, device=device)[None]
    check_moved(move, base, path, 16, 16, (16, 16), torch.bfloat16, device, rows=1)


@pytest.mark.parametrize("move", MOVES)
def test_paths_are_moved_within_a_ring(move, device) -> None:
    base = torch.tensor([11, 30, 1000], device=device)
    path = torch.tensor([[1, 3, 4, 7], [0, 2, 3, 3], [0, 1, 2, 3]], device=device)
    check_moved(move, base, path, 13, 13, (32, 16), torch.float32, device)


@pytest.mark.parametrize("move", MOVES)
def test_arguments_may_be_views(move, device) -> None:
    whole = torch.tensor([[2, 9, 3, 9, 5, 9], [0, 9, 2, 9, 2, 9]], device=device)
    base = torch.tensor([[1, 9], [4, 9]], device=device)[:, 0]
    check_moved(move, base, whole[:, ::2], 12, 12, (16, 16), torch.float16, device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_trial_agrees_and_can_disagree(dtype, device, monkeypatch) -> None:
    like = torch.zeros(1, dtype=dtype, device=device)
    assert cache_moves.agrees(like)
    with monkeypatch.context() as patch:
        patch.setattr(cache_moves, "write_ragged", lambda *_: None)
        assert not cache_moves.agrees(like)
    monkeypatch.setattr(cache_moves, "move_accepted", lambda *_: None)
    assert not cache_moves.agrees(like)
