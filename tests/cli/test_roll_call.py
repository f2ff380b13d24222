"""Processes that end together read each other's last lines, also from a store that one keeps."""

import threading
from typing import Any

import torch.distributed as dist

from hf_specdec.cli.roll_call import Member, RollCall


def stopped_pair() -> tuple[RollCall, RollCall]:
    """Two members of a run, both stopped."""
    store: Any = dist.HashStore()
    pair = RollCall(store, 0, 2), RollCall(store, 1, 2)
    for roll in pair:
        roll.end("stopped")
    return pair


def state_of(member: Member | None) -> str:
    return "unknown" if member is None else member.state


def test_the_keeper_of_the_store_waits_until_the_others_have_read() -> None:
    keeper, other = stopped_pair()
    found: list[dict[int, Member | None]] = []
    waiting = threading.Thread(target=lambda: found.append(keeper.settle(60)), daemon=True)
    waiting.start()
    waiting.join(0.6)
    assert waiting.is_alive() and not found
    assert state_of(other.settle(60)[0]) == "stopped"
    waiting.join(10)
    assert [state_of(members[1]) for members in found] == ["stopped"]


def test_the_keeper_does_not_wait_for_ever() -> None:
    keeper, _ = stopped_pair()
    assert state_of(keeper.settle(0.4)[1]) == "stopped"


def test_the_keeper_does_not_wait_for_those_that_read_nothing() -> None:
    store: Any = dist.HashStore()
    keeper, other = RollCall(store, 0, 2), RollCall(store, 1, 2)
    keeper.end("stopped")
    other.end("failed", "no memory")
    waiting = threading.Thread(target=keeper.settle, args=(60,), daemon=True)
    waiting.start()
    waiting.join(10)
    assert not waiting.is_alive()


def test_what_was_read_before_the_store_went_counts() -> None:
    _, other = stopped_pair()

    class Going:
        """A store whose keeper leaves once the lines have been read."""

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def set(self, key: str, value: str) -> None:
            raise RuntimeError("Connection was likely closed")

    store, other._store = other._store, Going()
    assert state_of(other.settle(60)[0]) == "stopped"
