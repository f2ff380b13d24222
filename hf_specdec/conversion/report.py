"""What a conversion did, as data.

Boundary: facts alone; how they are shown is the command line's business.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorRow:
    """One tensor.

    Attributes:
        source: its name before; ``None`` for a copy that was made for it.
        name: its name now; ``None`` if it is stored no more, as an equal one is.
        shape: of both.
        dtype_before: such as ``"float16"``.
        dtype_after: the same or another.
        bytes_before: on disk, 0 for an alias of a tensor that is stored already.
        bytes_after: the same now.
        remark: what happened to it, in a few words, or nothing.
    """

    source: str | None
    name: str | None
    shape: tuple[int, ...]
    dtype_before: str
    dtype_after: str
    bytes_before: int
    bytes_after: int
    remark: str = ""


@dataclass(frozen=True)
class ConversionReport:
    """A finished conversion.

    Attributes:
        source: what was read, and in which format.
        destination: what was written, and in which format.
        rows: every tensor of either side.
        notes: what else was decided or copied, in sentences.
    """

    source: str
    destination: str
    rows: tuple[TensorRow, ...]
    notes: tuple[str, ...]

    @property
    def bytes_before(self) -> int:
        """Bytes of all tensors before."""
        return sum(row.bytes_before for row in self.rows)

    @property
    def bytes_after(self) -> int:
        """Bytes of all tensors now."""
        return sum(row.bytes_after for row in self.rows)
