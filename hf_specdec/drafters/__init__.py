"""Ways of drafting: one file each, all of them `Drafter` subclasses."""

from hf_specdec.drafters.base import Drafter, PickToken, VerifiedStep
from hf_specdec.drafters.mlp import MLPDrafter

__all__ = ["Drafter", "MLPDrafter", "PickToken", "VerifiedStep"]
