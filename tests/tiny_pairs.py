"""A tiny pair as folders, as a user of the command line has it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import _target
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_specdec import MLPSpeculatorConfig, MLPSpeculatorPreTrainedModel

# One token a character; 0 pads, 1 begins, 2 ends.
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,!?:|<>"[:61]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}|{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def make_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer for the tiny targets, with or without a chat template."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="?",
        padding_side="left",
    )
    fast.chat_template = chat_template
    return fast


def random_speculator(target: Any) -> MLPSpeculatorPreTrainedModel:
    """A speculator for a tiny target, without training."""
    config = MLPSpeculatorConfig(
        vocab_size=target.config.vocab_size,
        emb_dim=target.config.hidden_size,
        inner_dim=24,
        n_predict=3,
        top_k_tokens_per_head=[2] * 3,
        n_candidates=2,
    )
    return MLPSpeculatorPreTrainedModel(config).eval()


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer without a chat template."""
    return make_tokenizer()


@pytest.fixture(scope="session")
def pair_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a tiny float32 target with its tokenizer, and of a speculator without one."""
    folder = tmp_path_factory.mktemp("pair")
    target: Any = _target("llama")
    target.save_pretrained(folder / "target")
    make_tokenizer().save_pretrained(folder / "target")
    random_speculator(target).save_pretrained(folder / "drafter")
    return folder / "target", folder / "drafter"


@pytest.fixture
def save(make_speculator, tmp_path: Path):
    """``save(**config)``: a speculator's folder, and the speculator."""

    def make(dtype=torch.float32, **fields):
        model = make_speculator(**fields).to(dtype)
        folder = tmp_path / "source"
        model.save_pretrained(folder)
        return folder, model

    return make
