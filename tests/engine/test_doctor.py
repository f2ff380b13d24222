"""The doctor finds a wrong feed, which nothing else would."""

import io
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from mtp_training import text
from rich.console import Console
from rich.markup import escape
from test_mtp import trained_target
from tiny_models import ScriptedDrafter
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_specdec.cli import doctor
from hf_specdec.cli.app import app
from hf_specdec.cli.doctor import DoctorSettings, feed_table, run_doctor, verdict
from hf_specdec.doctor import Feeding, Finding, better_than_configured, examine, feedings
from hf_specdec.drafters import MLPDrafter
from hf_specdec.metrics import SpeculationStats
from hf_specdec.modeling.mimo import MiMoMTP

PROMPTS = [text()[s : s + 30][None] for s in range(200, 9200, 1800)]


def examined(network: Any) -> list[Finding]:
    target = trained_target("post_norm")
    return list(examine(target, feedings(network), PROMPTS, max_new_tokens=50))


def test_the_right_feed_is_the_best():
    findings = examined(MiMoMTP(trained_target("post_norm")))
    assert [f.feeding.configured for f in findings] == [True] + [False] * 5
    assert len({f.feeding.name for f in findings}) == 6
    assert better_than_configured(findings) == []
    assert "No other feed" in verdict(findings)
    # Rotary positions are relative.
    assert findings[-1].feeding.name == "positions one further"
    assert findings[-1].first == pytest.approx(findings[0].first, abs=0.03)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"feed": "pre_norm"}, "state behind the final norm"),
        ({"hidden_first": False}, "[state, embedding]"),
        ({"token_shift": 0}, "token at the state's own position"),
    ],
)
def test_a_wrong_one_is_found(change, name):
    findings = examined(MiMoMTP(trained_target("post_norm")).with_switches(**change))
    best = better_than_configured(findings)[0]
    assert best.feeding.name == name and best.first > findings[0].first + 0.1
    assert escape(name) in verdict(findings) and "probably wrong" in verdict(findings)


def test_an_mlp_speculator_has_two(make_speculator, make_target):
    ways = feedings(make_speculator())
    assert [w.drafter.feed for w in ways] == ["post_norm", "pre_norm"]
    assert all(isinstance(w.drafter, MLPDrafter) for w in ways)
    findings = list(examine(make_target("llama"), ways, [torch.tensor([[5, 6, 7]])], 8, 2))
    assert [f.stats.num_new_tokens for f in findings] == [8, 8]


def test_what_reads_no_states_is_refused():
    with pytest.raises(ValueError, match="ScriptedDrafter, which reads no states"):
        feedings(ScriptedDrafter([[0]]))


def test_a_small_difference_is_nobodys_fault():
    def finding(accepted: int, configured: bool) -> Finding:
        stats = SpeculationStats(100, 100, accepted, [accepted])
        return Finding(Feeding("x", ScriptedDrafter([[0]]), configured), stats)

    assert better_than_configured([finding(50, True), finding(60, False)]) == []
    assert len(better_than_configured([finding(50, True), finding(70, False)])) == 1
    assert feed_table([finding(50, True)]).row_count == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target with MTP layers and a tokenizer of characters."""
    folder = tmp_path_factory.mktemp("target")
    trained_target("post_norm").save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({chr(97 + i): i for i in range(26)}, unk_token="a"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


class TestCommand:
    def test_it_prints_a_table_and_a_verdict(self, folder, tmp_path):
        (tmp_path / "prompts").write_text("hello there\nwho goes\n")
        result = CliRunner().invoke(
            app,
            [
                "doctor",
                str(folder),
                "--prompts",
                str(tmp_path / "prompts"),
                "--max-new-tokens",
                "8",
            ],
        )
        assert result.exit_code == 0, result.output
        assert "Acceptance under every plausible feed" in result.output and "→" in result.output
        # Brackets are shown, not taken for markup.
        assert "[state," in result.output and "[embedding," in result.output

    def test_an_assistant(self, folder, tmp_path, make_speculator):
        speculator = make_speculator(emb_dim=64)
        speculator.save_pretrained(tmp_path)
        result = CliRunner().invoke(
            app, ["doctor", str(folder), str(tmp_path), "--max-new-tokens", "6"]
        )
        assert result.exit_code == 0, result.output

    def test_an_offloaded_target(self, folder, tmp_path, make_speculator, monkeypatch):
        make_speculator(emb_dim=64).save_pretrained(tmp_path)
        load, console = doctor.load_target, Console(file=io.StringIO())

        def load_offloaded(*args: Any) -> Any:
            target, tokenizer = load(*args)
            return cpu_offload(target, "cpu"), tokenizer

        settings = DoctorSettings(str(folder), str(tmp_path), ("hello there",), 6, device="cpu")
        expected = run_doctor(settings, console)
        monkeypatch.setattr(doctor, "load_target", load_offloaded)
        found = run_doctor(settings, console)
        assert [f.stats for f in found] == [f.stats for f in expected]
        assert found[0].stats.num_drafts > 0

    def test_a_target_without_mtp_layers(self, folder, tmp_path):
        config = LlamaConfig(
            vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=1,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(tmp_path)
        for file in folder.glob("token*"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
        result = CliRunner().invoke(app, ["doctor", str(tmp_path)])
        assert result.exit_code == 1 and "has no MTP layers" in result.output

    def test_a_folder_that_is_not_there(self):
        result = CliRunner().invoke(app, ["doctor", "./nowhere"])
        assert result.exit_code == 1 and "hf-specdec doctor: " in result.output
