"""How a row chooses its tokens. Rows that choose alike can share a batch."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from hf_specdec.serving.api_errors import ApiError
from hf_specdec.serving.request_models import ChoiceFields, GenerationFields

_DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


@dataclass(frozen=True)
class Sampling:
    """The settings that a batch has in common; seeds, limits and stop strings are each row's own.

    Attributes:
        temperature: 0 is greedy; the three filters are then off.
        top_p: 1 is off.
        top_k: 0 is off.
        min_p: 0 is off.
        repetition_penalty: 1 is off.
        presence_penalty: subtracted from the logit of every token generated before.
        frequency_penalty: the same, times the number of its occurrences.
        logit_bias: ``((token id, added to its logit), ...)``.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of_request(
        cls, request: GenerationFields, config: GenerationConfig, vocab_size: int
    ) -> Sampling:
        """A request's settings; what it leaves open is the model's, else OpenAI's default.

        Args:
            request: what the client asked for.
            config: the model's ``generation_config``.
            vocab_size: limits the keys of ``logit_bias``.

        Raises:
            ApiError: 400, a key of ``logit_bias`` that is no token id.
        """
        values = {}
        for name, default in _DEFAULTS.items():
            asked, own = getattr(request, name), getattr(config, name, None)
            values[name] = next(v for v in (asked, own, default) if v is not None)
        values["top_k"] = max(values["top_k"], 0)
        if values["temperature"] == 0:
            values.update(top_p=1.0, top_k=0, min_p=0.0)
        if not isinstance(request, ChoiceFields):
            return cls(**values)
        return cls(
            **values,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            logit_bias=_logit_bias(request.logit_bias or {}, vocab_size),
        )

    def generation_config(self, base: GenerationConfig, max_new_tokens: int) -> GenerationConfig:
        """A copy of the model's config with these settings."""
        config: Any = copy.deepcopy(base)
        samples = self.temperature > 0
        config.do_sample = samples
        config.num_beams = config.num_return_sequences = 1
        config.max_length, config.max_new_tokens = None, max_new_tokens
        config.temperature = self.temperature if samples else None
        config.top_p = self.top_p if samples else None
        config.top_k = self.top_k if samples else None
        config.min_p = self.min_p or None
        config.repetition_penalty = self.repetition_penalty
        if self.logit_bias:
            config.sequence_bias = {(token,): bias for token, bias in self.logit_bias}
        return config

    def processors(self, prompt_length: int) -> LogitsProcessorList:
        """What transformers has no setting for.

        Args:
            prompt_length: columns of the batch that hold the padded prompts.
        """
        processors = LogitsProcessorList()
        if self.presence_penalty or self.frequency_penalty:
            processors.append(
                OccurrencePenalties(self.presence_penalty, self.frequency_penalty, prompt_length)
            )
        return processors


def _logit_bias(bias: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, value in bias.items():
        # Python doesn't read numbers of thousands of digits.
        is_number = key.isdecimal() and len(key) <= len(str(vocab_size))
        if not is_number or int(key) >= vocab_size:
            raise ApiError(
                400,
                f"logit_bias: {key[:20]!r} must be a token id from 0 to {vocab_size - 1}",
                "logit_bias",
                "invalid_value",
            )
        pairs.append((int(key), value))
    return tuple(sorted(pairs))


class OccurrencePenalties(LogitsProcessor):
    """OpenAI's ``presence_penalty`` and ``frequency_penalty``, over the generated tokens.

    Args:
        presence: subtracted once from tokens that occur.
        frequency: subtracted for each occurrence.
        prompt_length: tokens that don't count.
    """

    def __init__(self, presence: float, frequency: float, prompt_length: int):
        self._presence, self._frequency = presence, frequency
        self._prompt_length = prompt_length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        """Lower the scores, ``[B, V]``, of tokens in ``input_ids[:, prompt_length:]``."""
        generated = input_ids[:, self._prompt_length :]
        counts = torch.zeros_like(scores)
        counts.scatter_add_(1, generated, torch.ones_like(generated, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0).to(scores.dtype)
