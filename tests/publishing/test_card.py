"""Model cards: metadata the Hub takes, numbers that were measured, and nobody's words lost."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from card_numbers import RESULT, SPEED
from huggingface_hub import ModelCard
from transformers import AutoModel

from hf_specdec.modeling.card_on_save import CardOnSave
from hf_specdec.publishing.card import check_card, is_own, model_card, sealed, write_model_card
from hf_specdec.publishing.facts import CardFacts, gather_facts
from hf_specdec.publishing.speed import read_speed

CONFIG = {"model_type": "mlp_speculator", "n_predict": 3, "inner_dim": 24, "dtype": "bfloat16"}


def facts(**fields: Any) -> CardFacts:
    return CardFacts(**{"repo_id": "me/drafter", "config": CONFIG, **fields})


@pytest.fixture
def folder(make_speculator, tmp_path: Path) -> Path:
    make_speculator(base_model_name_or_path="owner/target").save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def test_metadata(folder: Path) -> None:
    (folder / "training").mkdir()
    (folder / "training" / "result.json").write_text(json.dumps(RESULT))
    gathered = gather_facts(folder, license="llama3", datasets=["owner/other"], tags=["mine"])
    data = ModelCard(model_card(gathered)).data.to_dict()
    assert data == {
        "library_name": "hf_specdec",
        "base_model": "owner/target",
        "base_model_relation": "adapter",
        "pipeline_tag": "text-generation",
        "license": "llama3",
        "datasets": ["owner/other", "owner/chats"],
        "tags": ["speculative-decoding", "mlp-speculator", "hf-specdec", "mine"],
    }


def test_numbers_are_those_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "speed.json").write_text(json.dumps(SPEED))
    speed = read_speed(tmp_path / "speed.json")
    text = model_card(facts(base_model="owner/target", result=RESULT, speed=speed, has_curve=True))
    for expected in (
        "| accepted this far | 61.2% | 40.0% | 25.0% | 2.26 |",
        "4,096 drafts",
        "target's own greedy text",
        r"Fast CPU \| model 9, 2 processes, 4 threads, torch 2.13.0",
        "| chat | 1 | 3 | 48.0 tok/s | 78.2 tok/s | 1.64x (1.26-2.14) | 1.82 | 0.48 0.22 0.12 |",
        "processor Fast CPU, threads 2, dtype bfloat16, torch 2.13.0, 128 new tokens",
        "| self generated | 1,000,000 tokens in 4,000 documents |",
        "| trained on | 2,000,000 tokens in 1,500 steps |",
        "| time | 30 minutes |",
        "| learning rate | 0.001 |",
        "conversations that the target wrote",
        "](training/curve.png)",
    ):
        assert expected in text, expected


def test_packed_weights_are_said_beside_the_speed(tmp_path: Path) -> None:
    settings = {**SPEED["settings"], "pack_weights": "in speculative runs"}
    (tmp_path / "speed.json").write_text(json.dumps({**SPEED, "settings": settings}))
    card = model_card(facts(speed=read_speed(tmp_path / "speed.json")))
    assert "128 new tokens, pack_weights in speculative runs." in card


def test_what_was_not_measured_is_left_out() -> None:
    text = model_card(facts(base_model="owner/target"))
    assert re.findall("^## .*", text, re.MULTILINE) == ["## Use"]
    assert "None" not in text and "trust_remote_code" not in text and "datasets" not in text
    half: dict[str, Any] = {"format_version": 1, "acceptance": {"per_position": []}}
    assert "## Acceptance" not in model_card(facts(result=half))
    assert "## Training" not in model_card(facts(result=half))


def test_kinds_of_examples() -> None:
    everything = facts(base_model="owner/t", has_remote_code=True, has_custom_generate=True)
    text = model_card(everything)
    assert text.count("```python") == 3 and "bind_target" not in text
    assert 'custom_generate="me/drafter"' in text and "- custom_generate" in text
    assert "apply_chat_template" not in text
    shared = {**CONFIG, "share_target_weights": True, "draft_vocab_size": 4096}
    text = model_card(facts(config=shared, has_remote_code=True, has_chat_template=True))
    assert "bind_target" in text and "apply_chat_template" in text and "4,096" in text
    text = model_card(
        facts(config={"model_type": "mimo", "num_nextn_predict_layers": 1}, base_model="owner/t",
              has_remote_code=True)
    )  # fmt: skip
    assert '{"method": "mtp"}' in text and "trust_remote_code=True" in text
    assert ModelCard(text).data.to_dict()["base_model_relation"] == "finetune"


def test_saved_speculator_has_a_card(folder: Path, make_speculator) -> None:
    text = (folder / "README.md").read_text()
    check_card(text)
    assert is_own(text) and "owner/target" in text and "# drafter" in text
    # What is there stays there.
    (folder / "README.md").write_text("mine")
    make_speculator().save_pretrained(folder)
    assert (folder / "README.md").read_text() == "mine"


def test_names_of_folders_are_not_in_a_saved_card(make_speculator, tmp_path: Path) -> None:
    training = {**RESULT["training"], "continued_from": "/home/me/earlier"}
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "result.json").write_text(json.dumps({**RESULT, "training": training}))
    make_speculator().save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "| continued from | earlier |" in card and "/home" not in card


def test_only_the_main_process_writes_a_card(make_speculator, tmp_path: Path) -> None:
    make_speculator().save_pretrained(tmp_path / "drafter", is_main_process=False)
    assert not (tmp_path / "drafter" / "README.md").exists()


def test_models_save_as_before_without_a_publisher(
    make_speculator, tmp_path: Path, monkeypatch
) -> None:
    """Where the code came with a checkpoint, and hf_specdec isn't installed."""
    monkeypatch.setattr(CardOnSave, "publisher", None)
    make_speculator().save_pretrained(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_training_does_not_end_because_of_a_card(make_speculator, tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "result.json").write_text("{")
    with pytest.warns(UserWarning, match="got no model card.*result.json"):
        make_speculator().save_pretrained(tmp_path)
    AutoModel.from_pretrained(tmp_path)


def test_own_cards_are_replaced_and_others_never(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    assert write_model_card(tmp_path, facts())
    assert not write_model_card(tmp_path, facts(license="mit"), replace_own=False)
    assert "license" not in card.read_text()
    assert write_model_card(tmp_path, facts(license="mit"))
    assert "license: mit" in card.read_text()
    changed = card.read_text().replace("## Use", "## Use it")
    card.write_text(changed)
    assert not write_model_card(tmp_path, facts(license="llama3"))
    assert card.read_text() == changed


def test_seal() -> None:
    text = sealed("---\na: b\n---\n\nHello\n")
    assert is_own(text) and is_own(text.replace("\n", "\r\n"))
    for other in (text.replace("Hello", "Hullo"), text + "more", "Hello", ""):
        assert not is_own(other)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"license": "Apache 2.0"}, "license='Apache 2.0'"),
        ({"base_model": "/home/me/target"}, "base_model='/home/me/target' is no Hub id"),
        ({"datasets": ("a/b/c",)}, "dataset='a/b/c' is no Hub id"),
        ({"tags": ("",)}, "must be words"),
    ],
)
def test_metadata_that_the_hub_would_refuse(fields, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_card(facts(**fields))


def test_card_without_metadata() -> None:
    with pytest.raises(ValueError, match="no metadata"):
        check_card("# Drafter\n")


def test_local_target_is_no_base_model(make_speculator, tmp_path: Path) -> None:
    make_speculator(base_model_name_or_path=str(tmp_path)).save_pretrained(tmp_path / "drafter")
    assert "base_model" not in (tmp_path / "drafter" / "README.md").read_text().split("---")[1]


def test_result_of_another_version(folder: Path) -> None:
    (folder / "training").mkdir()
    (folder / "training" / "result.json").write_text('{"format_version": 2}')
    with pytest.raises(ValueError, match="format_version=2, this hf_specdec reads 1"):
        gather_facts(folder)


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"rows": []}', '{"environment": {}, "rows": [{"batch": 1}]}']
)
def test_speed_of_something_else(tmp_path: Path, content: str) -> None:
    (tmp_path / "speed.json").write_text(content)
    with pytest.raises(ValueError, match="speed.json"):
        read_speed(tmp_path / "speed.json")


