"""A streamer and a stopping criterion for batches, which keep what they are shown."""

from collections.abc import Sequence

from hf_specdec import RowStep, RowStoppingCriteria, RowStreamer


class Collect(RowStreamer):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[RowStep]] = []
        self.ended = False

    def put_rows(self, steps: list[RowStep]) -> None:
        self.steps.append(steps)

    def end(self) -> None:
        self.ended = True

    def of_row(self, row: int) -> list[RowStep]:
        return [step for steps in self.steps for step in steps if step.row == row]

    def text(self, row: int) -> list[int]:
        return [token for step in self.of_row(row) for token in step.token_ids]


class Limits(RowStoppingCriteria):
    """Row b emits ``limits[b]`` tokens; remembers what it was shown."""

    def __init__(self, limits: list[int]) -> None:
        self.limits = limits
        self.seen: list[list[int]] = [[] for _ in limits]

    def first_stop(self, row: int, token_ids: Sequence[int]) -> int | None:
        left = self.limits[row] - len(self.seen[row])
        self.seen[row] += token_ids
        return left if len(token_ids) >= left else None
