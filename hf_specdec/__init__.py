"""Speculative decoding for Hugging Face transformers.

    import hf_specdec
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

    target = AutoModelForCausalLM.from_pretrained("meta-llama/Meta-Llama-3-8B-Instruct")
    assistant = AutoModel.from_pretrained("ibm-ai-platform/llama3-8b-accelerator")
    out = target.generate(**inputs, assistant_model=assistant, return_dict_in_generate=True)
    print(out.speculation)

Importing this package registers the drafter networks with the auto classes and lets ``generate``
serve them; `disable` undoes the latter.
"""

from hf_specdec._version import __version__
from hf_specdec.attach import attach, detach
from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters import Drafter
from hf_specdec.integration import disable, enable
from hf_specdec.metrics import SpeculationStats
from hf_specdec.modeling.mlp_speculator import MLPSpeculatorConfig, MLPSpeculatorPreTrainedModel
from hf_specdec.registry import mtp_network, register
from hf_specdec.stopping import RowStoppingCriteria
from hf_specdec.streaming import RowStep, RowStreamer

register()
enable()

__all__ = [
    "Drafter",
    "MLPSpeculatorConfig",
    "MLPSpeculatorPreTrainedModel",
    "RowStep",
    "RowStoppingCriteria",
    "RowStreamer",
    "SpeculationStats",
    "SpeculativeConfig",
    "__version__",
    "attach",
    "detach",
    "disable",
    "enable",
    "mtp_network",
]
