"""Verification by matching, plain torch and kernel: choices, ties, and what is accepted."""

import pytest
import torch
from kernel_twins import BLOCK, DEVICE, DTYPES, VOCABULARIES, far_apart, ids, verify_match

from hf_specdec.noise import gumbel

INF = torch.inf


def no_draft(rows: int) -> torch.Tensor:
    return torch.empty((rows, 0), dtype=torch.long, device=DEVICE)


def random_logits(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (4 * torch.randn(shape)).to(DEVICE, dtype)


def some_noise(rows: int, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    seeds = torch.tensor([12345, -6, 2**62 + 77, 2**33 - 1])[:rows]
    starts = torch.tensor([[3], [2**31 - 1], [70_000], [2**40 + 9]])[:rows]
    return seeds.to(DEVICE), (starts + torch.arange(positions)).to(DEVICE)


def first_of_largest(values: torch.Tensor) -> list[list[int]]:
    """``[B, Q, V]`` -> the lowest id of each largest value, by search."""
    largest = values.amax(dim=-1, keepdim=True)
    return [[int(q.nonzero()[0]) for q in row] for row in values == largest]


@pytest.mark.usefixtures("small_blocks", "grid")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 7, 63, 64, 65, 200])
def test_greedy_choices(implementation: str, vocabulary: int, dtype: torch.dtype) -> None:
    logits = random_logits(2, 2, vocabulary, dtype=dtype)
    tokens, _ = verify_match(implementation, ids([0], [0]), logits)
    assert tokens.tolist() == first_of_largest(logits.float())
    assert tokens.dtype == torch.long


@pytest.mark.usefixtures("small_blocks", "grid")
@pytest.mark.parametrize("temperature", [None, 0.6])
@pytest.mark.parametrize(("vocabulary", "dtype"), [(7, DTYPES[0]), (200, DTYPES[1])])
def test_sampled_choices(
    implementation: str, vocabulary: int, dtype: torch.dtype, temperature: float | None
) -> None:
    logits = random_logits(4, 2, vocabulary, dtype=dtype)
    seeds, positions = some_noise(4, 2)
    tokens, _ = verify_match(
        implementation, no_draft(4), logits, seeds, positions, *[temperature] * bool(temperature)
    )
    noise = gumbel(
        seeds[:, None, None], positions[..., None], torch.arange(vocabulary, device=DEVICE)
    )
    noisy = logits.float() / (temperature or 1.0) + noise
    assert tokens.tolist() == first_of_largest(noisy)
    if vocabulary > 7:
        assert tokens.tolist() != first_of_largest(logits.float()), "noise changes something"


@pytest.mark.usefixtures("small_blocks")
def test_the_noise_is_the_twins_noise(implementation: str) -> None:
    """With equal logits the choice is the noise's own: 256 positions, no two alike."""
    logits = torch.zeros(1, 1, 50, device=DEVICE).expand(64, 1, 50)
    seeds = torch.arange(64, device=DEVICE) * 2**29 - 2**31
    positions = torch.arange(64, device=DEVICE)[:, None] * 2**27
    tokens, _ = verify_match(implementation, no_draft(64), logits, seeds, positions)
    noise = gumbel(seeds[:, None, None], positions[..., None], torch.arange(50, device=DEVICE))
    assert tokens.tolist() == first_of_largest(noise)
    assert len(set(tokens.flatten().tolist())) > 20


