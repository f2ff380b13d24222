"""The noise: reproducible, independent of shape and device layout, and Gumbel-distributed."""

import pytest
import torch
from scipy import stats

from hf_specdec.noise import Stream, add_gumbel, gumbel, uniform


def grid(seeds, positions, tokens):
    return (
        torch.tensor(seeds)[:, None, None],
        torch.tensor(positions)[None, :, None],
        torch.arange(tokens),
    )


def test_noise_is_a_function_of_its_arguments_alone():
    block = gumbel(*grid([1, 2**61 + 5], [0, 7, 100_000], 500))
    assert block.dtype == torch.float32
    for s, seed in enumerate([1, 2**61 + 5]):
        for p, position in enumerate([0, 7, 100_000]):
            for token in (0, 1, 499):
                one = gumbel(torch.tensor(seed), torch.tensor(position), torch.tensor(token))
                assert one == block[s, p, token]


@pytest.mark.parametrize(
    "change",
    [
        lambda s, p, t, m: (s + 1, p, t, m),
        lambda s, p, t, m: (s + 2**32, p, t, m),
        lambda s, p, t, m: (s, p + 1, t, m),
        lambda s, p, t, m: (s, p, t + 1, m),
        lambda s, p, t, m: (s, p, t, Stream.RESIDUAL),
    ],
    ids=["low seed bits", "high seed bits", "position", "token", "stream"],
)
def test_each_argument_gives_independent_noise(change):
    seeds, positions, tokens = grid(range(40), range(50), 50)
    a = gumbel(seeds, positions, tokens, Stream.TOKEN).flatten()
    b = gumbel(*change(seeds, positions, tokens, Stream.TOKEN)).flatten()
    assert abs(stats.pearsonr(a.numpy(), b.numpy()).statistic) < 0.02
    assert (a == b).float().mean() < 1e-3


def test_noise_is_gumbel_and_uniform():
    noise = gumbel(*grid(range(30), range(40), 200)).flatten().double().numpy()
    assert stats.kstest(noise, "gumbel_r").pvalue > 1e-3
    u = uniform(torch.arange(500)[:, None], torch.arange(500)[None], Stream.ACCEPT)
    assert stats.kstest(u.flatten().double().numpy(), "uniform").pvalue > 1e-3
    assert u.min() > 0.0 and u.max() < 1.0


def test_extreme_bits_stay_finite(monkeypatch):
    from hf_specdec import noise

    bits = torch.tensor([0, 1, 2**32 - 1])
    monkeypatch.setattr(noise, "_bits", lambda *args: bits)
    value = noise.gumbel(bits, bits, bits)
    assert torch.isfinite(value).all()
    assert value[0] > 22  # the tail that decides among hundreds of thousands of tokens


@pytest.mark.parametrize("share_finite", [0.02, 0.5, 1.0])
def test_sparse_and_dense_noise_have_the_same_bits(share_finite):
    logits = torch.randn(3, 4, 1000)
    logits[torch.rand_like(logits) > share_finite] = -torch.inf
    seeds, positions = torch.tensor([3, 4, 5]), torch.randint(0, 99, (3, 4))
    noisy = add_gumbel(logits, seeds, positions)
    dense = logits + gumbel(seeds[:, None, None], positions[..., None], torch.arange(1000))
    assert torch.equal(noisy, dense)


def test_columns_can_name_their_tokens():
    ids = torch.tensor([7, 100, 3])
    logits = torch.zeros(2, 1, 3)
    seeds, positions = torch.tensor([1, 2]), torch.tensor([[5], [6]])
    whole = add_gumbel(torch.zeros(2, 1, 128), seeds, positions)
    assert torch.equal(add_gumbel(logits, seeds, positions, token_ids=ids), whole[..., ids])
