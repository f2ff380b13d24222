"""What differs between the kinds of drafters in a run: the model, its trainer, the final folder.

Boundary: from a target and corpora to a trainer, and from its best weights to what is published.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from hf_specdec.modeling.mimo import MiMoForCausalLM, mimo_from_decoder
from hf_specdec.modeling.mlp_speculator import MLPSpeculatorPreTrainedModel
from hf_specdec.modeling.quantized import is_plain
from hf_specdec.training.checkpoint import write_folder
from hf_specdec.training.corpora import StageCorpora
from hf_specdec.training.corpus import Corpus
from hf_specdec.training.corpus_metadata import fingerprint
from hf_specdec.training.draft_vocabulary import choose_draft_token_ids, count_tokens
from hf_specdec.training.initialization import new_speculator
from hf_specdec.training.loop import TrainingLoop
from hf_specdec.training.mtp_trainer import MTPTrainer
from hf_specdec.training.parallel import Processes
from hf_specdec.training.recipes import NetworkSettings
from hf_specdec.training.settings import TrainingSettings
from hf_specdec.training.trainer import Trainer


class DrafterKind(ABC):
    """One kind. Its constructor refuses a target that can't have such a drafter.

    Args:
        target: in evaluation mode.
        network: the drafter's shape.
        target_name: recorded in the drafter.
        continue_from: folder or Hub id of a drafter to begin with, ``None`` for a new one.
        always_drafted: ids in a reduced draft vocabulary whatever their count.
        seed: of initial weights.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        network: NetworkSettings,
        target_name: str | None = None,
        continue_from: str | None = None,
        always_drafted: list[int] | None = None,
        seed: int = 0,
    ) -> None:
        self.target = target
        self.network = network
        self.target_name = target_name
        self.continue_from = continue_from
        self.always_drafted = always_drafted or []
        self.seed = seed

    @abstractmethod
    def trainer(
        self,
        settings: TrainingSettings,
        out: Path,
        corpora: StageCorpora,
        processes: Processes,
        progress: bool,
    ) -> TrainingLoop:
        """A trainer of a drafter with its initial weights: the same ones every time."""

    @abstractmethod
    def save(self, trainer: TrainingLoop, out: Path, corpora: StageCorpora) -> None:
        """Write the best weights as what is published."""

    @abstractmethod
    def trained_module(self, trainer: TrainingLoop) -> nn.Module:
        """What has the trained parameters."""


class MLPKind(DrafterKind):
    """An MLP speculator for any target with a head. See `DrafterKind`.

    One that is continued keeps its shape, which ``network`` then says.

    Raises:
        ValueError: ``continue_from`` is no speculator for this target.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._start: MLPSpeculatorPreTrainedModel | None = None
        if self.continue_from is not None:
            self._start = _load_speculator(self.continue_from, self.target)
            self.network = _network_of(self._start, self.network)

    def trainer(
        self,
        settings: TrainingSettings,
        out: Path,
        corpora: StageCorpora,
        processes: Processes,
        progress: bool,
    ) -> Trainer:
        """See `DrafterKind.trainer`."""
        model = self._model(corpora)
        return Trainer(
            model,
            settings,
            out,
            corpora.ground_truth,
            corpora.self_generated,
            progress=progress,
            processes=processes,
        )

    def _model(self, corpora: StageCorpora) -> MLPSpeculatorPreTrainedModel:
        network = self.network
        if self._start is not None:
            return _copy_speculator(self._start, self.target, self.target_name)
        return new_speculator(
            self.target,
            _counted(corpora),
            always_drafted=self.always_drafted,
            seed=self.seed,
            initialize=network.initialize,
            n_predict=network.heads,
            inner_dim=network.inner_dim,
            scale_input=network.scale_input,
            tie_weights=network.tie_weights,
            share_target_weights=network.share_target_weights,
            draft_vocab_size=_vocabulary_size(network, self.target),
            n_candidates=1,
            **({} if self.target_name is None else {"base_model_name_or_path": self.target_name}),
        )

    def save(self, trainer: TrainingLoop, out: Path, corpora: StageCorpora) -> None:
        """Nothing: the trainer has saved the best weights as they are published."""

    def trained_module(self, trainer: TrainingLoop) -> nn.Module:
        """See `DrafterKind.trained_module`."""
        assert isinstance(trainer, Trainer)
        return trainer.model


class MTPKind(DrafterKind):
    """An MTP layer for a Llama, Qwen2 or Mistral, saved in MiMo's layout. See `DrafterKind`.

    Raises:
        ValueError: a target that can't be expressed as a MiMo, or a ``continue_from`` whose
            decoder is not the target's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._model = _as_mimo(self.target)
        if self.continue_from is not None:
            _take_layer(self._model, self.continue_from)
        layers = self._model.model.mtp_layers
        self._initial = {name: value.clone() for name, value in layers.float().state_dict().items()}

    def trainer(
        self,
        settings: TrainingSettings,
        out: Path,
        corpora: StageCorpora,
        processes: Processes,
        progress: bool,
    ) -> MTPTrainer:
        """See `DrafterKind.trainer`."""
        self._model.model.mtp_layers.load_state_dict(self._initial)
        return MTPTrainer(
            self._model,
            settings,
            out,
            corpora.ground_truth,
            corpora.self_generated,
            num_draft_tokens=self.network.heads,
            window_length=self.network.window_length,
            num_evaluated_drafts=self.network.evaluated_drafts,
            progress=progress,
            processes=processes,
        )

    def save(self, trainer: TrainingLoop, out: Path, corpora: StageCorpora) -> None:
        """Target and best layer as one checkpoint."""
        assert isinstance(trainer, MTPTrainer)
        trainer.load_best()
        model: Any = self._model
        if size := _vocabulary_size(self.network, self.target):
            counts = count_tokens(_counted(corpora))
            ids = choose_draft_token_ids(counts, size, self.always_drafted)
            model.config.mtp_draft_token_ids = ids.tolist()
        write_folder(out, model.to(self.target.dtype).save_pretrained)

    def trained_module(self, trainer: TrainingLoop) -> nn.Module:
        """See `DrafterKind.trained_module`."""
        return self._model.model.mtp_layers


