"""Static shapes: the tokens of plain ``generate``, and nothing compiled twice."""

import gc
import threading
import weakref
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from compiled_calls import Graphs, Recordings, small_target
from gemma4_models import gemma4_target
from operations import Operations
from tiny_models import ScriptedDrafter, new_tokens, row_by_row, sometimes_wrong
from transformers import DynamicCache

import hf_specdec
from hf_specdec import static_shapes
from hf_specdec.call import compile_options
from hf_specdec.static_shapes import (
    CompileChoice,
    StaticShapes,
    Workspace,
    bucket,
    kept_for,
    state_of,
)

NEW = 24
_TWO_FORMS: tuple[dict[str, Any], ...] = ({}, {"return_dict_in_generate": False})


@pytest.fixture(scope="module")
def small():
    """One target for all tests that leave it as it is; what is compiled for it stays."""
    return small_target()


@pytest.fixture(scope="module")
def graphs():
    return Graphs()


def text_of(model, inputs, num_new=NEW, **kwargs):
    return row_by_row(model, inputs, max_new_tokens=num_new, do_sample=False, **kwargs)


def call(model, inputs, drafter, graphs, num_new=NEW, **kwargs):
    return model.generate(
        **inputs,
        assistant_model=drafter,
        return_dict_in_generate=True,
        **{"do_sample": False, "max_new_tokens": num_new, **graphs.arguments, **kwargs},
    )


@pytest.mark.parametrize("family", ["gemma2", "gpt_bigcode", "granite", "mistral", "qwen2"])
def test_families(family, make_target, prompts):
    # Rings of 8 + 4 slots wrap around several times here.
    target, inputs, graphs = make_target(family), prompts(1), Graphs()
    expected = text_of(target, inputs)
    for wrong in (sometimes_wrong, lambda row, index: True):
        output = call(target, inputs, ScriptedDrafter(expected, wrong, 3), graphs)
        assert new_tokens(output.sequences, inputs, [NEW]) == expected
    assert len(graphs) == 1
    hf_specdec.release_compiled(target)


def test_layers_that_share_keys(prompts):
    target, inputs, graphs = gemma4_target("E2B"), prompts(1), Graphs()
    expected = text_of(target, inputs)
    output = call(target, inputs, ScriptedDrafter(expected, sometimes_wrong, 3), graphs)
    assert new_tokens(output.sequences, inputs, [NEW]) == expected
    assert len(graphs) == 1
    hf_specdec.release_compiled(target)


