"""Training a drafter for any decoder-only target: an MLP speculator, or an MTP layer.

    run = TrainingRun("mlp", Path("my-drafter"), data=DataChoice(("prompts.jsonl",)))
    train_drafter(run, target, tokenizer)

is a whole run, and what ``hf-specdec train`` does. Its parts:

    generate_corpus(target, ChatScripts(tokenizer), "corpus", 1_000_000, stop_ids=[...])
    model = new_speculator(target, Corpus("corpus"), inner_dim=1024, n_predict=4)
    Trainer(model, preset("small"), "drafter", self_generated=Corpus("corpus")).train()

    model = mimo_from_decoder(target)  # of hf_specdec.modeling.mimo
    MTPTrainer(model, preset("small"), "out", self_generated=Corpus("corpus")).train()

The target is run once, when a corpus is written (`generate_corpus`, `extract_ground_truth`);
training reads hidden states from disk, or runs the target again where they don't fit there.
"""

from hf_specdec.training.corpus import Corpus, CorpusWriter, Document
from hf_specdec.training.corpus_metadata import CorpusMetadata
from hf_specdec.training.data_sources import DataChoice
from hf_specdec.training.draft_vocabulary import choose_draft_token_ids, count_tokens, coverage
from hf_specdec.training.evaluation import Acceptance, HeldOutPositions
from hf_specdec.training.ground_truth import extract_ground_truth, tokenize_dataset
from hf_specdec.training.initialization import initialize_from_target, new_speculator
from hf_specdec.training.mtp_trainer import MTPTrainer
from hf_specdec.training.recipes import CorpusSettings, NetworkSettings, Recipe, recipe
from hf_specdec.training.recomputed_states import recompute_states
from hf_specdec.training.result import read_result
from hf_specdec.training.run import TrainingRun, train_drafter
from hf_specdec.training.scripts import (
    ChatScripts,
    Forced,
    Free,
    PromptScripts,
    ScriptSource,
    Temperatures,
)
from hf_specdec.training.self_generation import generate_corpus
from hf_specdec.training.settings import StageSettings, TrainingSettings, preset
from hf_specdec.training.stages import TrainingResult
from hf_specdec.training.trainer import Trainer, save_speculator

__all__ = [
    "Acceptance",
    "ChatScripts",
    "Corpus",
    "CorpusMetadata",
    "CorpusSettings",
    "CorpusWriter",
    "DataChoice",
    "Document",
    "Forced",
    "Free",
    "HeldOutPositions",
    "MTPTrainer",
    "NetworkSettings",
    "PromptScripts",
    "Recipe",
    "ScriptSource",
    "StageSettings",
    "Temperatures",
    "Trainer",
    "TrainingResult",
    "TrainingRun",
    "TrainingSettings",
    "choose_draft_token_ids",
    "count_tokens",
    "coverage",
    "extract_ground_truth",
    "generate_corpus",
    "initialize_from_target",
    "new_speculator",
    "preset",
    "read_result",
    "recipe",
    "recompute_states",
    "save_speculator",
    "tokenize_dataset",
    "train_drafter",
]
