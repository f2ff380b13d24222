"""Several processes that train one drafter together, with the library ``accelerate``.

Every process holds the drafter and runs its share of a step's examples; the gradients are averaged,
so that all do the same update. What a step does depends on the number of its parts (processes times
accumulation), not on which process runs them: two processes are one with twice the accumulation.

Started by ``torchrun`` or ``accelerate launch``; a plain start is one process.

Boundary: where to compute, and talking to the other processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

# A process waits so long for the others: one may have more to generate than another.
_PATIENCE_HOURS = 12


class Processes:
    """This process among the others; without ``accelerate`` or a launcher it is alone.

    Args:
        device: ``"auto"`` or a device's name. Several processes take one device each.

    Attributes:
        index: number of this process.
        count: number of processes.
        device: of this process.

    Raises:
        ImportError: started by a launcher, but ``accelerate`` is not installed.
    """

    def __init__(self, device: str = "auto") -> None:
        self.index, self.count = 0, 1
        self._state: Any = None
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            self._state = _accelerate_state(cpu=device == "cpu")
            self.index, self.count = self._state.process_index, self._state.num_processes
            self.device = torch.device(self._state.device)
        elif device == "auto":
            self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        else:
            self.device = torch.device(device)

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files."""
        return self.index == 0

    def wait(self) -> None:
        """Until all processes are here."""
        if self._state is not None:
            self._state.wait_for_everyone()

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace the gradients by their mean over the processes."""
        if self._state is None:
            return
        from accelerate.utils import reduce

        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        flat = reduce(flat, reduction="mean")
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, mean in zip(gradients, flat.split(sizes), strict=True):
            gradient.copy_(mean.view_as(gradient))

    def average(self, values: Tensor) -> Tensor:
        """The mean of a tensor over the processes."""
        if self._state is None:
            return values
        from accelerate.utils import reduce

        return reduce(values.clone(), reduction="mean")

    def from_main(self, value: Any) -> Any:
        """What the main process has; anything that can be pickled."""
        if self._state is None:
            return value
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0]


def _accelerate_state(cpu: bool) -> Any:
    from datetime import timedelta

    try:
        from accelerate import PartialState
    except ModuleNotFoundError as error:
        raise ImportError(
            'training in several processes needs accelerate: pip install "hf-specdec[train]"'
        ) from error
    return PartialState(cpu=cpu, timeout=timedelta(hours=_PATIENCE_HOURS))
