"""Targets whose weights are in main memory or on a disk between forwards (accelerate)."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import mtp_checkpoints
import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from gemma4_models import gemma4_assistant, gemma4_target
from second_device import FIRST, SECOND, block_names, separate_devices
from test_devices import NEW, mimo, on_first, run, shared_speculator, speculator
from test_lockstep import hybrid
from tiny_models import _target, new_tokens, row_by_row
from transformers import AutoModelForCausalLM, CompileConfig

import hf_specdec
from hf_specdec.modeling.placement import device_of, head_device, is_offloaded, weight_on
from hf_specdec.ranks import run_idle
from hf_specdec.registry import mtp_network

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}
WAYS: dict[str, Callable[[Any, str], Any]] = {
    "cpu": lambda model, folder: cpu_offload(model, "cpu"),
    "disk, layer 0 stays": lambda model, folder: dispatch_model(
        model,
        {name: "cpu" if "layers.0" in name else "disk" for name in block_names(model)},
        main_device="cpu",
        offload_dir=folder,
    ),
}
PAIRS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], dict[str, Any]]] = {
    "mlp": (lambda: copy.deepcopy(_target("gemma3")), speculator, {}),
    "tree": (lambda: copy.deepcopy(_target("llama")), speculator, {"num_tree_nodes": 5}),
    "target's tables": (lambda: copy.deepcopy(_target("llama")), shared_speculator, {}),
    "mimo, some rows of the head": (mimo, mtp_network, {"num_assistant_tokens": 3}),
    "gemma 4": (
        lambda: copy.deepcopy(gemma4_target("31B")),
        gemma4_assistant,
        {"num_assistant_tokens": 3},
    ),
    "lockstep": (lambda: copy.deepcopy(hybrid("qwen3_5_text")), speculator, {}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pair", PAIRS)
def test_the_same_tokens_and_drafts_as_in_memory(pair, way, prompts, tmp_path):
    make, drafter, call = PAIRS[pair]
    target, inputs = make(), prompts(3)
    expected, expected_feed = run(target, drafter(target), inputs, **call)
    assert new_tokens(expected.sequences, inputs, [NEW] * 3) == row_by_row(target, inputs, **GREEDY)
    WAYS[way](target, str(tmp_path))
    assert is_offloaded(target)
    output, feed = run(target, drafter(target), inputs, **call)
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert feed == expected_feed
    assert output.speculation.num_drafts > 0
    # Nothing was left in memory.
    assert target.get_output_embeddings().weight.device.type == "meta"


@pytest.mark.parametrize("name", ["deepseek_v3", "mimo_v2_flash"])
def test_mtp_layers_are_read_for_a_target_on_the_disk(name, prompts, tmp_path):
    whole, inputs = mtp_checkpoints.load(name), prompts(3)
    places = dict.fromkeys(block_names(whole), "disk")
    # transformers wants something that isn't on the disk.
    places["model.rotary_emb"] = "cpu"
    target = mtp_checkpoints.load(name, device_map=places, offload_folder=str(tmp_path))
    assert is_offloaded(target)
    call = {"num_assistant_tokens": 3}
    expected, expected_feed = run(whole, mtp_network(whole), inputs, **call)
    output, feed = run(target, None, inputs, use_mtp=True, **call)
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert feed == expected_feed
    network: Any = mtp_network(target)
    assert network.device.type == "cpu"


def test_offloaded_weights_are_used_where_a_gpu_would_use_them(target, prompts):
    """Weights in main memory, forwards on another device: the head's own device says nothing."""
    target, inputs = copy.deepcopy(target), prompts(3)
    expected, expected_feed = run(target, shared_speculator(target), inputs)
    with separate_devices():
        places: dict[str, Any] = dict.fromkeys(block_names(target), "cpu")
        places |= {"model.layers.0": FIRST, "model.layers.3": SECOND, "model.rotary_emb": FIRST}
        dispatch_model(target, places, main_device=FIRST)
        assert head_device(target) == FIRST
        assistant = shared_speculator(target).to(FIRST)
        output, feed = run(target, assistant, on_first(inputs))
        assert output.sequences.tolist() == expected.sequences.tolist()
        assert feed == expected_feed
        with pytest.raises(ValueError, match=rf"on device cpu, but .* on {FIRST}"):
            run(target, shared_speculator(target), on_first(inputs))


