"""Whether a drafter is fed what it was trained on.

A wrong feed never shows in the output, which verification keeps right; fewer drafts are accepted,
and that is all. The doctor generates the same texts with every plausible feed and compares how many
drafts are accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_specdec.drafters import Drafter, Feed, Gemma4Drafter, MLPDrafter, MTPDrafter
from hf_specdec.metrics import SpeculationStats
from hf_specdec.registry import drafter_for

_OTHER_FEED: dict[str, Feed] = {"post_norm": "pre_norm", "pre_norm": "post_norm"}
_FEED_NAMES = {
    "post_norm": "state behind the final norm",
    "pre_norm": "state before the final norm",
}
# Where an assistant stands that reads the target's keys, by the offset of its position.
_POSITION_NAMES = {
    0: "position of the last verified token (vLLM)",
    1: "position of the newest token (transformers)",
}
# Smaller differences than this share of drafts are nobody's fault.
_MARGIN = 0.02


@dataclass(frozen=True)
class Feeding:
    """One way to feed a drafter.

    Attributes:
        name: what sets it apart.
        drafter: fed that way.
        configured: whether it is how the drafter would be fed anyway.
    """

    name: str
    drafter: Drafter
    configured: bool = False


@dataclass(frozen=True)
class Finding:
    """What a feeding led to.

    Attributes:
        feeding: the way of feeding.
        stats: over all prompts.
    """

    feeding: Feeding
    stats: SpeculationStats

    @property
    def first(self) -> float:
        """Share of the drafts whose first token was accepted."""
        return self.stats.per_position[0] if self.stats.num_drafts else 0.0


def feedings(assistant_model: Any) -> list[Feeding]:
    """The configured way to feed an assistant, and the others that are plausible.

    Args:
        assistant_model: an MLP speculator, a Gemma 4 assistant, or the MTP layers of a target.

    Raises:
        ValueError: something that isn't fed with the target's states.
    """
    drafter = drafter_for(assistant_model)
    if isinstance(drafter, MLPDrafter):
        other = _OTHER_FEED[drafter.feed]
        return [
            Feeding(_FEED_NAMES[drafter.feed], drafter, configured=True),
            Feeding(_FEED_NAMES[other], MLPDrafter(drafter.model, feed=other)),
        ]
    if isinstance(drafter, Gemma4Drafter):
        return _feedings_of_an_assistant(drafter)
    if not isinstance(drafter, MTPDrafter):
        raise ValueError(
            f"assistant_model is a {type(assistant_model).__name__}, which reads no states of the "
            "target, so there is nothing to compare. The doctor examines MLP speculators, Gemma 4 "
            "assistants and MTP layers"
        )
    network: Any = drafter.network
    now = network.switches
    configured = ", ".join(
        (
            _FEED_NAMES[now.feed],
            "[state, embedding]" if now.hidden_first else "[embedding, state]",
            f"position 0 {'zeroed' if now.mask_position_0 else 'kept'}",
        )
    )
    other_order = "[embedding, state]" if now.hidden_first else "[state, embedding]"
    changes: list[tuple[str, dict[str, Any]]] = [
        (_FEED_NAMES[_OTHER_FEED[now.feed]], {"feed": _OTHER_FEED[now.feed]}),
        (other_order, {"hidden_first": not now.hidden_first}),
        (
            f"embedding at position 0 {'kept' if now.mask_position_0 else 'zeroed'}",
            {"mask_position_0": not now.mask_position_0},
        ),
        ("token at the state's own position", {"token_shift": 1 - now.token_shift}),
        ("positions one further", {"position_offset": now.position_offset + 1}),
    ]
    return [Feeding(configured, drafter, configured=True)] + [
        Feeding(name, MTPDrafter(network.with_switches(**change))) for name, change in changes
    ]


def _feedings_of_an_assistant(drafter: Gemma4Drafter) -> list[Feeding]:
    """Both states and both positions that implementations choose."""
    now = drafter.network.switches
    other_feed, other_offset = _OTHER_FEED[now.feed], 1 - min(now.position_offset, 1)
    configured = f"{_FEED_NAMES[now.feed]}, {_POSITION_NAMES[1 - other_offset]}"
    changes: list[tuple[str, dict[str, Any]]] = [
        (_FEED_NAMES[other_feed], {"feed": other_feed}),
        (_POSITION_NAMES[other_offset], {"position_offset": other_offset}),
    ]
    return [Feeding(configured, drafter, configured=True)] + [
        Feeding(name, Gemma4Drafter(drafter.network.with_switches(**change)))
        for name, change in changes
    ]


def examine(
    target: Any,
    ways: Sequence[Feeding],
    prompts: Sequence[torch.Tensor],
    max_new_tokens: int = 64,
    num_assistant_tokens: int | None = None,
) -> Iterator[Finding]:
    """Generate greedily behind every prompt with every feeding.

    Args:
        target: the model to draft for.
        ways: see `feedings`.
        prompts: int64 ``[1, T]`` each; run one by one, so that no row waits for another.
        max_new_tokens: for each prompt.
        num_assistant_tokens: K; the drafter's own by default.
    """
    for way in ways:
        stats = SpeculationStats()
        for ids in prompts:
            output = target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                assistant_model=way.drafter,
                num_assistant_tokens=num_assistant_tokens,
                return_dict_in_generate=True,
            )
            stats = stats + output.speculation
        yield Finding(way, stats)


def better_than_configured(findings: Sequence[Finding]) -> list[Finding]:
    """Findings that accept clearly more first tokens than the configured one, the best first.

    Clearly: by two standard errors of the difference, and by two points of a hundred.
    """
    (configured,) = (finding for finding in findings if finding.feeding.configured)
    better = []
    for finding in findings:
        variance = sum(
            f.first * (1 - f.first) / max(f.stats.num_drafts, 1) for f in (finding, configured)
        )
        if finding.first - configured.first > max(_MARGIN, 2 * variance**0.5):
            better.append(finding)
    return sorted(better, key=lambda finding: -finding.first)
