"""Run checks on several ranks at once: a script that forks the ranks, or one for torchrun.

``rank_runs.py FOLDER some_checks,other_checks:2 more_checks:4`` runs every function of the first
two modules that begins with ``check_``, in order, on two ranks, then those of the third on four.
The ranks share the imports of this process; started by ``torchrun`` it is one of the ranks itself.
Each rank writes to ``FOLDER`` what became of its checks. One whose check fails ends there, as the
others are then no longer where it is.
"""

import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

SECONDS = 400


def checks_of(*modules: str) -> list[tuple[str, Callable]]:
    """Names and functions, in the order in which they are written."""
    return [
        (name, function)
        for module in modules
        for name, function in vars(import_module(module)).items()
        if name.startswith("check_")
    ]


def prepare(modules: Sequence[str], folder: Path) -> None:
    """Write the checkpoints that some checks load; ranks can't, only the first of them saves."""
    for module in map(import_module, modules):
        if hasattr(module, "prepare"):
            module.prepare(folder)


def launch(folder: Path, *groups: str, launcher: Sequence[str] = ()) -> None:
    """Run this script on its own, or by a launcher; see `read` for what it found."""
    root = Path(__file__).parent.parent
    settings = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }
    with open(folder / "log", "w") as log:
        subprocess.run(
            [sys.executable, "-W", "ignore", *launcher, __file__, str(folder), *groups],
            env={**os.environ, **settings},
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
            check=False,
        )


def read(folder: Path, num_ranks: int, name: str) -> None:
    """Raise AssertionError unless a check passed on every rank."""
    for rank in range(num_ranks):
        file = folder / f"rank{rank}of{num_ranks}.json"
        found = json.loads(file.read_text()) if file.exists() else {}
        if name not in found:
            log = (folder / "log").read_text()[-4000:]
            raise AssertionError(f"rank {rank} never came to {name}; it did {list(found)}. {log}")
        assert found[name] is None, f"rank {rank}: {found[name]}"


def run(modules: Sequence[str], folder: Path) -> None:
    """Run the checks on this rank."""
    import torch
    import torch.distributed as dist

    # A rank that waits for one that failed gives up soon.
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, count = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}
    for name, check in checks_of(*modules):
        try:
            # Every rank draws other numbers, if nobody sees to it.
            torch.manual_seed(rank)
            check(folder, rank)
            found[name] = None
        except BaseException:
            found[name] = traceback.format_exc()
        (folder / f"rank{rank}of{count}.json").write_text(json.dumps(found))
        if found[name] is not None:
            os._exit(1)
    dist.destroy_process_group()


def fork(modules: Sequence[str], count: int, folder: Path) -> None:
    """Run the checks on ``count`` ranks."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    os.environ |= {"WORLD_SIZE": str(count), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            try:
                run(modules, folder)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def main() -> None:
    """Run as one of torchrun's ranks, or fork them."""
    import torch

    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for group in sys.argv[2:]:
        modules, count = group.split(":")
        if "RANK" in os.environ:
            run(modules.split(","), folder)
        else:
            prepare(modules.split(","), folder)
            fork(modules.split(","), int(count), folder)


if __name__ == "__main__":
    main()
