"""Gemma 4 assistants: small decoders that attend to their target's keys and values."""

from .modeling_gemma4_mtp import (
    ASSISTANTS,
    Gemma4MTP,
    States,
    shared_layers,
)
from .switches import Gemma4MTPSwitches

__all__ = ["ASSISTANTS", "Gemma4MTP", "Gemma4MTPSwitches", "States", "shared_layers"]
