"""Gemma 4 assistants: configs that name one, and pairs that don't fit."""

import copy
import warnings
from typing import Any

import pytest
import torch
from gemma4_models import gemma4_assistant, gemma4_target
from test_gemma4_targets import prompts_of
from transformers import AutoModel, StaticCache

import hf_specdec
from hf_specdec.doctor import feedings
from hf_specdec.drafters import Gemma4Drafter
from hf_specdec.integration import ATTACHED
from hf_specdec.modeling.gemma4_mtp import Gemma4MTPSwitches


@pytest.fixture
def target():
    """A target of the test's own."""
    return copy.deepcopy(gemma4_target("E2B"))


def drafted(target: Any, **kwargs: Any) -> int:
    """Tokens a step of a call drafts."""
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    output = target.generate(**prompts_of(6, 2), **{**options, **kwargs})
    return len(output.speculation.accepted_per_position)


def refused(target: Any, match: str, assistant: Any, **kwargs: Any) -> None:
    """A call raises before any forward."""
    forwards: list[int] = []
    handles = [
        model.register_forward_pre_hook(lambda *_: forwards.append(1))
        for model in (target, assistant)
    ]
    with pytest.raises(ValueError, match=match):
        target.generate(**prompts_of(6, 1), assistant_model=assistant, max_new_tokens=4, **kwargs)
    for handle in handles:
        handle.remove()
    assert not forwards


class TestConfigs:
    @pytest.mark.parametrize("k", [1, 2, 3, 5, 0])
    def test_an_assistant_by_name(self, target, tmp_path, k):
        gemma4_assistant(target, centroids=True).save_pretrained(tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            hf_specdec.attach(
                target, {"method": "mtp", "model": str(tmp_path), "num_speculative_tokens": k}
            )
        assert drafted(target) == k
        config = target.__dict__[ATTACHED].config
        assert config.method == "mtp" and config.draft_tensor_parallel_size == 1

    def test_a_loaded_one_and_both_model_types(self):
        for name in ("31B", "12B"):
            target = copy.deepcopy(gemma4_target(name))
            hf_specdec.attach(target, {"model": gemma4_assistant(target)})
            assert drafted(target) == 1

    def test_the_checkpoint_says_how_many(self, target):
        assistant = gemma4_assistant(target)
        assistant.generation_config.num_assistant_tokens = 4
        assert drafted(target, assistant_model=assistant) == 4
        assert drafted(target, assistant_model=Gemma4Drafter(assistant)) == 4
        assert drafted(target, assistant_model=assistant, num_assistant_tokens=2) == 2
        # It is the checkpoint's default, and no wish of the user's.
        hf_specdec.attach(target, {"model": assistant, "num_speculative_tokens": 1})
        assert drafted(target) == 1

    def test_it_is_read_in_the_targets_dtype(self, target, tmp_path):
        gemma4_assistant(target).save_pretrained(tmp_path)
        hf_specdec.attach(target.to(torch.bfloat16), {"model": str(tmp_path)})
        assert target.__dict__[ATTACHED].assistant.dtype == torch.bfloat16
        assert drafted(target) == 1

    def test_a_target_alone_is_told_of_its_assistant(self, target):
        with pytest.raises(ValueError, match="no MTP layers.*An assistant drafts for this target"):
            hf_specdec.attach(target, {"method": "mtp"})

    def test_another_method(self, target):
        with pytest.raises(ValueError, match="'mlp_speculator' contradicts.*of method='mtp'"):
            config = {"method": "mlp_speculator", "model": gemma4_assistant(target)}
            hf_specdec.attach(target, config)

    def test_another_size_by_name_loads_no_weights(self, target, tmp_path, monkeypatch):
        gemma4_assistant(target).save_pretrained(tmp_path)
        monkeypatch.setattr(
            AutoModel, "from_pretrained", lambda *_, **__: pytest.fail("weights were loaded")
        )
        target.config.hidden_size = 48
        with pytest.raises(ValueError, match="backbone_hidden_size=32, but .*hidden_size=48"):
            hf_specdec.attach(target, {"model": str(tmp_path)})


class TestPairs:
    def test_another_backbone(self, target):
        assistant = gemma4_assistant(target)
        assistant.config.backbone_hidden_size = 48
        refused(
            target, "backbone_hidden_size=48, but Gemma4ForCausalLM has hidden_size=32", assistant
        )

    def test_other_keys(self, target):
        refused(
            target,
            "full_attention layers read keys with {.*'head_dim': 24}, but .*'head_dim': 16}",
            gemma4_assistant(target, global_head_dim=24),
        )
        refused(
            target,
            "sliding_attention layers read keys with .*'sliding_window': 9.*'sliding_window': 8",
            gemma4_assistant(target, sliding_window=9),
        )
        refused(
            target, "'num_key_value_heads': 1.*2", gemma4_assistant(target, num_key_value_heads=1)
        )

    def test_another_vocabulary(self, target):
        refused(target, "vocab_size=70 .*vocab_size=64", gemma4_assistant(target, vocab_size=70))

    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    def test_a_target_without_shared_states(self, target, make_target, family):
        other = make_target(family)
        match = "shares none of its full_attention and sliding_attention layers"
        refused(other, match, gemma4_assistant(target))

    def test_another_dtype_or_device(self, target):
        assistant = gemma4_assistant(target)
        match = "in torch.bfloat16, but .* in torch.float32. Load it with dtype=torch.float32"
        refused(target, match, copy.deepcopy(assistant).to(torch.bfloat16))
        refused(target, "is on device meta, but .* on cpu. Move it", assistant.to("meta"))
        with pytest.raises(ValueError, match="have no weights"):
            Gemma4Drafter(assistant).check(target.to("meta"))

    def test_something_else(self, target):
        with pytest.raises(TypeError, match="needs a Gemma4AssistantForCausalLM"):
            Gemma4Drafter(target)


class TestCaches:
    def test_what_cant_be_shared(self, target):
        assistant = gemma4_assistant(target)
        static = StaticCache(config=target.config, max_cache_len=32)
        refused(target, "is a StaticCache, which .*can't continue", assistant, cache=static)
        offloaded = {"cache_implementation": "offloaded"}
        refused(target, "cache_implementation='offloaded'", assistant, **offloaded)
        quantized = {"cache_implementation": "quantized"}
        refused(target, "cache_implementation='quantized'", assistant, **quantized)

    def test_a_runner_without_a_ragged_cache(self, target):
        static = StaticCache(config=target.config, max_cache_len=32)
        with pytest.raises(ValueError, match="a StaticCache can't be shared"):
            Gemma4Drafter(gemma4_assistant(target)).share_cache(static)


def test_the_doctor_compares_states_and_positions(target):
    assistant = gemma4_assistant(target)
    names = [way.name for way in feedings(assistant)]
    assert names == [
        "state behind the final norm, position of the last verified token (vLLM)",
        "state before the final norm",
        "position of the newest token (transformers)",
    ]
    turned = Gemma4Drafter(assistant, Gemma4MTPSwitches("pre_norm", position_offset=1))
    ways = feedings(turned)
    assert ways[0].name.endswith("(transformers)") and ways[2].name.endswith("(vLLM)")
    switches = [way.drafter.network.switches for way in ways]  # type: ignore[attr-defined]
    assert [(s.feed, s.position_offset) for s in switches] == [
        ("pre_norm", 1), ("post_norm", 1), ("pre_norm", 0),
    ]  # fmt: skip