def test_a_forward_that_others_wait_for(target, count_forwards):
    """Its embedding is on the device meta, where no prompt may be."""
    target = cpu_offload(copy.deepcopy(target), "cpu")
    with count_forwards(target) as lengths:
        run_idle(target)
    assert lengths == [1]


def test_a_drafter_is_loaded_in_the_dtype_of_an_offloaded_target(tmp_path, prompts):
    target = copy.deepcopy(_target("llama")).to(torch.bfloat16)
    speculator(target).save_pretrained(tmp_path)
    cpu_offload(target, "cpu")
    hf_specdec.attach(target, {"model": str(tmp_path)})
    attached = target.__dict__[hf_specdec.integration.ATTACHED].assistant
    assert (attached.device.type, attached.dtype) == ("cpu", torch.bfloat16)
    output = target.generate(**prompts(2), **GREEDY, return_dict_in_generate=True)
    assert output.speculation.num_drafts > 0


def test_an_offloaded_drafter_is_refused(target, prompts):
    assistant = cpu_offload(speculator(target), "cpu")
    with pytest.raises(ValueError, match=r"assistant_model is offloaded.*device_map='cpu'"):
        run(target, assistant, prompts(1))


def test_nothing_is_compiled_for_an_offloaded_target(target, prompts, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    target, inputs = copy.deepcopy(target), prompts(2)
    expected = row_by_row(target, inputs, **GREEDY)
    cpu_offload(target, "cpu")
    with caplog.at_level("WARNING"):
        output, _ = run(
            target,
            speculator(target),
            inputs,
            cache_implementation="static",
            compile_config=CompileConfig(),
        )
    assert new_tokens(output.sequences, inputs, [NEW] * 2) == expected
    assert "weights of LlamaForCausalLM are offloaded, and fetched for every forward" in caplog.text


class TestWeightOn:
    def test_a_weight_that_is_there_is_not_copied(self, target):
        head = target.get_output_embeddings()
        assert weight_on(head, torch.device("cpu")) is head.weight

    def test_a_copy_is_made_once_and_anew_when_the_weight_changes(self):
        head = torch.nn.Linear(4, 4)
        with separate_devices():
            first = weight_on(head, FIRST)
            assert weight_on(head, FIRST) is first
            with torch.no_grad():
                head.weight.fill_(3.0)
            assert weight_on(head, FIRST).tolist() == [[3.0] * 4] * 4

    def test_an_offloaded_weight_is_fetched_once(self, target, prompts):
        target = copy.deepcopy(target)
        weight = target.lm_head.weight.detach().clone()
        cpu_offload(target, "cpu")
        fetched = weight_on(target.lm_head, torch.device("cpu"))
        assert torch.equal(fetched, weight)
        # A forward replaces the offloaded parameter.
        target(input_ids=prompts(1)["input_ids"])
        assert weight_on(target.lm_head, torch.device("cpu")) is fetched

    def test_a_module_without_weights(self):
        with torch.device("meta"):
            head = torch.nn.Linear(2, 2)
        assert device_of(head).type == "meta"
        with pytest.raises(ValueError, match="is on device meta and has no weights"):
            weight_on(head, torch.device("cpu"))


def test_loading_with_a_device_map_as_users_do(tmp_path, prompts):
    whole, inputs = _target("llama"), prompts(3)
    whole.save_pretrained(tmp_path / "target")
    places = {name: "disk" if "layers" in name else "cpu" for name in block_names(whole)}
    target = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", device_map=places, offload_folder=str(tmp_path / "offload")
    )
    target.generation_config = copy.deepcopy(whole.generation_config)
    output, _ = run(target, speculator(whole), inputs)
    assert new_tokens(output.sequences, inputs, [NEW] * 3) == row_by_row(whole, inputs, **GREEDY)
