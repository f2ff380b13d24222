"""What a loaded MLP speculator must satisfy.

Boundary: names, shapes and dtypes of weights, and the report of a load; tensors are read by
transformers.

transformers leaves a weight that a checkpoint lacks at its random initial value and prints a table.
A drafter with a random head still gives correct output, only slowly, so nobody would notice: here
it is an error.

Checkpoints with tied weights exist in two forms, and both are read: safetensors with one name per
shared tensor (``speculator.emb.0.weight`` but no ``speculator.emb.1.weight``), and pytorch ``.bin``
files with all names. The key prefix ``speculator.`` may be absent.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from hf_specdec.modeling.checkpoint_files import WeightsFiles
from hf_specdec.modeling.checkpoint_headers import check_stored_dtypes

from .configuration_mlp_speculator import MLPSpeculatorConfig

_WEIGHT_NAME = re.compile(
    r"^(speculator\.)?(emb|proj|head|ln|emb_proj|head_proj)\.\d+\.|draft_token_ids$"
)
_MOST_NAMED = 12
# No format packs more weights into a byte.
_MOST_PER_BYTE = 4


def tied_weight_names(config: MLPSpeculatorConfig) -> dict[str, str]:
    """Map each weight that is another one's alias to the weight it stands for.

    With ``tie_weights`` every head uses the weights of head 0, except that projection 0 reads the
    target's state [.., d] and stays apart, so projections 2.. use projection 1.

    Returns:
        Names with the prefix ``speculator.``; empty when the config does not tie.
    """
    if not config.tie_weights:
        return {}
    tables = ("emb_proj", "head_proj") if config.share_target_weights else ("emb", "head")
    parts = [(f"{table}.{{}}.weight", 0) for table in tables]
    parts += [("ln.{}.weight", 0), ("ln.{}.bias", 0), ("proj.{}.weight", 1)]
    return {
        f"speculator.{name.format(i)}": f"speculator.{name.format(first)}"
        for name, first in parts
        for i in range(first + 1, config.n_predict)
    }


def check_files(
    config: MLPSpeculatorConfig, source: object, files: WeightsFiles, num_parameters: int
) -> None:
    """Refuse weights that would be taken for something else, before memory is taken for them.

    Args:
        config: of the network.
        source: what is loaded, for the message.
        files: its weights files.
        num_parameters: of the network.

    Raises:
        ValueError: a network far larger than its files; weights that aren't floating point.
    """
    if num_parameters > _MOST_PER_BYTE * files.num_bytes:
        raise ValueError(
            f"the config of {str(source)!r} describes a network of {num_parameters:,} weights, but "
            f"the files of its weights have {files.num_bytes:,} bytes. {_sizes(config)}; correct "
            "the value that is wrong, or download the checkpoint again"
        )
    if getattr(config, "quantization_config", None) is None:
        check_dtypes(source, files)


def check_dtypes(source: object, files: WeightsFiles) -> None:
    """Raise ValueError for weights of the network that were quantized, or that are no weights."""
    own = {name: entry for name, entry in files.entries.items() if _WEIGHT_NAME.search(name)}
    check_stored_dtypes(source, own, lambda name: name.endswith("draft_token_ids"))


def check_loaded(
    config: MLPSpeculatorConfig,
    source: object,
    loading_info: Mapping[str, Any],
    tied: Mapping[str, str],
    ignore_mismatched_sizes: bool = False,
) -> None:
    """Refuse a load that left anything of the network random, misread or unread.

    Args:
        config: the config the model was built from.
        source: what was loaded, for the message.
        loading_info: transformers' report: ``missing_keys``, ``unexpected_keys``,
            ``mismatched_keys``.
        tied: the aliases that hold after the load.
        ignore_mismatched_sizes: the caller asked for weights of another shape to be initialised
            anew.

    Raises:
        ValueError: naming the weights that are missing, of the wrong shape, not used by the network
            this config describes, or different although the config ties them.
    """
    problems = []
    if missing := sorted(loading_info["missing_keys"]):
        problems.append(f"missing from the checkpoint: {_listed(missing)}")
    if (mismatched := sorted(loading_info["mismatched_keys"])) and not ignore_mismatched_sizes:
        shapes = [
            f"{key} (checkpoint {list(found)}, network {list(wanted)})"
            for key, found, wanted in mismatched
        ]
        problems.append(f"of the wrong shape: {_listed(shapes)}")
    if unused := sorted(key for key in loading_info["unexpected_keys"] if _WEIGHT_NAME.search(key)):
        problems.append(f"in the checkpoint but not in the network: {_listed(unused)}")
    expected_ties = tied_weight_names(config)
    if untied := sorted(set(expected_ties) - set(tied)):
        pairs = [f"{name} and {expected_ties[name]}" for name in untied]
        problems.append(f"tied by the config but different in the checkpoint: {_listed(pairs)}")
    if problems:
        raise ValueError(
            f"the weights of {str(source)!r} do not fit its config.\n  "
            + "\n  ".join(problems)
            + f"\n{_sizes(config)}; correct the value that is wrong, or load the checkpoint this "
            "config belongs to"
        )


def _sizes(config: MLPSpeculatorConfig) -> str:
    return (
        f"The config says n_predict={config.n_predict}, vocab_size={config.vocab_size}, "
        f"emb_dim={config.emb_dim}, inner_dim={config.inner_dim}, "
        f"tie_weights={config.tie_weights}, "
        f"share_target_weights={config.share_target_weights}, "
        f"draft_vocab_size={config.draft_vocab_size}"
    )


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
