"""Options that every command with a target and a drafter shares, and what they come down to.

Nothing heavy is imported here; `pairs` loads what is asked for.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

import typer

from hf_specdec.cli.demo_pair import DRAFTER_DIRECTORY
from hf_specdec.cli.spread import Spread
from hf_specdec.options.config import SpeculativeConfig
from hf_specdec.options.schedule import AUTO

DEMO = "demo"
"""In place of a model: the demo pair's."""
_SPECULATION = "Speculation"

DtypeName = Literal["auto", "bfloat16", "float16", "float32"]
Target = Annotated[
    str,
    typer.Argument(metavar="TARGET", help='Hub id or folder of the target; "demo": the demo pair.'),
]
SpeculativeConfigJson = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        metavar="JSON",
        help="How to speculate, as for vLLM.",
        rich_help_panel=_SPECULATION,
    ),
]
SpecMethod = Annotated[
    str | None,
    typer.Option(
        "--spec-method",
        metavar="NAME",
        help='Short for "method": mtp, ngram or mlp_speculator.',
        rich_help_panel=_SPECULATION,
    ),
]
SpecModel = Annotated[
    str | None,
    typer.Option(
        "--spec-model",
        metavar="DRAFTER",
        help='Short for "model": Hub id or folder of the drafter.',
        rich_help_panel=_SPECULATION,
    ),
]


def draft_tokens(text: str | int) -> int | str:
    """A number, or the word for none in particular."""
    if text == AUTO:
        return AUTO
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise typer.BadParameter(f"{text} must be an integer of at least 0, or {AUTO}")
    return number


SpecTokens = Annotated[
    Any,
    typer.Option(
        "--spec-tokens",
        metavar="K",
        parser=draft_tokens,
        help='Short for "num_speculative_tokens", K; "auto": chosen while generating.',
        rich_help_panel=_SPECULATION,
    ),
]
TreeNodes = Annotated[
    int | None,
    typer.Option(
        "--tree-nodes",
        metavar="N",
        min=0,
        help='Short for "num_tree_nodes": trees of N drafts (0: chains).',
        rich_help_panel=_SPECULATION,
    ),
]
Lookup = Annotated[
    int | None,
    typer.Option(
        "--prompt-lookup",
        metavar="N",
        min=1,
        help="Look N tokens up in the text first, where it repeats itself.",
        rich_help_panel=_SPECULATION,
    ),
]
Dtype = Annotated[
    DtypeName, typer.Option(metavar="DTYPE", help="auto, bfloat16, float16 or float32.")
]
Device = Annotated[
    str, typer.Option(metavar="DEVICE", help='cpu, cuda, ...; "auto": a GPU if torch sees one.')
]

PackWeights = Annotated[
    bool,
    typer.Option(
        "--pack-weights",
        help="On a CPU: keep weights in oneDNN's layout too; faster, twice the memory.",
    ),
]

Compile = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Compile the steps; the first ones take minutes.",
        rich_help_panel=_SPECULATION,
    ),
]


@dataclass(frozen=True)
class PairSettings:
    """A target, and how to speculate for it.

    Attributes:
        target: Hub id, folder, or ``"demo"``.
        speculative_config: for `hf_specdec.attach`; ``None`` runs the target alone.
        dtype: of both models; ``"auto"``: the target's own.
        device: of both models; ``"auto"``: a GPU if torch sees one.
        pack_weights: of both models, see `hf_specdec.pack_weights`.
        compiles: calls of the target run with static shapes, compiled.
        spread: how the target is spread over devices; ``None``: it is on ``device``.
    """

    target: str
    speculative_config: SpeculativeConfig | None = None
    dtype: DtypeName = "auto"
    device: str = "auto"
    pack_weights: bool = False
    compiles: bool = False
    spread: Spread | None = None

    def as_json(self) -> dict[str, Any]:
        """The settings for a file, with the fields of the config that say something."""
        config = self.speculative_config
        fields = {} if config is None else asdict(config)
        return {
            "target": self.target,
            "speculative_config": config
            and {name: value for name, value in fields.items() if value is not None},
            "dtype": self.dtype,
        }


def pair_settings(
    target: str,
    speculative_config: str | None = None,
    spec_method: str | None = None,
    spec_model: str | None = None,
    spec_tokens: int | str | None = None,
    dtype: DtypeName = "auto",
    device: str = "auto",
    pack_weights: bool = False,
    compiles: bool = False,
    tree_nodes: int | None = None,
    lookup: int | None = None,
    spread: Spread | None = None,
) -> PairSettings:
    """Make one config of the JSON and the shortcuts.

    The demo's target drafts with the demo's drafter unless a model or method is named; ``"demo"``
    as the model is that drafter, too. Without any of the options another target runs alone.

    Raises:
        typer.BadParameter: a config that doesn't work, JSON and a shortcut that disagree, or
            nothing that speculates to compile.
    """
    fields = _fields(speculative_config)
    shortcuts = {
        "method": ("--spec-method", spec_method),
        "model": ("--spec-model", spec_model),
        "num_speculative_tokens": ("--spec-tokens", spec_tokens),
        "num_tree_nodes": ("--tree-nodes", tree_nodes),
        "prompt_lookup_num_tokens": ("--prompt-lookup", lookup),
    }
    for name, (option, value) in shortcuts.items():
        if value is None:
            continue
        if fields.get(name, value) != value:
            raise typer.BadParameter(
                f"{option} {value} and --speculative-config with {name}={fields[name]!r} "
                "contradict each other: give one of them",
                param_hint=option,
            )
        fields[name] = value
    config = None
    if fields or speculative_config is not None or target == DEMO:
        config = _checked(fields)
        is_free = config.model is None and config.method in (None, "mlp_speculator")
        if config.model == DEMO or (target == DEMO and is_free):
            config = replace(config, model=str(DRAFTER_DIRECTORY))
    if compiles and config is None:
        raise typer.BadParameter(
            f"compiles the steps of speculation, and {target} would run without a drafter: name "
            "one with --spec-model or --spec-method",
            param_hint="--compile",
        )
    if spread is not None and target == DEMO:
        raise typer.BadParameter(
            "the demo's target is small: give a target of your own, or leave this out",
            param_hint="--device-map",
        )
    return PairSettings(target, config, dtype, device, pack_weights, compiles, spread)


def _fields(text: str | None) -> dict[str, Any]:
    """The JSON's fields, dashes in names as underscores."""
    if text is None:
        return {}
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(
            f"{text!r} is not JSON ({error}); quote it for the shell: "
            """'{"method": "mtp", "num_speculative_tokens": 1}'""",
            param_hint="--speculative-config",
        ) from None
    _checked(fields)
    return {name.replace("-", "_"): value for name, value in fields.items()}


def _checked(fields: Any) -> SpeculativeConfig:
    """The config, its errors as those of an option."""
    try:
        return SpeculativeConfig.from_value(fields)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--speculative-config") from None
