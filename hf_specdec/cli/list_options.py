"""Options that take several values: ``--k 1 2 3`` as well as ``--k 1 --k 2 --k 3``."""

from collections.abc import Collection, Sequence
from typing import Any

from typer.core import TyperCommand


class ListOptionsCommand(TyperCommand):
    """A command whose list options take every value up to the next option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Name the option again in front of each further value, as click wants it."""
        lists = {
            name for option in self.params if getattr(option, "multiple", False)
            for name in option.opts
        }  # fmt: skip
        return super().parse_args(ctx, repeat_names(args, lists))


def repeat_names(arguments: Sequence[str], options: Collection[str]) -> list[str]:
    """The arguments with ``--k 1 2`` written as ``--k 1 --k 2``.

    Args:
        arguments: of a command.
        options: names of its list options.
    """
    repeated: list[str] = []
    current: str | None = None
    has_value = False
    for position, argument in enumerate(arguments):
        if argument == "--":
            return [*repeated, *arguments[position:]]
        if argument.startswith("-"):
            current, has_value = (argument if argument in options else None), False
        elif current is not None:
            if has_value:
                repeated.append(current)
            has_value = True
        repeated.append(argument)
    return repeated
