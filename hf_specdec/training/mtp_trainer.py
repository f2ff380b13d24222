"""Training the MTP layer of a MiMo on corpora, in up to two stages.

Embedding, decoder and head are the target's, frozen and not run: a corpus holds its states. Those
are the states after the final norm, so the model must have ``mtp_feed="post_norm"``.

The layer is trained on windows of text (`windows`), for its first draft and, on its own output, for
the ones that follow (`mtp_passes`).

Files in the output folder, besides what `TrainingLoop` keeps there:
``training/best_mtp_layers.safetensors``, the best layers so far under their names in a checkpoint.

Boundary: a model with initial MTP layers and corpora in, trained layers out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_specdec.modeling.checkpoint_headers import read_header
from hf_specdec.modeling.mimo import MiMoForCausalLM, MiMoMTP
from hf_specdec.training.checkpoint import write_whole
from hf_specdec.training.corpus import Corpus
from hf_specdec.training.evaluation import Acceptance
from hf_specdec.training.loop import TrainingLoop
from hf_specdec.training.losses import DraftLoss
from hf_specdec.training.mtp_evaluation import HeldOutDocuments
from hf_specdec.training.mtp_passes import run_passes
from hf_specdec.training.objectives import OutputLayer
from hf_specdec.training.parallel import Processes
from hf_specdec.training.settings import TrainingSettings
from hf_specdec.training.windows import Windows

_BEST = "best_mtp_layers.safetensors"
_PREFIX = "model.mtp_layers."


class WindowExamples:
    """Every window is an example.

    Args:
        network: the layer.
        settings: objective and sampling.
        corpus: the data.
        documents: bool ``[num_documents]``, the documents to take.
        heads: n.
        window_length: N.
    """

    def __init__(
        self,
        network: MiMoMTP,
        settings: TrainingSettings,
        corpus: Corpus,
        documents: Tensor,
        heads: int,
        window_length: int,
    ) -> None:
        self._network = network
        self._windows = Windows(corpus, documents, heads, window_length)
        self._table, ids = network.head_weight, network.draft_token_ids
        vocab_size = network.config.vocab_size
        self._loss = DraftLoss(settings, corpus, documents, vocab_size, ids, self._table.device)

    @property
    def tokens_per_example(self) -> int:
        """See `Examples`."""
        return self._windows.index.shape[1]

    @property
    def blocks(self) -> Tensor | None:
        """See `Examples`."""
        blocks = self._windows.corpus.blocks
        return None if blocks is None else blocks[self._windows.index[:, 0]]

    def __len__(self) -> int:
        return len(self._windows)

    def losses(self, numbers: Tensor, generator: torch.Generator) -> Tensor:
        """See `Examples.losses`."""
        index = self._windows.index[numbers]
        batch = self._windows.batch(index, self._loss.top_k).to(self._table.device)
        entries, shape = batch.entries, index.shape
        targets = self._loss.targets(entries)
        drawn = self._loss.draw(generator)
        passes = run_passes(
            self._network,
            entries.hidden_states.view(*shape, -1),
            entries.input_ids.view(*shape, -1),
            batch.position_ids,
            batch.document,
        )
        losses = []
        for k, state in enumerate(passes):
            # The head is the larger part of the work: only where there is something to learn.
            here = targets.covered[:, k].nonzero()[:, 0]
            layer = OutputLayer(state.flatten(0, 1)[here], self._table)
            loss = self._loss(layer, targets.columns[here, k], targets.weights[here, k], drawn)
            losses.append(loss.sum() / max(len(here), 1))
        return torch.stack(losses)


class MTPTrainer(TrainingLoop):
    """Trains the MTP layer of ``model`` in place, and freezes everything else in it.

    Args:
        model: a MiMo whose MTP layer is float32, such as `mimo_from_decoder` makes; the rest may
            be in any dtype.
        settings: see `TrainingSettings`; ``batch_size`` counts windows.
        output_dir: see the module.
        ground_truth: corpus of stage 1; ``None`` leaves the stage out.
        self_generated: corpus of stage 2; ``None`` leaves the stage out.
        num_draft_tokens: drafts of a step to train for. Each further one is one more pass over
            every window, and is what the layer's recycled output is trained by.
        window_length: entries of a window.
        progress: show a bar.
        num_evaluated_drafts: drafts of a step that acceptance is measured for; ``None``: those
            that are trained for.
        processes: which train together; ``None``: this one alone.

    Raises:
        TypeError: a model that is no MiMo.
        ValueError: no corpus, one of another target, layers that are not float32, a
            ``distill_top_k`` the corpus does not have, another feed than ``"post_norm"``, more MTP
            layers than the one that drafts, or a number out of range.
    """

    held_out: HeldOutDocuments

    def __init__(
        self,
        model: MiMoForCausalLM,
        settings: TrainingSettings,
        output_dir: str | Path,
        ground_truth: Corpus | None = None,
        self_generated: Corpus | None = None,
        num_draft_tokens: int = 1,
        window_length: int = 256,
        progress: bool = True,
        num_evaluated_drafts: int | None = None,
        processes: Processes | None = None,
    ) -> None:
        self.network = MiMoMTP(model)
        _check_model(model)
        if num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens={num_draft_tokens} must be at least 1")
        if num_evaluated_drafts is not None and num_evaluated_drafts < 1:
            raise ValueError(f"num_evaluated_drafts={num_evaluated_drafts} must be at least 1")
        if window_length < 2:
            raise ValueError(f"window_length={window_length} must be at least 2")
        self.model = model
        self.num_draft_tokens = num_draft_tokens
        self.num_evaluated_drafts = num_evaluated_drafts or num_draft_tokens
        self.window_length = window_length
        model.requires_grad_(False)
        layers = model.model.mtp_layers.requires_grad_(True)
        super().__init__(
            layers, settings, output_dir, ground_truth, self_generated, progress, processes
        )

    def load_best(self) -> None:
        """Put the best layers into the model, as they were saved: ready for ``save_pretrained``.

        Raises:
            FileNotFoundError: nothing was evaluated yet.
        """
        path = self.output_dir / "training" / _BEST
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: call train() first")
        read_header(path)
        tensors = load_file(path)
        layers = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
        self.model.model.mtp_layers.load_state_dict(layers)

    def _check_corpus(self, name: str, corpus: Corpus) -> None:
        metadata, config = corpus.metadata, self.model.config
        if (metadata.hidden_size, metadata.vocab_size) != (config.hidden_size, config.vocab_size):
            raise ValueError(
                f"{name} has hidden_size={metadata.hidden_size} and vocab_size="
                f"{metadata.vocab_size}, the model {config.hidden_size} and {config.vocab_size}; "
                f"it was made with another target, {metadata.target!r}"
            )

    def _examples(self, corpus: Corpus, documents: Tensor) -> WindowExamples:
        heads, length = self.num_draft_tokens, self.window_length
        return WindowExamples(self.network, self.settings, corpus, documents, heads, length)

    def _hold_out(self, corpus: Corpus, documents: Tensor) -> HeldOutDocuments:
        most = self.settings.evaluate_positions
        return HeldOutDocuments(corpus, documents, self.num_evaluated_drafts, most)

    def _measure(self) -> Acceptance:
        return self.held_out.measure(self.network, self.settings.precision == "bf16")

    def _save_best(self) -> None:
        dtype = getattr(torch, self.settings.save_dtype)
        tensors = {
            f"{_PREFIX}{name}": tensor.to(dtype).contiguous()
            for name, tensor in self.model.model.mtp_layers.state_dict().items()
        }
        path = self.output_dir / "training" / _BEST
        write_whole(path, lambda partial: save_file(tensors, partial))

    def _model_values(self) -> dict[str, Any]:
        ignored = ("transformers_version", "dtype", "_name_or_path", "architectures")
        values = self.model.config.to_dict()
        names = ("num_draft_tokens", "num_evaluated_drafts", "window_length")
        values |= {name: getattr(self, name) for name in names}
        return {key: value for key, value in values.items() if key not in ignored}


def _check_model(model: MiMoForCausalLM) -> None:
    config = model.config
    if config.mtp_feed != "post_norm":
        raise ValueError(
            f"model.config.mtp_feed={config.mtp_feed!r}, but a corpus holds the target's states "
            "after its final norm; set it to 'post_norm' before training, and leave it there"
        )
    if config.num_nextn_predict_layers != 1:
        raise ValueError(
            f"model.config.num_nextn_predict_layers={config.num_nextn_predict_layers}, but the "
            "first layer makes every draft and the others would stay untrained; use a model with 1"
        )
