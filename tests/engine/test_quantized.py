"""Quantized targets: their own plain texts, and the states that a plain forward computes."""

import copy
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quantized_models import (
    HIDDEN,
    KINDS,
    assert_same_or_near_tie,
    keep_gguf_blocks,
    make_prompts,
    of_equality,
    quantized,
    write_gguf,
)
from tiny_models import PAD, VOCAB_SIZE, ScriptedDrafter, new_tokens, row_by_row, sometimes_wrong
from transformers.models.auto import AutoModelForCausalLM

import hf_specdec
from hf_specdec.drafters import MLPDrafter, VerifiedStep
from hf_specdec.integration import ATTACHED
from hf_specdec.modeling.quantized import compute_dtype, num_ids, stored_parts
from hf_specdec.static_shapes import state_of

NEW = 12
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}


class Watcher(ScriptedDrafter):
    """Drafts what it is told, and keeps the last right state of every row with its length."""

    def start(self, target, prompt=None, num_draft_tokens=None) -> None:
        super().start(target, prompt, num_draft_tokens)
        self.states: list[tuple[int, int, torch.Tensor]] = []

    def observe(self, step) -> None:
        last = step.last_states()
        super().observe(step)
        self.states += [
            (row, self._emitted[row], state) for row, state in zip(self._rows, last, strict=True)
        ]

    def propose(self, token_ids, num_draft_tokens, pick=None) -> torch.Tensor:
        drafts = []
        for row in self._rows:
            known = (self._answers[row] + [3] * num_draft_tokens)[self._emitted[row] :]
            drafts.append(
                [
                    3 if self._wrong(row, self._emitted[row] + i) else token
                    for i, token in enumerate(known[:num_draft_tokens])
                ]
            )
        return torch.tensor(drafts)


@functools.cache
def plain_rows(name: str) -> list[list[int]]:
    """What a quantized target says behind the three prompts, one at a time."""
    rows = row_by_row(quantized(name), make_prompts(3), **GREEDY)
    assert len(set(rows[0])) > 4, "a text without variety tests nothing"
    return rows


def speculate(target: Any, inputs: dict[str, torch.Tensor], drafter: Any, **kwargs: Any) -> Any:
    arguments = {**GREEDY, **kwargs}
    return target.generate(
        **inputs, **arguments, assistant_model=drafter, return_dict_in_generate=True
    )


@torch.no_grad()
def check_states(target: Any, inputs: Any, rows: list[list[int]], watcher: Watcher) -> None:
    """What a drafter was shown is what the decoder says of the same text, in its dtype."""
    # A row that ends inside its draft has accepted more than it emits.
    seen = [entry for entry in watcher.states if entry[1] <= NEW]
    assert len(seen) > 3 * len(rows)
    for row, emitted, state in seen:
        prompt = inputs["input_ids"][row][inputs["attention_mask"][row].bool()]
        # The newest token was not in the forward.
        text = torch.cat([prompt, torch.tensor(rows[row][: emitted - 1], dtype=torch.int64)])
        expected = target.model(text[None]).last_hidden_state[0, -1]
        assert state.dtype == expected.dtype == compute_dtype(target) == target.dtype
        similarity = torch.cosine_similarity(state.float(), expected.float(), dim=0)
        assert similarity > 0.98
        assert float(state.norm() / expected.norm()) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("name", of_equality("exact", "rounded"))
class TestEachTokenByItself:
    def test_greedy(self, name, make_speculator):
        target, equality = quantized(name), KINDS[name].equality
        assert target.is_quantized or name == "fp8-dequantized"
        speculator = make_speculator(emb_dim=HIDDEN, n_predict=3)
        for batch in (1, 3):
            inputs, expected = make_prompts(batch), plain_rows(name)[:batch]
            output = speculate(target, inputs, speculator)
            rows = new_tokens(output.sequences, inputs, [NEW] * batch)
            assert_same_or_near_tie(target, inputs, rows, expected, equality)

    def test_half_right_drafts_and_the_states_behind_them(self, name):
        target, inputs, equality = quantized(name), make_prompts(3), KINDS[name].equality
        expected = plain_rows(name)
        watcher = Watcher(expected, sometimes_wrong, 3)
        output = speculate(target, inputs, watcher)
        rows = new_tokens(output.sequences, inputs, [NEW] * 3)
        assert_same_or_near_tie(target, inputs, rows, expected, equality)
        if rows == expected:
            assert 0.2 < output.speculation.acceptance_rate < 0.9
        check_states(target, inputs, rows, watcher)


