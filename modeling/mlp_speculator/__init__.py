"""IBM's MLP speculator (``mlp_speculator``): a chain of small heads on the target's last state."""

from .configuration_mlp_speculator import MLPSpeculatorConfig
from .modeling_mlp_speculator import MLPSpeculatorOutput, MLPSpeculatorPreTrainedModel

__all__ = ["MLPSpeculatorConfig", "MLPSpeculatorOutput", "MLPSpeculatorPreTrainedModel"]
