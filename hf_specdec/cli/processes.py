"""The processes of one run under `accelerate launch` or torchrun; one where nothing launched it.

They share no tensors, only the prompts, so there is no process group: a key-value store, which the
launcher or process 0 keeps at MASTER_ADDR, is all that connects them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

from hf_specdec.cli.roll_call import LostProcessError, RollCall, ranges

Item = TypeVar("Item")
# From the first process's start to the last one's.
_ARRIVAL = timedelta(minutes=10)
_POLL = 0.05


@dataclass(frozen=True)
class Processes:
    """Which of how many processes this is.

    Attributes:
        rank: from 0; 0 is the main process.
        count: of all processes.
        local_rank: on this machine.
        roll: what is known of the others; ``None`` for a process that is alone.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    roll: RollCall | None = None

    @classmethod
    def of_launcher(cls) -> Processes:
        """What the launcher's environment variables say.

        Raises:
            ValueError: variables that are missing or no numbers.
            LostProcessError: the other processes don't come.
        """
        count = _number("WORLD_SIZE", 1)
        if count == 1:
            return cls()
        rank, local_rank = _number("RANK"), _number("LOCAL_RANK", 0)
        roll = RollCall(_store(rank, count), rank, count)
        roll.begin()
        return cls(rank, count, local_rank, roll)

    @property
    def is_main(self) -> bool:
        """Whether this is the process that joins the others' work."""
        return self.rank == 0

    def share(self, items: Sequence[Item], rank: int | None = None) -> list[Item]:
        """A process's items, by default this one's: every count-th, so that long ones spread."""
        return list(items[self.rank if rank is None else rank :: self.count])

    def device(self, device: str) -> str:
        """The device of this process: with ``"auto"`` on a machine of several GPUs, its own."""
        if device != "auto" or self.count == 1:
            return device
        import torch

        gpus = torch.cuda.device_count()
        return f"cuda:{self.local_rank % gpus}" if gpus else "cpu"


def _number(variable: str, default: int | None = None) -> int:
    text = os.environ.get(variable)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ValueError(
            f"the environment has WORLD_SIZE={os.environ.get('WORLD_SIZE')} and {variable}={text}: "
            "a launcher of several processes sets both to numbers. Start them with torchrun or "
            "accelerate launch, or unset WORLD_SIZE"
        ) from None


def _store(rank: int, count: int) -> Any:
    """The store that all processes share, once all have come to it."""
    import torch.distributed as dist

    if not dist.is_available():
        raise ValueError(
            f"WORLD_SIZE={count}: this build of torch has no torch.distributed, so it can't run "
            "several processes; install another, or give each process an --output of its own"
        )
    address = ":".join(os.environ.get(f"MASTER_{name}", "?") for name in ("ADDR", "PORT"))
    missing = "not all processes have come"
    try:
        shared, _, _ = next(dist.rendezvous("env://", timeout=_ARRIVAL))
        store = dist.PrefixStore("hf_specdec", shared)
        name, absent = _meet(store, rank, count)
        if not absent:
            return dist.PrefixStore(name, store)
        missing = f"{'process' if len(absent) == 1 else 'processes'} {ranges(absent)} did not come"
    except ValueError as error:
        raise ValueError(
            f"WORLD_SIZE={count}, but the processes can't meet ({error}). Start them with torchrun "
            "or accelerate launch, or set MASTER_ADDR and MASTER_PORT"
        ) from None
    except RuntimeError as error:
        missing += f" ({str(error).splitlines()[0]})"
    raise LostProcessError(
        f"process {rank} of {count} has waited at {address}: {missing}. Start all of them, on "
        "every machine, with the same MASTER_ADDR and MASTER_PORT"
    )


def _meet(store: Any, rank: int, count: int) -> tuple[str, set[int]]:
    """Agree on a name for this start: a launcher that restarts processes may keep the store.

    Each process says a word of its own; process 0 answers with that word and the name, so that no
    answer of an earlier start is taken for one of this.

    Returns:
        The name, and who did not come in time.
    """
    word, until = uuid4().hex, time.monotonic() + _ARRIVAL.total_seconds()
    if rank:
        key = f"answer/{rank}"
        store.set(f"word/{rank}", word)
        while time.monotonic() < until:
            said, _, name = _read(store, key).partition(" ")
            if said == word:
                store.set(f"{name}/came/{rank}", "yes")
                return name, set()
            time.sleep(_POLL)
        return "", {0}
    absent = set(range(1, count))
    answered: dict[int, str] = {}
    while absent and time.monotonic() < until:
        for other in sorted(absent):
            said = _read(store, f"word/{other}")
            if said and answered.get(other) != said:
                answered[other] = said
                store.set(f"answer/{other}", f"{said} {word}")
            if _read(store, f"{word}/came/{other}"):
                absent.remove(other)
        time.sleep(_POLL)
    return word, absent


def _read(store: Any, key: str) -> str:
    """A text of the store, empty before it is there."""
    return store.get(key).decode() if store.check([key]) else ""