@pytest.mark.parametrize("name", of_equality("mixed"))
def test_tokens_that_depend_on_each_other(name, make_speculator):
    """Step by step the texts are equal; forwards over several tokens have other logits."""
    target, inputs, expected = quantized(name), make_prompts(1), plain_rows(name)[:1]
    plain = speculate(target, inputs, make_speculator(emb_dim=HIDDEN), num_assistant_tokens=0)
    rows = new_tokens(plain.sequences, inputs, [NEW])
    assert_same_or_near_tie(target, inputs, rows, expected, "mixed")
    inputs, watcher = make_prompts(3), Watcher(plain_rows(name), sometimes_wrong, 3)
    output = speculate(target, inputs, watcher)
    assert output.sequences.shape == (3, inputs["input_ids"].shape[1] + NEW)
    assert 0.1 < output.speculation.acceptance_rate < 0.9
    assert {state.dtype for _, _, state in watcher.states} == {torch.float32}


# One of each library, with its head where that can be quantized, and groups of 4 bits.
@pytest.mark.parametrize(
    "name", ["bnb-fp4-head", "torchao-int8-head", "torchao-int4", "quanto-int8-head"]
)
class TestWeightsAlone:
    def test_sampled_under_a_seed(self, name, make_speculator):
        target, inputs = quantized(name), make_prompts(3)
        common = {"do_sample": True, "row_seeds": [5, 6, 7]}
        speculator = make_speculator(emb_dim=HIDDEN, n_predict=3)
        plain, fast = (
            speculate(target, inputs, speculator, num_assistant_tokens=k, **common) for k in (0, 3)
        )
        assert plain.sequences.tolist() == fast.sequences.tolist()
        torch.manual_seed(1)
        rejected = speculate(
            target, inputs, speculator, do_sample=True, verification="rejection"
        ).sequences
        assert rejected.shape == plain.sequences.shape and int(rejected.max()) < VOCAB_SIZE

    def test_trees_and_drafts_out_of_the_text(self, name, make_speculator):
        target, inputs, expected = quantized(name), make_prompts(3), plain_rows(name)
        # Padded: its last ids are none of the target's, whatever its packed head looks like.
        speculator = make_speculator(emb_dim=HIDDEN, n_predict=3, vocab_size=VOCAB_SIZE + 40)
        tree = speculate(target, inputs, speculator, num_tree_nodes=6)
        assert new_tokens(tree.sequences, inputs, [NEW] * 3) == expected
        hf_specdec.attach(target, {"method": "ngram", "num_speculative_tokens": 3})
        try:
            output = target.generate(**inputs, **GREEDY)
        finally:
            hf_specdec.detach(target)
        assert new_tokens(output, inputs, [NEW] * 3) == expected


@pytest.mark.parametrize("name", [n for n in KINDS if KINDS[n].equality != "rounded"])
@torch.no_grad()
def test_whether_a_token_depends_on_the_others_of_the_forward(name):
    """What docs/targets.md says of each kind; a plain batch of two texts shows it."""
    target = quantized(name)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, VOCAB_SIZE, (4, 9), generator=generator)
    alone = torch.cat([target(row[None]).logits for row in ids])
    change = float((target(ids).logits - alone).abs().max())
    assert change > 0.02 if KINDS[name].equality == "mixed" else change < 1e-3


class TestDtypes:
    """The drafter computes in its own dtype, whatever the target's weights are kept in."""

    @pytest.mark.parametrize(
        "name, dtype, other",
        [
            ("bnb-fp4-head", torch.float32, torch.bfloat16),
            ("torchao-int8-head", torch.bfloat16, torch.float32),
            ("quanto-int8-head", torch.bfloat16, torch.float32),
        ],
    )
    def test_of_the_state_and_of_the_drafter(
        self, name, dtype, other, make_speculator, monkeypatch
    ):
        target, inputs = quantized(name, dtype), make_prompts(3)
        speculator = make_speculator(emb_dim=HIDDEN, n_predict=3).to(other)
        drafter = hf_specdec.drafters.MLPDrafter(speculator)
        # The end of the call would let go of the state.
        monkeypatch.setattr(drafter, "finish", lambda: None)
        output = speculate(target, inputs, drafter)
        assert drafter._hidden_states is not None and drafter._hidden_states.dtype == other
        assert output.sequences.shape == (3, inputs["input_ids"].shape[1] + NEW)
        watcher = Watcher(row_by_row(target, inputs, **GREEDY), sometimes_wrong, 3)
        rows = new_tokens(speculate(target, inputs, watcher).sequences, inputs, [NEW] * 3)
        check_states(target, inputs, rows, watcher)

    @pytest.mark.parametrize("name", ["bnb-fp4-head", "torchao-int8-head", "quanto-int8-head"])
    def test_a_drafter_named_in_a_config_gets_the_targets(self, name, make_speculator, tmp_path):
        make_speculator(emb_dim=HIDDEN).save_pretrained(tmp_path)
        target = quantized(name, torch.bfloat16)
        hf_specdec.attach(target, {"model": str(tmp_path)})
        try:
            assert target.__dict__[ATTACHED].assistant.dtype == torch.bfloat16
        finally:
            hf_specdec.detach(target)

    def test_the_dtype_of_a_packed_embedding_is_not_asked(self):
        packed = SimpleNamespace(weight=torch.zeros(8, 3, dtype=torch.uint8), num_embeddings=64)
        target: Any = SimpleNamespace(get_input_embeddings=lambda: packed, dtype=torch.bfloat16)
        assert compute_dtype(target) == torch.bfloat16
        assert num_ids(packed) == 64


