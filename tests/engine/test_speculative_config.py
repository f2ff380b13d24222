"""SpeculativeConfig: vLLM's fields, in every form, and what each wrong one is told."""

import json
import warnings
from typing import Any

import pytest

from hf_specdec import SpeculativeConfig

# vLLM's list, 0.32 and 0.33.
VLLM_MTP_METHODS = [
    "deepseek_mtp", "dots3_note_mtp", "mimo_mtp", "mimo_v2_mtp", "glm4_moe_mtp",
    "glm4_moe_lite_mtp", "glm_ocr_mtp", "ernie_mtp", "nemotron_h_mtp", "exaone_moe_mtp",
    "exaone4_5_mtp", "qwen3_next_mtp", "qwen4_exp_mtp", "qwen3_5_mtp", "longcat_flash_mtp",
    "bailing_hybrid_mtp", "bailing_hybrid_v3_mtp", "minimax_m3_mtp", "kimi_k3_mtp",
    "pangu_ultra_moe_mtp", "step3p5_mtp", "step5_mtp", "hy_v3_mtp", "hy_v4_mtp", "gemma4_mtp",
    "inkling_mtp", "glm5_next_mtp",
]  # fmt: skip


def refused(config, match) -> None:
    with pytest.raises(ValueError, match=match):
        SpeculativeConfig.from_value(config)


class TestForms:
    def test_dict_json_and_object_are_one(self):
        fields: dict[str, Any] = {
            "method": "mlp_speculator",
            "model": "some/drafter",
            "num_speculative_tokens": 3,
            "draft_tensor_parallel_size": 1,
            "num_speculative_tokens_per_batch_size": [[1, 4, 3]],
            "revision": "main",
            "verification": "rejection",
        }
        expected = SpeculativeConfig(**fields)
        dashed = {name.replace("_", "-"): value for name, value in fields.items()}
        for value in (fields, json.dumps(fields), dashed, json.dumps(dashed), expected):
            assert SpeculativeConfig.from_value(value) == expected

    def test_nothing_has_to_be_said(self):
        config = SpeculativeConfig.from_value("{}")
        assert config == SpeculativeConfig()
        assert config.verification == "match" and config.method is None

    def test_an_object_is_checked_again(self):
        config: Any = SpeculativeConfig()
        config.num_speculative_tokens = -2
        with pytest.raises(ValueError, match="num_speculative_tokens=-2"):
            SpeculativeConfig.from_value(config)

    @pytest.mark.parametrize(
        ("value", "match"),
        [
            ("[1]", "is a list: it must be a dict, the JSON text of one, or a SpeculativeConfig"),
            (None, "is a NoneType"),
            ("{'method': 'mtp'}", "is not JSON"),
            pytest.param("[" * 100_000, r"^.{,300}\.\.\.' is not JSON: .{,99}$", id="nested"),
            ({"a-b": 1, "a_b": 2}, r"\['a-b', 'a_b'\].*give each field once"),
        ],
    )
    def test_other_forms(self, value, match):
        with pytest.raises(ValueError, match=match):
            SpeculativeConfig.from_value(value)


class TestFields:
    @pytest.mark.parametrize(
        ("fields", "match"),
        [
            ({"num_speculative_tokens": True}, "num_speculative_tokens=True must be an integer"),
            ({"num_speculative_tokens": 1.0}, "num_speculative_tokens=1.0 must be an integer"),
            ({"num_speculative_tokens": -1}, "num_speculative_tokens=-1.*at least 0"),
            ({"draft_tensor_parallel_size": 0}, "draft_tensor_parallel_size=0 must be"),
            ({"draft_tensor_parallel_size": True}, "draft_tensor_parallel_size=True must be"),
            ({"draft_tensor_parallel_size": "2"}, "draft_tensor_parallel_size='2' must be"),
            ({"model": " "}, "model=' ' is empty"),
            ({"model": "some/drafter", "revision": 3}, "revision=3 must be a string"),
            ({"revision": "main"}, "revision='main'.*model is no Hub id"),
            ({"model": ".", "revision": "main"}, "revision='main'.*model is a folder"),
            ({"method": ["mtp"]}, r"method=\['mtp'\] is not known; choose from"),
        ],
    )
    def test_values(self, fields, match):
        with pytest.raises(ValueError, match=match):
            SpeculativeConfig(**fields)

    @pytest.mark.parametrize(
        ("name", "match"),
        [
            ("tensor_parallel_size", "use draft_tensor_parallel_size"),
            ("quantization", "pass the loaded model as model"),
            ("draft_load_config", "pass the loaded model as model"),
            ("parallel_drafting", "leave it out"),
            ("max_model_len", "max_length"),
            ("rejection_sample_method", "verification='match'"),
            ("suffix_decoding_max_tree_depth", "method='suffix'"),
            ("use_heterogeneous_vocab", "assistant_tokenizer"),
            ("target_model_config", "engine fills it in"),
            ("disable_by_batch_size", "num_speculative_tokens_per_batch_size"),
            ("acceptance_method", "verification='match'"),
        ],
    )
    def test_what_only_vllm_has(self, name, match):
        match = rf"keys \['{name}'\].*{name} is vLLM's: .*{match}"
        for key in (name, name.replace("_", "-")):
            refused({"method": "mtp", key: 1}, match)

    def test_unknown_keys_are_met_with_the_nearest(self):
        refused(
            {"num_speculative_token": 1, "zzz": 1},
            r"keys \['num_speculative_token', 'zzz'\]; its fields are \['method', .*\]. "
            r"Did you mean 'num_speculative_tokens' by 'num_speculative_token'\?$",
        )
        refused({3: 1}, r"keys \['3'\]")


class TestMethods:
    @pytest.mark.parametrize("method", VLLM_MTP_METHODS)
    def test_old_names_of_mtp(self, method):
        with pytest.warns(FutureWarning, match=f"method='{method}' is deprecated.*method='mtp'"):
            config = SpeculativeConfig.from_value({"method": method})
        assert config.method == "mtp"

    def test_the_new_name_needs_no_note(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert SpeculativeConfig(method="mtp").method == "mtp"

    @pytest.mark.parametrize(
        ("method", "match"),
        [
            ("ngram_gpu", r"method='ngram' looks drafts up"),
            ("draft_model", r"generate\(assistant_model=...\)"),
            ("custom_class", "subclass of hf_specdec.Drafter"),
            ("suffix", "no drafter for it"),
            ("eagle", "no drafter for it"),
            ("eagle3", "no drafter for it"),
            ("medusa", "no drafter for it"),
            ("dflash", "no drafter for it"),
            ("dspark", "no drafter for it"),
            ("extract_hidden_states", "output_hidden_states=True"),
        ],
    )
    def test_what_only_vllm_has(self, method, match):
        ours = r"\['mlp_speculator', 'mtp', 'ngram'\]"
        refused({"method": method}, rf"method='{method}' is vLLM's.*{ours}.*{match}")

    def test_vllms_models_that_mean_ngram(self):
        for model in ("ngram", "[ngram]"):
            config = SpeculativeConfig(model=model)
            assert (config.method, config.model) == ("ngram", None)
            refused({"method": "mtp", "model": model}, "method='mtp' contradicts model=.*ngram")

    def test_unknown_methods_are_met_with_the_nearest(self):
        refused({"method": "mlp-speculator"}, "is not known.*mean 'mlp_speculator'")
        refused({"method": "qqqqq"}, r"method='qqqqq' is not known; choose from [^?]*\]$")
