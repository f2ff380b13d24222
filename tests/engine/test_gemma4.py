"""Gemma 4 assistants as drafters: the target's own text, in batches, greedy and sampled."""

import copy
from typing import Any

import pytest
import torch
from gemma4_models import TARGETS, WINDOW, gemma4_assistant, gemma4_target
from operations import Operations
from scipy import stats
from test_gemma4_targets import prompts_of
from tiny_models import new_tokens, row_by_row
from transformers.generation import GenerationMixin

from hf_specdec import integration
from hf_specdec.drafters import Gemma4Drafter
from hf_specdec.modeling.gemma4_mtp import Gemma4MTPSwitches, shared_layers

NEW = 18


def speculate(target, inputs, assistant, k, num_new=NEW, **kwargs):
    return target.generate(
        **inputs,
        assistant_model=assistant,
        num_assistant_tokens=k,
        max_new_tokens=num_new,
        return_dict_in_generate=True,
        **kwargs,
    )


class TestSameText:
    # Shorter than the window, the window, beyond it.
    @pytest.mark.parametrize(
        ("rows", "length"), [(1, 30), (3, WINDOW - 3), (3, WINDOW), (8, 30)], ids=str
    )
    @pytest.mark.parametrize("name", TARGETS)
    def test_greedy(self, name, rows, length):
        target, inputs = gemma4_target(name), prompts_of(length, rows)
        expected = row_by_row(target, inputs, max_new_tokens=NEW, do_sample=False)
        for k in (1, 2, 5):
            assistant = gemma4_assistant(target, centroids=k % 2 == 0)
            output = speculate(target, inputs, assistant, k, do_sample=False)
            assert new_tokens(output.sequences, inputs, [NEW] * rows) == expected
            assert output.speculation.num_drafts > 0

    @pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 8}], ids=str)
    @pytest.mark.parametrize("name", ["E2B", "26B-A4B", "12B"])
    def test_a_seed_gives_one_text_for_every_drafter_and_k(self, name, settings):
        target, inputs = gemma4_target(name), prompts_of(13, 3)
        seeds = [21, 22, 23]
        wanted = {"do_sample": True, "row_seeds": seeds, **settings}
        expected = speculate(target, inputs, gemma4_assistant(target), 0, **wanted)
        for k in (1, 4):
            for centroids in (False, True):
                assistant = gemma4_assistant(target, centroids, seed=k)
                output = speculate(target, inputs, assistant, k, **wanted)
                assert torch.equal(output.sequences, expected.sequences)
        for row in range(3):
            seen = inputs["attention_mask"][row].bool()
            ids = inputs["input_ids"][row][seen][None]
            alone = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            wanted["row_seeds"] = seeds[row : row + 1]
            output = speculate(target, alone, gemma4_assistant(target), 3, **wanted)
            assert output.sequences[0, -NEW:].tolist() == expected.sequences[row, -NEW:].tolist()