class TestBatches:
    def test_a_batch_shrinks_through_the_buckets(self, small, graphs, prompts):
        inputs = prompts(5)
        texts = text_of(small, inputs, 40)
        # The id that ends the most rows, at different times.
        eos = max(range(3, 64), key=lambda t: len({r.index(t) for r in texts if t in r}))
        expected = [r[: r.index(eos) + 1] if eos in r else r for r in texts]
        lengths = [len(r) for r in expected]
        assert len(set(lengths)) >= 3
        for wrong in (sometimes_wrong, lambda row, index: False):
            drafter = ScriptedDrafter(texts, wrong, 3)
            for kwargs in _TWO_FORMS:
                output = small.generate(
                    **inputs,
                    assistant_model=drafter,
                    **{
                        "max_new_tokens": 40,
                        "do_sample": False,
                        "eos_token_id": eos,
                        "return_dict_in_generate": True,
                        **graphs.arguments,
                        **kwargs,
                    },
                )
                sequences = output if kwargs else output.sequences
                assert new_tokens(sequences, inputs, lengths) == expected

    def test_nothing_is_compiled_again(self, small, graphs, prompts):
        warm = prompts(3)
        call(small, warm, ScriptedDrafter(text_of(small, warm), sometimes_wrong, 3), graphs)
        before = len(graphs)
        unique = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        torch._dynamo.utils.counters["graph_break"].clear()
        for rows, num_new, shift in ((4, 24, 0), (3, 9, 5), (1, 31, 2), (2, 1, 1)):
            inputs = prompts(rows)
            inputs["input_ids"] = torch.where(
                inputs["attention_mask"].bool(), (inputs["input_ids"] + shift) % 61 + 3, 0
            )
            expected = text_of(small, inputs, num_new)
            output = call(
                small, inputs, ScriptedDrafter(expected, sometimes_wrong, 3), graphs, num_new
            )
            assert new_tokens(output.sequences, inputs, [num_new] * rows) == expected
        assert len(graphs) == before
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == unique
        assert not torch._dynamo.utils.counters["graph_break"]

    def test_functions_share_no_limit(self, small, prompts):
        graphs = Graphs()
        inputs = prompts(1)
        with torch._dynamo.config.patch(recompile_limit=1):
            for k in (1, 2):
                drafter = ScriptedDrafter(text_of(small, inputs, 6), sometimes_wrong, k)
                call(small, inputs, drafter, graphs, 6)
        assert len(graphs) == 2

    def test_holes_in_the_mask(self, small, graphs, prompts):
        inputs = prompts(3)
        inputs["attention_mask"][0, 7] = inputs["attention_mask"][2, 3:5] = 0
        arguments = {**inputs, "max_new_tokens": 12, "do_sample": False}
        plain = small.generate(**arguments)
        rows = plain[:, inputs["input_ids"].shape[1] :].tolist()
        output = call(small, inputs, ScriptedDrafter(rows, sometimes_wrong, 3), graphs, 12)
        assert output.sequences.tolist() == plain.tolist()

    def test_sampled_as_without_drafts(self, small, graphs, prompts):
        inputs = prompts(3)
        arguments = {"do_sample": True, "top_k": 20, "row_seeds": [5, 6, 7]}
        nothing = ScriptedDrafter([[0]] * 3)
        expected = small.generate(
            **inputs,
            assistant_model=nothing,
            num_assistant_tokens=0,
            max_new_tokens=NEW,
            **arguments,
        )
        rows = expected[:, inputs["input_ids"].shape[1] :].tolist()
        drafter = ScriptedDrafter(rows, sometimes_wrong, 3)
        output = call(small, inputs, drafter, graphs, **arguments)
        assert output.sequences.tolist() == expected.tolist()
        assert output.speculation.num_accepted_tokens > 0


