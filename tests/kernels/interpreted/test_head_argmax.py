"""Largest logits of a head, kernels and twins: values, ties, infinities, every shape."""

import pytest
import torch

from hf_specdec.kernels import head_argmax
from hf_specdec.kernels.head_argmax import head_top_k, head_top_k_twin

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ARGMAX = [head_argmax.head_argmax, head_argmax.head_argmax_twin]
TOP_K = [head_top_k, head_top_k_twin]


def whole_numbers(n, vocabulary, inner, dtype, device):
    """Operands whose logits are exact in any order of summing, with many ties."""
    states, head = (torch.randint(-2, 3, (rows, inner)) for rows in (n, vocabulary))
    return states.to(device, dtype), head.to(device, dtype)


def ranked(states, head, k):
    """By value, then by index; in float64, rounded to the dtype at the end as a logit is."""
    logits = (states.double() @ head.double().T).to(states.dtype).double()
    rows = [sorted(range(len(row)), key=lambda i: (-row[i], i))[:k] for row in logits.tolist()]
    indices = torch.tensor(rows, device=states.device)
    return logits.gather(1, indices).to(states.dtype), indices


@pytest.mark.parametrize("top_k", TOP_K)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 5, 16])
@pytest.mark.parametrize(
    ("vocabulary", "inner", "k"),
    [(8, 1, 8), (50, 24, 1), (70, 80, 3), (40, 257, 1), (33, 256, 8), (150, 64, 3)],
)
def test_the_largest_are_found_in_order(
    top_k, dtype, n, vocabulary, inner, k, device, poisoned
) -> None:
    states, head = whole_numbers(n, vocabulary, inner, dtype, device)
    values, indices = top_k(states, head, k)
    expected = ranked(states, head, k)
    assert torch.equal(values, expected[0])
    assert torch.equal(indices, expected[1])
    assert indices.dtype == torch.int64 and values.dtype == dtype


@pytest.mark.parametrize("argmax", ARGMAX)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 7])
@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33])
def test_argmax_of_any_vocabulary(argmax, dtype, n, vocabulary, device, poisoned) -> None:
    states, head = whole_numbers(n, vocabulary, 48, dtype, device)
    found = argmax(states, head)
    assert torch.equal(found, ranked(states, head, 1)[1][:, 0])
    assert found.dtype == torch.int64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 4])
