"""What holds for every test: no network, one seed, one CPU thread, GPU tests only with a GPU."""

import os

import pytest

# Before transformers is imported: a test that asks for a model by its hub name must fail, not load.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# As many workers run as there are cores: commands that tests start must not take all of them each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

try:
    import torch
except ModuleNotFoundError:  # the tests of the architecture run without it
    torch = None  # type: ignore[assignment]

# Fixtures: tiny targets, speculators, pairs on disk, corpora, servers, drafters of known quality.
_PLUGINS = ["tiny_models", "tiny_corpora", "tiny_pairs", "serving_server", "training_command"]
pytest_plugins = ["refusals", *(_PLUGINS if torch is not None else [])]

SEED = 0


def pytest_configure() -> None:
    # The order of a sum depends on the number of threads, so equality tests use one.
    if torch is not None:
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch is not None and torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(no_gpu)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Gives every test the same random numbers, whatever ran before it."""
    if torch is not None:
        torch.manual_seed(SEED)