KINDS: dict[str, type[DrafterKind]] = {"mlp": MLPKind, "mtp": MTPKind}


def _counted(corpora: StageCorpora) -> Corpus:
    """Where the frequent ids are counted: in the target's own text, if there is any."""
    counted = corpora.self_generated or corpora.ground_truth
    assert counted is not None
    return counted


def _vocabulary_size(network: NetworkSettings, target: PreTrainedModel) -> int:
    """``draft_vocab_size``, or 0 for all where the target has no more ids than that."""
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    return network.draft_vocab_size if network.draft_vocab_size < vocab_size else 0


def _network_of(model: MLPSpeculatorPreTrainedModel, network: NetworkSettings) -> NetworkSettings:
    """The shape of a speculator in the words of the settings."""
    config = model.config
    return replace(
        network,
        heads=config.n_predict,
        inner_dim=config.inner_dim,
        share_target_weights=config.share_target_weights,
        tie_weights=config.tie_weights,
        scale_input=config.scale_input,
        draft_vocab_size=config.draft_vocab_size,
    )


def _load_speculator(source: str, target: PreTrainedModel) -> MLPSpeculatorPreTrainedModel:
    model = AutoModel.from_pretrained(source, dtype=torch.float32)
    if not isinstance(model, MLPSpeculatorPreTrainedModel):
        raise ValueError(
            f"continue_from={source!r} is a {type(model).__name__}; an MLP speculator is needed"
        )
    config, text = model.config, target.config.get_text_config(decoder=True)
    if config.emb_dim != text.hidden_size or config.vocab_size < text.vocab_size:
        raise ValueError(
            f"continue_from={source!r} is for a target with hidden size {config.emb_dim} and "
            f"{config.vocab_size} ids, this one has {text.hidden_size} and {text.vocab_size}"
        )
    return model


def _copy_speculator(
    start: MLPSpeculatorPreTrainedModel, target: PreTrainedModel, target_name: str | None
) -> MLPSpeculatorPreTrainedModel:
    model: Any = copy.deepcopy(start)
    if target_name is not None:
        model.config.base_model_name_or_path = target_name
    head: Any = target.get_output_embeddings()
    embeddings: Any = target.get_input_embeddings()
    model.to(head.weight.device)
    if model.config.share_target_weights:
        model.bind_target(embeddings.weight.detach(), head.weight.detach())
    return model


def _as_mimo(target: PreTrainedModel) -> MiMoForCausalLM:
    if isinstance(target, MiMoForCausalLM):
        for name, weight in target.named_parameters():
            if not is_plain(weight):
                raise ValueError(
                    f"kind='mtp' trains a layer that belongs to the target, whose {name} is "
                    f"quantized ({type(weight).__name__}, {weight.dtype}); load the target in "
                    "bfloat16 or float32"
                )
        return target
    try:
        return mimo_from_decoder(target)
    except TypeError as error:
        raise ValueError(
            f"kind='mtp' can't add a layer to a {type(target).__name__}: {error}. For this target "
            "train kind='mlp', which any decoder can have"
        ) from error


def _take_layer(model: MiMoForCausalLM, source: str) -> None:
    """Copy the MTP layer of another checkpoint of the same decoder."""
    other = AutoModelForCausalLM.from_pretrained(source, dtype=model.dtype)
    if not isinstance(other, MiMoForCausalLM):
        raise ValueError(
            f"continue_from={source!r} is a {type(other).__name__} without MTP layers of this kind;"
            " name a checkpoint that `hf-specdec train --kind mtp` has written"
        )
    if other.config.mtp_feed != model.config.mtp_feed:
        raise ValueError(
            f"continue_from={source!r} has mtp_feed={other.config.mtp_feed!r}; only layers with "
            f"{model.config.mtp_feed!r} can be trained on corpora"
        )
    own, theirs = (fingerprint(_without_layers(m)) for m in (model, other))
    if own != theirs:
        raise ValueError(
            f"continue_from={source!r} was made for another target: its decoder has other weights"
        )
    model.model.mtp_layers.load_state_dict(other.model.mtp_layers.state_dict())


def _without_layers(model: MiMoForCausalLM) -> Any:
    return model.model.layers
