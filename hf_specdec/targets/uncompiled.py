"""A target whose whole forward was compiled runs uncompiled while a call speculates.

Hooks are new in every call, and rows have lengths of their own: compiled code would be compiled
anew for most calls, which takes longer than it saves. ``cache_implementation="static"`` is the way
to compiled steps (see `static_target`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

# What compiled functions and modules are made of; where torch keeps them.
_ORIGINAL = "_torchdynamo_orig_callable"
_COMPILED_CALL = "_compiled_call_impl"

_lock = threading.Lock()
_users: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_set_aside: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


@contextmanager
def uncompiled(model: Any) -> Iterator[None]:
    """Undo ``model.compile()`` and ``model.forward = torch.compile(model.forward)`` in the block.

    Calls in several threads share the switch: the last one to leave puts what was there back.
    """
    with _lock:
        applies = model in _users or bool(_compiled_parts(model))
        if applies:
            _users[model] = _users.get(model, 0) + 1
            if _users[model] == 1:
                _set_aside[model] = _compiled_parts(model)
                for name, value in _set_aside[model].items():
                    model.__dict__[name] = getattr(value, _ORIGINAL) if name == "forward" else None
    try:
        yield
    finally:
        if applies:
            with _lock:
                _users[model] -= 1
                if _users[model] == 0:
                    del _users[model]
                    model.__dict__.update(_set_aside.pop(model))


def _compiled_parts(model: Any) -> dict[str, Any]:
    """The attributes of the model itself that hold compiled code."""
    parts = {}
    if model.__dict__.get(_COMPILED_CALL) is not None:
        parts[_COMPILED_CALL] = model.__dict__[_COMPILED_CALL]
    if hasattr(model.__dict__.get("forward"), _ORIGINAL):
        parts["forward"] = model.__dict__["forward"]
    return parts
