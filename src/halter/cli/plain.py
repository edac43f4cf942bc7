"""Help without noise: a flag takes no value, so no type is shown beside it."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from typer.core import TyperCommand, TyperGroup, TyperOption

if TYPE_CHECKING:
    from typer._click.core import Context, Parameter


class PlainCommand(TyperCommand):
    """A command with such a help."""

    def get_params(self, ctx: "Context") -> "list[Parameter]":
        """List the parameters, the flag for help among them."""
        return _plain(super().get_params(ctx))


class PlainGroup(TyperGroup):
    """A group of commands with such a help."""

    def get_params(self, ctx: "Context") -> "list[Parameter]":
        """List the parameters, the flag for help among them."""
        return _plain(super().get_params(ctx))


class ListingGroup(PlainGroup):
    """A group that lists what there is, unless one of its commands is named."""

    def parse_args(self, ctx: "Context", args: list[str]) -> list[str]:
        """Take what is no command for words of the one called `list`."""
        first = next(iter(args), "")
        return super().parse_args(ctx, args if first in self.commands or first == "--help" else ["list", *args])


def _plain(params: "Iterable[Parameter]") -> "list[Parameter]":
    found = list(params)
    for param in found:
        if isinstance(param, TyperOption) and param.is_flag:
            param.metavar = ""
    return found
