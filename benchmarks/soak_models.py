"""Tiny models for the soaks, and what plain ``generate`` says to their prompts.

Every text is kept as a tuple of ints, once: the garbage collector doesn't even track those, so that
what grows in the process while a soak runs isn't the soak's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch
from random_models import gemma4_pair
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Lfm2Config,
    LlamaConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MistralConfig,
    PreTrainedTokenizerFast,
)
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers.models.auto import AutoModelForCausalLM

from hf_specdec import MLPSpeculatorConfig, MLPSpeculatorPreTrainedModel
from hf_specdec.modeling.mimo import MiMoConfig, MiMoForCausalLM
from hf_specdec.noise import add_gumbel

VOCAB_SIZE, PAD, END = 64, 0, 2
NUM_PROMPTS, LONGEST_PROMPT, LONGEST_TEXT = 12, 40, 24
SEEDS = (5, 2**61 + 3)
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": END,
    "pad_token_id": PAD,
    # Peaked logits: greedy texts that vary, and top logits that are far apart.
    "initializer_range": 0.4,
}
_LFM2 = {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}
TARGETS: dict[str, Callable[[], Any]] = {
    "llama": lambda: AutoModelForCausalLM.from_config(LlamaConfig(**_SIZES)),
    "mistral": lambda: AutoModelForCausalLM.from_config(
        MistralConfig(**_SIZES, sliding_window=8, head_dim=8)
    ),
    "mimo": lambda: MiMoForCausalLM(MiMoConfig(**_SIZES, mtp_feed="pre_norm")),
    "lfm2": lambda: AutoModelForCausalLM.from_config(Lfm2Config(**_SIZES, **_LFM2)),
}


@dataclass(frozen=True)
class Settings:
    """How a text's tokens are chosen; the reference depends on nothing else.

    Attributes:
        temperature: 0 chooses greedily.
        top_k: 0 filters nothing.
        repetition_penalty: 1 is none.
        ends: whether the end-of-sequence token ends a text.
    """

    temperature: float = 0.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    ends: bool = False

    def arguments(self) -> dict[str, Any]:
        """Of ``generate``."""
        wanted: dict[str, Any] = {"do_sample": self.temperature > 0, "eos_token_id": None}
        if self.ends:
            wanted["eos_token_id"] = END
        if self.temperature > 0:
            wanted |= {"temperature": self.temperature, "top_k": self.top_k}
        if self.repetition_penalty != 1:
            wanted["repetition_penalty"] = self.repetition_penalty
        return wanted


SETTINGS = (
    *[Settings()] * 3,
    Settings(ends=True),
    Settings(repetition_penalty=1.3),
    Settings(temperature=0.8, top_k=8),
    Settings(temperature=1.2, ends=True),
)


class SeededNoise(LogitsProcessor):
    """The project's sampling rule for transformers' own greedy loop: the noise of a row's seed."""

    def __init__(self, seed: int, prompt_length: int):
        self._seeds = torch.tensor([seed])
        self._prompt_length = prompt_length

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """One row, without padding: the next token's position is the length so far."""
        position = torch.tensor([[input_ids.shape[1]]])
        return add_gumbel(scores[:, None].float(), self._seeds, position)[:, 0]


@dataclass
class Pair:
    """A target, what drafts for it, and what it says.

    Attributes:
        name: of the target.
        target: the model under test.
        plain: a copy whose ``generate`` is never touched.
        speculator: an MLP speculator; ``None`` if its drafter is of another kind.
        assistant: a Gemma 4 assistant.
        prompts: token ids.
    """

    name: str
    target: Any
    plain: Any
    speculator: Any = None
    assistant: Any = None
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    _texts: dict[Any, tuple[int, ...]] = field(default_factory=dict)

    def text(self, prompt: int, length: int, settings: Settings, seed: int = 0) -> list[int]:
        """The first ``length`` tokens that plain ``generate`` says to a prompt, alone.

        Under a seed it is transformers' greedy loop over logits with the seed's noise.
        """
        # No objects: the collector doesn't track such a key either.
        key = prompt, *astuple(settings)[:3], seed if settings.temperature else 0
        if key not in self._texts:
            endless = replace(settings, ends=False)
            said = self.say(self.prompts[prompt], LONGEST_TEXT, endless, seed)
            self._texts[key] = tuple(said)
        text = list(self._texts[key][:length])
        return text[: text.index(END) + 1] if settings.ends and END in text else text

    def say(
        self, prompt: Sequence[int], length: int, settings: Settings, seed: int = 0
    ) -> list[int]:
        """The same of any prompt, which isn't remembered."""
        ids = torch.tensor([list(prompt)])
        processors = []
        if settings.repetition_penalty != 1:
            processors.append(RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
        if settings.temperature:
            processors.append(TemperatureLogitsWarper(settings.temperature))
            if settings.top_k:
                processors.append(TopKLogitsWarper(settings.top_k))
            processors.append(SeededNoise(seed, len(prompt)))
        output = self.plain.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=length,
            eos_token_id=END if settings.ends else None,
            logits_processor=LogitsProcessorList(processors),
        )
        return output[0, ids.shape[1] :].tolist()

    def batch(self, chosen: Sequence[int]) -> dict[str, torch.Tensor]:
        """Prompts as a left-padded batch."""
        rows = [self.prompts[i] for i in chosen]
        return left_padded(rows)


def left_padded(rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Token ids and their mask."""
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def make_speculator(target: Any, seed: int = 3) -> MLPSpeculatorPreTrainedModel:
    """An MLP speculator for a tiny target, with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = MLPSpeculatorConfig(
            vocab_size=target.config.vocab_size,
            emb_dim=target.config.hidden_size,
            inner_dim=24,
            n_predict=3,
            top_k_tokens_per_head=[2] * 3,
            n_candidates=2,
        )
        return MLPSpeculatorPreTrainedModel(config).eval()


def make_target(name: str) -> Any:
    """A tiny target of one kind, float32, that never ends by itself."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = TARGETS[name]().eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


def make_pair(name: str) -> Pair:
    """A target with what drafts for it; ``"gemma4"`` has an assistant of its own."""
    if name == "gemma4":
        made = [gemma4_pair(torch.float32, 2, 64, VOCAB_SIZE, 1.0) for _ in range(2)]
        (target, assistant), (plain, _) = made
        for model in (target, plain):
            model.generation_config.eos_token_id = None
        pair = Pair(name, target, plain, assistant=assistant)
    else:
        target, plain = make_target(name), make_target(name)
        pair = Pair(name, target, plain, speculator=make_speculator(target))
    for model in (pair.target, pair.plain):
        # transformers installs hooks of its own where hidden states are first asked for, for good.
        ids = torch.tensor([[3]])
        model.generate(
            ids, max_new_tokens=1, output_hidden_states=True, return_dict_in_generate=True
        )
    choice = random.Random(f"prompts of {name}")
    for index in range(NUM_PROMPTS):
        # Some that repeat themselves, for what is looked up.
        length = 1 + index * (LONGEST_PROMPT - 1) // (NUM_PROMPTS - 1)
        ids = [choice.randrange(3, VOCAB_SIZE) for _ in range(length)]
        if index % 3 == 0:
            ids = (ids[:5] * length)[:length]
        pair.prompts.append(tuple(ids))
    return pair


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; the ids are those of the tiny models."""
    characters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,!?:|<>"[:61]
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="?",
        padding_side="left",
    )