@pytest.mark.parametrize("name", [n for n in KINDS if n.endswith("-head")])
def test_a_quantized_head_knows_as_many_ids_as_before(name):
    head = quantized(name).get_output_embeddings()
    assert num_ids(head) == VOCAB_SIZE
    kept = stored_parts(head.weight)
    assert kept[0].dtype in (torch.int8, torch.uint8)
    assert sum(part.nbytes for part in kept) < VOCAB_SIZE * HIDDEN * 1.5


def test_a_recording_depends_on_the_parts_of_a_quantized_weight():
    """The weight itself has no memory: its address says nothing, only those of its parts do."""
    head = copy.deepcopy(quantized("torchao-int8-head").get_output_embeddings())
    kept, before = head.weight, state_of(head)
    assert state_of(head) == before
    head.weight = torch.nn.Parameter(copy.deepcopy(kept), requires_grad=False)
    assert state_of(head) != before
    head.weight = kept
    assert state_of(head) == before


def test_drafts_beside_a_packed_embedding_may_be_any_of_its_ids(make_speculator):
    """Packed, it has fewer rows than ids; no draft is moved below those."""
    packed = SimpleNamespace(weight=torch.zeros(8, 3, dtype=torch.uint8), num_embeddings=VOCAB_SIZE)
    target: Any = SimpleNamespace(get_input_embeddings=lambda: packed)
    drafts = []
    for extra in (0, 40):
        # With padding of its own, which the target lacks, only ids in there are moved.
        drafter = MLPDrafter(make_speculator(vocab_size=VOCAB_SIZE + extra, n_predict=2))
        drafter.start(target)
        drafter.observe(VerifiedStep.of_prompt(torch.zeros(5, 1).long(), torch.randn(5, 1, 32)))
        drafts.append(drafter.propose(torch.arange(5), 2))
    assert all(8 <= draft.max() < VOCAB_SIZE for draft in drafts)


@pytest.fixture
def gguf_target(tmp_path) -> Any:
    """A Llama from a GGUF file of 4-bit blocks, as a user loads it: transformers unpacks it."""
    file = write_gguf(tmp_path / "tiny.gguf", "Q4_0")
    target: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32
    ).eval()
    target.generation_config.eos_token_id = None
    target.generation_config.pad_token_id = PAD
    return target


@pytest.mark.parametrize("kept", [False, True], ids=["unpacked", "in_blocks"])
def test_a_target_from_a_gguf_file(kept, gguf_target, make_speculator, monkeypatch):
    target, inputs = gguf_target, make_prompts(3)
    if kept:
        # As transformers does it for families and devices that it has kernels for.
        keep_gguf_blocks(target, "Q4_0")
        # The other way of the two that they compute in needs a kernel of the device's.
        monkeypatch.setattr("transformers.integrations.gguf.utils.MAX_GEMV_ROWS", 0)
    head, embeddings = target.get_output_embeddings(), target.get_input_embeddings()
    assert head.weight.dtype == embeddings.weight.dtype
    assert head.weight.dtype == (torch.uint8 if kept else torch.float32)
    assert num_ids(head) == num_ids(embeddings) == VOCAB_SIZE
    assert compute_dtype(target) == target.dtype == torch.float32
    expected = row_by_row(target, inputs, **GREEDY)
    watcher = Watcher(expected, sometimes_wrong, 3)
    for drafter in (make_speculator(emb_dim=HIDDEN), watcher):
        output = speculate(target, inputs, drafter)
        assert new_tokens(output.sequences, inputs, [NEW] * 3) == expected
    check_states(target, inputs, expected, watcher)
