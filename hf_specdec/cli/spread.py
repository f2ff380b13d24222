"""Options that spread the target over devices, and what they come down to.

Nothing heavy is imported here; accelerate does what is asked for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

import typer

MAPS = ("auto", "balanced", "balanced_low_0", "sequential")

DeviceMap = Annotated[
    str | None,
    typer.Option(
        "--device-map",
        metavar="MAP",
        help="Spread the target: auto, ... or JSON.",
    ),
]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        "--max-memory",
        metavar="JSON",
        help='As {"0": "20GiB", "cpu": "60GiB"}.',
    ),
]
OffloadFolder = Annotated[
    str | None,
    typer.Option(
        "--offload-folder",
        metavar="DIR",
        help="For weights that fit nowhere else.",
    ),
]


@dataclass(frozen=True)
class Spread:
    """Arguments of ``from_pretrained``.

    Attributes:
        device_map: a word of `MAPS`, or devices by the names of modules.
        max_memory: by device, if there is a limit.
        offload_folder: for weights on the disk.
    """

    device_map: str | dict[str, Any]
    max_memory: dict[int | str, Any] | None = None
    offload_folder: str | None = None

    def arguments(self) -> dict[str, Any]:
        """Those that were given."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def check_processes(self, count: int) -> None:
        """Raise ValueError if several processes would spread a copy each over the same devices.

        Args:
            count: of processes.
        """
        places = self.device_map.values() if isinstance(self.device_map, dict) else ()
        if count > 1 and len(set(places)) != 1:
            raise ValueError(
                f"--device-map {self.device_map}: each of {count} processes would spread a whole "
                "target over the same devices. Start one process; or leave --device-map out, and "
                "every process has a target on its own device"
            )


def spread(
    device_map: str | None,
    max_memory: str | None,
    offload_folder: str | None,
    device: str,
    compiles: bool,
    pack_weights: bool,
) -> Spread | None:
    """Check the options, beside those that contradict them.

    Returns:
        ``None`` if the target goes on one device.

    Raises:
        typer.BadParameter: options that don't fit each other, or aren't JSON.
    """
    if device_map is None:
        for option, value in (("--max-memory", max_memory), ("--offload-folder", offload_folder)):
            if value is not None:
                raise typer.BadParameter(
                    f"{value} says nothing without --device-map: add --device-map auto",
                    param_hint=option,
                )
        return None
    others = (
        (device != "auto", f"--device {device}"),
        (compiles, "--compile"),
        (pack_weights, "--pack-weights"),
    )
    for is_given, option in others:
        if is_given:
            raise typer.BadParameter(
                f"{device_map} spreads the target over devices, and {option} wants it on one: "
                "leave one of them out",
                param_hint="--device-map",
            )
    places: str | dict[str, Any] = device_map
    if device_map not in MAPS:
        example = '{"model.embed_tokens": 0, "model.layers": "cpu", ...}'
        places = _object(device_map, "--device-map", f"one of {', '.join(MAPS)}, or {example}")
    limits = None
    if max_memory is not None:
        example = '{"0": "20GiB", "cpu": "60GiB"}'
        found = _object(max_memory, "--max-memory", example)
        limits = {int(name) if name.isdigit() else name: value for name, value in found.items()}
    return Spread(places, limits, offload_folder)


def _object(text: str, option: str, example: str) -> dict[str, Any]:
    """A JSON object with something in it."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict) or not value:
        raise typer.BadParameter(f"{text!r} must be {example}", param_hint=option)
    return value
