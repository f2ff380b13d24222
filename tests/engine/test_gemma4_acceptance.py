"""A trained assistant is accepted, and a wrong feed is seen in the acceptance rate."""

import functools
from typing import Any

import pytest
from gemma4_training import acceptance, trained_pair
from mtp_training import text
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_specdec.cli.app import app
from hf_specdec.cli.doctor import verdict
from hf_specdec.doctor import better_than_configured, examine, feedings
from hf_specdec.drafters import Gemma4Drafter
from hf_specdec.drafters.gemma4 import _Context
from hf_specdec.modeling.gemma4_mtp import Gemma4MTPSwitches


class OtherLayers(Gemma4Drafter):
    """Every layer reads the keys of the other type."""

    def _context_of_cache(self):
        right = super()._context_of_cache()
        other = {"full_attention": "sliding_attention", "sliding_attention": "full_attention"}
        shared = {other[name]: states for name, states in right.shared.items()}
        visible = {other[name]: mask for name, mask in right.visible.items()}
        return _Context(shared, visible, right.position_ids)


class KeepsTheState(Gemma4Drafter):
    """Every step reads the target's state, none what the step before made."""

    def start(self, *args: Any, **kwargs: Any):
        super().start(*args, **kwargs)
        vars(self.network)["recycle"] = lambda _states: self._hidden_states


@functools.cache
def right() -> list[float]:
    return acceptance(Gemma4Drafter(trained_pair()[1]))


def test_a_trained_assistant_is_accepted():
    first, second, third = right()
    assert first > 0.5 and first > second > third > 0.1


@pytest.mark.parametrize(
    ("wrong", "margin"),
    [
        ({"feed": "pre_norm"}, 0.1),
        ({"position_offset": 4}, 0.08),
        # One position more or less is little, but never better than what it was trained with.
        ({"position_offset": 1}, 0),
        ({"position_offset": -1}, 0),
    ],
    ids=str,
)
def test_a_wrong_feed_is_seen(wrong, margin):
    drafter = Gemma4Drafter(trained_pair()[1], Gemma4MTPSwitches(**wrong))
    assert acceptance(drafter)[0] < right()[0] - margin


def test_keys_of_the_wrong_layer_type_are_seen():
    assert acceptance(OtherLayers(trained_pair()[1]))[0] < right()[0] - 0.2


def test_a_state_that_isnt_recycled_is_seen():
    rates = acceptance(KeepsTheState(trained_pair()[1]))
    assert abs(rates[0] - right()[0]) < 0.1 and rates[1] < right()[1] - 0.1


def test_the_doctor_finds_it():
    target, assistant = trained_pair()
    prompts = [text()[start : start + 30][None] for start in range(200, 9200, 1800)]
    ways = feedings(assistant)
    assert better_than_configured(list(examine(target, ways, prompts, 40, 2))) == []
    wrong = Gemma4Drafter(assistant, Gemma4MTPSwitches("pre_norm"))
    findings = list(examine(target, feedings(wrong), prompts, 40, 2))
    assert better_than_configured(findings)[0].feeding.name == "state behind the final norm"
    assert "probably wrong" in verdict(findings)


def test_the_command_compares_them(tmp_path):
    target, assistant = trained_pair()
    target.save_pretrained(tmp_path / "target")
    assistant.save_pretrained(tmp_path / "assistant")
    tokenizer = Tokenizer(WordLevel({chr(97 + i): i for i in range(26)}, unk_token="a"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "target")
    arguments = ["doctor", str(tmp_path / "target"), str(tmp_path / "assistant")]
    result = CliRunner().invoke(app, [*arguments, "--max-new-tokens", "6"])
    assert result.exit_code == 0, result.output
    output = " ".join(result.output.split())
    for words in ("(vLLM)", "(transformers)", "before the final norm"):
        assert words in output


def test_centroids_that_keep_the_likely_ids_draft_as_well():
    # Each id in the cluster whose centroid is the mean of its embeddings: what training leads to.
    from gemma4_models import assistant_config
    from transformers import Gemma4AssistantForCausalLM

    target, assistant = trained_pair()
    own = assistant.config.text_config
    config = assistant_config(
        target.config,
        centroids=True,
        hidden_size=own.hidden_size,
        intermediate_size=own.intermediate_size,
        rope_parameters=own.rope_parameters,
    )
    model: Any = Gemma4AssistantForCausalLM(config).eval()
    model.load_state_dict(assistant.state_dict(), strict=False)
    head, weight = model.masked_embedding, model.lm_head.weight.detach()
    order = (weight @ weight.mean(0)).argsort()
    head.token_ordering.copy_(order)
    head.centroids.weight.data = weight[order].view(head.num_centroids, -1, own.hidden_size).mean(1)
    assert right()[0] - 0.2 < acceptance(Gemma4Drafter(model))[0] <= right()[0] + 0.02