class TestWhatIsLeft:
    def test_scores_and_logits(self, small, graphs, prompts):
        inputs = prompts(2)
        drafter = ScriptedDrafter(text_of(small, inputs), sometimes_wrong, 3)
        arguments = {"output_logits": True, "output_scores": True}
        output = call(small, inputs, drafter, graphs, **arguments)
        plain = small.generate(
            **inputs, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, **arguments
        )
        for name in ("logits", "scores"):
            for ours, theirs in zip(output[name], plain[name], strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)

    def test_the_cache_goes_on(self, small, graphs, prompts):
        # Rows that ended early are fillers for a while, and are handed out as they were.
        inputs = prompts(4)
        texts = text_of(small, inputs)
        eos = texts[1][4]
        outputs = []
        nothing: dict[str, Any] = {}
        for arguments in (graphs.arguments, nothing):
            cache = DynamicCache(config=small.config)
            drafter = ScriptedDrafter(texts, sometimes_wrong, 3)
            outputs.append(
                small.generate(
                    **inputs,
                    assistant_model=drafter,
                    cache=cache,
                    eos_token_id=eos,
                    max_new_tokens=NEW,
                    do_sample=False,
                    return_dict_in_generate=True,
                    **arguments,
                )
            )
        ours, ordinary = outputs
        assert ours.sequences.tolist() == ordinary.sequences.tolist()
        width = inputs["input_ids"].shape[1]
        lengths = [width + r.num_new_tokens - 1 for r in ours.speculation.rows]
        assert len(set(lengths)) > 1
        padding = (inputs["attention_mask"] == 0).sum(1).tolist()
        for mine, other in zip(ours.cache.layers, ordinary.cache.layers, strict=True):
            for row, (start, end) in enumerate(zip(padding, lengths, strict=True)):
                for name in ("keys", "values"):
                    torch.testing.assert_close(
                        getattr(mine, name)[row, :, start:end],
                        getattr(other, name)[row, :, start:end],
                        atol=1e-4,
                        rtol=1e-4,
                    )
        before = [layer.keys.clone() for layer in ours.cache.layers]
        call(small, prompts(4), ScriptedDrafter(texts, num_draft_tokens=3), graphs)
        for layer, keys in zip(ours.cache.layers, before, strict=True):
            assert torch.equal(layer.keys, keys), "buffers serve the next call, a cache is its own"

    def test_a_target_and_what_is_kept_for_it_go(self, prompts):
        target, inputs, graphs = small_target(), prompts(1), Graphs()
        drafter = ScriptedDrafter(text_of(target, inputs, 4), num_draft_tokens=1)
        call(target, inputs, drafter, graphs, 4)
        work = weakref.ref(kept_for(target)._free[0])
        gone = weakref.ref(target)
        del target
        gc.collect()
        assert gone() is None
        assert work() is None

    def test_release(self, prompts):
        target, inputs, graphs = small_target(num_hidden_layers=1), prompts(1), Graphs()
        expected = text_of(target, inputs, 6)
        for _ in range(2):
            drafter = ScriptedDrafter(expected, num_draft_tokens=1)
            output = call(target, inputs, drafter, graphs, 6)
            assert new_tokens(output.sequences, inputs, [6]) == expected
            work = weakref.ref(kept_for(target)._free[0])
            hf_specdec.release_compiled(target)
            gc.collect()
            assert work() is None
        assert len(graphs) == 2
        hf_specdec.release_compiled(target)

    def test_after_an_error_in_the_middle(self, small, graphs, prompts):
        inputs = prompts(3)
        expected = text_of(small, inputs)

        def interrupt(input_ids, scores, **kwargs):
            if input_ids.shape[1] > 20:
                raise KeyboardInterrupt
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        drafter = ScriptedDrafter(expected, sometimes_wrong, 3)
        with pytest.raises(KeyboardInterrupt):
            call(small, inputs, drafter, graphs, stopping_criteria=[interrupt])
        head = small.get_output_embeddings()
        assert not head._forward_pre_hooks
        assert small.config._attn_implementation == "sdpa"
        output = call(small, inputs, drafter, graphs)
        assert new_tokens(output.sequences, inputs, [NEW] * 3) == expected


class TestSurroundings:
    def test_nan_of_an_earlier_call(self, small, graphs, prompts):
        inputs = prompts(1)
        expected = text_of(small, inputs)
        for work in kept_for(small)._free:
            for tensor in work.tensors.values():
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))
        output = call(small, inputs, ScriptedDrafter(expected, sometimes_wrong, 3), graphs)
        assert new_tokens(output.sequences, inputs, [NEW]) == expected

    def test_inference_mode_in_turns_with_no_grad(self, small, graphs, prompts):
        inputs = prompts(1)
        expected = text_of(small, inputs)
        call(small, inputs, ScriptedDrafter(expected, num_draft_tokens=3), graphs)
        before = len(graphs)
        for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
            with mode():
                output = call(small, inputs, ScriptedDrafter(expected, num_draft_tokens=3), graphs)
            assert new_tokens(output.sequences, inputs, [NEW]) == expected
        assert len(graphs) == before

    def test_two_threads(self, small, graphs, prompts):
        inputs = [prompts(1), {n: t[1:2] for n, t in prompts(2).items()}]
        expected = [text_of(small, i) for i in inputs]
        call(small, inputs[0], ScriptedDrafter(expected[0], num_draft_tokens=3), graphs)
        found: list = [None, None]

        def run(i):
            for _ in range(3):
                drafter = ScriptedDrafter(expected[i], sometimes_wrong, 3)
                output = call(small, inputs[i], drafter, graphs)
                found[i] = new_tokens(output.sequences, inputs[i], [NEW])

        threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == expected

    def test_one_read_a_step_on_the_host(self, small, graphs, prompts, monkeypatch):
        inputs = prompts(2)
        expected = text_of(small, inputs)
        call(small, inputs, ScriptedDrafter(expected, num_draft_tokens=3), graphs)
        draft = torch.full((2, 3), 5)

        class Constant(ScriptedDrafter):
            def observe(self, step):
                pass

            def propose(self, token_ids, num_draft_tokens, pick=None):
                return draft[: len(token_ids), :num_draft_tokens]

        reads = []
        for name in ("cpu", "tolist", "item", "__bool__", "__int__", "numpy", "nonzero"):
            original = getattr(torch.Tensor, name)

            def watched(self, *args, name=name, original=original, **kwargs):
                reads.append(name)
                return original(self, *args, **kwargs)

            monkeypatch.setattr(torch.Tensor, name, watched)
        steps = []
        decoder = hf_specdec.decoding.SpeculativeDecoder
        original_step = decoder._step

        def step(self):
            reads.clear()
            # What is compiled is one graph without such an operator, or an error.
            with monkeypatch.context() as inner, Operations() as operations:
                run = static_shapes.Workspace.run

                def outside(*args, **kwargs):
                    with torch.utils._python_dispatch._disable_current_modes():
                        return run(*args, **kwargs)

                inner.setattr(static_shapes.Workspace, "run", outside)
                original_step(self)
            names = operations.names
            assert not [n for n in names if "_local_scalar" in n or "nonzero" in n], names
            if len(self._host_rows) == 2:
                # The copy to the host, and its numbers.
                assert reads == ["cpu", "tolist"]
                steps.append(1)

        monkeypatch.setattr(decoder, "_step", step)
        call(small, inputs, Constant(expected, num_draft_tokens=3), graphs)
        assert len(steps) > 5


