"""The loop: draft, verify, accept, roll back - for all rows, until every row is finished."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from hf_specdec.cache import compact_order
from hf_specdec.drafters.base import Drafter, VerifiedStep
from hf_specdec.metrics import SpeculationStats, StatsRecorder
from hf_specdec.noise import Stream, add_gumbel
from hf_specdec.processors import LogitsPipeline
from hf_specdec.stopping import StoppingRules
from hf_specdec.target import TargetOutput, TargetRunner
from hf_specdec.verification import Verdict, choose_tokens, verify_match, verify_rejection

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer


@dataclass
class DecodingSettings:
    """What one call is asked for.

    Attributes:
        num_draft_tokens: K; 0 decodes without drafts, by the same rules.
        do_sample: sample from the processed logits instead of taking the largest.
        row_seeds: int64 ``[B]`` on the target's device, the seeds of the sampling noise.
        rejection: verify by rejection sampling instead of by matching.
        eos_token_ids: int64 ``[E]`` or ``None``.
        pad_token_id: fills a finished row.
        max_length: tokens of the longest result, prompt and padding included.
    """

    num_draft_tokens: int
    do_sample: bool
    row_seeds: torch.Tensor
    rejection: bool
    eos_token_ids: torch.Tensor | None
    pad_token_id: int
    max_length: int


class SpeculativeDecoder:
    """Decodes one batch.

    Args:
        target: the model whose output this is.
        drafter: proposes; it never changes the output.
        input_ids: int64 ``[B, T]``, left-padded prompts.
        padding: int64 ``[B]``, left padding of each row.
        settings: see `DecodingSettings`.
        processors: transformers' logits processors for this call.
        criteria: transformers' stopping criteria for this call.
        streamer: receives every step's tokens (one row only).
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter,
        input_ids: torch.Tensor,
        padding: torch.Tensor,
        settings: DecodingSettings,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None = None,
    ):
        num_rows, prompt_length = input_ids.shape
        self._settings = settings
        self._target_model = target
        self._drafter = drafter
        self._streamer = streamer
        self._target = TargetRunner(
            target, input_ids, padding, settings.num_draft_tokens + 1, settings.max_length
        )
        self._pipeline = LogitsPipeline(processors, num_rows)
        self._stopping = StoppingRules(criteria, settings.eos_token_ids, settings.max_length)
        self._stats = StatsRecorder(num_rows)
        # A step writes up to K tokens further than a row reaches; the end turns them into padding.
        width = settings.max_length + settings.num_draft_tokens
        self._sequences = input_ids.new_full((num_rows, width), settings.pad_token_id)
        self._sequences[:, :prompt_length] = input_ids
        self._prompt_length = prompt_length
        self._final_lengths = [prompt_length] * num_rows
        # Of the active rows only. The last token of each is chosen but not in the cache yet.
        self._rows = torch.arange(num_rows, device=input_ids.device)
        self._host_rows = list(range(num_rows))
        self._lengths = torch.full_like(self._rows, prompt_length)
        self._host_lengths = [prompt_length] * num_rows
        self._padding = padding
        self._seeds = settings.row_seeds
        self._last_tokens = input_ids[:, -1]

    def run(self, model_kwargs: dict[str, Any]) -> tuple[torch.Tensor, SpeculationStats]:
        """Decode until every row is finished.

        Args:
            model_kwargs: what ``generate`` prepared for the first forward.

        Returns:
            int64 ``[B, L]`` prompts and new tokens, finished rows padded; and the statistics.
        """
        self._drafter.start(self._target_model)
        with self._target.capture():
            self._prefill(model_kwargs)
            while self._host_rows:
                self._step()
        if self._streamer is not None:
            self._streamer.end()
        longest = max(self._final_lengths)
        sequences = self._sequences[:, :longest]
        index = torch.arange(longest, device=sequences.device)
        lengths = torch.tensor(self._final_lengths, device=sequences.device)
        behind = index >= lengths[:, None]
        sequences = sequences.masked_fill(behind, self._settings.pad_token_id)
        stats = self._stats.finish([n - self._prompt_length for n in self._final_lengths])
        return sequences, stats

    def _prefill(self, model_kwargs: dict[str, Any]) -> None:
        """Run the prompts: a step without drafts, whose token is the last of every prompt."""
        output = self._target.prefill(model_kwargs)
        no_draft = self._last_tokens.new_empty((len(self._host_rows), 0))
        verdict = self._verify(no_draft, None, output.logits, self._positions(1))
        self._emit(self._last_tokens[:, None], output, verdict)

    def _step(self) -> None:
        """Draft, verify, accept, roll back."""
        room = self._settings.max_length - min(self._host_lengths)
        num_draft_tokens = min(self._settings.num_draft_tokens, room - 1)
        positions = self._positions(num_draft_tokens + 1)

        draft_ids, draft_probs = self._draft(num_draft_tokens, positions)
        tokens = torch.cat([self._last_tokens[:, None], draft_ids], dim=1)
        output = self._target.verify(tokens)
        verdict = self._verify(draft_ids, draft_probs, output.logits, positions)
        self._emit(tokens, output, verdict)

    def _positions(self, count: int) -> torch.Tensor:
        """Positions (padding not counted) of the next ``count`` tokens: int64 ``[n, count]``."""
        offsets = torch.arange(count, device=self._lengths.device)
        return (self._lengths - self._padding)[:, None] + offsets

    def _draft(
        self, num_draft_tokens: int, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft ids ``[n, K]`` and, for rejection, the ``[n, K, V]`` they were sampled from."""
        if num_draft_tokens == 0:
            return self._last_tokens.new_empty((len(self._host_rows), 0)), None
        if not self._settings.do_sample:
            return self._drafter.propose(self._last_tokens, num_draft_tokens), None
        vocabulary = self._target_model.get_output_embeddings().weight.shape[0]
        rejection = self._settings.rejection
        probs: list[torch.Tensor] = []

        def pick(k: int, logits: torch.Tensor, token_ids: torch.Tensor | None) -> torch.Tensor:
            if token_ids is None:
                # A padded drafter vocabulary has columns that the target lacks.
                logits = logits[:, :vocabulary]
            logits = self._pipeline.draft(logits)
            # The target's own noise makes the draft agree with its choice far more often; the
            # rejection rule needs a draft that is independent of it.
            stream = Stream.DRAFT if rejection else Stream.TOKEN
            if rejection:
                probs.append(_spread(logits.softmax(dim=-1), token_ids, vocabulary))
            position = positions[:, k : k + 1]
            noisy = add_gumbel(logits[:, None], self._seeds, position, stream, token_ids)
            return noisy[:, 0].argmax(dim=-1)

        draft_ids = self._drafter.propose(self._last_tokens, num_draft_tokens, pick)
        return draft_ids, torch.stack(probs, dim=1) if rejection else None

    def _verify(
        self,
        draft_ids: torch.Tensor,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        positions: torch.Tensor,
    ) -> Verdict:
        """Which drafts are accepted and what follows them."""
        logits = logits.to(draft_ids.device)
        if self._pipeline.reads_prefix:
            return self._verify_along_paths(draft_ids, logits, positions)
        logits = self._pipeline.block(logits)
        if not self._settings.do_sample:
            return verify_match(draft_ids, logits)
        if draft_probs is None:
            return verify_match(draft_ids, logits, self._seeds, positions)
        return verify_rejection(draft_ids, draft_probs, logits, self._seeds, positions)

    def _verify_along_paths(
        self, draft_ids: torch.Tensor, logits: torch.Tensor, positions: torch.Tensor
    ) -> Verdict:
        """Like `verify_match`, for processors that must see each position's own prefix."""
        tokens = torch.nn.functional.pad(draft_ids, (0, 1))
        num_accepted = []
        for i, (row, length) in enumerate(zip(self._host_rows, self._host_lengths, strict=True)):
            seeds = self._seeds[i : i + 1] if self._settings.do_sample else None

            def choose(k: int, scores: torch.Tensor, i: int = i, seeds=seeds) -> int:
                position = positions[i : i + 1, k : k + 1]
                return int(choose_tokens(scores[None, None], seeds, position))

            prefix = self._sequences[row, :length]
            emitted = self._pipeline.along_path(row, prefix, draft_ids[i], logits[i], choose)
            tokens[i, : len(emitted)] = tokens.new_tensor(emitted)
            num_accepted.append(len(emitted) - 1)
        return Verdict(tokens, tokens.new_tensor(num_accepted))

    def _emit(self, run_tokens: torch.Tensor, output: TargetOutput, verdict: Verdict) -> None:
        """Write the accepted tokens, roll back the rest, and let finished rows go."""
        tokens = verdict.tokens
        index = torch.arange(tokens.shape[1], device=tokens.device)
        self._sequences[self._rows[:, None], self._lengths[:, None] + index] = tokens
        num_new, finished = self._stopping.cut(tokens, verdict.num_accepted + 1, self._lengths)
        # The one read of a step on the host.
        host = torch.stack([num_new, finished.long(), verdict.num_accepted]).cpu()
        if self._stopping.asks_per_token:
            host = self._ask_criteria(host)
            num_new = host[0].to(tokens.device)
        host_num_new, host_finished, _ = host.tolist()
        accepted = torch.minimum(host[0], host[2])
        num_draft_tokens = run_tokens.shape[1] - 1
        self._stats.record_step(torch.tensor(self._host_rows), accepted, num_draft_tokens)
        self._target.cache.advance(num_new, host_num_new)
        if self._streamer is not None:
            self._streamer.put(tokens[0, : host_num_new[0]].cpu())

        self._drafter.observe(VerifiedStep(run_tokens, output.hidden_states, verdict.num_accepted))
        self._last_tokens = tokens.gather(1, num_new[:, None] - 1)[:, 0]
        self._lengths = self._lengths + num_new
        self._host_lengths = [a + b for a, b in zip(self._host_lengths, host_num_new, strict=True)]
        if any(host_finished):
            self._drop([not f for f in host_finished])

    def _ask_criteria(self, host: torch.Tensor) -> torch.Tensor:
        """Let the criteria that look at a row stop it earlier; rows of ``host`` as in `_emit`."""
        host = host.clone()
        for i, (row, length) in enumerate(zip(self._host_rows, self._host_lengths, strict=True)):
            sequence = self._sequences[row, : length + int(host[0, i])]
            if (num_new := self._stopping.first_stop(sequence, length)) is not None:
                host[0, i], host[1, i] = num_new, 1
        return host

    def _drop(self, keep: list[bool]) -> None:
        """Take the finished rows out of the batch."""
        for row, length, kept in zip(self._host_rows, self._host_lengths, keep, strict=True):
            if not kept:
                self._final_lengths[row] = length
        order = compact_order(keep)
        self._host_rows = [self._host_rows[i] for i in order]
        self._host_lengths = [self._host_lengths[i] for i in order]
        if not order:
            return
        index = torch.tensor(order, device=self._rows.device)
        self._rows, self._lengths = self._rows[index], self._lengths[index]
        self._padding, self._seeds = self._padding[index], self._seeds[index]
        self._last_tokens = self._last_tokens[index]
        self._target.cache.keep_rows(order)
        self._drafter.keep_rows(index)


def _spread(probs: torch.Tensor, token_ids: torch.Tensor | None, size: int) -> torch.Tensor:
    """Place probabilities ``[B, V']`` of some ids (default 0..V'-1) in a row of ``size``."""
    full = probs.new_zeros((probs.shape[0], size))
    if token_ids is None:
        full[:, : probs.shape[1]] = probs
    else:
        full[:, token_ids] = probs
    return full
