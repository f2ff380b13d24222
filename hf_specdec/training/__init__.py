"""Training a drafter for any decoder-only target: an MLP speculator, or an MTP layer.

    generate_corpus(target, ChatScripts(tokenizer), "corpus", 1_000_000, stop_ids=[...])
    model = new_speculator(target, Corpus("corpus"), inner_dim=1024, n_predict=4)
    Trainer(model, preset("small"), "drafter", self_generated=Corpus("corpus")).train()

    model = mimo_from_llama(target)  # of hf_specdec.modeling.mimo
    MTPTrainer(model, preset("small"), "out", self_generated=Corpus("corpus")).train()

The target is run once, when a corpus is written (`generate_corpus`, `extract_ground_truth`);
training reads hidden states from disk. ``examples/train_smollm2_drafter.py`` and
``examples/train_smollm2_mtp.py`` are whole recipes.
"""

from hf_specdec.training.corpus import Corpus, CorpusWriter, Document
from hf_specdec.training.corpus_metadata import CorpusMetadata
from hf_specdec.training.draft_vocabulary import choose_draft_token_ids, count_tokens, coverage
from hf_specdec.training.evaluation import Acceptance, HeldOutPositions
from hf_specdec.training.ground_truth import extract_ground_truth, tokenize_dataset
from hf_specdec.training.initialization import initialize_from_target, new_speculator
from hf_specdec.training.mtp_trainer import MTPTrainer
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
    "CorpusWriter",
    "Document",
    "Forced",
    "Free",
    "HeldOutPositions",
    "MTPTrainer",
    "PromptScripts",
    "ScriptSource",
    "StageSettings",
    "Temperatures",
    "Trainer",
    "TrainingResult",
    "TrainingSettings",
    "choose_draft_token_ids",
    "count_tokens",
    "coverage",
    "extract_ground_truth",
    "generate_corpus",
    "initialize_from_target",
    "new_speculator",
    "preset",
    "save_speculator",
    "tokenize_dataset",
]
