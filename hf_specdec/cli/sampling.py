"""Options that choose how tokens are chosen, and what they come down to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

_PANEL = "Sampling (greedy without any of these)"

Temperature = Annotated[
    float | None, typer.Option(min=0, metavar="T", help="0 is greedy.", rich_help_panel=_PANEL)
]
TopP = Annotated[
    float | None,
    typer.Option(min=0, max=1, metavar="P", help="Nucleus.", rich_help_panel=_PANEL),
]
TopK = Annotated[
    int | None,
    typer.Option(min=1, metavar="K", help="Among the K likeliest.", rich_help_panel=_PANEL),
]
MinP = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        metavar="P",
        help="Times the likeliest one's.",
        rich_help_panel=_PANEL,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        # A prompt's index still fits beside it into 64 bits.
        min=-(2**63),
        max=2**62,
        metavar="N",
        help="Plus a prompt's index: its seed [0].",
        rich_help_panel=_PANEL,
    ),
]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: greedily, unless one of the first four is given.

    What isn't given is left to the target's generation_config. A prompt is sampled with its own
    seed, or with ``seed`` plus its index, so that neither the batch nor the drafter matters.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken every time."""
        return not self.arguments()

    def arguments(self) -> dict[str, Any]:
        """What was given, for ``generate``."""
        chosen = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
        }
        return {name: value for name, value in chosen.items() if value is not None}


def sampling(
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    seed: int | None,
) -> Sampling:
    """Check the options against each other.

    Raises:
        typer.BadParameter: an option that would change nothing.
    """
    if temperature == 0:
        if not (top_p is None and top_k is None and min_p is None):
            raise typer.BadParameter(
                "0 is greedy, which --top-p, --top-k and --min-p don't change: leave them out, or "
                "give a temperature above 0",
                param_hint="--temperature",
            )
        temperature = None
    chosen = Sampling(temperature, top_p, top_k, min_p, seed or 0)
    if seed is not None and chosen.is_greedy:
        raise typer.BadParameter(
            f"{seed} changes nothing in greedy decoding; add a --temperature above 0",
            param_hint="--seed",
        )
    return chosen
