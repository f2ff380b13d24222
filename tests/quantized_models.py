"""A tiny target quantized in every way that a CPU can run, and how equal its texts can be."""

import functools
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tiny_models import EOS, PAD, VOCAB_SIZE
from tiny_pairs import make_tokenizer
from transformers import (
    BitsAndBytesConfig,
    FineGrainedFP8Config,
    LlamaConfig,
    QuantoConfig,
    TorchAoConfig,
)
from transformers.models.auto import AutoModelForCausalLM

from hf_specdec.agreement import explain_difference

HIDDEN = 64
# No name of a layer: nothing is left out of the quantization, not even the head.
_ALL_LAYERS = ["-"]
Equality = Literal["exact", "rounded", "mixed"]


@dataclass(frozen=True)
class Kind:
    """A way to quantize.

    Attributes:
        library: that it needs.
        make: a transformers config from that library's module.
        equality: ``"exact"``: weights alone are quantized. ``"rounded"``: so is the input of a
            layer, each token by itself, and a last bit of it can become a step of 8 bits.
            ``"mixed"``: how a token is quantized depends on the others of the forward.
    """

    library: str
    make: Callable[[Any], Any]
    equality: Equality = "exact"


def _bnb(**fields: Any) -> Callable[[Any], Any]:
    return lambda _module: BitsAndBytesConfig(**fields)


def _bnb4(**fields: Any) -> Callable[[Any], Any]:
    # Quantized in 4 bits, computed in the target's own dtype.
    return _bnb(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, **fields)


def _ao(make: Callable[[Any], Any], **fields: Any) -> Callable[[Any], Any]:
    return lambda ao: TorchAoConfig(quant_type=make(ao), **fields)


# Newer than torch's own stubs.
_INT4: Any = vars(torch)["int4"]


def _ao_4_bits(ao: Any) -> dict[str, Any]:
    return {"weight_dtype": _INT4, "granularity": ao.PerGroup(32)}


