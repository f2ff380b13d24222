"""MiMo-7B's network against numbers of a reference implementation, and its checkpoints.

``tests/golden/mimo_mtp_golden.safetensors``: a tiny MiMo with random weights; the target's states
and logits, the MTP layer's first pass over the prompt, and three drafted tokens, for each feed with
and without the embedding at position 0.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import hf_specdec  # noqa: F401
from hf_specdec.drafters import MTPDrafter, VerifiedStep
from hf_specdec.modeling.mimo import MiMoConfig, MiMoForCausalLM, MiMoModel, MiMoMTP

GOLDEN = Path(__file__).parents[1] / "golden" / "mimo_mtp_golden.safetensors"
SETTINGS = [
    pytest.param(feed, masked, id=f"{feed}-{'masked' if masked else 'whole'}")
    for feed in ("pre_norm", "post_norm")
    for masked in (True, False)
]


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN)


@pytest.fixture(scope="module")
def checkpoint(golden, tmp_path_factory):
    """The tiny MiMo in the published layout: config.json and model.safetensors."""
    folder = tmp_path_factory.mktemp("mimo")
    with safe_open(GOLDEN, "pt") as file:
        config = json.loads(file.metadata()["config"])
    config["architectures"] = ["MiMoForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    prefix = "weights/"
    weights = {k.removeprefix(prefix): v for k, v in golden.items() if k.startswith(prefix)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def target(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint)


def test_the_auto_classes_load_it_without_remote_code(checkpoint):
    config = AutoConfig.from_pretrained(checkpoint)
    assert type(config) is MiMoConfig
    assert (config.rope_parameters or {})["rope_theta"] == 640000.0
    loaded: Any = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    model, report = loaded
    assert type(model) is MiMoForCausalLM
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert type(AutoModel.from_pretrained(checkpoint)) is MiMoModel


def test_saving_keeps_the_layout(target, golden, tmp_path):
    target.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    expected = {k.removeprefix("weights/") for k in golden if k.startswith("weights/")}
    assert set(stored) == expected
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    for (name, a), (_, b) in zip(target.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@torch.no_grad()
def test_the_target(target, golden):
    output = target(golden["input_ids"], output_hidden_states=True)
    torch.testing.assert_close(output.logits, golden["target_logits"], atol=1e-4, rtol=1e-4)
    post_norm = output.hidden_states[-1]
    torch.testing.assert_close(post_norm, golden["target_hidden_post_norm"], atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(("feed", "masked"), SETTINGS)
def test_first_pass_and_drafts(feed, masked, target, golden):
    target.config.mtp_feed, target.config.mtp_mask_position_0 = feed, masked
    key = f"{feed}_{'mask0' if masked else 'nomask0'}"
    outputs = []

    class Records(MiMoMTP):
        def __call__(self, *args, **kwargs):
            outputs.append(super().__call__(*args, **kwargs))
            return outputs[-1]

    drafter = MTPDrafter(Records(target))
    assert drafter.feed == feed
    drafter.start(target)
    ids = golden["input_ids"]
    last = ids.shape[1] - 1
    seen, logits = [], target.lm_head.forward

    def pick(k, values, token_ids):
        seen.append(values)
        return values.argmax(-1)

    pick.done = False  # type: ignore[attr-defined]
    drafter.observe(
        VerifiedStep(ids, golden[f"target_hidden_{feed}"], torch.tensor([last]), [last])
    )
    drafts = drafter.propose(golden["first_emitted_token"][:, 0], 3, pick)  # type: ignore[arg-type]
    assert torch.equal(drafts, golden[f"{key}/draft_tokens"])
    first_pass = logits(outputs[0])
    torch.testing.assert_close(first_pass, golden[f"{key}/first_pass_logits"], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        torch.stack(seen, dim=1), golden[f"{key}/draft_logits"], atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"mtp_feed": "normed"}, "mtp_feed='normed'"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers=-1"),
    ],
)
def test_configs_that_cant_be(fields, match):
    with pytest.raises(ValueError, match=match):
        MiMoConfig(**fields)


def test_models_without_mtp_layers(target):
    with pytest.raises(TypeError, match="needs a MiMoForCausalLM, got MiMoModel"):
        MiMoMTP(target.model)
    config = MiMoConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, num_nextn_predict_layers=0,
    )  # fmt: skip
    with pytest.raises(ValueError, match="num_nextn_predict_layers=0"):
        MiMoMTP(MiMoForCausalLM(config))
