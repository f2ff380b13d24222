"""Multi-token-prediction layers of many families: one table, one network."""

from .checkpoint_mtp import load_mtp
from .families import FAMILIES, MTPFamily, family_of
from .modeling_mtp import MTPModel, final_norm
from .switches import Feed, MTPSwitches

__all__ = [
    "FAMILIES",
    "Feed",
    "MTPFamily",
    "MTPModel",
    "MTPSwitches",
    "family_of",
    "final_norm",
    "load_mtp",
]
