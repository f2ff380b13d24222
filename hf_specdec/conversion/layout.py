"""What the tensors of a speculator's checkpoint mean: their names, and the config that fits them.

fms names are those of the network without the prefix ``speculator.``; shapes tell the sizes:

    proj.0.weight [D, d]        emb.0.weight [V, D]        as many heads as emb.{i}
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_specdec.modeling.mlp_speculator import MLPSpeculatorConfig, MLPSpeculatorPreTrainedModel

PREFIX = "speculator."
_HEAD = re.compile(r"^emb\.(\d+)\.weight$")


def network_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Map the checkpoint's names to the network's, which have the prefix ``speculator.``.

    Raises:
        ValueError: a tensor is there twice, with the prefix and without.
    """
    names = {name: name if name.startswith(PREFIX) else PREFIX + name for name in tensors}
    if len(set(names.values())) < len(names):
        raise ValueError(
            f"the checkpoint has some tensors both with the prefix {PREFIX!r} and without"
        )
    return names


def shapes_of(config: MLPSpeculatorConfig) -> dict[str, tuple[int, ...]]:
    """Name to shape of everything that a speculator of this config has, aliases included."""
    with torch.device("meta"):
        model = MLPSpeculatorPreTrainedModel(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def config_from_shapes(
    tensors: Mapping[str, Tensor], scale_input: bool, **fields: Any
) -> MLPSpeculatorConfig:
    """The config of an fms checkpoint.

    Args:
        tensors: under their fms names.
        scale_input: can't be told from tensors.
        **fields: other fields of the config that were given; ``None`` is the default.

    Raises:
        ValueError: tensors that no config fits, naming them.
    """
    plain = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    heads = sorted(int(match[1]) for name in plain if (match := _HEAD.match(name)))
    missing = [name for name in ("emb.0.weight", "proj.0.weight") if name not in plain]
    if missing or heads != list(range(len(heads))):
        raise ValueError(
            f"the checkpoint is no MLP speculator: it lacks {missing or 'some emb.{i}.weight'}; it "
            f"has {listed(plain)}. Names such as emb.0.weight, proj.0.weight, head.0.weight, "
            "ln.0.weight are expected"
        )
    for name in ("emb.0.weight", "proj.0.weight"):
        if plain[name].dim() != 2:
            raise ValueError(f"{name} has shape {list(plain[name].shape)}, it must be a matrix")
    vocab_size, inner_dim = plain["emb.0.weight"].shape
    return MLPSpeculatorConfig(
        vocab_size=vocab_size,
        emb_dim=plain["proj.0.weight"].shape[1],
        inner_dim=inner_dim,
        n_predict=len(heads),
        scale_input=scale_input,
        **{name: value for name, value in fields.items() if value is not None},
    )


def check_tensors(
    tensors: Mapping[str, Tensor], config: MLPSpeculatorConfig, aliases: Mapping[str, str]
) -> None:
    """Every tensor has a place, every place a tensor, and all of the right shape and kind.

    Args:
        tensors: under the network's names.
        config: of the network they are for.
        aliases: names that may be absent, as the tensor they stand for is there.

    Raises:
        ValueError: naming those that don't.
    """
    expected = shapes_of(config)
    problems = []
    if unknown := sorted(set(tensors) - set(expected)):
        problems.append(f"no place in the network for {listed(unknown)}")
    missing = [
        name for name in expected if name not in tensors and aliases.get(name) not in tensors
    ]
    if missing:
        problems.append(f"missing: {listed(missing)}")
    for name in sorted(set(tensors) & set(expected)):
        tensor, is_ids = tensors[name], name.endswith("draft_token_ids")
        if tuple(tensor.shape) != expected[name]:
            problems.append(f"{name} is {list(tensor.shape)}, expected {list(expected[name])}")
        elif is_ids != (tensor.dtype == torch.int64) or not (is_ids or tensor.is_floating_point()):
            problems.append(f"{name} has dtype {tensor.dtype}, which a speculator doesn't have")
    if problems:
        raise ValueError(
            "the tensors don't fit a speculator of "
            f"n_predict={config.n_predict}, vocab_size={config.vocab_size}, "
            f"emb_dim={config.emb_dim}, inner_dim={config.inner_dim}: " + "; ".join(problems)
        )


def listed(names: Iterable[str], most: int = 12) -> str:
    """Names for a message, not too many."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
