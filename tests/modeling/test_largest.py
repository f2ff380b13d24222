"""The index of the largest value: `torch.max`'s, for every kind of row."""

import pytest
import torch

from hf_specdec.modeling.largest import index_of_largest

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SIZES = [1, 7, 511, 2048, 2049, 4096, 32000, 50257]


def check(values):
    assert index_of_largest(values).equal(values.max(dim=-1).indices)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
class TestAgainstTorch:
    def test_random_rows(self, size, dtype):
        check(torch.randn(2, 3, size).to(dtype))

    def test_rows_of_negative_numbers(self, size, dtype):
        check(-torch.rand(5, size).to(dtype) - 1)

    def test_of_equal_values_the_first(self, size, dtype):
        check(torch.randint(-2, 2, (40, size)).to(dtype))
        check(torch.zeros(3, size, dtype=dtype))
        signs = torch.randint(0, 2, (10, size)) * 2 - 1
        check(torch.zeros(10, size, dtype=dtype) * signs)
        check(torch.full((2, size), -torch.inf, dtype=dtype))

    def test_the_largest_anywhere(self, size, dtype):
        places = torch.randint(0, size, (60,)).tolist() + [0, size - 1]
        for low, high in ((-3.0, -1.0), (-1.0, 1.0), (1.0, 2.0), (-torch.inf, -5.0)):
            values = torch.full((len(places), size), low, dtype=dtype)
            values[torch.arange(len(places)), places] = high
            assert index_of_largest(values).tolist() == places

    def test_infinities(self, size, dtype):
        values = torch.randn(4, size).to(dtype)
        values[0] = torch.inf
        values[1, size // 2 :] = torch.inf
        values[2, : size // 2] = -torch.inf
        check(values)

    def test_rows_that_are_no_number(self, size, dtype):
        values = torch.full((2, size), torch.nan, dtype=dtype)
        values[1] = -values[1]
        check(values)

    def test_a_nan_gives_an_index_in_range(self, size, dtype):
        values = torch.randn(8, size).to(dtype)
        values[torch.rand(8, size) < 0.1] = torch.nan
        values[torch.rand(8, size) < 0.1] = -torch.nan
        index = index_of_largest(values)
        assert ((index >= 0) & (index < size)).all()


def test_rows_that_are_not_contiguous():
    values = torch.randn(4, 3, 9000, dtype=torch.float32).to(torch.bfloat16)
    check(values[:, 1:])
    check(values[..., 100:8000])
    check(values[:, :, ::2])
    check(values.transpose(0, 1))