class TestRecordings:
    """CUDA graphs, imitated: fixed addresses, and outputs that the next replay overwrites."""

    @pytest.fixture
    def recordings(self, monkeypatch):
        recordings, graphs = Recordings(), Graphs()
        choice = CompileChoice(backend=graphs, fullgraph=True, graphs=True)
        monkeypatch.setattr(static_shapes, "record", recordings.record)
        monkeypatch.setattr(compile_options, "_choice", lambda *_: choice)
        return recordings

    def test_the_same_tokens(self, recordings, prompts, make_speculator, graphs):
        target, speculator = small_target(), make_speculator(n_predict=3)
        for rows, num_new in ((3, 24), (2, 15), (3, 24)):
            inputs = prompts(rows)
            expected = text_of(target, inputs, num_new)
            for drafter in (speculator, ScriptedDrafter(expected, sometimes_wrong, 3)):
                output = call(target, inputs, drafter, graphs, num_new, output_logits=True)
                assert new_tokens(output.sequences, inputs, [num_new] * rows) == expected
                # Logits that are kept are not those of a later step.
                best = torch.stack(output.logits, dim=1).argmax(-1)
                assert best.tolist() == expected
        assert 0 < recordings.count <= 6
        assert recordings.replays > 40

    def test_a_model_that_has_changed_is_recorded_again(self, recordings, prompts, graphs):
        target, inputs = small_target(num_hidden_layers=1), prompts(1)

        def run():
            expected = text_of(target, inputs, 8)
            drafter = ScriptedDrafter(expected, num_draft_tokens=2)
            output = call(target, inputs, drafter, graphs, 8)
            assert new_tokens(output.sequences, inputs, [8]) == expected
            return expected

        first = run()
        run()
        assert recordings.count == 1
        norm = target.model.norm
        norm.weight = torch.nn.Parameter(-2.0 * norm.weight.detach())
        assert run() != first
        assert recordings.count == 2

    def test_larger_batches_move_to_larger_buffers(self, recordings, prompts, graphs):
        target = small_target(num_hidden_layers=1)
        for rows in (1, 2, 1):
            inputs = prompts(rows)
            expected = text_of(target, inputs, 8)
            drafter = ScriptedDrafter(expected, num_draft_tokens=2)
            output = call(target, inputs, drafter, graphs, 8)
            assert new_tokens(output.sequences, inputs, [8] * rows) == expected
        assert [work.rows for work in kept_for(target)._free] == [2]


