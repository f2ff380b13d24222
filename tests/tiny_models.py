"""Tiny random targets of every supported family, and drafters whose quality is known."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPTBigCodeConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto import AutoModelForCausalLM

import hf_specdec
from hf_specdec import Drafter, MLPSpeculatorConfig, MLPSpeculatorPreTrainedModel
from hf_specdec.drafters import VerifiedStep

VOCAB_SIZE = 64
HIDDEN_SIZE = 32
PAD, EOS = 0, 2

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    # Peaked logits: greedy texts that vary, and top logits that are far apart.
    "initializer_range": 0.4,
}
# Gemma scales its embeddings up; with a tied head a random model would only repeat its input.
_GEMMA: dict[str, Any] = {**_COMMON, "tie_word_embeddings": False}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
CONFIGS: dict[str, Callable] = {
    "llama": lambda: LlamaConfig(**_COMMON),
    "granite": lambda: GraniteConfig(**_COMMON, logits_scaling=4.0, residual_multiplier=0.5),
    "mistral": lambda: MistralConfig(**_COMMON, sliding_window=8, head_dim=8),
    "qwen2": lambda: Qwen2Config(
        **_COMMON, use_sliding_window=True, sliding_window=8, layer_types=_ALTERNATING
    ),
    "qwen3": lambda: Qwen3Config(**_COMMON, head_dim=8),
    "gemma2": lambda: Gemma2Config(**_GEMMA, head_dim=8, sliding_window=8, query_pre_attn_scalar=8),
    "gemma3": lambda: Gemma3TextConfig(
        **_GEMMA, head_dim=8, sliding_window=8, query_pre_attn_scalar=8, layer_types=_ALTERNATING
    ),
    "gpt_bigcode": lambda: GPTBigCodeConfig(
        vocab_size=VOCAB_SIZE,
        n_positions=256,
        n_embd=HIDDEN_SIZE,
        n_layer=3,
        n_head=4,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=PAD,
        initializer_range=0.4,
    ),
}
FAMILIES = sorted(CONFIGS)


@functools.cache
def _target(family: str):
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(CONFIGS[family]()).eval()
    # Most tests want texts of a known length; those about stopping set their own.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


@pytest.fixture
def make_target() -> Callable:
    """``make_target(family)``: a tiny float32 target, the same one for every test."""
    return _target


@pytest.fixture
def target():
    """The tiny Llama."""
    return _target("llama")


@pytest.fixture
def make_speculator() -> Callable:
    """``make_speculator(**config)``: a speculator with random weights for the tiny targets."""

    def make(seed: int = 3, **fields) -> MLPSpeculatorPreTrainedModel:
        n = fields.pop("n_predict", 4)
        values = {
            "vocab_size": VOCAB_SIZE,
            "emb_dim": HIDDEN_SIZE,
            "inner_dim": 24,
            "n_predict": n,
            "top_k_tokens_per_head": [2] * n,
            "n_candidates": 2,
        }
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            config = MLPSpeculatorConfig(**{**values, **fields})
            return MLPSpeculatorPreTrainedModel(config).eval()

    return make


@pytest.fixture
def prompts() -> Callable:
    """``prompts(n)``: n prompts of different lengths, left-padded, with their mask."""

    def make(n: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(11)
        lengths = [9, 5, 13, 1, 7, 12, 3, 10][:n]
        width = max(lengths)
        input_ids = torch.full((n, width), PAD)
        for row, length in enumerate(lengths):
            ids = torch.randint(3, VOCAB_SIZE, (length,), generator=generator)
            input_ids[row, width - length :] = ids
        mask = (input_ids != PAD).long()
        return {"input_ids": input_ids, "attention_mask": mask}

    return make


def row_by_row(model, inputs: dict[str, torch.Tensor], **kwargs) -> list[list[int]]:
    """Plain ``generate`` on every prompt alone, without padding: the reference of every test."""
    rows = []
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        prompt = ids[mask.bool()][None]
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), **kwargs)
        rows.append(output[0, prompt.shape[1] :].tolist())
    return rows


def new_tokens(
    sequences: torch.Tensor, inputs: dict[str, torch.Tensor], lengths: list[int]
) -> list[list[int]]:
    """What each row of a batch emitted; behind it there must be nothing but padding."""
    width = inputs["input_ids"].shape[1]
    rows = []
    for row, length in zip(sequences[:, width:].tolist(), lengths, strict=True):
        assert set(row[length:]) <= {PAD}
        rows.append(row[:length])
    return rows


def sometimes_wrong(row: int, index: int) -> bool:
    """For about a third of the tokens, without a period that K + 1 could fall in step with."""
    return (row * 2654435761 + (index + 1) * 40503 * (index + 3)) % 1000 < 330


class ScriptedDrafter(Drafter):
    """Knows what each row will say, and is wrong exactly where it is told to be.

    Args:
        answers: the tokens each row will emit.
        wrong: ``wrong(row, index)`` says whether to propose another token for ``answers[row]
            [index]``.
        num_draft_tokens: its limit K.
    """

    def __init__(
        self,
        answers: list[list[int]],
        wrong: Callable[[int, int], bool] = lambda row, index: False,
        num_draft_tokens: int = 4,
    ):
        self._answers = answers
        self._wrong = wrong
        self._limit = num_draft_tokens

    @property
    def max_draft_tokens(self) -> int:
        return self._limit

    def check(self, target) -> None:
        pass

    def start(self, target, prompt=None, num_draft_tokens=None) -> None:
        self._rows = list(range(len(self._answers)))
        self._emitted = [0] * len(self._answers)

    def observe(self, step: VerifiedStep) -> None:
        for row, n in zip(self._rows, step.num_accepted.tolist(), strict=True):
            self._emitted[row] += n + 1

    def propose(self, token_ids, num_draft_tokens, pick=None) -> torch.Tensor:
        draft: list[list[int]] = []
        for row in self._rows:
            start = self._emitted[row]
            assert token_ids[len(draft)] == self._answers[row][start - 1]
            known = (self._answers[row] + [3] * num_draft_tokens)[start:][:num_draft_tokens]
            draft.append(
                [
                    3 + (token - 2) % (VOCAB_SIZE - 3) if self._wrong(row, start + i) else token
                    for i, token in enumerate(known)
                ]
            )
        return torch.tensor(draft)

    def keep_rows(self, order) -> None:
        self._rows = [self._rows[i] for i in order]


@pytest.fixture
def count_forwards() -> Callable:
    """``with count_forwards(model) as lengths``: query lengths of the model's forwards."""
    from contextlib import contextmanager

    @contextmanager
    def count(model):
        lengths: list[int] = []
        handle = model.register_forward_pre_hook(
            lambda _module, _args, kwargs: lengths.append(kwargs["input_ids"].shape[1]),
            with_kwargs=True,
        )
        try:
            yield lengths
        finally:
            handle.remove()

    return count


@pytest.fixture(autouse=True)
def _seams_are_open():
    """A test that closes the seams must not leave them closed for the next one."""
    yield
    hf_specdec.enable()
