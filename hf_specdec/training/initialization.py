"""Starting a speculator from its target's token tables instead of from noise.

The target's embeddings already say which tokens are alike, which a small drafter would otherwise
spend most of its training on finding out.

The network balances state and token by constants that assume token vectors of standard deviation
1/sqrt(D) (see the model); whatever the target's scale is, it is brought there:

* own tables (IBM's format): emb = E P and head = H P, rescaled to root mean square 1/sqrt(D). With
  D < d, P holds the D principal directions of the table; with D >= d, orthonormal rows, so that all
  inner products survive.
* shared target tables: emb_proj is random with the standard deviation that gives emb_proj(E[token])
  the same scale; head_proj keeps the network's own 1/sqrt(D).

Boundary: writes initial weights of a given model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.modeling.mlp_speculator import MLPSpeculatorConfig, MLPSpeculatorPreTrainedModel
from hf_specdec.modeling.quantized import is_plain
from hf_specdec.training.corpus import Corpus
from hf_specdec.training.draft_vocabulary import choose_draft_token_ids, count_tokens


def new_speculator(
    target: PreTrainedModel,
    corpus: Corpus | None = None,
    always_drafted: Sequence[int] = (),
    seed: int = 0,
    initialize: Literal["target", "random"] = "target",
    **config: Any,
) -> MLPSpeculatorPreTrainedModel:
    """A float32 speculator for ``target``, ready to be trained on the target's device.

    Args:
        target: gives sizes and token tables.
        corpus: gives the frequent ids; needed with ``draft_vocab_size``.
        always_drafted: ids in a reduced draft vocabulary whatever their count.
        seed: of the initial weights.
        initialize: ``"target"`` begins with the target's token tables (see the module),
            ``"random"`` draws all weights from N(0, 1/sqrt(D)), as IBM's recipe does.
        **config: for [`MLPSpeculatorConfig`]: ``inner_dim``, ``n_predict``,
            ``share_target_weights``, ``draft_vocab_size`` ...

    Raises:
        ValueError: ``draft_vocab_size`` without a corpus, or another ``initialize``.
    """
    if initialize not in ("target", "random"):
        raise ValueError(f"initialize={initialize!r} must be 'target' or 'random'")
    target_config = target.config.get_text_config(decoder=True)
    name = corpus.metadata.target if corpus is not None else target_config._name_or_path
    values: dict[str, Any] = {
        "vocab_size": target_config.vocab_size,
        "emb_dim": target_config.hidden_size,
        "base_model_name_or_path": name or None,
        **config,
    }
    input_embeddings: Any = target.get_input_embeddings()
    output_embeddings: Any = target.get_output_embeddings()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MLPSpeculatorPreTrainedModel(MLPSpeculatorConfig(**values)).float()
    if size := model.config.draft_vocab_size:
        if corpus is None:
            raise ValueError(f"draft_vocab_size={size} needs a corpus to count the ids in")
        counts = count_tokens(corpus)
        model.set_draft_token_ids(choose_draft_token_ids(counts, size, always_drafted))
    tables = input_embeddings.weight.detach(), output_embeddings.weight.detach()
    if initialize == "target":
        initialize_from_target(model, *tables, seed=seed)
    model.to(output_embeddings.weight.device)
    if model.config.share_target_weights:
        model.bind_target(*tables)
    return model


def root_mean_square(table: Tensor) -> float:
    """Root of the mean square of all entries."""
    return float(table.detach().float().pow(2).mean().sqrt())


@torch.no_grad()
def initialize_from_target(
    model: MLPSpeculatorPreTrainedModel,
    input_embeddings_weight: Tensor,
    lm_head_weight: Tensor,
    seed: int = 0,
) -> None:
    """Write initial token tables, or the projections in their place, into ``model``.

    Args:
        model: a new speculator; its draft token ids are already set, if it has any.
        input_embeddings_weight: the target's input embedding ``[>= V, d]``.
        lm_head_weight: the target's output weight ``[>= V, d]``.
        seed: of the random projections. All heads start from the same one.

    Raises:
        ValueError: a table that is quantized or does not fit the model.
    """
    config = model.config
    network: Any = model.speculator
    for name, table in (
        ("input_embeddings_weight", input_embeddings_weight),
        ("lm_head_weight", lm_head_weight),
    ):
        if not is_plain(table):
            raise ValueError(
                f"{name} is quantized ({type(table).__name__}, {table.dtype}), so the speculator's "
                "token tables can't begin with the target's: set initialize='random', or leave the "
                "head and the embedding out of the quantization"
            )
        if table.dim() != 2 or table.shape[1] != config.emb_dim or len(table) < config.vocab_size:
            raise ValueError(
                f"{name} must be [at least {config.vocab_size}, {config.emb_dim}], the target's, "
                f"got {list(table.shape)}"
            )
    generator = torch.Generator().manual_seed(seed)
    width = config.inner_size
    if config.share_target_weights:
        scale = root_mean_square(input_embeddings_weight[: config.vocab_size])
        for projection in network.emb_proj:
            weight = projection.weight
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise / (scale * (config.emb_dim * width) ** 0.5))
        for projection in network.head_proj:
            weight = projection.weight
            weight.copy_(torch.randn(weight.shape, generator=generator) / width**0.5)
        return
    head_rows = lm_head_weight[: config.vocab_size]
    if network.draft_token_ids is not None:
        head_rows = head_rows[network.draft_token_ids.to(head_rows.device)]
    embedding = project_table(input_embeddings_weight[: config.vocab_size], width, generator)
    head = project_table(head_rows, width, generator)
    for index in range(config.n_predict):
        network.emb[index].weight.copy_(embedding)
        network.head[index].weight.copy_(head)


def project_table(table: Tensor, width: int, generator: torch.Generator) -> Tensor:
    """Bring rows ``[V, d]`` to ``[V, width]`` with root mean square 1/sqrt(width), float32.

    The distances between rows survive: exactly, up to a common factor, for ``width >= d``, and as
    well as ``width`` dimensions allow for less.
    """
    table = table.float().cpu()
    size = table.shape[1]
    if width < size:
        # Principal directions from the d x d second moment: no decomposition of the [V, d] table.
        directions = torch.linalg.eigh(table.T @ table).eigenvectors[:, -width:]
    else:
        directions = torch.linalg.qr(torch.randn(width, size, generator=generator)).Q.T
    projected = table @ directions
    return projected / (root_mean_square(projected) * width**0.5)
