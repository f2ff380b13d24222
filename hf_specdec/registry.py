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

from hf_specdec.drafters import Drafter, MLPDrafter, MTPDrafter
from hf_specdec.modeling.mimo import MiMoConfig, MiMoForCausalLM, MiMoModel, MiMoMTP
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


MTP_NETWORKS: dict[str, type[Any]] = {MiMoConfig.model_type: MiMoMTP}
"""By model type: what makes a drafter network of a target that carries its own draft layers."""


def drafter_for(assistant_model: Any) -> Drafter | None:
    """The drafter that serves an ``assistant_model``, or ``None`` if it isn't one of ours."""
    if isinstance(assistant_model, Drafter):
        return assistant_model
    if isinstance(assistant_model, tuple(MTP_NETWORKS.values())):
        network: Any = assistant_model
        return MTPDrafter(network)
    config = getattr(assistant_model, "config", None)
    family = FAMILIES.get(getattr(config, "model_type", ""))
    return None if family is None else family.drafter_class(assistant_model)


def mtp_network(target: Any) -> Any:
    """The MTP layers of a target as a drafter network.

    Raises:
        ValueError: a target without MTP layers, or of a family that isn't known.
    """
    make = MTP_NETWORKS.get(target.config.model_type)
    if make is None:
        raise ValueError(
            f"method='mtp': the target {type(target).__name__} (model_type="
            f"{target.config.model_type!r}) has no MTP layers that hf_specdec knows. It knows "
            f"those of {sorted(MTP_NETWORKS)}"
        )
    return make(target)


def register() -> None:
    """Make transformers' auto classes know every family; may be called any number of times."""
    AutoConfig.register(MiMoConfig.model_type, MiMoConfig, exist_ok=True)
    AutoModel.register(MiMoConfig, MiMoModel, exist_ok=True)
    AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM, exist_ok=True)
    for model_type, family in FAMILIES.items():
        AutoConfig.register(model_type, family.config_class, exist_ok=True)
        AutoModel.register(family.config_class, family.model_class, exist_ok=True)
        AutoModelForCausalLM.register(family.config_class, family.model_class, exist_ok=True)
