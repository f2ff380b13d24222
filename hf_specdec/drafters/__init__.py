"""Ways of drafting: one file each, all of them `Drafter` subclasses."""

from hf_specdec.drafters.base import Drafter, Feed, PickToken, VerifiedStep
from hf_specdec.drafters.gemma4 import Gemma4Drafter
from hf_specdec.drafters.mlp import MLPDrafter
from hf_specdec.drafters.mtp import MTPDrafter
from hf_specdec.drafters.ngram import NGramDrafter
from hf_specdec.drafters.no_drafts import NoDrafts

__all__ = [
    "Drafter",
    "Feed",
    "Gemma4Drafter",
    "MLPDrafter",
    "MTPDrafter",
    "NGramDrafter",
    "NoDrafts",
    "PickToken",
    "VerifiedStep",
]
