"""Prompts with images and sounds: run as the processor's inputs, then speculated on as text."""

import pytest
import torch
from gemma4_models import gemma4_assistant, gemma4_multimodal, multimodal_prompts

from hf_specdec.drafters import Gemma4Drafter
from hf_specdec.modeling.gemma4_mtp import Gemma4MTPSwitches

NEW = 20


@pytest.mark.parametrize("name", ["E2B", "12B", "26B-A4B", "31B"])
@pytest.mark.parametrize("rows", [1, 2])
class TestSameText:
    def prompts(self, name, rows):
        return {key: value[:rows] for key, value in multimodal_prompts(name).items()}

    def test_greedy(self, name, rows):
        target, inputs = gemma4_multimodal(name), self.prompts(name, rows)
        plain = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        with torch.no_grad():
            logits = target(**inputs).logits[:, -1]
            for name_of in ("pixel_values", "input_features"):
                other = target(**{**inputs, name_of: -inputs[name_of]}).logits[:, -1]
                assert not torch.allclose(logits, other), "what nobody looks at tests nothing"
        for k in (1, 3, 6):
            output = target.generate(
                **inputs, max_new_tokens=NEW, do_sample=False, num_assistant_tokens=k,
                assistant_model=gemma4_assistant(target, centroids=k == 3),
            )  # fmt: skip
            assert torch.equal(output, plain)
        drafter = Gemma4Drafter(gemma4_assistant(target), Gemma4MTPSwitches(feed="pre_norm"))
        output = target.generate(
            **inputs, max_new_tokens=NEW, do_sample=False, assistant_model=drafter
        )
        assert torch.equal(output, plain)

    def test_sampled(self, name, rows):
        target, inputs = gemma4_multimodal(name), self.prompts(name, rows)
        texts = [
            target.generate(
                **inputs, max_new_tokens=NEW, do_sample=True, num_assistant_tokens=k,
                assistant_model=gemma4_assistant(target), row_seeds=[5, 6][:rows],
            )
            for k in (0, 1, 4)
        ]  # fmt: skip
        assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])


def test_encoders_keep_their_own_attention():
    # Setting another one on the outer config would set it on the sound's encoder, which has none.
    target, inputs = gemma4_multimodal("E2B"), multimodal_prompts("E2B")
    seen: list[str] = []
    parts = (target.model.audio_tower, target.model.vision_tower, target.model.language_model)
    handles = [
        part.register_forward_pre_hook(
            lambda module, _args: seen.append(module.config._attn_implementation)
        )
        for part in parts
    ]
    target.generate(**inputs, max_new_tokens=3, assistant_model=gemma4_assistant(target))
    for handle in handles:
        handle.remove()
    assert set(seen) == {"eager", "sdpa", "hf_specdec_grouped_sdpa"}
    assert [part.config._attn_implementation for part in parts] == ["eager", "sdpa", "sdpa"]
