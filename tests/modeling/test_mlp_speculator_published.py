"""The published checkpoints, as far as a test without a network can go: shapes, names and sizes.

Dimensions are those of the configs on huggingface.co; where a config could not be read they follow
from the size of the weight file. Every network is built on the meta device.
"""

from dataclasses import dataclass

import pytest
import torch

from hf_specdec.modeling.mlp_speculator import MLPSpeculatorConfig, MLPSpeculatorPreTrainedModel


@dataclass(frozen=True)
class Published:
    """A checkpoint: its config's fields, its parameters, and the bytes of its float16 weights."""

    repo: str
    emb_dim: int
    inner_dim: int
    n_predict: int
    vocab_size: int
    tied: bool
    scaled: bool
    top_k: tuple[int, ...]
    parameters: int
    bytes_on_disk: int


# fmt: off
PUBLISHED = [
    Published("ibm-ai-platform/llama-13b-accelerator", 5120, 4096, 3, 32000, False, False,
              (5, 3, 2), 840_982_528, 1_681_965_056),
    Published("ibm-ai-platform/llama3-8b-accelerator", 4096, 3072, 4, 128256, False, False,
              (4, 3, 2, 2), 3_192_938_496, 6_385_876_992),
    Published("ibm-ai-platform/llama3-70b-accelerator", 8192, 8192, 4, 128256, True, True,
              (4, 3, 2, 2), 2_235_580_416, 4_471_160_832),
    Published("ibm-ai-platform/codellama-34b-accelerator", 8192, 8192, 5, 32000, True, True,
              (4, 3, 2, 2, 2), 658_522_112, 1_317_044_224),
    Published("ibm-ai-platform/llama2-70b-accelerator", 8192, 8192, 4, 32000, True, True,
              (4, 3, 2, 2), 658_522_112, 1_317_044_224),
    Published("ibm-granite/granite-3b-code-instruct-accelerator", 2560, 4096, 5, 49152, True, False,
              (4, 3, 2, 2, 2), 429_924_352, 859_848_704),
    Published("ibm-granite/granite-8b-code-instruct-accelerator", 4096, 4096, 5, 49152, False,
              False, (4, 3, 2, 2, 2), 2_097_192_960, 4_194_385_920),
    Published("ibm-granite/granite-20b-code-instruct-accelerator", 6144, 4096, 4, 49152, False,
              False, (4, 3, 2, 2), 1_686_142_976, 3_372_285_952),
    Published("ibm-granite/granite-7b-instruct-accelerator", 4096, 4096, 5, 32008, False, False,
              (4, 3, 2, 2, 2), 1_394_974_720, 2_789_949_440),
    Published("ibm-ai-platform/llama-160m-accelerator", 768, 1024, 3, 32000, False, False,
              (5, 3, 2), 199_497_728, 398_995_456),
]
# fmt: on


@pytest.fixture(params=PUBLISHED, ids=lambda published: published.repo)
def published(request: pytest.FixtureRequest) -> Published:
    return request.param


def build(published: Published) -> MLPSpeculatorPreTrainedModel:
    config = MLPSpeculatorConfig(
        emb_dim=published.emb_dim,
        inner_dim=published.inner_dim,
        n_predict=published.n_predict,
        vocab_size=published.vocab_size,
        tie_weights=published.tied,
        scale_input=published.scaled,
        top_k_tokens_per_head=list(published.top_k),
        dtype="float16",
    )
    with torch.device("meta"):
        return MLPSpeculatorPreTrainedModel(config).half()


def test_size_is_the_published_one(published: Published) -> None:
    model = build(published)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.num_parameters() == published.parameters
    assert sum(parameter.nbytes for parameter in model.parameters()) == published.bytes_on_disk


def test_weight_names_are_the_published_ones(published: Published) -> None:
    kinds = ("emb.{}.weight", "proj.{}.weight", "head.{}.weight", "ln.{}.weight", "ln.{}.bias")
    expected = {
        f"speculator.{kind.format(i)}" for kind in kinds for i in range(published.n_predict)
    }
    assert set(build(published).state_dict()) == expected


def test_heads_run_on_the_meta_device(published: Published) -> None:
    model, n = build(published), published.n_predict
    hidden_states = torch.empty(2, 3, published.emb_dim, dtype=torch.float16, device="meta")
    input_ids = torch.empty(2, 3 + n, dtype=torch.int64, device="meta")
    output = model(hidden_states, input_ids)
    assert output.logits.shape == (n, 2, 3, published.vocab_size)
    assert output.logits.dtype == torch.float16
    assert model.propose(hidden_states[:, 0], input_ids[:, 0]).shape == (2, n)
    assert model.propose_candidates(hidden_states[:, 0], input_ids[:, 0]).shape == (2, 5, n)