class Watched(Gemma4Drafter):
    """Notes what it drafts; what it says is sometimes what the target will say.

    Args:
        model: see `Gemma4Drafter`.
        texts: each row's prompt and answer, without padding.
        switches: see `Gemma4Drafter`.
    """

    def __init__(self, model, texts=(), switches=None):
        super().__init__(model, switches)
        self.texts = texts
        self.drafts: list[tuple[int, int, list[int]]] = []
        """Row, number of its tokens whose keys exist, draft."""

    @property
    def cache(self) -> Any:
        return self._cache

    def start(self, target, prompt=None, num_draft_tokens=None):
        super().start(target, prompt, num_draft_tokens)
        self.rows = list(range(len(self.texts)))

    def keep_rows(self, order):
        super().keep_rows(order)
        self.rows = [self.rows[i] for i in order]

    def propose(self, token_ids, num_draft_tokens, pick=None):
        draft = super().propose(token_ids, num_draft_tokens, pick)
        kept = (self.cache.lengths - self.cache.padding).tolist()
        for i, (row, count) in enumerate(zip(self.rows, kept, strict=True)):
            assert self.texts[row][count] == token_ids[i]
            self.drafts.append((row, count, draft[i].tolist()))
            right = torch.tensor(self.texts[row][count + 1 :][:num_draft_tokens])
            size = min((row + count + count // 3) % 4, len(right))
            draft[i, :size] = right[:size]
        return draft


@torch.no_grad()
def draft_without_caches(target, model, ids: list[int], k: int, offset: int) -> list[int]:
    """By transformers' own forwards, over the verified tokens alone."""
    output = target(
        torch.tensor([ids[:-1]]), output_hidden_states=True, return_shared_kv_states=True
    )
    shared = dict(output.shared_kv_states)
    keys, values = shared["sliding_attention"]
    seen = WINDOW - offset
    shared["sliding_attention"] = keys[:, :, -seen:], values[:, :, -seen:]
    state, token = output.hidden_states[-1][:, -1:], torch.tensor([[ids[-1]]])
    position = torch.tensor([[len(ids) - 2 + offset]])
    draft = []
    for _ in range(k):
        embeds = torch.cat([target.get_input_embeddings()(token), state], dim=-1)
        step = model(inputs_embeds=embeds, position_ids=position, shared_kv_states=shared)
        token, state = step.logits.argmax(dim=-1), step.last_hidden_state
        draft.append(int(token))
    return draft


class TestDrafts:
    @pytest.mark.parametrize("offset", [0, 1])
    @pytest.mark.parametrize("name", ["E2B", "26B-A4B", "12B"])
    def test_they_are_what_a_run_without_caches_drafts(self, name, offset):
        # After any mixture of accepted and rejected drafts, in rows of different lengths: nothing
        # that was rejected is seen, and nothing that should be is missing.
        target, inputs, k = gemma4_target(name), prompts_of(11, 3), 4
        answers = row_by_row(target, inputs, max_new_tokens=40, do_sample=False)
        prompts = [
            ids[mask.bool()].tolist()
            for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        ]
        texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        for centroids in (False, True):
            model = gemma4_assistant(target, centroids)
            drafter = Watched(model, texts, Gemma4MTPSwitches(position_offset=offset))
            output = speculate(target, inputs, drafter, k, 40, do_sample=False)
            assert new_tokens(output.sequences, inputs, [40] * 3) == answers
            assert 0.2 < output.speculation.acceptance_rate < 0.8
            assert len(drafter.drafts) >= 20
            for row, count, draft in drafter.drafts:
                ids = texts[row][: count + 1]
                assert draft == draft_without_caches(target, model, ids, len(draft), offset)

    def test_they_go_on_from_a_given_cache(self):
        target, inputs = gemma4_target("E2B"), prompts_of(21, 1)
        model = gemma4_assistant(target)
        text = target.generate(**inputs, max_new_tokens=40, do_sample=False).tolist()
        first = speculate(target, inputs, Watched(model, text), 3, 15, do_sample=False)
        ids = torch.tensor([text[0][: 21 + 20]])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "cache": first.cache}
        drafter = Watched(model, text)
        output = speculate(target, inputs, drafter, 3, 20, do_sample=False)
        assert output.sequences.tolist() == text
        assert len(drafter.drafts) > 4
        for _, count, draft in drafter.drafts:
            ids = text[0][: count + 1]
            assert draft == draft_without_caches(target, model, ids, len(draft), 0)

    def test_the_first_one_is_transformers_own(self):
        # Where nothing has been rejected, and within the window, the conventions agree.
        target, inputs = gemma4_target("31B"), prompts_of(WINDOW - 2, 1)
        model = gemma4_assistant(target)
        model.generation_config.num_assistant_tokens = 4
        theirs = []
        handle = model.register_forward_hook(
            lambda _m, _a, out: theirs.append(int(out.logits.argmax()))
        )
        integration.disable()
        try:
            plain = target.generate(
                **inputs, assistant_model=model, max_new_tokens=8, do_sample=False
            )
        finally:
            integration.enable()
            handle.remove()
        drafter = Watched(model, plain.tolist(), Gemma4MTPSwitches(position_offset=1))
        speculate(target, inputs, drafter, 4, 8, do_sample=False)
        assert drafter.drafts[0][2] == theirs[:4]

    def test_transformers_own_loop_gets_the_same(self, monkeypatch):
        target, inputs = gemma4_target("E2B"), prompts_of(12, 1)
        plain = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        ours = Watched(gemma4_assistant(target), [[*plain[0].tolist(), 0, 0, 0, 0]])
        monkeypatch.setattr(Watched, "propose", _watch_only)
        speculate(target, inputs, ours, 3, do_sample=False)
        model = gemma4_assistant(target)
        model.generation_config.num_assistant_tokens = 3
        theirs = Watched(model)
        original = integration._originals["_assisted_decoding"]

        def own_loop(self, *args, speculation_options=None, **kwargs):
            return original(self, *args, **kwargs)

        monkeypatch.setattr(GenerationMixin, "_assisted_decoding", own_loop)
        output = target.generate(
            **inputs, max_new_tokens=NEW, do_sample=False, assistant_model=theirs
        )
        assert torch.equal(output, plain)
        common = [d[2] for d in ours.drafts if len(d[2]) == 3]
        assert len(common) > 10
        assert [d[2] for d in theirs.drafts][: len(common)] == common


def _watch_only(self, token_ids, num_draft_tokens, pick=None):
    draft = Gemma4Drafter.propose(self, token_ids, num_draft_tokens, pick)
    self.drafts.append((0, 0, draft[0].tolist()))
    return draft


class TestMemory:
    def test_keys_are_read_where_they_are(self, monkeypatch):
        target, inputs = gemma4_target("31B"), prompts_of(400, 2)
        drafter = Watched(gemma4_assistant(target))
        step, seen = drafter.network.step, []

        def watch(embeds, states, position_ids, shared, masks):
            for name, layer in shared_layers(target.config).items():
                buffers = drafter.cache.layers[layer]
                for view, buffer in zip(shared[name], (buffers.keys, buffers.values), strict=True):
                    assert view.data_ptr() == buffer.data_ptr()
                    assert view.stride() == buffer.stride()
            with Operations() as operations:
                result = step(embeds, states, position_ids, shared, masks)
            assert operations.largest < shared["full_attention"][0].numel() / 4
            seen.append(shared["full_attention"][0].shape[2])
            return result

        monkeypatch.setattr(drafter.network, "step", watch)
        monkeypatch.setattr(Watched, "propose", _watch_only)
        speculate(target, inputs, drafter, 3, do_sample=False)
        assert seen[0] == 400 and seen[-1] > 410

    @pytest.mark.parametrize("centroids", [False, True])
    def test_a_proposal_waits_for_no_device(self, monkeypatch, centroids):
        target, inputs = gemma4_target("E2B"), prompts_of(30, 3)
        assistant = gemma4_assistant(target, centroids)
        assistant.generation_config.suppress_tokens = [7]
        names: set[str] = set()

        def watch(self, *args, **kwargs):
            with Operations() as operations:
                draft = propose(self, *args, **kwargs)
            names.update(operations.names)
            return draft

        propose = Gemma4Drafter.propose
        monkeypatch.setattr(Gemma4Drafter, "propose", watch)
        speculate(target, inputs, assistant, 3, do_sample=False)
        assert "aten.mm.default" in names or "aten.addmm.default" in names
        assert not [n for n in names if "_local_scalar" in n or "nonzero" in n or "unique" in n]

    @pytest.mark.parametrize("chunk", [None, 16])
    def test_sliding_layers_keep_a_window_and_k_more(self, chunk, monkeypatch):
        target, inputs, k = gemma4_target("E2B"), prompts_of(300, 2), 4
        drafter = Gemma4Drafter(gemma4_assistant(target))
        expected = row_by_row(target, inputs, max_new_tokens=NEW, do_sample=False)
        # The end of the call would let go of it.
        monkeypatch.setattr(drafter, "finish", lambda: None)
        output = speculate(target, inputs, drafter, k, do_sample=False, prefill_chunk_size=chunk)
        assert new_tokens(output.sequences, inputs, [NEW] * 2) == expected
        cache: Any = drafter._cache
        slots = [layer.keys.shape[2] if layer.is_initialized else 0 for layer in cache.layers]
        assert slots[0] == slots[2] == WINDOW + k + 1
        assert slots[1] == slots[3] >= 300
        assert slots[4:] == [0, 0], "layers that share keys keep none of their own"


class TestDistribution:
    """Two tokens after a fixed prompt, against the exact joint distribution."""

    ROWS = 6000
    PROMPT = torch.tensor([[5, 9, 11]])
    KEPT = 6

    def exact(self, target, temperature):
        def next_probs(ids):
            logits = target(ids).logits[:, -1].double() / temperature
            top = logits.topk(self.KEPT)
            return (
                torch.full_like(logits, -torch.inf).scatter(1, top.indices, top.values).softmax(1)
            )

        first = next_probs(self.PROMPT)[0]
        joint = {}
        for a in first.nonzero()[:, 0].tolist():
            second = next_probs(torch.cat([self.PROMPT, torch.tensor([[a]])], dim=1))[0]
            for b in second.nonzero()[:, 0].tolist():
                joint[a, b] = float(first[a] * second[b])
        return joint

    def chi_square_p_value(self, joint, pairs):
        counts = torch.tensor([pairs.count(pair) for pair in joint]).double()
        expected = torch.tensor(list(joint.values())).double() * len(pairs)
        # Rare pairs go into one cell, as the test needs a few expected hits in each.
        rare = expected < 6
        observed, wanted = (
            [*t[~rare].tolist(), *([float(t[rare].sum())] if rare.any() else [])]
            for t in (counts, expected)
        )
        return stats.chisquare(observed, wanted, sum_check=False).pvalue

    @torch.no_grad()
    @pytest.mark.parametrize("centroids", [False, True])
    @pytest.mark.parametrize("verification", ["match", "rejection"])
    def test_joint_distribution_is_the_targets(self, verification, centroids):
        target, temperature = gemma4_target("31B"), 3.0
        joint = self.exact(target, temperature)
        torch.manual_seed(1)
        ids = self.PROMPT.repeat(self.ROWS, 1)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        output = speculate(
            target, inputs, gemma4_assistant(target, centroids), 2, 3, do_sample=True,
            temperature=temperature, top_k=self.KEPT, verification=verification,
        )  # fmt: skip
        assert output.speculation.num_accepted_tokens > 50, "no draft was ever accepted"
        pairs = [tuple(row) for row in output.sequences[:, 3:5].tolist()]
        assert set(pairs) <= set(joint)
        assert self.chi_square_p_value(joint, pairs) > 1e-3
        # The test has power: the same table refuses a cooler distribution.
        assert self.chi_square_p_value(self.exact(target, 0.6 * temperature), pairs) < 1e-3


def test_one_assistant_serves_calls_of_other_sizes_in_turn():
    target = gemma4_target("31B")
    assistant = copy.deepcopy(gemma4_assistant(target))
    for length, rows in ((20, 3), (5, 1), (33, 2)):
        inputs = prompts_of(length, rows)
        expected = row_by_row(target, inputs, max_new_tokens=NEW, do_sample=False)
        output = speculate(target, inputs, assistant, 2, do_sample=False)
        assert new_tokens(output.sequences, inputs, [NEW] * rows) == expected