_AO_HEAD = {"include_input_output_embeddings": True, "modules_to_not_convert": []}
KINDS: dict[str, Kind] = {
    "bnb-nf4": Kind(
        "bitsandbytes", _bnb4(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    ),
    "bnb-fp4-head": Kind("bitsandbytes", _bnb4(llm_int8_skip_modules=_ALL_LAYERS)),
    "bnb-int8": Kind("bitsandbytes", _bnb(load_in_8bit=True), "mixed"),
    "bnb-int8-no-outliers-head": Kind(
        "bitsandbytes",
        _bnb(load_in_8bit=True, llm_int8_threshold=0.0, llm_int8_skip_modules=_ALL_LAYERS),
        "rounded",
    ),
    "torchao-int8-head": Kind("torchao", _ao(lambda ao: ao.Int8WeightOnlyConfig(), **_AO_HEAD)),
    "torchao-int4": Kind("torchao", _ao(lambda ao: ao.IntxWeightOnlyConfig(**_ao_4_bits(ao)))),
    "torchao-float8": Kind("torchao", _ao(lambda ao: ao.Float8WeightOnlyConfig())),
    "torchao-int8-dynamic": Kind(
        "torchao", _ao(lambda ao: ao.Int8DynamicActivationInt8WeightConfig()), "rounded"
    ),
    "torchao-int4-dynamic": Kind(
        "torchao",
        _ao(
            lambda ao: ao.Int8DynamicActivationIntxWeightConfig(
                weight_dtype=_INT4, weight_granularity=ao.PerGroup(32)
            )
        ),
        "rounded",
    ),
    "torchao-int8-per-tensor": Kind(
        "torchao",
        _ao(lambda ao: ao.Int8DynamicActivationInt8WeightConfig(granularity=ao.PerTensor())),
        "mixed",
    ),
    "quanto-int8-head": Kind(
        "optimum.quanto",
        lambda _module: QuantoConfig(weights="int8", modules_to_not_convert=_ALL_LAYERS),
    ),
    "quanto-int4": Kind("optimum.quanto", lambda _module: QuantoConfig(weights="int4")),
    "quanto-float8": Kind("optimum.quanto", lambda _module: QuantoConfig(weights="float8")),
    "fp8-dequantized": Kind(
        "torch",
        lambda _module: FineGrainedFP8Config(weight_block_size=(32, 32), dequantize=True),
    ),
}


def of_equality(*wanted: Equality) -> list[str]:
    """Names of kinds."""
    return [name for name, kind in KINDS.items() if kind.equality in wanted]


def config_of(name: str) -> Any:
    """The ``quantization_config`` of a kind; skips the test where its library has no wheel."""
    kind = KINDS[name]
    if kind.library == "bitsandbytes" and sys.platform != "linux":
        pytest.skip("bitsandbytes is tested on Linux")
    __import__(kind.library)
    module = sys.modules[kind.library]
    if kind.library == "optimum.quanto":
        _keep_quanto_from_compiling()
    if kind.library == "torchao":
        import torchao.quantization as module  # type: ignore[no-redef]
    return kind.make(module)


def _keep_quanto_from_compiling() -> None:
    """Unpack in torch what quanto would compile a C++ function for, a minute at its first use."""

    def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
        return torch.cat([packed >> shift & 2**bits - 1 for shift in range(0, 8, bits)])

    extension = import_module("optimum.quanto.library.extensions").get_extension("quanto_cpp")
    extension._lib = SimpleNamespace(unpack=unpack)


@functools.cache
def plain_folder() -> Path:
    """A float32 Llama with its tokenizer, whose layers 4-bit groups fit in."""
    folder = Path(tempfile.mkdtemp(prefix="quantized"))
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=HIDDEN, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        bos_token_id=1, eos_token_id=EOS, pad_token_id=PAD, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model: Any = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@functools.cache
def quantized(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The tiny Llama quantized, as a user loads it."""
    target = AutoModelForCausalLM.from_pretrained(
        plain_folder(), dtype=dtype, quantization_config=config_of(name)
    )
    return target.eval()


def make_prompts(num_rows: int) -> dict[str, torch.Tensor]:
    """Left-padded prompts of different lengths; the first rows are the same for every number."""
    generator = torch.Generator().manual_seed(11)
    lengths = [9, 5, 13][:num_rows]
    ids = torch.full((num_rows, max(lengths)), PAD)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.randint(3, VOCAB_SIZE, (length,), generator=generator)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def assert_same_or_near_tie(
    target: Any,
    inputs: dict[str, torch.Tensor],
    rows: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    equality: Equality,
) -> None:
    """Equal, or where inputs are quantized apart at a near-tie alone."""
    if equality == "exact":
        assert rows == expected
        return
    for i, (row, other) in enumerate(zip(rows, expected, strict=True)):
        prompt = inputs["input_ids"][i][inputs["attention_mask"][i].bool()][None]
        difference = explain_difference(target, prompt, other, row)
        assert difference is None or difference.near_tie, f"row {i}: {difference}"


def write_gguf(path: Path, quantization: str) -> Path:
    """A Llama of 2 layers in a GGUF file, tokens, head and layers in blocks of ``quantization``."""
    import gguf
    from gguf.quants import quantize

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(2)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB_SIZE)
    random = np.random.default_rng(5)
    kind = getattr(gguf.GGMLQuantizationType, quantization)

    def add(name: str, rows: int, columns: int) -> None:
        table = random.normal(0, 0.3, (rows, columns)).astype(np.float32)
        writer.add_tensor(name, quantize(table, kind), raw_dtype=kind)

    add("token_embd.weight", VOCAB_SIZE, HIDDEN)
    add("output.weight", VOCAB_SIZE, HIDDEN)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for i in range(2):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{norm}.weight", np.ones(HIDDEN, np.float32))
        for part, rows in (("attn_q", 64), ("attn_k", 32), ("attn_v", 32), ("attn_output", 64)):
            add(f"blk.{i}.{part}.weight", rows, HIDDEN)
        add(f"blk.{i}.ffn_gate.weight", 128, HIDDEN)
        add(f"blk.{i}.ffn_up.weight", 128, HIDDEN)
        add(f"blk.{i}.ffn_down.weight", HIDDEN, 128)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def keep_gguf_blocks(model: torch.nn.Module, quantization: str) -> None:
    """Put transformers' layers for GGUF blocks in the place of linear layers and embeddings."""
    import gguf
    from gguf.quants import quantize
    from transformers.integrations.gguf.utils import GgufEmbedding, GgufLinear

    kind = getattr(gguf.GGMLQuantizationType, quantization)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, (torch.nn.Linear, torch.nn.Embedding)):
                continue
            rows, columns = child.weight.shape
            packed: Any
            if isinstance(child, torch.nn.Linear):
                packed = GgufLinear(columns, rows, kind)
            else:
                packed = GgufEmbedding(rows, columns, kind, child.weight.dtype)
            blocks = torch.from_numpy(quantize(child.weight.detach().float().numpy(), kind))
            packed.weight.data = blocks
            setattr(parent, name, packed)
