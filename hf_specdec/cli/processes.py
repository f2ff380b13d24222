"""The processes of one run under `accelerate launch` or torchrun; one where nothing launched it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

Item = TypeVar("Item")
# A process that is done waits for the slowest one, which may take days.
_PATIENCE = timedelta(days=30)


@dataclass(frozen=True)
class Processes:
    """Which of how many processes this is.

    Attributes:
        rank: from 0; 0 is the main process.
        count: of all processes.
        local_rank: on this machine.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    _state: Any = None

    @classmethod
    def of_launcher(cls) -> Processes:
        """What the launcher's environment variables say.

        Raises:
            ValueError: several processes, and accelerate isn't installed.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        try:
            from accelerate import PartialState
        except ImportError:
            raise ValueError(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']}: several processes need the package "
                "accelerate. Install it with: pip install accelerate"
            ) from None
        # The processes only wait for each other; the models' device is chosen apart from that.
        state = PartialState(cpu=True, timeout=_PATIENCE)
        return cls(
            state.process_index, state.num_processes, int(os.environ.get("LOCAL_RANK", "0")), state
        )

    @property
    def is_main(self) -> bool:
        """Whether this is the process that joins the others' work."""
        return self.rank == 0

    def wait_for_all(self) -> None:
        """Return when every process is here."""
        if self._state is not None:
            self._state.wait_for_everyone()

    def share(self, items: Sequence[Item]) -> list[Item]:
        """This process's items: every count-th, so that long and short ones mix."""
        return list(items[self.rank :: self.count])

    def device(self, device: str) -> str:
        """The device of this process: with ``"auto"`` on a machine of several GPUs, its own."""
        if device != "auto" or self.count == 1:
            return device
        import torch

        gpus = torch.cuda.device_count()
        return f"cuda:{self.local_rank % gpus}" if gpus else "cpu"

    def close(self) -> None:
        """Leave the group of processes."""
        if self._state is not None:
            self._state.destroy_process_group()
