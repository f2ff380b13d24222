"""The assistant as a drafter network: transformers' own numbers, and no more work than needed."""

from typing import Any

import pytest
import torch
from gemma4_models import WINDOW, assistant_config, gemma4_assistant, gemma4_target
from operations import Operations
from tiny_models import VOCAB_SIZE
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Gemma4AssistantConfig,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedTextConfig,
)

from hf_specdec.modeling.gemma4_mtp import Gemma4MTP, Gemma4MTPSwitches, shared_layers

NAMES = ["E2B", "26B-A4B", "12B"]
ROWS = 3


def random_inputs(target: Any, length: int) -> dict[str, Any]:
    """Inputs of a step, with the keys that a target would hand out."""
    config = target.config.get_text_config()
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    shared = {}
    for layer_type, layer in shared_layers(config).items():
        sizes = config.per_layer_config[layer]
        shape = (ROWS, sizes.num_key_value_heads, length, sizes.head_dim)
        shared[layer_type] = (random(*shape), random(*shape))
    return {
        "embeds": random(ROWS, config.hidden_size),
        "states": random(ROWS, config.hidden_size),
        "position_ids": torch.tensor([[length - 1], [length], [length + 3]]),
        "shared": shared,
    }


def transformers_forward(model: Any, inputs: dict[str, Any]) -> Any:
    joined = torch.cat([inputs["embeds"], inputs["states"]], dim=-1)[:, None]
    return model(
        inputs_embeds=joined,
        position_ids=inputs["position_ids"],
        shared_kv_states=inputs["shared"],
    )


