"""Run checks on several ranks at once: a script for torchrun, or one that forks the ranks itself.

``torchrun --nproc-per-node 2 rank_runs.py tensor_parallel_checks,in_step_checks FOLDER`` runs every
function of these modules that begins with ``check_``, in order, on both ranks, and each rank writes
to ``FOLDER`` what became of them. Without torchrun, a third argument says how many ranks to fork.
A rank whose check fails ends there, as the others are then no longer where it is.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

SECONDS = 240


def checks_of(*modules: str) -> list[tuple[str, Callable]]:
    """Names and functions, in the order in which they are written."""
    return [
        (name, function)
        for module in modules
        for name, function in vars(import_module(module)).items()
        if name.startswith("check_")
    ]


def launch(modules: Sequence[str], num_ranks: int, folder: Path, fork: bool = False) -> None:
    """Run the checks of some modules on ``num_ranks`` ranks; see `read` for what they found."""
    script = [str(Path(__file__)), ",".join(modules), str(folder)]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = [*script, str(num_ranks)] if fork else [*launcher, *script]
    root = Path(__file__).parent.parent
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    with open(folder / "log", "w") as log:
        subprocess.run(
            [sys.executable, "-W", "ignore", *command],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
            check=False,
        )


def read(folder: Path, num_ranks: int, name: str) -> None:
    """Raise AssertionError unless a check passed on every rank."""
    for rank in range(num_ranks):
        file = folder / f"rank{rank}.json"
        found = json.loads(file.read_text()) if file.exists() else {}
        if name not in found:
            log = (folder / "log").read_text()[-4000:]
            raise AssertionError(f"rank {rank} never came to {name}; it did {list(found)}. {log}")
        assert found[name] is None, f"rank {rank}: {found[name]}"


def run(modules: Sequence[str], folder: Path) -> None:
    """Run the checks on this rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # A rank that waits for one that failed gives up soon.
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    for name, check in checks_of(*modules):
        try:
            # Every rank draws other numbers, if nobody sees to it.
            torch.manual_seed(rank)
            check(folder, rank)
            found[name] = None
        except BaseException:
            found[name] = traceback.format_exc()
        (folder / f"rank{rank}.json").write_text(json.dumps(found))
        if found[name] is not None and not os.environ.get("GO_ON"):
            sys.stdout.flush()
            os._exit(1)
    dist.destroy_process_group()


def main() -> None:
    """Run as one of torchrun's ranks, or fork them."""
    modules, folder = sys.argv[1].split(","), Path(sys.argv[2])
    checks_of(*modules)
    if len(sys.argv) < 4:
        run(modules, folder)
        return
    count = int(sys.argv[3])
    os.environ |= {"WORLD_SIZE": str(count), "MASTER_ADDR": "localhost"}
    os.environ["MASTER_PORT"] = str(_free_port())
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            run(modules, folder)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