def test_speed_that_says_nothing_of_the_drafter(tmp_path: Path) -> None:
    file = tmp_path / "speed.json"
    file.write_text(json.dumps({**SPEED, "settings": {"drafter": "synthetic"}}))
    with pytest.raises(ValueError, match="measured with a synthetic drafter"):
        read_speed(file)
    file.write_text(json.dumps({**SPEED, "rows": [{**SPEED["rows"][0], "wrong": 2}]}))
    with pytest.raises(ValueError, match="says that 2 texts were not the target's own"):
        read_speed(file)


def test_speed_of_the_script_before(tmp_path: Path) -> None:
    row = {k: v for k, v in SPEED["rows"][0].items() if k not in ("speedup", "prompt_set")}
    row |= {"speedup_median": 1.6, "speedup_min": 1.2, "speedup_max": 2.1, "schedule": None}
    content = {"machine": {"dtype": "bfloat16", "new_tokens": 64}, "rows": [row]}
    (tmp_path / "speed.json").write_text(json.dumps(content))
    text = model_card(facts(speed=read_speed(tmp_path / "speed.json")))
    assert "| 1 | 3 | 48.0 tok/s | 78.2 tok/s | 1.60x (1.20-2.10) |" in text
    assert "dtype bfloat16, 64 new tokens" in text


def test_full_disk_does_not_end_training(make_speculator, tmp_path: Path, monkeypatch) -> None:
    """The card is missing then, whole; the weights are there."""
    from hf_specdec.publishing import whole_files

    def full(source: Any, place: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(whole_files.os, "replace", full)
    with pytest.warns(UserWarning, match="no model card: No space left"):
        make_speculator().save_pretrained(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