def masks_of_transformers(model: Any, shared: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Its own masks, as what is added to the scores."""
    own = model.create_attention_masks(torch.zeros(ROWS, 1, 1), None, shared)
    masks = {}
    for name, mask in own.items():
        keys = shared[name][0].shape[2]
        seen = torch.ones(ROWS, 1, 1, keys, dtype=torch.bool) if mask is None else mask
        masks[name] = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo().min)
    return masks


@torch.no_grad()
@pytest.mark.parametrize("length", [5, WINDOW, 30])
@pytest.mark.parametrize("centroids", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_equals_transformers_own_forward(name, centroids, length):
    target = gemma4_target(name)
    model = gemma4_assistant(target, centroids)
    network, inputs = Gemma4MTP(model), random_inputs(target, length)
    theirs = transformers_forward(model, inputs)
    inner = network.step(**inputs, masks=masks_of_transformers(model, inputs["shared"]))
    torch.testing.assert_close(network.recycle(inner), theirs.last_hidden_state[:, 0])
    logits, expected = network.logits(inner), theirs.logits[:, 0]
    scored = logits.isfinite()
    # What the centroids leave out counts for nothing here; transformers gives it the least score.
    assert scored.sum() == ROWS * VOCAB_SIZE / (2 if centroids else 1)
    torch.testing.assert_close(logits[scored], expected[scored])
    assert torch.equal(network.most_likely(inner), expected.argmax(dim=-1))


@torch.no_grad()
@pytest.mark.parametrize("centroids", [False, True])
def test_the_cap_of_the_logits(centroids):
    target = gemma4_target("31B")
    model = gemma4_assistant(target, centroids, final_logit_softcapping=5.0)
    network, inputs = Gemma4MTP(model), random_inputs(target, 5)
    masks = masks_of_transformers(model, inputs["shared"])
    inner = network.step(**inputs, masks=masks)
    logits = network.logits(inner)
    # transformers' own forward leaves it out, which no argmax notices.
    expected = torch.tanh(transformers_forward(model, inputs).logits[:, 0] / 5) * 5
    scored = logits.isfinite()
    torch.testing.assert_close(logits[scored], expected[scored])
    assert torch.equal(network.most_likely(inner), logits.argmax(dim=-1))


@torch.no_grad()
def test_the_centroid_head_scores_its_own_ids_only_and_waits_for_nothing():
    target = gemma4_target("31B")
    network = Gemma4MTP(gemma4_assistant(target, centroids=True))
    # 1 of 8 clusters: 8 ids for each row.
    network.model.masked_embedding.centroid_intermediate_top_k = 1
    states = torch.randn(ROWS, 16)
    with Operations() as operations:
        network.most_likely(states)
    assert operations.largest == ROWS * 8 * 16 < ROWS * VOCAB_SIZE * 16
    with Operations() as operations:
        network.logits(states)
        network.most_likely(states)
    assert not {n for n in operations.names if "_local_scalar" in n or "nonzero" in n}
    with Operations() as operations:
        network.model.masked_embedding(states[:, None], network.model.lm_head.weight)
    assert {n for n in operations.names if "_local_scalar" in n}, "transformers waits: compare"


@torch.no_grad()
@pytest.mark.parametrize("centroids", [False, True])
def test_suppressed_ids_are_never_drafted(centroids):
    network = Gemma4MTP(gemma4_assistant(gemma4_target("31B"), centroids))
    states = torch.randn(64, 16)
    common = network.most_likely(states).unique().tolist()[:5]
    network.model.generation_config.suppress_tokens = common
    drafted = network.most_likely(states)
    assert not set(drafted.tolist()) & set(common)
    logits = network.logits(states)
    assert torch.equal(logits.argmax(dim=-1), drafted)
    assert (logits[:, common] == -torch.inf).all()
    network.model.generation_config.suppress_tokens = [VOCAB_SIZE + 3]
    assert set(network.most_likely(states).tolist()) & set(common)


@pytest.mark.parametrize("centroids", [False, True])
@pytest.mark.parametrize("name", ["31B", "12B"])
def test_the_published_layout_loads_by_the_auto_classes(name, centroids, tmp_path):
    model = gemma4_assistant(gemma4_target(name), centroids)
    model.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).model_type == model.config.model_type
    for auto in (AutoModel, AutoModelForCausalLM):
        loaded = auto.from_pretrained(tmp_path)
        assert type(loaded) is type(model)
        for key, tensor in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[key], tensor), key
        Gemma4MTP(loaded)


def test_the_names_of_the_weights():
    model = gemma4_assistant(gemma4_target("31B"), centroids=True)
    layer = {n.removeprefix("model.layers.0.") for n in model.state_dict() if ".layers.0." in n}
    assert layer == {
        *(f"self_attn.{n}.weight" for n in ("q_proj", "o_proj", "q_norm")),
        *(f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")),
        "input_layernorm.weight", "post_attention_layernorm.weight",
        "pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight", "layer_scalar",
    }  # fmt: skip
    assert {n for n in model.state_dict() if ".layers." not in n} == {
        "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight",
        "pre_projection.weight", "post_projection.weight",
        "masked_embedding.centroids.weight", "masked_embedding.token_ordering",
    }  # fmt: skip


@pytest.mark.parametrize("centroids", [False, True])
@pytest.mark.parametrize("unified", [False, True])
def test_the_default_sizes_run(unified, centroids):
    """Those of E2B (12B if unified) where transformers states them; shapes alone, no weights."""
    own: Any = Gemma4UnifiedTextConfig if unified else Gemma4TextConfig
    outer: Any = Gemma4UnifiedAssistantConfig if unified else Gemma4AssistantConfig
    none = {} if unified else {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    text = own(hidden_size=256, num_hidden_layers=6, num_kv_shared_layers=6, **none)
    config = outer(text_config=text, use_ordered_embeddings=centroids)
    width = 3840 if unified else 1536
    assert config.backbone_hidden_size == width and config.num_centroids == 2048
    with torch.device("meta"):
        network = Gemma4MTP(AutoModelForCausalLM.from_config(config))
        shared, masks = {}, {}
        for layer_type in network.layer_types:
            sizes = text.per_layer_config[text.layer_types.index(layer_type)]
            shape = (ROWS, sizes.num_key_value_heads, 40, sizes.head_dim)
            shared[layer_type] = (torch.zeros(shape), torch.zeros(shape))
            masks[layer_type] = torch.zeros(ROWS, 1, 1, 40)
        states, positions = torch.zeros(ROWS, width), torch.zeros(ROWS, 1, dtype=torch.long)
        inner = network.step(states, states, positions, shared, masks)
        assert network.recycle(inner).shape == (ROWS, width)
        assert network.logits(inner).shape == (ROWS, 262_144)
        assert network.most_likely(inner).shape == (ROWS,)


def test_which_layers_a_target_shares():
    types = {n: shared_layers(gemma4_target(n).config) for n in ("E2B", "31B", "12B", "3n")}
    assert types["31B"] == {"sliding_attention": 4, "full_attention": 5}
    assert types["E2B"] == types["12B"] == types["3n"]
    assert types["E2B"] == {"sliding_attention": 2, "full_attention": 3}
    assert shared_layers(assistant_config(gemma4_target("31B").config).text_config) == {}


def test_switches_are_turned_on_the_same_weights():
    network = Gemma4MTP(gemma4_assistant(gemma4_target("31B")))
    assert network.switches == Gemma4MTPSwitches(feed="post_norm", position_offset=0)
    other = network.with_switches(position_offset=1)
    assert other.model is network.model and other.switches.position_offset == 1


def test_something_else_is_refused():
    with pytest.raises(TypeError, match="needs a Gemma4AssistantForCausalLM or .*, got Gemma4For"):
        Gemma4MTP(gemma4_target("31B"))