@pytest.mark.usefixtures("small_blocks", "grid")
@pytest.mark.parametrize(
    "tied",
    [
        [5, 6],
        [5, 5 + BLOCK],  # one lane, two blocks
        [6, 5 + BLOCK],  # the lower id in the higher lane
        [BLOCK - 1, BLOCK, 3 * BLOCK],
        [150, 17, 199],
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_go_to_the_lowest_id(implementation: str, dtype: torch.dtype, tied: list[int]) -> None:
    logits = random_logits(1, 1, 200, dtype=dtype).clamp(max=8.0)
    logits[0, 0, tied] = 30.0
    tokens, _ = verify_match(implementation, no_draft(1), logits)
    assert tokens.tolist() == [[min(tied)]]


@pytest.mark.usefixtures("small_blocks", "grid")
def test_rows_of_nothing_but_extremes(implementation: str) -> None:
    """Rows that are all -inf, all the largest number, all but one -inf; and both zeros."""
    logits = torch.full((5, 1, 200), -INF, device=DEVICE)
    logits[1] = torch.finfo(torch.float32).max
    logits[2, 0, 137] = -1e30
    logits[3, 0, [66, 130]] = INF
    logits[4] = -1.0
    logits[4, 0, 3], logits[4, 0, 70] = -0.0, 0.0
    tokens, _ = verify_match(implementation, no_draft(5), logits)
    assert tokens.tolist() == [[0], [0], [137], [66], [3]]
    half, _ = verify_match(implementation, no_draft(5), logits.clamp(-60000, 60000).half())
    assert half.tolist() == [[0], [0], [0], [66], [3]]


@pytest.mark.usefixtures("small_blocks", "grid")
def test_sampling_keeps_to_what_is_finite(implementation: str) -> None:
    logits = torch.full((3, 1, 200), -INF, device=DEVICE)
    logits[0, 0, 137] = -1e30
    logits[1, 0, [20, 90]] = 0.0
    tokens, _ = verify_match(implementation, no_draft(3), logits, *some_noise(3, 1), 0.5)
    assert tokens[0, 0] == 137
    assert tokens[1, 0] in (20, 90)
    assert tokens[2, 0] == 0, "nothing to choose from"


@pytest.mark.usefixtures("small_blocks", "grid")
@pytest.mark.parametrize("sampled", [False, True])
def test_the_first_nan_is_chosen_as_by_torch(implementation: str, sampled: bool) -> None:
    """torch orders NaN above everything, and so does plain ``generate``."""
    logits = random_logits(3, 1, 200)
    logits[0, 0, [131, 190]] = torch.nan
    logits[0, 0, 3] = INF
    logits[1, 0, [40, 40 + BLOCK]] = torch.nan
    logits[2] = torch.nan
    noise = some_noise(3, 1) if sampled else ()
    tokens, _ = verify_match(implementation, no_draft(3), logits, *noise)
    assert tokens.tolist() == [[131], [40], [0]]
    assert tokens.tolist() == logits.max(dim=-1).indices.tolist()


@pytest.mark.usefixtures("small_blocks", "grid")
def test_views_into_a_larger_tensor(implementation: str) -> None:
    """Rows of a padded vocabulary, some positions of many; what is around them is NaN."""
    around = torch.full((4, 6, 203), torch.nan, device=DEVICE)
    logits = around[::2, 1:4, 2:135]
    logits.copy_(random_logits(2, 3, 133))
    expected = first_of_largest(logits)
    draft = ids(expected[0], expected[1])[:, :2]
    apart = torch.full((2, 4), -1, device=DEVICE)
    apart[:, ::2] = draft
    tokens, num_accepted = verify_match(implementation, apart[:, ::2], logits)
    assert tokens.tolist() == expected
    assert num_accepted.tolist() == [2, 2]
    seeds, positions = some_noise(2, 3)
    one_place = positions[:, :1].expand(2, 3)
    strided, _ = verify_match(implementation, draft, logits, seeds[:1].expand(2), one_place)
    dense, _ = verify_match(
        implementation, draft, logits.clone(), seeds[:1].repeat(2), one_place.clone()
    )
    assert strided.tolist() == dense.tolist()


@pytest.mark.usefixtures("small_blocks", "grid")
def test_every_number_of_accepted_drafts(implementation: str) -> None:
    logits = random_logits(6, 5, 70)
    chosen = torch.tensor(first_of_largest(logits), device=DEVICE)
    draft = chosen[:, :4].clone()
    for row in range(4):
        draft[row, row] = -1  # what a drafter says when it has nothing
    draft[1, 2] = (draft[1, 2] + 1) % 70  # behind the first error nothing counts
    draft[5, 1] += 2**32  # not the same id
    tokens, num_accepted = verify_match(implementation, draft, logits)
    assert num_accepted.tolist() == [0, 1, 2, 3, 4, 1]
    assert num_accepted.dtype == torch.long
    assert torch.equal(tokens, chosen)


@pytest.mark.usefixtures("small_blocks")
def test_more_positions_than_a_tile_of_chunks_has(implementation: str) -> None:
    logits = random_logits(1, 40, 130)
    chosen = torch.tensor(first_of_largest(logits), device=DEVICE)
    tokens, num_accepted = verify_match(implementation, chosen[:, :39], logits)
    assert torch.equal(tokens, chosen)
    assert num_accepted.tolist() == [39]


def test_the_temperature_rounds_as_in_torch(implementation: str) -> None:
    """Neighbouring numbers become equal when divided by 3: the lower id must win."""
    upper = torch.nextafter(torch.arange(1.0, 2.0, 0.01), torch.tensor(9.0))
    lower = torch.nextafter(upper, torch.tensor(0.0))
    merge = (upper.to(DEVICE) / 3.0 == lower.to(DEVICE) / 3.0).nonzero()
    assert len(merge) > 5, "otherwise this shows nothing"
    for which in merge[:3, 0].tolist():
        logits = torch.zeros(1, 1, 16, device=DEVICE)
        logits[0, 0, 2], logits[0, 0, 9] = float(lower[which]), float(upper[which])
        tokens, _ = verify_match(implementation, no_draft(1), logits, None, None, 3.0)
        assert tokens.tolist() == [[2]]
        tokens, _ = verify_match(implementation, no_draft(1), logits)
        assert tokens.tolist() == [[9]]


@pytest.mark.usefixtures("large_blocks")
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_vocabularies_of_real_models(implementation: str, vocabulary: int) -> None:
    logits = random_logits(1, 2, vocabulary, dtype=torch.bfloat16).clamp(max=20)
    logits[0, 0, vocabulary - 1] = 30
    logits[0, 1, [vocabulary // 2, vocabulary - 5]] = 30
    tokens, num_accepted = verify_match(implementation, ids([vocabulary - 1]), logits)
    assert tokens.tolist() == [[vocabulary - 1, vocabulary // 2]]
    assert num_accepted.tolist() == [1]


def test_sampling_from_a_vocabulary_of_a_real_model(implementation: str) -> None:
    logits = torch.randn(1, 1, 128256).to(DEVICE)
    seeds, positions = some_noise(1, 1)
    tokens, _ = verify_match(implementation, no_draft(1), logits, seeds, positions)
    noise = gumbel(seeds[:, None, None], positions[..., None], torch.arange(128256, device=DEVICE))
    assert tokens.tolist() == first_of_largest(logits + noise)


def test_rows_beyond_32_bit_offsets(implementation: str) -> None:
    logits = far_apart(3 * 80).view(3, 3, 80)
    for row in range(3):
        for position in range(3):
            logits[row, position, 10 * row + position] = 1.0
    tokens, num_accepted = verify_match(implementation, ids([0, 1], [10, 0], [20, 21]), logits)
    assert tokens.tolist() == [[0, 1, 2], [10, 11, 12], [20, 21, 22]]
    assert num_accepted.tolist() == [2, 1, 2]
