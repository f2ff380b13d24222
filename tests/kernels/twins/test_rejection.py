"""The rejection rule, plain torch and kernel: acceptance, residual, bonus, the impossible."""

import pytest
import torch
from kernel_twins import DEVICE, DTYPES, VOCABULARIES, far_apart, ids, verify_rejection

from hf_specdec.noise import Stream, gumbel, uniform

INF = torch.inf


def noise_of(rows: int, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    seeds = torch.arange(rows, device=DEVICE) * 0x123456789AB - 2**40
    return seeds, torch.arange(positions, device=DEVICE) + 2**32 - 1 + 7 * seeds[:, None]


def some_drafts(
    rows: int, count: int, vocabulary: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draft ids, what they were sampled from, and logits roughly like it."""
    logits = (3 * torch.randn(rows, count + 1, vocabulary)).to(DEVICE, dtype)
    rough = logits[:, :-1].float() + 2 * torch.randn(rows, count, vocabulary).to(DEVICE)
    draft_probs = rough.softmax(dim=-1)
    flat = draft_probs.view(rows * count, vocabulary)
    return flat.multinomial(1).view(rows, count), draft_probs, logits


def by_the_book(
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor,
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperature: float = 1.0,
) -> list[list[int]]:
    """What each row emits, position by position, in float64."""
    emitted = []
    vocabulary = torch.arange(logits.shape[-1], device=DEVICE)
    target_probs = (logits.double() / temperature).softmax(dim=-1)
    for row in range(len(draft_ids)):
        tokens: list[int] = []
        for k, probs in enumerate(target_probs[row]):
            seed, position = seeds[row : row + 1], positions[row, k : k + 1]
            residual = probs
            if k < draft_ids.shape[1]:
                token = int(draft_ids[row, k])
                u = uniform(seed, position, Stream.ACCEPT).double()
                if u * draft_probs[row, k, token].double() < probs[token]:
                    tokens.append(token)
                    continue
                left = (probs - draft_probs[row, k].double()).clamp(min=0)
                residual = left if float(left.sum()) > 0 else probs
            noisy = residual.log() + gumbel(seed, position, vocabulary, Stream.RESIDUAL)
            emitted.append([*tokens, int(noisy.argmax())])
            break
    return emitted


def emitted(result: tuple[torch.Tensor, torch.Tensor]) -> list[list[int]]:
    tokens, num_accepted = result
    assert tokens.dtype == num_accepted.dtype == torch.long
    pairs = zip(tokens.tolist(), num_accepted.tolist(), strict=True)
    return [row[: count + 1] for row, count in pairs]


@pytest.mark.usefixtures("small_blocks", "grid")
@pytest.mark.parametrize("temperature", [None, 0.6])
@pytest.mark.parametrize(
    ("vocabulary", "count", "dtype"), [(7, 1, DTYPES[0]), (65, 2, DTYPES[2]), (200, 3, DTYPES[1])]
)
def test_what_is_emitted(
    implementation: str,
    vocabulary: int,
    count: int,
    dtype: torch.dtype,
    temperature: float | None,
) -> None:
    drafts = some_drafts(6, count, vocabulary, dtype)
    noise = noise_of(6, count + 1)
    result = verify_rejection(implementation, *drafts, *noise, temperature)
    assert emitted(result) == by_the_book(*drafts, *noise, temperature or 1.0)
    assert len(set(result[1].tolist())) > 1, "drafts of various quality"


@pytest.mark.usefixtures("small_blocks")
def test_every_number_of_accepted_drafts(implementation: str) -> None:
    """Certain drafts and impossible ones, so that no noise can change a count."""
    draft_ids, draft_probs, logits = some_drafts(4, 3, 70)
    draft_probs = torch.nn.functional.one_hot(draft_ids, 70).float()
    logits[:, :3].scatter_(-1, draft_ids[..., None], 80.0)
    for row in range(3):
        logits[row, row, draft_ids[row, row]] = -INF
    noise = noise_of(4, 4)
    result = verify_rejection(implementation, draft_ids, draft_probs, logits, *noise)
    assert result[1].tolist() == [0, 1, 2, 3]
    assert emitted(result) == by_the_book(draft_ids, draft_probs, logits, *noise)


@pytest.mark.usefixtures("small_blocks")
def test_what_the_draft_has_enough_of_is_never_sampled(implementation: str) -> None:
    """The residual is where the target has more: a single token, however improbable."""
    rows, vocabulary = 8, 130
    logits = torch.zeros(rows, 2, vocabulary, device=DEVICE)
    logits[:, 0, 9] = -3.0
    draft_probs = torch.full((rows, 1, vocabulary), 0.5, device=DEVICE)
    draft_probs[:, :, 9] = 0.0
    drafted = ids(*[[row] for row in range(20, 20 + rows)])
    result = verify_rejection(implementation, drafted, draft_probs, logits, *noise_of(rows, 2))
    assert all(row == [9] for row in emitted(result) if len(row) == 1)
    assert result[1].sum() < rows / 4


@pytest.mark.usefixtures("small_blocks", "grid")
def test_no_residual_leaves_the_targets_own_row(implementation: str) -> None:
    draft_ids, draft_probs, logits = some_drafts(8, 1, 130)
    logits[:, 0].scatter_(-1, draft_ids, -INF)
    draft_probs.fill_(2.0)
    noise = noise_of(8, 2)
    result = verify_rejection(implementation, draft_ids, draft_probs, logits, *noise)
    expected = by_the_book(draft_ids, draft_probs, logits, *noise)
    assert emitted(result) == expected
    assert len({row[0] for row in expected}) > 4


@pytest.mark.usefixtures("small_blocks")
def test_the_bonus_is_the_targets_own(implementation: str) -> None:
    rows = 8
    draft_ids, draft_probs, logits = some_drafts(rows, 1, 130)
    logits[:, 0].scatter_(-1, draft_ids, 90.0)  # accepted for certain
    logits[:, 1] = torch.randn(130)  # the same for all: only noise differs
    noise = noise_of(rows, 2)
    result = verify_rejection(implementation, draft_ids, draft_probs, logits, *noise)
    assert result[1].tolist() == [1] * rows
    assert emitted(result) == by_the_book(draft_ids, draft_probs, logits, *noise)
    assert len(set(result[0][:, 1].tolist())) > 4


@pytest.mark.usefixtures("small_blocks")
def test_a_token_of_probability_zero_is_never_emitted(implementation: str) -> None:
    """Neither as a draft, even if the drafter says that it can't have been drawn, nor sampled."""
    rows, vocabulary = 12, 140
    draft_ids, draft_probs, logits = some_drafts(rows, 2, vocabulary)
    impossible = torch.zeros(vocabulary, dtype=torch.bool, device=DEVICE)
    impossible[torch.randperm(vocabulary)[:130].to(DEVICE)] = True
    logits[..., impossible] = -INF
    draft_ids[:, 0] = (~impossible).nonzero()[0]
    draft_probs[:, 0, draft_ids[0, 0]] = 0.0  # accepted for certain
    draft_ids[:, 1] = impossible.nonzero()[0]
    draft_probs[:6, 1, draft_ids[0, 1]] = 0.0
    draft_probs[9:, 1] = 3.0
    result = verify_rejection(implementation, draft_ids, draft_probs, logits, *noise_of(rows, 3))
    assert result[1].tolist() == [1] * rows
    assert not any(bool(impossible[token]) for row in emitted(result) for token in row)


@pytest.mark.usefixtures("small_blocks")
def test_saturated_and_undefined_rows(implementation: str) -> None:
    """Large equal logits are a uniform distribution; nothing, +inf and NaN are none: token 0."""
    draft_ids, draft_probs, logits = some_drafts(6, 1, 130)
    logits[0] = torch.finfo(torch.float32).max
    logits[1] = -1e4
    logits[2, 0] = -INF
    logits[3, 0, 77] = INF
    logits[4, 0, 77] = torch.nan
    logits[5, 0] = -INF
    logits[5, 0, draft_ids[5, 0]] = 5.0
    logits[5, 1, 77] = torch.nan
    noise = noise_of(6, 2)
    result = verify_rejection(implementation, draft_ids, draft_probs, logits, *noise)
    first = (draft_ids[:2], draft_probs[:2], logits[:2], noise[0][:2], noise[1][:2])
    assert emitted(result)[:2] == by_the_book(*first)
    assert emitted(result)[2:5] == [[0], [0], [0]]
    assert emitted(result)[5] == [int(draft_ids[5, 0]), 0]


@pytest.mark.usefixtures("small_blocks", "grid")
def test_a_drafter_that_cannot_say_what_it_sampled_from(implementation: str) -> None:
    """NaN in place of a draft's probabilities: not accepted, and the target's own row counts."""
    draft_ids, draft_probs, logits = some_drafts(9, 2, 130)
    draft_probs[:4, 0] = torch.nan  # everywhere
    draft_probs[4:8, 0] = 0.0
    draft_probs[4:8, 0, ::2] = torch.nan  # in half of the vocabulary, the draft's token included
    draft_ids[4:8, 0] = 8
    logits[8, 0, draft_ids[8, 0]] = 90.0  # accepted for certain
    draft_probs[8, 1] = torch.nan
    noise = noise_of(9, 3)
    result = verify_rejection(implementation, draft_ids, draft_probs, logits, *noise)
    assert result[1].tolist() == [0] * 8 + [1]
    believed = draft_probs.nan_to_num(nan=torch.inf)
    assert emitted(result) == by_the_book(draft_ids, believed, logits, *noise)
    assert len({row[0] for row in emitted(result)[:8]}) > 4


@pytest.mark.usefixtures("small_blocks")
def test_views_into_larger_tensors(implementation: str) -> None:
    """What stands around logits and draft probabilities is NaN."""
    draft_ids, draft_probs, logits = some_drafts(3, 2, 133)
    seeds, positions = noise_of(1, 5)
    around = torch.full((2, 6, 8, 203), torch.nan, device=DEVICE)
    around[0, ::2, 1:4, 2:135] = logits
    around[1, ::2, 1:3, 5:138] = draft_probs
    apart = torch.full((3, 4), -1, device=DEVICE)
    apart[:, ::2] = draft_ids
    noise = seeds.expand(3), positions.expand(3, 5)[:, ::2]
    views = (apart[:, ::2], around[1, ::2, 1:3, 5:138], around[0, ::2, 1:4, 2:135])
    result = verify_rejection(implementation, *views, *noise)
    assert emitted(result) == by_the_book(draft_ids, draft_probs, logits, *noise)


@pytest.mark.usefixtures("small_blocks")
def test_a_draft_that_is_no_token_is_refused(implementation: str) -> None:
    if implementation == "plain":
        pytest.skip("torch refuses the index with an error, which a kernel can't")
    draft_ids, draft_probs, logits = some_drafts(3, 1, 70)
    draft_ids[:, 0] = ids(-1, 70, 2**40)
    tokens, num_accepted = verify_rejection(
        implementation, draft_ids, draft_probs, logits, *noise_of(3, 2)
    )
    assert num_accepted.tolist() == [0, 0, 0]
    assert bool(((tokens[:, 0] >= 0) & (tokens[:, 0] < 70)).all())


@pytest.mark.usefixtures("large_blocks")
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_vocabularies_of_real_models(implementation: str, vocabulary: int) -> None:
    """A certain draft, and a bonus that only the last or the middle token can be."""
    logits = torch.zeros(1, 2, vocabulary, dtype=torch.bfloat16, device=DEVICE)
    logits[0, 0, vocabulary - 2] = 80.0
    logits[0, 1] = -INF
    only = vocabulary - 1 if vocabulary % 3 else vocabulary // 2
    logits[0, 1, only] = 1.0
    draft_probs = torch.zeros(1, 1, vocabulary, device=DEVICE)
    draft_probs[0, 0, vocabulary - 2] = 1.0
    result = verify_rejection(
        implementation, ids([vocabulary - 2]), draft_probs, logits, *noise_of(1, 2)
    )
    assert emitted(result) == [[vocabulary - 2, only]]


def test_a_residual_over_a_vocabulary_of_a_real_model(implementation: str) -> None:
    draft_ids, draft_probs, logits = some_drafts(1, 1, 49152)
    logits[0, 0, draft_ids[0, 0]] = -INF
    noise = noise_of(1, 2)
    result = verify_rejection(implementation, draft_ids, draft_probs, logits, *noise)
    assert emitted(result) == by_the_book(draft_ids, draft_probs, logits, *noise)


@pytest.mark.usefixtures("small_blocks")
def test_rows_beyond_32_bit_offsets(implementation: str) -> None:
    logits = far_apart(2 * 80).view(3, 2, 80)
    draft_probs = torch.zeros(3, 1, 80, device=DEVICE)
    draft_ids = ids([3], [4], [5])
    for row in range(3):
        logits[row, 0, 3 + row] = 60.0
        logits[row, 1, 50 + row] = 60.0
        draft_probs[row, 0, 3 + row] = 1.0
    result = verify_rejection(implementation, draft_ids, draft_probs, logits, *noise_of(3, 2))
    assert emitted(result) == [[3, 50], [4, 51], [5, 52]]
