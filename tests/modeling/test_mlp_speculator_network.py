"""The maths of the MLP speculator against numbers of the reference implementation, and its API.

`tests/golden/mlp_speculator_golden.safetensors` holds four small networks with the logits, greedy
drafts and candidates it computed. Every constant of the recurrence shows in those numbers.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from hf_specdec.modeling.mlp_speculator import MLPSpeculatorConfig, MLPSpeculatorPreTrainedModel

GOLDEN = Path(__file__).parent.parent / "golden" / "mlp_speculator_golden.safetensors"
CASES = ["untied", "tied_scaled", "inner_zero", "untied_scaled"]


class Case:
    """One golden network with its inputs and the numbers it must give."""

    def __init__(self, name: str) -> None:
        with safe_open(GOLDEN, "pt") as file:
            self.fields: dict[str, Any] = json.loads(file.metadata()["cases"])[name]
            names = list(file.keys())
            read = {key: file.get_tensor(key) for key in names if key.startswith(f"{name}/")}
        tensors = {key.removeprefix(f"{name}/"): value for key, value in read.items()}
        self.hidden_states: Tensor = tensors["hidden_states"]
        self.input_ids: Tensor = tensors["input_ids"]
        self.logits: Tensor = tensors["logits"]
        self.greedy_draft: Tensor = tensors["greedy_draft"]
        self.candidates: Tensor = tensors["candidates"]
        self.weights = {
            key.removeprefix("weights/"): value
            for key, value in tensors.items()
            if key.startswith("weights/")
        }
        same = ("emb_dim", "inner_dim", "vocab_size", "n_predict", "tie_weights", "scale_input")
        self.config = MLPSpeculatorConfig(
            **{key: self.fields[key] for key in same},
            top_k_tokens_per_head=self.fields["topk"],
            n_candidates=self.fields["n"],
        )
        self.model = MLPSpeculatorPreTrainedModel(self.config).eval()
        self.model.load_state_dict(self.weights)
        # The drafts start from the last position.
        last = self.hidden_states.shape[1] - 1
        self.last_state, self.last_token = self.hidden_states[:, last], self.input_ids[:, last]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def tiny(**fields: Any) -> MLPSpeculatorPreTrainedModel:
    defaults = {"vocab_size": 32, "emb_dim": 12, "inner_dim": 8, "n_predict": 3}
    return MLPSpeculatorPreTrainedModel(MLPSpeculatorConfig(**{**defaults, **fields})).eval()


def inputs(model: MLPSpeculatorPreTrainedModel, batch: int = 2, length: int = 5):
    config = model.config
    hidden_states = torch.randn(batch, length, config.emb_dim)
    input_ids = torch.randint(config.vocab_size, (batch, length + config.n_predict))
    return hidden_states, input_ids


def test_logits_are_those_of_the_reference(case: Case) -> None:
    logits = case.model(case.hidden_states, case.input_ids).logits
    torch.testing.assert_close(logits, case.logits, rtol=0, atol=1e-5)


def test_weights_of_state_and_embedding_are_those_of_the_reference(case: Case) -> None:
    assert case.config.state_weight == pytest.approx(case.fields["state_weight"], abs=1e-12)
    assert case.config.emb_weight == pytest.approx(case.fields["emb_weight"], abs=1e-12)


def test_greedy_draft_is_that_of_the_reference(case: Case) -> None:
    assert torch.equal(case.model.propose(case.last_state, case.last_token), case.greedy_draft)


def test_candidates_are_those_of_the_reference(case: Case) -> None:
    candidates = case.model.propose_candidates(case.last_state, case.last_token)
    assert torch.equal(candidates, case.candidates)


def test_fewer_heads_keep_the_weights_of_the_config(case: Case) -> None:
    for heads in range(1, case.config.n_predict):
        draft = case.model.propose(case.last_state, case.last_token, num_draft_tokens=heads)
        assert torch.equal(draft, case.greedy_draft[:, :heads])
        logits = case.model(case.hidden_states, case.input_ids, num_heads=heads).logits
        torch.testing.assert_close(logits, case.logits[:heads], rtol=0, atol=1e-5)


def test_draft_is_the_argmax_chain_of_teacher_forcing_on_its_own_tokens(case: Case) -> None:
    draft = case.model.propose(case.last_state, case.last_token)
    input_ids = torch.cat([case.last_token.unsqueeze(1), draft[:, :-1]], dim=1)
    logits = case.model(case.last_state.unsqueeze(1), input_ids).logits
    assert torch.equal(logits[:, :, 0].argmax(-1).T, draft)


def test_one_candidate_is_the_jointly_best_and_can_differ_from_the_greedy_draft() -> None:
    differs = False
    for name in CASES:
        case = Case(name)
        best = case.model.propose_candidates(case.last_state, case.last_token, n_candidates=1)
        assert torch.equal(best, case.candidates[:, :1])
        differs |= not torch.equal(best[:, 0], case.greedy_draft)
    assert differs


def test_a_narrow_tree_is_the_greedy_draft(case: Case) -> None:
    for heads in (1, case.config.n_predict):
        draft = case.model.propose_candidates(case.last_state, case.last_token, [1] * heads, 1)
        assert torch.equal(draft[:, 0], case.greedy_draft[:, :heads])


def test_choose_picks_the_token_the_next_head_reads() -> None:
    model = tiny()
    hidden_states, input_ids = inputs(model)
    steps = []

    def smallest(step: int, logits: Tensor, token_ids: Tensor | None) -> Tensor:
        assert token_ids is None
        assert logits.shape == (2, 32)
        steps.append(step)
        return logits.argmin(-1)

    draft = model.propose(hidden_states[:, 0], input_ids[:, 0], choose=smallest)
    chain = torch.cat([input_ids[:, :1], draft[:, :-1]], dim=1)
    logits = model(hidden_states[:, :1], chain).logits
    assert steps == [0, 1, 2]
    assert torch.equal(draft, logits[:, :, 0].argmin(-1).T)


def test_default_draft_makes_no_copy_of_the_logits_in_float32() -> None:
    model = tiny().bfloat16()
    hidden_states, input_ids = inputs(model)
    seen = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.shape[-1:] == (32,):
                seen.append(result.dtype)
            return result

    with Recorder():
        draft = model.propose(hidden_states[:, 0].bfloat16(), input_ids[:, 0])
    assert draft.dtype == torch.int64
    assert set(seen) == {torch.bfloat16}


def test_hidden_states_of_another_dtype_are_read_in_the_speculators() -> None:
    model = tiny().half()
    hidden_states, input_ids = inputs(model)
    assert model(hidden_states.double(), input_ids).logits.dtype == torch.float16


def test_head_i_is_trained_on_the_token_after_the_one_it_reads() -> None:
    model = tiny()
    hidden_states, input_ids = inputs(model)
    labels = input_ids.clone()
    labels[0, 3] = -100
    output = model(hidden_states, input_ids, labels=labels)
    for i in range(3):
        terms = []
        for b in range(2):
            for t in range(5):
                target = labels[b, t + i + 1]
                if target != -100:
                    terms.append(-output.logits[i, b, t].log_softmax(-1)[target])
        torch.testing.assert_close(output.head_losses[i], torch.stack(terms).mean().detach())
    torch.testing.assert_close(output.loss, output.head_losses.sum())


def test_losses_need_no_logits_and_reach_every_weight() -> None:
    model = tiny()
    hidden_states, input_ids = inputs(model)
    output = model(hidden_states, input_ids, labels=input_ids, return_logits=False)
    assert output.logits is None
    assert output.head_losses.shape == (3,)
    output.loss.backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in model.parameters())


def test_labels_without_any_token_give_no_loss_rather_than_nan() -> None:
    model = tiny()
    hidden_states, input_ids = inputs(model)
    output = model(hidden_states, input_ids, labels=torch.full_like(input_ids, -100))
    assert output.loss.item() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden_states": torch.zeros(2, 5, 13)}, "emb_dim=12"),
        ({"hidden_states": torch.zeros(2, 12)}, r"hidden_states must be \[B, N, 12\]"),
        ({"input_ids": torch.zeros(2, 6, dtype=torch.int64)}, "at least 7"),
        ({"input_ids": torch.zeros(3, 8, dtype=torch.int64)}, "B=2"),
        ({"input_ids": torch.zeros(2, 8)}, "integer token ids"),
        ({"labels": torch.zeros(2, 7, dtype=torch.int64)}, r"labels must be \[B=2, at least 8\]"),
        ({"num_heads": 0}, "num_heads=0"),
        ({"num_heads": 4}, "n_predict=3"),
    ],
)
def test_forward_names_the_argument_that_does_not_fit(arguments: dict, message: str) -> None:
    fits = {
        "hidden_states": torch.zeros(2, 5, 12),
        "input_ids": torch.zeros(2, 8, dtype=torch.int64),
    }
    model = tiny()
    model(**fits)
    with pytest.raises(ValueError, match=message):
        model(**{**fits, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden_states": torch.zeros(2, 5, 12)}, r"hidden_states must be \[B, 12\]"),
        ({"input_ids": torch.zeros(3, dtype=torch.int64)}, "B=2"),
        ({"num_draft_tokens": 4}, "num_draft_tokens=4"),
        ({"num_draft_tokens": True}, "num_draft_tokens=True"),
    ],
)
def test_propose_names_the_argument_that_does_not_fit(arguments: dict, message: str) -> None:
    fits = {"hidden_states": torch.zeros(2, 12), "input_ids": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(ValueError, match=message):
        tiny().propose(**{**fits, **arguments})


@pytest.mark.parametrize(
    ("top_k", "n_candidates", "message"),
    [
        ([2, 2, 2, 2], 1, "n_predict=3"),
        ([], 1, "top_k"),
        ([2, 33], 1, "1 to 32"),
        ([2, 2], 5, "4 leaves"),
        ([2, 2], 0, "n_candidates=0"),
    ],
)
def test_candidates_need_a_tree_the_heads_can_grow(top_k, n_candidates, message) -> None:
    arguments = torch.zeros(2, 12), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        tiny().propose_candidates(*arguments, top_k, n_candidates)


def test_initial_weights_have_the_spread_the_weights_of_state_and_embedding_assume() -> None:
    model = tiny(vocab_size=2000, emb_dim=64, inner_dim=100)
    for name, weight in model.named_parameters():
        if ".ln." in name:
            assert torch.equal(weight, torch.full_like(weight, name.endswith("weight")))
        else:
            assert weight.std().item() == pytest.approx(0.1, rel=0.05), name


class TestReducedVocabulary:
    """Heads that cover only some ids draft target ids all the same."""

    IDS = torch.tensor([30, 2, 17, 5, 9])

    def model(self, **fields: Any) -> MLPSpeculatorPreTrainedModel:
        model = tiny(draft_vocab_size=5, **fields)
        model.set_draft_token_ids(self.IDS)
        return model

    def test_drafts_are_those_of_full_heads_with_the_other_ids_barred(self) -> None:
        model, full = self.model(), tiny()
        weights = {k: v for k, v in model.state_dict().items() if "head" not in k}
        weights.pop("speculator.draft_token_ids")
        full.load_state_dict(weights, strict=False)
        with torch.no_grad():
            for i in range(3):
                name = f"speculator.head.{i}.weight"
                full.get_parameter(name)[self.IDS] = model.get_parameter(name)
        barred = torch.ones(32, dtype=torch.bool).index_fill(0, self.IDS, False)
        hidden_states, input_ids = inputs(model)
        arguments = hidden_states[:, 0], input_ids[:, 0]
        expected = full.propose(
            *arguments, choose=lambda i, logits, _: logits.masked_fill(barred, -1e9).argmax(-1)
        )
        assert torch.equal(model.propose(*arguments), expected)
        assert torch.isin(model.propose_candidates(*arguments), self.IDS).all()

    def test_choose_gets_the_ids_and_answers_in_positions(self) -> None:
        hidden_states, input_ids = inputs(model := self.model())
        given: list[Tensor | None] = []

        def second(step: int, logits: Tensor, token_ids: Tensor | None) -> Tensor:
            given.append(token_ids)
            return torch.ones(len(logits), dtype=torch.int64)

        draft = model.propose(hidden_states[:, 0], input_ids[:, 0], choose=second)
        assert all(ids is not None and torch.equal(ids, self.IDS) for ids in given)
        assert torch.equal(draft, torch.full((2, 3), 2))

    def test_labels_are_target_ids_and_those_not_covered_are_left_out(self) -> None:
        hidden_states, input_ids = inputs(model := self.model())
        labels = torch.full_like(input_ids, 31)
        labels[0, 1], labels[1, 2] = 17, 30
        output = model(hidden_states, input_ids, labels=labels)
        first = -output.logits[0, 0, 0].log_softmax(-1)[2]
        second = -output.logits[0, 1, 1].log_softmax(-1)[0]
        torch.testing.assert_close(output.head_losses[0], ((first + second) / 2).detach())

    @pytest.mark.parametrize(
        ("ids", "message"),
        [
            ([1, 2, 3], r"int64 \[3\]"),
            ([1, 2, 3, 4, 4], "4 distinct"),
            ([1, 2, 3, 4, 32], "1 to 32"),
            ([-1, 2, 3, 4, 5], "-1 to 5"),
        ],
    )
    def test_ids_must_be_distinct_ones_of_the_target(self, ids: list[int], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            self.model().set_draft_token_ids(torch.tensor(ids))

    def test_ids_need_a_reduced_vocabulary(self) -> None:
        with pytest.raises(ValueError, match="draft_vocab_size > 0"):
            tiny().set_draft_token_ids(self.IDS)


class TestSharedTargetWeights:
    """A speculator that reads tokens and makes logits with the target's own tables."""

    def target(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        tables = torch.randn(34, 12, dtype=dtype), torch.randn(34, 12, dtype=dtype)
        return torch.nn.Parameter(tables[0]), torch.nn.Parameter(tables[1])

    @pytest.mark.parametrize("draft_vocab_size", [0, 5])
    def test_equals_a_network_with_the_products_as_its_own_tables(self, draft_vocab_size) -> None:
        model = tiny(share_target_weights=True, draft_vocab_size=draft_vocab_size)
        own = tiny(draft_vocab_size=draft_vocab_size)
        embeddings, lm_head = self.target()
        rows = torch.arange(32)
        if draft_vocab_size:
            rows = torch.tensor([30, 2, 17, 5, 9])
            model.set_draft_token_ids(rows)
            own.set_draft_token_ids(rows)
        model.bind_target(embeddings, lm_head)
        own.load_state_dict(
            {k: v for k, v in model.state_dict().items() if "_proj" not in k}, strict=False
        )
        with torch.no_grad():
            for i in range(3):
                emb_proj = model.get_parameter(f"speculator.emb_proj.{i}.weight")
                head_proj = model.get_parameter(f"speculator.head_proj.{i}.weight")
                own.get_parameter(f"speculator.emb.{i}.weight").copy_(embeddings[:32] @ emb_proj.T)
                own.get_parameter(f"speculator.head.{i}.weight").copy_(lm_head[rows] @ head_proj)
        hidden_states, input_ids = inputs(model)
        logits = model(hidden_states, input_ids).logits
        torch.testing.assert_close(logits, own(hidden_states, input_ids).logits)
        arguments = hidden_states[:, 0], input_ids[:, 0]
        assert torch.equal(model.propose(*arguments), own.propose(*arguments))

    def test_borrowed_tables_are_neither_copied_nor_saved_nor_counted_nor_trained(self) -> None:
        model = tiny(share_target_weights=True)
        keys, count = set(model.state_dict()), model.num_parameters()
        embeddings, lm_head = self.target()
        model.bind_target(embeddings, lm_head)
        tables = model.speculator.target_tables
        assert tables is not None
        assert tables.embeddings.data_ptr() == embeddings.data_ptr()
        assert tables.head.data_ptr() == lm_head.data_ptr()
        assert set(model.state_dict()) == keys
        assert model.num_parameters() == count
        hidden_states, input_ids = inputs(model)
        model(hidden_states, input_ids, labels=input_ids).loss.backward()
        assert embeddings.grad is None and lm_head.grad is None
        assert all(weight.grad is not None for weight in model.parameters())

    def test_a_copy_must_be_bound_anew(self) -> None:
        model = tiny(share_target_weights=True)
        model.bind_target(*self.target())
        assert copy.deepcopy(model).speculator.target_tables is None
        assert model.speculator.target_tables is not None

    def test_binding_again_reads_only_a_target_that_changed(self) -> None:
        model = tiny(share_target_weights=True, draft_vocab_size=5).bfloat16()
        embeddings, lm_head = self.target()
        model.bind_target(embeddings, lm_head)
        first = model.speculator.target_tables
        assert first is not None and first.head.dtype == torch.bfloat16
        model.bind_target(embeddings, lm_head)
        assert model.speculator.target_tables is first

        with torch.no_grad():
            lm_head.mul_(2)
        model.bind_target(embeddings, lm_head)
        second = model.speculator.target_tables
        assert second is not None and torch.equal(second.head, first.head * 2)

        model.bind_target(*self.target())
        assert model.speculator.target_tables is not second

    def test_other_draft_ids_need_a_new_bind(self) -> None:
        model = tiny(share_target_weights=True, draft_vocab_size=5)
        model.bind_target(*self.target())
        model.set_draft_token_ids(torch.tensor([30, 2, 17, 5, 9]))
        with pytest.raises(RuntimeError, match="bind_target"):
            model.propose(torch.zeros(1, 12), torch.zeros(1, dtype=torch.int64))

    def test_unbound_or_moved_is_an_error_that_names_bind_target(self) -> None:
        model = tiny(share_target_weights=True)
        hidden_states, input_ids = inputs(model)
        with pytest.raises(RuntimeError, match="bind_target"):
            model(hidden_states, input_ids)
        with pytest.raises(RuntimeError, match="bind_target"):
            model.propose(hidden_states[:, 0], input_ids[:, 0])
        model.bind_target(*self.target())
        model.half()
        with pytest.raises(RuntimeError, match=r"float32 on cpu.*now torch.float16"):
            model.propose(hidden_states[:, 0], input_ids[:, 0])

    def test_tables_of_another_target_are_refused(self) -> None:
        model = tiny(share_target_weights=True)
        good = torch.zeros(34, 12)
        with pytest.raises(ValueError, match=r"input_embeddings_weight must be .*\[34, 13\]"):
            model.bind_target(torch.zeros(34, 13), good)
        with pytest.raises(ValueError, match="lm_head_weight must be .*vocab_size=32"):
            model.bind_target(good, torch.zeros(31, 12))
        with pytest.raises(ValueError, match="int8"):
            model.bind_target(good, good.to(torch.int8))
        with pytest.raises(ValueError, match="meta"):
            model.bind_target(good.to("meta"), good)
        with pytest.raises(ValueError, match="share_target_weights=True"):
            tiny().bind_target(good, good)


def test_transformers_bookkeeping_finds_or_misses_the_embeddings_without_a_crash() -> None:
    assert tiny().get_input_embeddings().weight.shape == (32, 8)  # type: ignore[union-attr]
    assert tiny(share_target_weights=True).get_input_embeddings() is None
    assert tiny().get_output_embeddings() is None
    assert not tiny().can_generate()
    with pytest.raises(NotImplementedError, match="target's"):
        tiny().resize_token_embeddings(64)
