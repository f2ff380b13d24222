"""What ``import hf_specdec`` brings: the public names, registered models and open seams.

Apart from `hf_specdec` itself because the command line imports that without all this (`startup`).
"""

from hf_specdec import seams

# Before anything is imported that would fail without a reason.
seams.check(seams.ENGINE)

from hf_specdec import publishing
from hf_specdec.attach import attach, detach, speculation_totals
from hf_specdec.drafters import Drafter
from hf_specdec.integration import disable, enable
from hf_specdec.metrics import SpeculationStats, SpeculationTotals
from hf_specdec.modeling.mlp_speculator import MLPSpeculatorConfig, MLPSpeculatorPreTrainedModel
from hf_specdec.options.config import SpeculativeConfig
from hf_specdec.registry import mtp_network, register
from hf_specdec.static_shapes import release_compiled
from hf_specdec.stopping import RowStoppingCriteria
from hf_specdec.streaming import RowStep, RowStreamer
from hf_specdec.targets.packing import pack_weights, unpack_weights

register()
enable()
publishing.register()

__all__ = [
    "Drafter",
    "MLPSpeculatorConfig",
    "MLPSpeculatorPreTrainedModel",
    "RowStep",
    "RowStoppingCriteria",
    "RowStreamer",
    "SpeculationStats",
    "SpeculationTotals",
    "SpeculativeConfig",
    "attach",
    "detach",
    "disable",
    "enable",
    "mtp_network",
    "pack_weights",
    "release_compiled",
    "speculation_totals",
    "unpack_weights",
]
