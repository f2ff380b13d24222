"""Calling kernels and their torch twins in one way, with buffers that show what isn't written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_specdec import verification

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK = 64
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of published models; the last two aren't multiples of a block.
VOCABULARIES = [32000, 49152, 128256, 151680, 262144]

Result = tuple[torch.Tensor, torch.Tensor]


def verify_match(implementation: str, *args: Any) -> Result:
    """Tokens and numbers of accepted drafts, by the twin or the kernel."""
    if implementation == "plain":
        verdict = verification.match_in_torch(*args)
        return verdict.tokens, verdict.num_accepted
    from hf_specdec.kernels import matching

    return _in_poisoned_buffers(matching.verify_match, *args)


def verify_rejection(implementation: str, *args: Any) -> Result:
    """The same for the rejection rule."""
    if implementation == "plain":
        verdict = verification.reject_in_torch(*args)
        return verdict.tokens, verdict.num_accepted
    from hf_specdec.kernels import rejection

    return _in_poisoned_buffers(rejection.verify_rejection, *args)


def _in_poisoned_buffers(function: Callable[..., Result], *args: Any) -> Result:
    """Call a launcher with NaN, or a wrong index, in all that it allocates and doesn't write."""
    empty = torch.empty

    def poisoned(*size: Any, **kwargs: Any) -> torch.Tensor:
        buffer = empty(*size, **kwargs)
        return buffer.fill_(torch.nan if buffer.is_floating_point() else -7)

    torch.empty = poisoned  # type: ignore[assignment]
    try:
        return function(*args)
    finally:
        torch.empty = empty


def far_apart(row_size: int) -> torch.Tensor:
    """float16 zeros ``[3, row_size]``, rows 2**30 elements apart: the last offset is 2**31.

    Not more: an argument that needs 64 bits itself would make every product with it one of 64 bits.
    Only what the rows hold is touched.
    """
    try:
        storage = torch.empty(2**31 + row_size, dtype=torch.float16, device=DEVICE)
    except RuntimeError:
        pytest.skip("needs 4 GB of address space")
    return storage.as_strided((3, row_size), (2**30, 1)).zero_()


def ids(*values: Any) -> torch.Tensor:
    """An int64 tensor on the device under test."""
    return torch.tensor(values, dtype=torch.long, device=DEVICE)
