"""Fields of a ``config.json`` that are transformers' own, checked before transformers reads them.

It takes most values as they come and fails over them later, with an error that names no field.

Boundary: the fields every config may have. A model's own are its config class's business.
"""

from collections.abc import Mapping
from typing import Any

import torch

from hf_specdec.modeling.checkpoint_headers import shown

# What configs are looked up by; an instance's own would hide the class's.
_OF_THE_CLASS = ("attribute_map", "base_config_key", "sub_configs_defaults")


def check_other_fields(config_class: type, fields: Mapping[str, Any]) -> None:
    """Check what goes to `PreTrainedConfig`.

    Args:
        config_class: whose methods no field may hide.
        fields: by name.

    Raises:
        ValueError: naming the field.
    """
    for name in fields:
        there = getattr(config_class, name, None)
        if (
            name.startswith("__")
            or name in _OF_THE_CLASS
            or callable(there)
            or (isinstance(there, property) and there.fset is None)
        ):
            raise ValueError(
                f"{name}={shown(fields[name])} is no field of a config, but a part of "
                f"{config_class.__name__}; leave it out"
            )
    architectures = fields.get("architectures")
    if architectures is not None and not _is_list_of_text(architectures):
        raise ValueError(f"architectures must be a list of class names, got {shown(architectures)}")
    for name in ("dtype", "torch_dtype"):
        if not _is_float_dtype(fields.get(name)):
            raise ValueError(
                f"{name} must be a floating-point dtype of torch such as 'bfloat16', got "
                f"{shown(fields[name])}"
            )
    quantization = fields.get("quantization_config")
    if not (quantization is None or isinstance(quantization, dict) or _is_config(quantization)):
        raise ValueError(
            f"quantization_config must be an object with a quant_method, got {shown(quantization)}"
        )


def _is_list_of_text(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(entry, str) for entry in value)


def _is_float_dtype(value: Any) -> bool:
    if isinstance(value, str):
        value = getattr(torch, value.removeprefix("torch."), value)
    return value is None or (isinstance(value, torch.dtype) and value.is_floating_point)


def _is_config(value: Any) -> bool:
    return callable(getattr(value, "to_dict", None))


# What a network is allocated by, or looped over, and the most that any model comes near.
_LARGEST = {
    "backbone_hidden_size": 2**17,
    "centroid_intermediate_top_k": 2**24,
    "head_dim": 2**14,
    "global_head_dim": 2**14,
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "num_attention_heads": 2**12,
    "num_centroids": 2**24,
    "num_global_key_value_heads": 2**12,
    "num_hidden_layers": 2**10,
    "num_key_value_heads": 2**12,
    "vocab_size": 2**24,
}


def check_sizes(config: Any) -> None:
    """Refuse sizes that would keep a network's construction busy for ever, or that are none.

    Args:
        config: a loaded config; of one with a text model inside both are looked at.

    Raises:
        ValueError: naming the field.
    """
    for part in (config, config.get_text_config(decoder=True)):
        # Not by attribute: of layers that differ, configs refuse to give one size for all.
        fields = vars(part)
        for name, largest in _LARGEST.items():
            value = fields.get(name)
            if value is None:
                continue
            is_size = isinstance(value, int) and not isinstance(value, bool)
            if not is_size or not 1 <= value <= largest:
                raise ValueError(
                    f"{name} must be an integer from 1 to {largest}, got {shown(value)}"
                )
