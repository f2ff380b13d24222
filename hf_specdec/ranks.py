"""The processes that one call of ``generate`` involves, and how they stay together.

Ranks that hold parts of one target (tensor parallel) run the same rows. Every forward of theirs is
a computation of all of them, so all must feed it the same tokens, and end at the same step: what
the first of them decides, all do. Its decision is sent, not repeated, as clocks differ from rank to
rank and logits may in their last bits.

Ranks that hold parts of every layer and gather them in each forward (FSDP, DeepSpeed's ZeRO-3) run
rows of their own, but none may run a forward alone. One that has finished its rows goes on with
forwards over a single token that nobody reads, until all have finished.

Boundary: who the others are and talking to them; what there is to talk about is `common_call`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_specdec.modeling.placement import input_device


class Ranks:
    """This process among the others.

    Args:
        same_rows: process group of the ranks that run the same rows; ``None``: this one alone.
        in_step: whether all ranks, whatever their rows, must run the same number of forwards.
        device: where tensors are that the ranks exchange.
    """

    def __init__(
        self,
        same_rows: Any = None,
        in_step: bool = False,
        device: torch.device | str = "cpu",
    ):
        self.same_rows = same_rows
        self.in_step = in_step
        self._device = torch.device(device)
        self._first = 0 if same_rows is None else dist.get_global_rank(same_rows, 0)

    def of_first(self, value: Tensor) -> Tensor:
        """The first rank's value, of the same shape and dtype on all that run the same rows."""
        if self.same_rows is None:
            return value
        sent = value.to(self._device, copy=True).contiguous()
        dist.broadcast(sent, self._first, group=self.same_rows)
        return sent.to(value.device)

    def number_of_first(self, value: int) -> int:
        """The first rank's number."""
        if self.same_rows is None:
            return value
        return int(self.of_first(torch.tensor(value)))

    def object_of_first(self, value: Any) -> Any:
        """The first rank's value; anything that can be pickled."""
        if self.same_rows is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, self._first, group=self.same_rows, device=self._device)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """What each of the ranks that run the same rows has; anything that can be pickled."""
        if self.same_rows is None:
            return [value]
        values = [None] * dist.get_world_size(self.same_rows)
        dist.all_gather_object(values, value, group=self.same_rows)
        return values

    def steps(self, has_rows: Callable[[], bool], model: Any) -> Iterator[None]:
        """Yield once for every step that this rank is to run.

        In step with others it goes on, without yielding, until they have finished too.

        Args:
            has_rows: whether this rank has rows that aren't finished.
            model: the target.
        """
        while has_rows() if not self.in_step else self.most(int(has_rows())):
            if has_rows():
                yield
            else:
                run_idle(model)

    def most(self, number: int) -> int:
        """The largest number of all ranks that are in step; this one's if it isn't."""
        if not self.in_step:
            return number
        largest = torch.tensor(number, device=self._device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)

    def level(self, number: int, model: Any) -> None:
        """Run as many idle forwards as this rank runs fewer than others.

        Args:
            number: forwards that it runs on its own account, before or after this.
            model: the target.
        """
        for _ in range(self.most(number) - number):
            run_idle(model)


def run_idle(model: Any) -> None:
    """A forward over one token, for the ranks that can't do without this one's part of it."""
    tokens = torch.zeros((1, 1), dtype=torch.long, device=input_device(model))
    model(input_ids=tokens, use_cache=False)


@contextmanager
def whole_ends(target: Any) -> Iterator[None]:
    """Let FSDP keep the embedding and the output head whole inside the block.

    For drafters that run these outside of the target's forward: gathered each time, they would have
    to be run equally often on every rank. What FSDP keeps anyway is left alone, and other targets.

    Args:
        target: all ranks are about to generate with it.
    """
    cut = _cut_ends(target)
    for unit in cut:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in cut:
            unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()


def _cut_ends(target: Any) -> list[Any]:
    """FSDP's units that free the embedding or the head after each forward, each once."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    # Before its first forward everything is cut, and nothing says what will stay.
    run_idle(target)
    ends = (target.get_input_embeddings(), target.get_output_embeddings())
    units: dict[int, Any] = {}
    for end in ends:
        if not isinstance(end.weight, DTensor):
            continue
        name = next(name for name, module in target.named_modules() if module is end)
        above = [target.get_submodule(name[:i]) for i, c in enumerate(name) if c == "."]
        holders = [m for m in (target, *above, end) if isinstance(m, FSDPModule)]
        if holders:
            units[id(holders[-1])] = holders[-1]
    return list(units.values())


def ranks_of(target: Any, synced: bool, device: torch.device | str) -> Ranks:
    """The ranks of a call.

    Args:
        target: the model.
        synced: ``synced_gpus``.
        device: of the target.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks()
    return Ranks(tensor_parallel_group(target), synced and dist.get_world_size() > 1, device)


def tensor_parallel_group(target: Any) -> Any:
    """The process group whose ranks hold parts of a target's weights; ``None`` if they are whole.

    Read from the weights themselves: transformers' ``tp_plan`` and torch's ``parallelize_module``
    leave the same in them. Weights that FSDP has cut are put together before they are used, so
    that they don't count.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    meshes = [p.device_mesh for p in target.parameters() if isinstance(p, DTensor)]
    named = [mesh for mesh in meshes if "tp" in (mesh.mesh_dim_names or ())]
    if named:
        group = named[0].get_group("tp")
    else:
        is_sharded = any(isinstance(module, FSDPModule) for module in target.modules())
        if not meshes or meshes[0].ndim > 1 or is_sharded:
            return None
        group = meshes[0].get_group()
    return group if dist.get_world_size(group) > 1 else None
