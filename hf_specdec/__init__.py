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

from typing import TYPE_CHECKING, Any

from hf_specdec._version import __version__
from hf_specdec.startup import complete_package, is_command_line

if TYPE_CHECKING or not is_command_line():
    from hf_specdec.public import (
        Drafter,
        MLPSpeculatorConfig,
        MLPSpeculatorPreTrainedModel,
        RowStep,
        RowStoppingCriteria,
        RowStreamer,
        SpeculationStats,
        SpeculationTotals,
        SpeculativeConfig,
        attach,
        detach,
        disable,
        enable,
        mtp_network,
        pack_weights,
        release_compiled,
        speculation_totals,
        unpack_weights,
    )
else:
    # The command line completes the package before it runs a command; this is for whoever asks
    # for a public name before that.
    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        complete_package()
        return globals()[name]


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
    "__version__",
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