def test_of_random_numbers_the_largest_is_found(dtype, n, device) -> None:
    states, head = (torch.randn(rows, 320).to(device, dtype) for rows in (n, 200))
    values, indices = head_top_k(states, head, 2)
    logits = states.double() @ head.double().T
    best = logits.max(-1).values
    eps = torch.finfo(dtype).eps
    assert ((values[:, 0].double() - best).abs() <= 2 * eps * best.abs()).all()
    chosen = logits.gather(1, indices)
    assert ((values.double() - chosen).abs() <= 2 * eps * chosen.abs()).all()


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("vocabulary", [32000, 49152, 128256, 151680, 262144])
def test_vocabularies_of_published_models(n, vocabulary, device, poisoned, monkeypatch) -> None:
    """The best three in the last, the first and an inner place, and those behind them."""
    if device == "cpu":  # a program of the interpreter takes milliseconds, however small it is
        for name in ("_ONE_STATE", "_MORE_STATES", "_MORE_STATES_LARGE"):
            monkeypatch.setattr(head_argmax, name, {"BLOCK_V": 4096, "BLOCK_D": 16})
        # So few blocks leave few candidates, of which the second pass still takes several turns.
        monkeypatch.setattr(head_argmax, "_MERGE_BLOCK", 16)
    head = torch.zeros(vocabulary, 16, dtype=torch.bfloat16, device=device)
    states = torch.ones(n, 16, dtype=torch.bfloat16, device=device)
    places = [vocabulary - 1, 0, vocabulary // 3]
    for rank, place in enumerate(places):
        head[place] = 3.0 - rank
    values, indices = head_top_k(states, head, 5)
    # Behind them all logits are 0, and the lowest ids come first.
    assert indices.tolist() == [[*places, 1, 2]] * n
    assert values.tolist() == [[48.0, 32.0, 16.0, 0.0, 0.0]] * n


@pytest.mark.parametrize("top_k", TOP_K)
@pytest.mark.parametrize("n", [1, 3])
def test_among_equals_the_lowest_index_wins(top_k, n, device) -> None:
    """In one block, in two blocks, and everywhere."""
    states = torch.ones(n, 32, dtype=torch.float16, device=device)
    head = torch.zeros(200, 32, dtype=torch.float16, device=device)
    assert top_k(states, head, 3)[1].tolist() == [[0, 1, 2]] * n
    head[[199, 100, 101, 150]] = 1.0
    assert top_k(states, head, 4)[1].tolist() == [[100, 101, 150, 199]] * n


@pytest.mark.parametrize("top_k", TOP_K)
@pytest.mark.parametrize("n", [1, 3])
def test_logits_tie_as_their_dtype_says(top_k, n, device) -> None:
    """256 and 257 are one bfloat16 number: the higher of the two isn't preferred."""
    states = torch.ones(n, 16, dtype=torch.bfloat16, device=device)
    head = torch.zeros(40, 16, dtype=torch.bfloat16, device=device)
    head[5, 0], head[30, 0], head[30, 1] = 256, 256, 1
    values, indices = top_k(states, head, 2)
    assert indices.tolist() == [[5, 30]] * n
    assert values.tolist() == [[256.0, 256.0]] * n
    head[30, 1] = 3  # 259 is nearer to 260
    assert top_k(states, head, 1)[1].tolist() == [[30]] * n
    assert top_k(states, head, 1)[0].tolist() == [[260.0]] * n


@pytest.mark.parametrize("top_k", TOP_K)
@pytest.mark.parametrize("n", [1, 3])
def test_infinities_are_ordered_too(top_k, n, device) -> None:
    states = torch.ones(n, 16, device=device)
    head = torch.full((100, 16), -float("inf"), device=device)
    assert top_k(states, head, 3)[1].tolist() == [[0, 1, 2]] * n
    head[[40, 70]] = torch.tensor([[-1.0], [float("inf")]], device=device)
    values, indices = top_k(states, head, 4)
    assert indices.tolist() == [[70, 40, 0, 1]] * n
    assert values[0].tolist() == [float("inf"), -16.0, -float("inf"), -float("inf")]


@pytest.mark.parametrize("n", [1, 3])
def test_nan_never_wins_and_never_leads_out_of_the_vocabulary(n, device) -> None:
    states = torch.ones(n, 16, device=device)
    head = torch.full((37, 16), float("nan"), device=device)
    assert head_top_k(states, head, 2)[1].tolist() == [[0, 1]] * n
    head[20] = -5.0
    assert head_top_k(states, head, 2)[1].tolist() == [[20, 0]] * n


def test_a_row_does_not_depend_on_the_others(device) -> None:
    states, head = whole_numbers(3, 100, 64, torch.float32, device)
    alone = head_top_k(states, head, 3)
    states[1] = float("nan")
    together = head_top_k(states, head, 3)
    for a, b in zip(alone, together, strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]])


@pytest.mark.parametrize("n", [1, 3])
def test_rows_of_views_are_read_where_they_are(n, device) -> None:
    states, head = whole_numbers(n, 50, 40, torch.float32, device)
    wide = torch.full((n, 50), float("nan"), device=device)
    wide[:, 3:43] = states
    wide_head = torch.full((60, 57), 9.0, device=device)
    wide_head[:50, 2:42] = head
    found = head_top_k(wide[:, 3:43], wide_head[:50, 2:42], 3)
    for a, b in zip(found, head_top_k(states, head, 3), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("n", [1, 2])
def test_heads_beyond_two_billion_elements_are_read(n, device) -> None:
    """Only the pages that are touched take memory."""
    stride = 2**30 + 16
    memory = torch.empty(2 * stride + 16, dtype=torch.float16, device=device)
    head = memory.as_strided((3, 16), (stride, 1))
    head.copy_(torch.tensor([[1.0], [2.0], [3.0]], device=device).expand(3, 16))
    states = torch.ones(n, 16, dtype=torch.float16, device=device)
    assert head_top_k(states, head, 3)[1].tolist() == [[2, 1, 0]] * n


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_trial_agrees_and_can_disagree(dtype, device, monkeypatch) -> None:
    like = torch.zeros(1, dtype=dtype, device=device)
    assert head_argmax.agrees(like)
    with monkeypatch.context() as patch:
        kernel = head_argmax.head_argmax
        patch.setattr(head_argmax, "head_argmax", lambda *a: kernel(*a).add(1))
        assert not head_argmax.agrees(like)
    monkeypatch.setattr(head_argmax, "head_top_k", lambda *a: [t.flip(1) for t in head_top_k(*a)])
    assert not head_argmax.agrees(like)