class FakeCuda:
    """The calls of `record` on ``torch.cuda``, in order."""

    def __init__(self, monkeypatch, error=None):
        self.calls: list[str] = []
        this = self

        class Stream:
            def __init__(self, name="side"):
                self.name = name

            def wait_stream(self, other):
                this.calls.append(f"{self.name} waits for {other.name}")

        class Graph:
            def replay(self):
                this.calls.append("replay")

        @contextmanager
        def block(name):
            this.calls.append(name)
            yield
            this.calls.append(f"end of {name}")
            if name.startswith("capture") and error is not None:
                raise error

        fakes = {
            "Stream": Stream,
            "current_stream": lambda: Stream("current"),
            "CUDAGraph": Graph,
            "device": lambda device: block(f"device {device.index}"),
            "stream": lambda stream: block(f"stream {stream.name}"),
            "graph": lambda graph, pool, stream, capture_error_mode: block(
                f"capture {pool} {stream.name} {capture_error_mode}"
            ),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)


class TestRecord:
    def test_runs_first_then_a_capture_that_computes_nothing(self, monkeypatch):
        cuda = FakeCuda(monkeypatch)

        def function():
            cuda.calls.append("run")
            return (torch.ones(2),)

        recording = static_shapes.record(function, lambda: "pool", torch.device("cuda", 1))
        recording.replay()
        assert cuda.calls == [
            "device 1",
            "side waits for current",
            "stream side",
            "run",
            "run",
            "end of stream side",
            "current waits for side",
            "capture pool side thread_local",
            "run",
            "end of capture pool side thread_local",
            "end of device 1",
            "replay",
        ]
        assert len(recording.outputs) == 1

    def test_what_a_graph_cannot_hold(self, monkeypatch):
        FakeCuda(monkeypatch, RuntimeError("operation not permitted when stream is capturing"))
        match = r"can't be recorded as a CUDA graph \(operation not.*mode='default'"
        with pytest.raises(RuntimeError, match=match):
            static_shapes.record(tuple, lambda: "pool", torch.device("cuda", 0))
        FakeCuda(monkeypatch, torch.OutOfMemoryError("out of memory"))
        with pytest.raises(torch.OutOfMemoryError):
            static_shapes.record(tuple, lambda: "pool", torch.device("cuda", 0))


def test_what_a_recording_depends_on():
    model = small_target(num_hidden_layers=1)
    layer = model.model.layers[0].mlp
    layer.scaling = {"default": 1.0}
    seen = [state_of(model)]
    assert state_of(model) == seen[0]

    def changed():
        seen.append(state_of(model))
        return len(set(map(repr, seen))) == len(seen)

    layer.scaling["default"] = 2.0
    assert changed()
    model.train()
    assert changed()
    layer.register_forward_hook(lambda *_: None)
    assert changed()
    model.config.rms_norm_eps = 0.5
    assert changed()
    layer.up_proj = torch.nn.Linear(32, 48, bias=False)
    assert changed()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    assert changed()


def test_workspaces_are_used_by_one_call_at_a_time():
    shapes = StaticShapes()
    first = shapes.borrow("a", 2)
    assert shapes.borrow("a", 2) is not first
    shapes.give_back(first)
    assert shapes.borrow("b", 2) is not first
    assert shapes.borrow("a", 1) is first
    shapes.give_back(first)
    # Too small: the larger one takes its place.
    assert shapes.borrow("a", 4).rows == 4
    assert shapes.borrow("a", 2) is not first
    assert [bucket(n) for n in (1, 2, 3, 5, 8, 9)] == [1, 2, 4, 8, 8, 16]


def test_views_are_made_once_and_again_for_a_replaced_tensor():
    work, asked = Workspace("a", 4), []

    def tensor(width):
        return work.tensor("states", (4, width), torch.float32, torch.device("cpu"))

    def views():
        asked.append(1)
        return tensor(3)[:2], [None]

    def function(states, nothing):
        assert nothing == [None]
        states += 1
        return (states.clone(),)

    tensor(3)[0] = 5
    for count in (6, 7):
        (output,) = work.run("key", function, views, False)
        assert output.tolist() == [[count] * 3, [count - 5] * 3]
        assert tensor(3)[0].tolist() == [count] * 3
    assert len(asked) == 1
    work.run("another", function, views, False)
    assert len(asked) == 2
    # One of another shape, and the first one again: at another address.
    tensor(2)
    (output,) = work.run("key", function, views, False)
    assert output.tolist() == tensor(3)[:2].tolist() == [[1] * 3] * 2
