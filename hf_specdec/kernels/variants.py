"""What a kernel is compiled for ahead of time: one entry for each way it is launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel.

    Attributes:
        name: kernel and variant, e.g. ``"match_partial bf16"``.
        kernel: the ``triton.jit`` function.
        signature: Triton's type of each argument that isn't constexpr, e.g. ``"*bf16"``, ``"i32"``.
        constexprs: values of the others; ``None`` for pointers that aren't given.
        divisible_by_16: arguments that the launcher would find divisible by 16.
        num_warps: warps of a program.
        bytes_moved: what it reads and writes, as a formula in words.
        floor: the least that could be moved for the same result.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    divisible_by_16: tuple[str, ...]
    num_warps: int
    bytes_moved: str
    floor: str
