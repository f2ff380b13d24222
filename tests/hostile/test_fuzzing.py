"""Anything in place of configs, headers, indexes and prompts: documented errors, and no others.

pytest -m exhaustive tests/hostile/test_fuzzing.py    # HF_SPECDEC_CASES=20000
"""

import builtins
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from gemma4_models import gemma4_assistant, gemma4_target
from hostile_files import INDEX, WEIGHTS, header_of, write_header
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import _target
from tiny_pairs import random_speculator
from transformers import AutoModel

import hf_specdec
from hf_specdec import MLPSpeculatorConfig, SpeculativeConfig
from hf_specdec.cli.inspection import inspect_drafter
from hf_specdec.cli.prompt_files import read_items
from hf_specdec.modeling.checkpoint_headers import read_header, read_index
from hf_specdec.modeling.mtp import FAMILIES

# What may come out: the errors that the documentation names.
ERRORS = (ValueError, OSError, typer.BadParameter)
LONG = int(os.environ.get("HF_SPECDEC_CASES", "5000"))
_SETTINGS: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}

_NUMBERS = st.one_of(
    st.integers(-3, 9), st.sampled_from([2**24, 2**31, 2**63, 10**15, 10**30, -(10**15)])
)
_ATOMS = st.one_of(
    st.none(), st.booleans(), _NUMBERS, st.floats(), st.text(max_size=6),
    st.sampled_from(["float16", "int8", "mlp_speculator", "auto", "../x", "/etc", "\0"]),
)  # fmt: skip
VALUES = st.recursive(
    _ATOMS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
_SPECULATOR = [name for name in MLPSpeculatorConfig().to_dict() if name != "model_type"]
_EVERYBODYS = [
    "architectures", "attn_implementation", "auto_map", "attribute_map", "dtype", "id2label",
    "is_encoder_decoder", "label2id", "num_labels", "output_attentions", "per_layer_config",
    "problem_type", "quantization_config", "return_dict", "to_dict", "torch_dtype",
    "transformers_version", "use_cache", "hidden_size", "draft_vocab_size", "share_target_weights",
    "name_or_path", "_commit_hash", "__class__", "tie_word_embeddings", "update", "inner_size",
]  # fmt: skip
FIELDS = st.one_of(st.sampled_from(_SPECULATOR + _EVERYBODYS), st.text(max_size=8))
CHANGES = st.dictionaries(FIELDS, VALUES, min_size=1, max_size=3)


@contextmanager
def nothing_else_opened(folder: Path) -> Iterator[None]:
    """No file is written outside the folder, and none with another folder's secrets read."""
    opened, real = [], builtins.open

    def watched(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        path = os.path.abspath(file) if isinstance(file, (str, os.PathLike)) else ""
        if path.startswith("/etc/") or (path and set(mode) & set("wax+") and path != os.devnull):
            opened.append(path)
        return real(file, mode, *args, **kwargs)

    builtins.open = watched  # type: ignore[assignment]
    try:
        yield
    finally:
        builtins.open = real
    strangers = [path for path in opened if not path.startswith(str(folder))]
    assert not strangers


def only_documented(call: Callable[[], object], folder: Path | None = None) -> bool:
    """Whether the call succeeded; an error that isn't documented, or says nothing, fails."""
    with nothing_else_opened(folder or Path("/nowhere")):
        try:
            call()
        except ERRORS as error:
            assert len(str(error)) > 10, repr(error)
            return False
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good speculator's folder; each case spoils a copy."""
    path = tmp_path_factory.mktemp("good") / "drafter"
    random_speculator(_target("llama")).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def assistant_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of a Gemma 4 assistant."""
    path = tmp_path_factory.mktemp("good") / "assistant"
    gemma4_assistant(gemma4_target("31B"), centroids=True).save_pretrained(path)
    return path


def copy_of(folder: Path) -> Path:
    spoilt = folder.parent / "spoilt"
    shutil.rmtree(spoilt, ignore_errors=True)
    shutil.copytree(folder, spoilt)
    return spoilt


def attach(target: Any, folder: Path) -> None:
    hf_specdec.attach(target, {"model": str(folder)})
    hf_specdec.detach(target)


def check_speculator_config(folder: Path, changes: dict[str, Any]) -> None:
    spoilt, target = copy_of(folder), _target("llama")
    config = json.loads((spoilt / "config.json").read_text())
    (spoilt / "config.json").write_text(json.dumps({**config, **changes}))
    before = set(target.__dict__)
    only_documented(lambda: AutoModel.from_pretrained(spoilt), spoilt)
    only_documented(lambda: attach(target, spoilt), spoilt)
    only_documented(lambda: inspect_drafter(str(spoilt)), spoilt)
    assert set(target.__dict__) == before


def check_assistant_config(folder: Path, changes: dict[str, Any], inner: bool) -> None:
    spoilt, target = copy_of(folder), gemma4_target("31B")
    config = json.loads((spoilt / "config.json").read_text())
    (config["text_config"] if inner else config).update(changes)
    (spoilt / "config.json").write_text(json.dumps(config))
    before = set(target.__dict__)
    only_documented(lambda: attach(target, spoilt), spoilt)
    assert set(target.__dict__) == before


ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "I64", "X", "F4"]) | VALUES,
        "shape": st.lists(st.integers(0, 64), max_size=3) | VALUES,
        "data_offsets": st.lists(st.integers(0, 9000), min_size=2, max_size=2) | VALUES,
    },
)


def check_header(folder: Path, which: int, entry: Any, length: int | None, cut: int) -> None:
    spoilt, target = copy_of(folder), _target("llama")
    header, data = header_of(spoilt / WEIGHTS)
    names = [name for name in header if name != "__metadata__"]
    name = names[which % len(names)]
    header[name] = {**header[name], **entry} if isinstance(entry, dict) else entry
    write_header(spoilt / WEIGHTS, header, data[: len(data) - cut], length)
    good = only_documented(lambda: read_header(spoilt / WEIGHTS), spoilt)
    loaded = only_documented(lambda: attach(target, spoilt), spoilt)
    assert good or not loaded


def check_index(folder: Path, content: Any) -> None:
    spoilt = copy_of(folder)
    (spoilt / WEIGHTS).rename(spoilt / "a.safetensors")
    (spoilt / INDEX).write_text(json.dumps(content))
    only_documented(lambda: read_index(spoilt / INDEX), spoilt)
    only_documented(lambda: AutoModel.from_pretrained(spoilt), spoilt)
    only_documented(lambda: inspect_drafter(str(spoilt)), spoilt)


FILES = st.sampled_from(
    ["a.safetensors", "../a.safetensors", "/etc/passwd", "b.bin", "", "a\0.bin"]
)
INDEXES = st.one_of(
    VALUES,
    st.fixed_dictionaries(
        {"metadata": st.just({}) | VALUES},
        optional={
            "weight_map": VALUES
            | st.dictionaries(
                st.sampled_from(["speculator.emb.0.weight", "x"]), FILES | VALUES, max_size=3
            )
        },
    ),
)
LINES = st.one_of(
    VALUES.map(json.dumps),
    st.text(max_size=20),
    st.dictionaries(st.sampled_from(["prompt", "messages", "seed", "x"]), VALUES, max_size=3).map(
        json.dumps
    ),
)
SPECULATIVE = st.dictionaries(
    st.sampled_from(list(SpeculativeConfig.__dataclass_fields__)) | st.text(max_size=8),
    VALUES,
    max_size=4,
)


@settings(max_examples=40, derandomize=True, **_SETTINGS)
@given(changes=CHANGES)
def test_configs_of_speculators(folder: Path, changes: dict[str, Any]) -> None:
    check_speculator_config(folder, changes)


GEMMA_FIELDS = st.sampled_from(
    ["backbone_hidden_size", "num_centroids", "centroid_intermediate_top_k", "vocab_size",
     "hidden_size", "num_hidden_layers", "layer_types", "num_attention_heads", "head_dim",
     "use_ordered_embeddings", "text_config", "sliding_window", "rope_parameters", "dtype",
     "num_key_value_heads", "intermediate_size", "architectures", "hidden_activation"]
)  # fmt: skip


@settings(max_examples=25, derandomize=True, **_SETTINGS)
@given(changes=st.dictionaries(GEMMA_FIELDS, VALUES, min_size=1, max_size=2), inner=st.booleans())
def test_configs_of_assistants(assistant_folder: Path, changes, inner: bool) -> None:
    check_assistant_config(assistant_folder, changes, inner)


@settings(max_examples=50, derandomize=True, **_SETTINGS)
@given(
    which=st.integers(0, 20),
    entry=ENTRY | VALUES,
    length=st.none() | st.sampled_from([0, 1, 7, 10**5, 2**63]),
    cut=st.sampled_from([0, 0, 0, 1, 4096]),
)
def test_headers(folder: Path, which: int, entry: Any, length: int | None, cut: int) -> None:
    check_header(folder, which, entry, length, cut)


@settings(max_examples=40, derandomize=True, **_SETTINGS)
@given(content=INDEXES)
def test_indexes(folder: Path, content: Any) -> None:
    check_index(folder, content)


@settings(max_examples=100, derandomize=True, **_SETTINGS)
@given(value=SPECULATIVE | VALUES | SPECULATIVE.map(json.dumps) | st.text(max_size=20))
def test_speculative_configs(value: Any) -> None:
    only_documented(lambda: SpeculativeConfig.from_value(value))


@settings(max_examples=100, derandomize=True, **_SETTINGS)
@given(lines=st.lists(LINES, max_size=4), field=st.none() | st.text(max_size=5))
def test_prompt_files(lines: list[str], field: str | None) -> None:
    only_documented(lambda: read_items(lines, "prompts.jsonl", field))


@settings(max_examples=100, derandomize=True, **_SETTINGS)
@given(value=VALUES, family=st.sampled_from(sorted(FAMILIES)))
def test_numbers_of_mtp_modules(value: Any, family: str) -> None:
    row = FAMILIES[family]
    config = type("Config", (), dict.fromkeys(row.n_predict, value))()
    only_documented(lambda: row.declared_modules(config))


@settings(max_examples=15, derandomize=True, **_SETTINGS)
@given(content=st.binary(max_size=200), keep=st.booleans())
def test_bytes_for_weights(folder: Path, content: bytes, keep: bool) -> None:
    spoilt = copy_of(folder)
    whole = (spoilt / WEIGHTS).read_bytes()
    (spoilt / WEIGHTS).write_bytes(whole[: len(content) * 7] + content if keep else content)
    assert not only_documented(lambda: attach(_target("llama"), spoilt), spoilt)
    (spoilt / WEIGHTS).rename(spoilt / "pytorch_model.bin")
    assert not only_documented(lambda: attach(_target("llama"), spoilt), spoilt)


def test_a_good_pair_still_works(folder: Path) -> None:
    """Behind all of the above, in the same process."""
    target = _target("llama")
    prompt = torch.tensor([[5, 6, 7]])
    plain = target.generate(prompt, do_sample=False, max_new_tokens=8)
    hf_specdec.attach(target, {"model": str(folder)})
    try:
        assert target.generate(prompt, do_sample=False, max_new_tokens=8).tolist() == plain.tolist()
    finally:
        hf_specdec.detach(target)


@pytest.mark.exhaustive
@settings(max_examples=LONG, **_SETTINGS)
@given(data=st.data())
def test_and_for_as_long_as_one_likes(folder: Path, assistant_folder: Path, data: Any) -> None:
    check_speculator_config(folder, data.draw(CHANGES))
    fields = st.dictionaries(GEMMA_FIELDS, VALUES, min_size=1, max_size=2)
    check_assistant_config(assistant_folder, data.draw(fields), data.draw(st.booleans()))
    check_index(folder, data.draw(INDEXES))
    entry, cut = data.draw(ENTRY | VALUES), data.draw(st.integers(0, 5000))
    check_header(folder, data.draw(st.integers(0, 20)), entry, None, cut)
