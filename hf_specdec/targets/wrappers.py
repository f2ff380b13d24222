"""Objects that stand for a model: PEFT's adapters around it, ``torch.compile``'s module.

Both pass ``generate`` on to the model they hold, so that is where an attachment must be kept.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


def unwrapped(model: Any) -> Any:
    """The model whose ``generate`` runs when ``model.generate`` is called.

    A ``PeftModel`` gives the model with the adapters in it, an ``OptimizedModule`` the model that
    was compiled; anything else is returned as it is.
    """
    while True:
        if is_peft_model(model):
            model = model.get_base_model()
        elif isinstance(model, torch.nn.Module) and "_orig_mod" in model._modules:
            model = model._orig_mod
        else:
            return model


def is_peft_model(model: Any) -> bool:
    """Whether this is one of PEFT's wrappers; PEFT isn't imported for the answer."""
    peft = sys.modules.get("peft")
    # Only there when its import is over.
    classes = (getattr(peft, "PeftModel", None), getattr(peft, "PeftMixedModel", None))
    return isinstance(model, tuple(c for c in classes if c is not None))
