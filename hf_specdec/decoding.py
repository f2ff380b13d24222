"""The loop: draft, verify, accept, roll back - for all rows, until every row is finished."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import Cache

from hf_specdec.caches.ragged_cache import compact_order
from hf_specdec.call.decoding_settings import Decoded, DecodingSettings
from hf_specdec.common_call import settle_verdict
from hf_specdec.drafters.base import Drafter, VerifiedStep, started
from hf_specdec.drafting import DraftPicker
from hf_specdec.metrics import StatsRecorder
from hf_specdec.modeling.quantized import num_ids
from hf_specdec.outputs import OutputCollector, padded_behind
from hf_specdec.processors import LogitsPipeline
from hf_specdec.prompt_lookup import LookupDrafts
from hf_specdec.proposals import Proposals
from hf_specdec.stopping import StoppingRules
from hf_specdec.streaming import RowStep, RowStreamer
from hf_specdec.targets.prompt import Prompt
from hf_specdec.targets.target import RaggedTarget, TargetOutput, TargetRunner
from hf_specdec.tree_steps import ActiveRows, TreeStepper
from hf_specdec.verification import Verdict, choose_tokens, verify_match, verify_rejection

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer


class SpeculativeDecoder:
    """Decodes one batch.

    Args:
        target: runs the model whose output this is.
        drafter: proposes; it never changes the output.
        prompt: the prompts.
        settings: see `DecodingSettings`.
        processors: transformers' logits processors for this call.
        criteria: transformers' stopping criteria for this call.
        streamer: receives every step's tokens; of several rows only a `RowStreamer`.
        layer_windows: for each layer the window of its attention, or ``None``.
    """

    def __init__(
        self,
        target: TargetRunner,
        drafter: Drafter,
        prompt: Prompt,
        settings: DecodingSettings,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None = None,
        layer_windows: Sequence[int | None] = (),
    ):
        self._prompt = prompt
        input_ids = prompt.input_ids
        num_rows, prompt_length = input_ids.shape
        self._settings = settings
        self._draft_length = settings.draft_length
        self._target = target
        self._drafter = drafter
        self._vocabulary = num_ids(target.model.get_output_embeddings())
        self._proposals = Proposals(drafter, self._vocabulary)
        self._ranks = settings.ranks
        self._streamer = streamer
        self._pipeline = LogitsPipeline(processors, num_rows, prompt.given_on)
        self._stopping = StoppingRules(
            criteria, settings.eos_token_ids, settings.max_length, num_rows, prompt.given_on
        )
        self._asks_rows = self._ranks.number_of_first(int(self._stopping.asks_rows))
        self._stats = StatsRecorder(num_rows)
        self._trees: TreeStepper | None = None
        if settings.tree is not None:
            assert isinstance(target, RaggedTarget)
            self._trees = TreeStepper(
                target, drafter, self._pipeline, settings.tree, settings.outputs, settings.ranks
            )
        self._collector: OutputCollector | None = None
        if settings.outputs:
            self._collector = OutputCollector(
                settings.outputs, num_rows, layer_windows, prompt.num_slots
            )
        # A step writes up to K tokens further than a row reaches; the end turns them into padding.
        width = settings.max_length + settings.most_draft_tokens
        self._sequences = input_ids.new_full((num_rows, width), settings.pad_token_id)
        self._sequences[:, :prompt_length] = input_ids
        self._prompt_length = prompt_length
        self._final_lengths = [prompt_length] * num_rows
        # Of the active rows only. The last token of each is chosen but not in the cache yet.
        self._rows = torch.arange(num_rows, device=input_ids.device)
        self._host_rows = list(range(num_rows))
        self._lengths = torch.full_like(self._rows, prompt_length)
        self._host_lengths = [prompt_length] * num_rows
        self._slots_before = prompt.slots_before
        # Index in the result minus position.
        self._offsets = prompt.offsets - prompt.slots_before
        self._seeds = settings.row_seeds
        self._lookup = LookupDrafts(settings.lookup) if settings.lookup else None
        # Embeddings have no ids; drafters are shown a zero for the prompt's last token.
        no_ids = self._rows.new_zeros(num_rows)
        self._last_tokens = input_ids[:, -1] if prompt_length else no_ids

    def run(self, model_kwargs: dict[str, Any], cache: Cache | None = None) -> Decoded:
        """Decode until every row is finished.

        Args:
            model_kwargs: what ``generate`` prepared for the first forward.
            cache: where to put keys and values for the caller, if they are wanted.
        """
        drafter, target = self._drafter, self._target
        most = self._draft_length.limit
        with (
            started(drafter, target.model, target.cache, self._prompt, most),
            target.capture(drafter.feed, drafter.reads_prompt),
        ):
            self._prefill(model_kwargs)
            for _ in self._ranks.steps(lambda: bool(self._host_rows), target.model):
                self._step()
            # Rows that ended early take one forward more to be handed out.
            uneven = cache is not None and len(set(self._final_lengths)) > 1
            self._ranks.level(int(uneven), target.model)
            if cache is not None:
                cache = self._hand_out(cache)
        if self._trees is not None:
            self._trees.finish()
        if self._streamer is not None:
            self._streamer.end()
        sequences = padded_behind(self._sequences, self._final_lengths, self._settings.pad_token_id)
        num_new = [n - self._prompt_length for n in self._final_lengths]
        outputs = self._collector.finish(max(num_new)) if self._collector else {}
        return Decoded(sequences, self._stats.finish(num_new), outputs, cache)

    def _hand_out(self, cache: Cache) -> Cache | None:
        lengths = torch.tensor(self._final_lengths, device=self._sequences.device)
        last_tokens = self._sequences.gather(1, lengths[:, None] - 1)[:, 0]
        return self._target.hand_out(
            cache, last_tokens, [n + self._slots_before - 1 for n in self._final_lengths]
        )

    def _prefill(self, model_kwargs: dict[str, Any]) -> None:
        """Run the prompts: a step without drafts, whose token is the last of every prompt."""
        output = self._target.prefill(model_kwargs, self._settings.prefill_chunk_size)
        no_draft = self._last_tokens.new_empty((len(self._host_rows), 0))
        verdict, scores = self._verify(no_draft, None, output.logits, self._positions(1))
        verdict = settle_verdict(self._ranks, verdict)
        self._emit(self._last_tokens[:, None], output, verdict, scores, "nobody")

    def _step(self) -> None:
        """Draft, verify, accept, roll back."""
        most = self._settings.max_length - min(self._host_lengths) - 1
        num_draft_tokens = self._draft_length.next(len(self._host_rows), most)
        looks_up = self._lookup is not None and self._lookup.applies(self._settings.rejection)
        if looks_up:
            draft_ids, draft_probs = self._look_up(num_draft_tokens, most), None
        elif self._trees is not None and num_draft_tokens and self._draft_length.drafts_tree:
            self._tree_step(self._trees, num_draft_tokens)
            return
        else:
            positions = self._positions(num_draft_tokens + 1)
            draft_ids, draft_probs = self._draft(num_draft_tokens, positions)
        positions = self._positions(draft_ids.shape[1] + 1)
        tokens = torch.cat([self._last_tokens[:, None], draft_ids], dim=1)
        output = self._target.verify(tokens)
        verdict, scores = self._verify(draft_ids, draft_probs, output.logits, positions)
        verdict = settle_verdict(self._ranks, verdict)
        self._emit(tokens, output, verdict, scores, "lookup" if looks_up else "drafter")

    def _tree_step(self, trees: TreeStepper, depth: int) -> None:
        """The same with a tree of drafts, of which a path is emitted as if it were a chain."""
        rows = ActiveRows(
            self._last_tokens,
            self._lengths - self._offsets,
            self._seeds if self._settings.do_sample else None,
            self._sequences,
            self._host_rows,
            self._host_lengths,
        )
        step = trees.step(rows, depth)
        self._stats.record_tree(self._host_rows, step.num_nodes)
        self._emit(step.run_tokens, step.output, step.verdict, step.scores, "drafter")

    def _positions(self, count: int) -> torch.Tensor:
        """Positions (padding not counted) of the next ``count`` tokens: int64 ``[n, count]``.

        Only noise is asked for by position: a greedy call gets none, ``[n, 0]``.
        """
        if not self._settings.do_sample:
            return self._lengths[:, None][:, :0]
        offsets = torch.arange(count, device=self._lengths.device)
        return (self._lengths - self._offsets)[:, None] + offsets

    def _draft(
        self, num_draft_tokens: int, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft ids ``[n, K]`` and, for rejection, the ``[n, K, V]`` they were sampled from."""
        settings = self._settings
        if num_draft_tokens == 0:
            return self._last_tokens.new_empty((len(self._host_rows), 0)), None
        if not settings.do_sample and not settings.confidence_threshold:
            return self._proposals.chain(self._last_tokens, num_draft_tokens)
        pick = DraftPicker(
            self._pipeline,
            self._seeds if settings.do_sample else None,
            positions,
            self._vocabulary,
            settings.do_sample and settings.rejection,
            settings.confidence_threshold,
        )
        return self._proposals.chain(self._last_tokens, num_draft_tokens, pick)

    def _look_up(self, num_draft_tokens: int, most: int) -> torch.Tensor:
        """Draft ids ``[n, K']`` from the text; of rows where it doesn't repeat, the drafter's."""
        assert self._lookup is not None
        drafted = None
        if not self._lookup.serves_all and num_draft_tokens:
            drafted, _ = self._draft(num_draft_tokens, self._positions(num_draft_tokens + 1))
        num_tokens = min(self._lookup.options.num_tokens, most)
        num_tokens = self._draft_length.allowed(len(self._host_rows), num_tokens)
        return self._lookup.fill(self._text(), self._lengths, num_tokens, drafted)

    def _text(self, ahead: int = 0) -> torch.Tensor:
        """What the active rows say so far and ``ahead`` tokens further: int64 ``[n, L]``."""
        text = self._sequences[:, : max(self._host_lengths) + ahead]
        return text if len(self._host_rows) == len(text) else text[self._rows]

    def _verify(
        self,
        draft_ids: torch.Tensor,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[Verdict, torch.Tensor]:
        """Which drafts are accepted and what follows them.

        And the processed logits, if scores are asked for; otherwise nobody reads them.
        """
        logits = logits.to(draft_ids.device)
        if self._pipeline.reads_prefix:
            return self._verify_along_paths(draft_ids, logits, positions)
        # Verification can divide by a temperature itself, without a copy of the logits.
        temperature = None if self._settings.outputs.scores else self._pipeline.temperature
        scores = self._pipeline.block(logits) if temperature is None else logits
        if not self._settings.do_sample:
            return verify_match(draft_ids, scores, None, None, temperature), scores
        noise = (self._seeds, positions, temperature)
        if draft_probs is None:
            return verify_match(draft_ids, scores, *noise), scores
        return verify_rejection(draft_ids, draft_probs, scores, *noise), scores

    def _verify_along_paths(
        self, draft_ids: torch.Tensor, logits: torch.Tensor, positions: torch.Tensor
    ) -> tuple[Verdict, torch.Tensor]:
        """Like `verify_match`, for processors that must see each position's own prefix."""
        tokens = torch.nn.functional.pad(draft_ids, (0, 1))
        num_accepted = []
        # A copy: the raw logits may be asked for too.
        scores = logits.to(torch.float32, copy=True) if self._settings.outputs.scores else logits
        for i, (row, length) in enumerate(zip(self._host_rows, self._host_lengths, strict=True)):
            seeds = self._seeds[i : i + 1] if self._settings.do_sample else None
            drafts = draft_ids[i].tolist()

            def choose(k: int, scores: torch.Tensor, i: int = i, seeds=seeds) -> int:
                position = positions[i : i + 1, k : k + 1]
                return int(choose_tokens(scores[None, None], seeds, position))

            def follow(k: int, token: int, drafts=drafts) -> int | None:
                return k + 1 if k < len(drafts) and drafts[k] == token else None

            prefix = self._sequences[row, :length]
            emitted, _, processed = self._pipeline.along_path(
                row, prefix, logits[i], choose, follow
            )
            tokens[i, : len(emitted)] = tokens.new_tensor(emitted)
            num_accepted.append(len(emitted) - 1)
            if self._settings.outputs.scores:
                scores[i, : len(emitted)] = torch.stack(processed)
        return Verdict(tokens, tokens.new_tensor(num_accepted)), scores

    def _emit(
        self,
        run_tokens: torch.Tensor,
        output: TargetOutput,
        verdict: Verdict,
        scores: torch.Tensor,
        drafted_by: Literal["drafter", "lookup", "nobody"],
    ) -> None:
        """Write the accepted tokens, roll back the rest, and let finished rows go."""
        tokens = verdict.tokens
        num_emitted = verdict.num_accepted + 1
        if self._target.advances_together:
            num_emitted = num_emitted.amin().expand_as(num_emitted)
        index = torch.arange(tokens.shape[1], device=tokens.device)
        self._sequences[self._rows[:, None], self._lengths[:, None] + index] = tokens
        num_new, finished = self._stopping.cut(tokens, num_emitted, self._lengths)
        per_row = [num_new, finished.long(), num_emitted]
        if self._lookup is not None:
            text = self._text(ahead=tokens.shape[1])
            per_row.append(self._lookup.search(text, self._lengths + num_new))
        # The one read of a step on the host.
        host = torch.stack(per_row).cpu()
        if self._asks_rows:
            host = self._ranks.of_first(self._ask_criteria(host, scores))
            num_new = host[0].to(tokens.device)
        host_num_new, host_finished, host_num_emitted, *host_matched = host.tolist()
        num_draft_tokens = run_tokens.shape[1] - 1
        # A row that ends inside its draft accepts no more than it emits.
        accepted = [min(n, m - 1) for n, m in zip(host_num_new, host_num_emitted, strict=True)]
        self._stats.record_step(self._host_rows, accepted, num_draft_tokens)
        if drafted_by == "drafter":
            self._draft_length.update(num_draft_tokens, accepted, self._host_rows)
        if self._lookup is not None:
            if drafted_by != "nobody":
                self._lookup.learn(accepted, looked_up=drafted_by == "lookup")
            self._lookup.settle(*host_matched)
        if self._collector is not None:
            first = [length - self._prompt_length for length in self._host_lengths]
            self._collector.record(self._host_rows, first, host_num_new, output, scores)
        if self._streamer is not None:
            self._stream(tokens, host_num_new, host_finished, accepted, num_draft_tokens)

        if self._target.advances_together:
            # Only rows that end here can keep fewer, and those leave.
            count = max(host_num_new)
            num_new_in_cache = torch.full_like(num_new, count)
            self._target.advance(num_new_in_cache, [count] * len(host_num_new))
        else:
            self._target.advance(num_new, host_num_new)
        if output.hidden_states.shape[1] == run_tokens.shape[1]:
            step = VerifiedStep(
                run_tokens,
                output.hidden_states,
                num_emitted - 1 if self._target.advances_together else verdict.num_accepted,
                [n - 1 for n in host_num_emitted],
            )
        else:
            step = VerifiedStep.of_prompt(self._prompt.input_ids, output.hidden_states)
        self._drafter.observe(step)
        self._last_tokens = tokens.gather(1, num_new[:, None] - 1)[:, 0]
        self._lengths = self._lengths + num_new
        self._host_lengths = [a + b for a, b in zip(self._host_lengths, host_num_new, strict=True)]
        if any(host_finished):
            self._drop([not f for f in host_finished])

    def _stream(
        self,
        tokens: torch.Tensor,
        num_new: list[int],
        finished: list[int],
        accepted: Sequence[int],
        num_draft_tokens: int,
    ) -> None:
        """Hand the streamer what `_emit` has settled."""
        assert self._streamer is not None
        if not isinstance(self._streamer, RowStreamer):
            self._streamer.put(tokens[0, : num_new[0]].cpu())
            return
        token_ids = tokens.tolist()
        self._streamer.put_rows(
            [
                RowStep(row, token_ids[i][: num_new[i]], num_draft_tokens, count, bool(finished[i]))
                for i, (row, count) in enumerate(zip(self._host_rows, accepted, strict=True))
            ]
        )

    def _ask_criteria(self, host: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Let the criteria that look at a row stop it earlier; rows of ``host`` as in `_emit`."""
        host = host.clone()
        for i, (row, length) in enumerate(zip(self._host_rows, self._host_lengths, strict=True)):
            count = int(host[0, i])
            seen = None
            if self._collector is not None and self._settings.outputs.scores:
                seen = self._collector.scores_of(row) + scores[i, :count].float().unbind(0)
            sequence = self._sequences[row, : length + count]
            num_new = self._stopping.first_stop(row, sequence, length, seen)
            if num_new is not None:
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
        self._offsets, self._seeds = self._offsets[index], self._seeds[index]
        self._last_tokens = self._last_tokens[index]
        if self._lookup is not None:
            self._lookup.keep_rows(order, index)
        self._target.keep_rows(order)
        self._drafter.keep_rows(order)
