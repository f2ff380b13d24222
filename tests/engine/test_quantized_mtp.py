"""MTP layers of quantized targets: which dtype they have, and the target's own texts."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import mtp_checkpoints
import pytest
import test_mtp_families as families
import torch
from quantized_models import config_of
from safetensors.torch import load_file
from test_mtp import tiny_config
from test_mtp_families import copy_of, rewrite
from tiny_models import PAD, new_tokens, row_by_row
from transformers.models.auto import AutoModelForCausalLM

from hf_specdec.drafters import MTPDrafter
from hf_specdec.modeling.mimo import MiMoForCausalLM
from hf_specdec.modeling.mtp import checkpoint_mtp, load_mtp
from hf_specdec.registry import mtp_network

NEW = 12
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}
# One of each library whose head is quantized as well.
HEADS = ["bnb-fp4-head", "torchao-int8-head", "quanto-int8-head"]


@functools.cache
def mimo_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="mimo"))
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = MiMoForCausalLM(tiny_config(hidden_size=64, intermediate_size=64))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    model.save_pretrained(folder)
    return folder


def check_both(target: Any) -> Any:
    """Greedy texts as plain generate's row by row, sampled ones as without drafts."""
    inputs, network = families.batch(3), mtp_network(target)
    expected = row_by_row(target, inputs, **GREEDY)
    output = target.generate(
        **inputs, **GREEDY, assistant_model=network, return_dict_in_generate=True
    )
    assert new_tokens(output.sequences, inputs, [NEW] * 3) == expected
    assert output.speculation.num_draft_tokens > 0
    common = {"do_sample": True, "max_new_tokens": 8, "row_seeds": [3, 1, 4]}
    slow, fast = (
        target.generate(**inputs, **common, assistant_model=network, num_assistant_tokens=k)
        for k in (0, 2)
    )
    assert slow.tolist() == fast.tolist()
    return network


class Notes(MTPDrafter):
    """Keeps what it drafts."""

    def propose(self, token_ids, num_draft_tokens, pick=None):
        draft = super().propose(token_ids, num_draft_tokens, pick)
        self.drafts = [*getattr(self, "drafts", []), *draft.flatten().tolist()]
        return draft


@pytest.mark.parametrize("name", HEADS)
class TestLayersOfTheTargetItself:
    def test_are_quantized_with_it(self, name):
        target: Any = AutoModelForCausalLM.from_pretrained(
            mimo_folder(), dtype=torch.float32, quantization_config=config_of(name)
        )
        layer = target.model.mtp_layers[0]
        assert type(layer.input_proj.weight) is type(target.lm_head.weight)
        assert type(layer.input_proj.weight) is not torch.nn.Parameter
        check_both(target.eval())

    def test_draft_a_part_of_the_vocabulary(self, name):
        """Of a quantized head no rows are gathered: the drafts are those of the gathered ones."""
        target: Any = AutoModelForCausalLM.from_pretrained(
            mimo_folder(), dtype=torch.float32, quantization_config=config_of(name)
        ).eval()
        target.config.mtp_draft_token_ids = ids = list(range(3, 64, 2))
        network = check_both(target)
        with pytest.raises(ValueError, match="lm_head is quantized, so its rows can't be read"):
            _ = network.head_weight
        drafter = Notes(network)
        target.generate(**families.batch(3), **GREEDY, assistant_model=drafter)
        assert set(drafter.drafts) <= set(ids) and len(set(drafter.drafts)) > 3
        state = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
        expected = target.lm_head(state)[:, ids]
        assert torch.equal(network.logits(state), expected)


@pytest.mark.parametrize("name", HEADS)
def test_layers_out_of_the_checkpoint_stay_in_full_precision(name, monkeypatch):
    target = mtp_checkpoints.load("glm4_moe", quantization_config=config_of(name))
    network = check_both(target)
    exact = load_mtp(families.target_of("glm4_moe"))
    assert network.dtype == torch.float32
    for ours, theirs in zip(network.parameters(), exact.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    # What they draft is what a plain run of the same modules says behind this target's states.
    monkeypatch.setattr(families, "target_of", lambda _name: target)
    families.check_drafts("glm4_moe", num_assistant_tokens=3)


def test_a_packed_embedding_does_not_give_the_dtype():
    target = mtp_checkpoints.load("glm4_moe")
    embeddings = target.get_input_embeddings()
    original = embeddings.weight
    network = load_mtp(target)
    embeddings.weight = torch.nn.Parameter(original.to(torch.uint8), requires_grad=False)
    assert load_mtp(target).dtype == torch.float32
    network.follow_target()
    assert network.dtype == torch.float32


class TestQuantizedInTheCheckpoint:
    KEY = "model.layers.3.self_attn.o_proj.weight"

    def change(self, folder: Path, weight: torch.Tensor, **more: torch.Tensor) -> Any:
        copied = copy_of("deepseek_v3", folder)
        shard = copied / "model-00002-of-00002.safetensors"
        state = load_file(shard)
        state[self.KEY] = weight
        state.update({f"{self.KEY}_{name}": tensor for name, tensor in more.items()})
        rewrite(copied, shard, state)
        return AutoModelForCausalLM.from_pretrained(copied, dtype=torch.float32)

    @pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
    def test_in_a_way_that_is_not_known(self, dtype, tmp_path):
        shape = families.target_of("deepseek_v3").model.layers[-1].self_attn.o_proj.weight.shape
        target = self.change(tmp_path, torch.ones(shape).to(dtype), scale=torch.ones(shape[0], 1))
        with pytest.raises(ValueError, match=rf"o_proj\.weight' as {dtype}"):
            load_mtp(target)

    def test_in_blocks_of_another_size(self, tmp_path):
        shape = families.target_of("deepseek_v3").model.layers[-1].self_attn.o_proj.weight.shape
        factors = torch.arange(1.0, 1 + (shape[0] // 16) * (shape[1] // 16)).view(
            shape[0] // 16, shape[1] // 16
        )
        target = self.change(tmp_path, torch.ones(shape).to(torch.float8_e4m3fn), scale_inv=factors)
        with pytest.raises(ValueError, match=r"must be one factor for each block of \(128, 128\)"):
            load_mtp(target)
        target.config.quantization_config = {"quant_method": "fp8", "weight_block_size": [16, 16]}
        blocks: Any = load_mtp(target).blocks
        found = blocks[0][0].self_attn.o_proj.weight
        expected = factors.repeat_interleave(16, 0).repeat_interleave(16, 1)
        assert torch.equal(found, expected)


def test_the_block_size_is_the_configs():
    assert checkpoint_mtp._block_size(families.target_of("deepseek_v3")) == (128, 128)
