"""Which network and which drafter belong to a model type.

Boundary: a table and its registration with transformers' auto classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from hf_specdec.drafters import Drafter, Gemma4Drafter, MLPDrafter, MTPDrafter
from hf_specdec.modeling.config_fields import check_sizes
from hf_specdec.modeling.gemma4_mtp import shared_layers
from hf_specdec.modeling.mimo import MiMoConfig, MiMoForCausalLM, MiMoModel, MiMoMTP
from hf_specdec.modeling.mlp_speculator import MLPSpeculatorConfig, MLPSpeculatorPreTrainedModel
from hf_specdec.modeling.mtp import FAMILIES as MTP_FAMILIES
from hf_specdec.modeling.mtp import MTPModel, family_of, load_mtp
from hf_specdec.targets.wrappers import unwrapped


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

    def without_weights(self, config: PreTrainedConfig) -> Drafter:
        """A drafter whose network is on the meta device, for what configs alone can tell.

        Raises:
            ValueError: a config of which no network can be made.
        """
        check_sizes(config)
        try:
            with torch.device("meta"):
                return self.drafter_class(self.model_class(config))
        except ValueError:
            raise
        except Exception as error:  # networks rely on their configs
            raise ValueError(
                f"no {self.model_class.__name__} can be made of this config: "
                f"{type(error).__name__}: {error}"
            ) from error


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(MLPSpeculatorConfig, MLPSpeculatorPreTrainedModel, MLPDrafter),
        Family(Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4Drafter),
        Family(Gemma4UnifiedAssistantConfig, Gemma4UnifiedAssistantForCausalLM, Gemma4Drafter),
    )
}


MTP_MODEL_TYPES = frozenset({MiMoConfig.model_type, *MTP_FAMILIES})
"""Model types (of text configs) of the targets whose MTP layers are known."""
_MTP_NETWORKS = (MiMoMTP, MTPModel)
# Where a target keeps its MTP layers, once read. Not as an attribute of its own: a module in there
# would become a part of the target.
_LOADED = "_hf_specdec_mtp"


def drafter_for(assistant_model: Any) -> Drafter | None:
    """The drafter that serves an ``assistant_model``, or ``None`` if it isn't one of ours."""
    assistant_model = unwrapped(assistant_model)
    if isinstance(assistant_model, Drafter):
        return assistant_model
    if isinstance(assistant_model, _MTP_NETWORKS):
        return MTPDrafter(assistant_model)
    config = getattr(assistant_model, "config", None)
    family = FAMILIES.get(getattr(config, "model_type", ""))
    return None if family is None else family.drafter_class(assistant_model)


def has_mtp(target: Any) -> bool:
    """Whether the target is of a family whose MTP layers are known; its checkpoint isn't read."""
    target = unwrapped(target)
    return isinstance(target, MiMoForCausalLM) or family_of(target.config) is not None


def mtp_network(target: Any) -> MiMoMTP | MTPModel:
    """The MTP layers of a target as a drafter network.

    They are read from the target's checkpoint once, then kept with the target, on its device and in
    its dtype.

    Raises:
        ValueError: a target without MTP layers, or of a family that isn't known.
    """
    target = unwrapped(target)
    if isinstance(target, MiMoForCausalLM):
        return MiMoMTP(target)
    if not has_mtp(target):
        hint = ""
        if shared_layers(target.config.get_text_config(decoder=True)):
            hint = ". An assistant drafts for this target: name its Hub id or folder as model"
        raise ValueError(
            f"method='mtp': the target {type(target).__name__} (model_type="
            f"{target.config.model_type!r}) has no MTP layers that hf_specdec knows. It knows "
            f"those of {sorted(MTP_MODEL_TYPES)}{hint}"
        )
    network: MTPModel | None = target.__dict__.get(_LOADED)
    # A copy of the target brings the layers of the original along.
    if network is None or network.target is not target:
        network = target.__dict__[_LOADED] = load_mtp(target)
    network.follow_target()
    return network


def register() -> None:
    """Make transformers' auto classes know every family; may be called any number of times."""
    AutoConfig.register(MiMoConfig.model_type, MiMoConfig, exist_ok=True)
    AutoModel.register(MiMoConfig, MiMoModel, exist_ok=True)
    AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM, exist_ok=True)
    for model_type, family in FAMILIES.items():
        AutoConfig.register(model_type, family.config_class, exist_ok=True)
        AutoModel.register(family.config_class, family.model_class, exist_ok=True)
        AutoModelForCausalLM.register(family.config_class, family.model_class, exist_ok=True)
