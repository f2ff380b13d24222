"""MiMo-7B (``mimo``): Qwen2 with multi-token-prediction layers in the checkpoint."""

from .configuration_mimo import MiMoConfig
from .convert_mimo import mimo_from_decoder, mimo_from_llama
from .modeling_mimo import MiMoForCausalLM, MiMoModel, MiMoMTPLayer
from .mtp_mimo import MiMoMTP

__all__ = [
    "MiMoConfig",
    "MiMoForCausalLM",
    "MiMoMTP",
    "MiMoMTPLayer",
    "MiMoModel",
    "mimo_from_decoder",
    "mimo_from_llama",
]
