"""Where no kernel can run, none is imported (torch itself may import Triton)."""

import os
import subprocess
import sys

CODE = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import hf_specdec

target = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
    num_attention_heads=4, eos_token_id=None, pad_token_id=0,
))
config = hf_specdec.MLPSpeculatorConfig(vocab_size=64, emb_dim=32, inner_dim=24, n_predict=2)
speculator = hf_specdec.MLPSpeculatorPreTrainedModel(config)
ids = torch.randint(1, 64, (2, 5))
target.generate(
    ids, attention_mask=torch.ones_like(ids), assistant_model=speculator, max_new_tokens=8
)
runtime = {"hf_specdec.kernels", "hf_specdec.kernels.runtime"}
found = {name for name in sys.modules if name.startswith("hf_specdec.kernels")} - runtime
assert not found, found
"""


def test_generate_imports_no_kernel() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    subprocess.run([sys.executable, "-c", CODE], env=environment, check=True)
