"""Which network and which drafter belong to a model type.

Boundary: a table and its registration with transformers' auto classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from hf_specdec.drafters import Drafter, MLPDrafter
from hf_specdec.modeling.mlp_speculator import MLPSpeculatorConfig, MLPSpeculatorPreTrainedModel


@dataclass(frozen=True)
class Family:
    """One model type.

    Attributes:
        config_class: its config; carries the model type.
        model_class: its network.
        drafter_class: makes a drafter of a loaded network.
    """

    config_class: type[PreTrainedConfig]
    model_class: type[PreTrainedModel]
    drafter_class: Callable[[Any], Drafter]

    @property
    def model_type(self) -> str:
        """The ``model_type`` of the family's configs."""
        return self.config_class.model_type


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (Family(MLPSpeculatorConfig, MLPSpeculatorPreTrainedModel, MLPDrafter),)
}


def register() -> None:
    """Make transformers' auto classes know every family; may be called any number of times."""
    for model_type, family in FAMILIES.items():
        AutoConfig.register(model_type, family.config_class, exist_ok=True)
        AutoModel.register(family.config_class, family.model_class, exist_ok=True)
        AutoModelForCausalLM.register(family.config_class, family.model_class, exist_ok=True)
