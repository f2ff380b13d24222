"""What a training run ended with: ``training/result.json`` in the drafter's folder.

The file is what a model card, or anyone who compares runs, needs to know. Its keys:

    format_version  1
    created         time of writing, UTC, ISO 8601, "2026-01-31T12:00:00+00:00"
    kind            "mlp" or "mtp"
    target          name (Hub id or path as recorded in the drafter), model_type, num_parameters,
                    dtype ("bfloat16")
    acceptance      of the saved weights on held-out documents: per_position (list of float, share
                    of drafts whose tokens 1 .. k were all right), mean_acceptance_length (float,
                    the bonus token included), num_positions (drafts compared), greedy_text (bool,
                    whether the documents are the target's own greedy text), step and
                    tokens_trained (when it was measured)
    training        steps, tokens_trained (positions run through the drafter, repeats included),
                    stopped ("finished", "no improvement" or "time budget"), seconds
                    (generation, training, total), time_budget_minutes (float or null),
                    continued_from (name or null)
    hardware        device ("cpu", "cuda"), name (of the processor or GPU), processes, threads (of
                    each), cores, memory_gib, torch, transformers, hf_specdec (versions), platform
    preset          "small" or "ibm"
    settings        `TrainingSettings` as a dict
    network         what decides the drafter's shape: num_parameters (trained ones) and the
                    options of the run (heads, inner_dim, share_target_weights ...)
    data            description (a sentence), datasets (Hub ids, may be empty), files (names of
                    local files, may be empty), corpora: a list with one entry for each, holding
                    stage ("ground_truth" or "self_generated"), name (its folder's), tokens,
                    documents, settings (of its metadata)

Boundary: numbers in, one file out. `model_card` and the like only read it.
"""

from __future__ import annotations

import json
import os
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_specdec._version import __version__
from hf_specdec.modeling.checkpoint_headers import read_json
from hf_specdec.training.checkpoint import write_whole

FORMAT_VERSION = 1
RESULT_FILE = Path("training", "result.json")


def write_result(directory: str | Path, values: dict[str, Any]) -> Path:
    """Write ``training/result.json`` under a drafter's folder, whole or not at all.

    Args:
        directory: the drafter's folder.
        values: every key of the module's list but ``format_version`` and ``created``.

    Returns:
        The path of the file.

    Raises:
        ValueError: a key is missing or unknown.
    """
    if different := set(values) ^ _KEYS:
        raise ValueError(
            f"values must have the keys {sorted(_KEYS)}, differing: {sorted(different)}"
        )
    now = datetime.now(timezone.utc).replace(microsecond=0)
    content = {"format_version": FORMAT_VERSION, "created": now.isoformat(), **values}
    path = Path(directory) / RESULT_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=2) + "\n"
    write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8"))
    return path


def read_result(directory: str | Path) -> dict[str, Any]:
    """Read what `write_result` wrote.

    Raises:
        FileNotFoundError: the folder holds no result.
        ValueError: it was written in another version of the format.
    """
    path = Path(directory) / RESULT_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; `hf-specdec train` writes it at its end")
    values = read_json(path)
    if (version := values.get("format_version")) != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format_version={version!r}, this release reads {FORMAT_VERSION}; train "
            "again, or use the release that wrote it"
        )
    return values


def describe_hardware(device: torch.device, processes: int = 1) -> dict[str, Any]:
    """The machine, as ``hardware`` in the file; names no host."""
    cuda = device.type == "cuda"
    return {
        "device": device.type,
        "name": torch.cuda.get_device_name(device) if cuda else _processor_name(),
        "processes": processes,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "memory_gib": _memory_gib(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_specdec": __version__,
        "platform": platform.system(),
    }


def _processor_name() -> str:
    # platform.processor() is empty on most Linux systems.
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    return round(pages * size / 2**30, 1)


_KEYS = {
    "kind",
    "target",
    "acceptance",
    "training",
    "hardware",
    "preset",
    "settings",
    "network",
    "data",
}
