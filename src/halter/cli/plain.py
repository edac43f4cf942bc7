"""Help without noise, and commands whose code is loaded when they are typed.

A flag takes no value, so no type is shown beside it. Below the options stand examples.
"""

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

if TYPE_CHECKING:
    from typer._click.core import Command, Context, Parameter


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

    def resolve_command(self, ctx: "Context", args: list[str]) -> "tuple[str | None, Command | None, list[str]]":
        """Find the command that was typed, and load it."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.loaded() if isinstance(command, Later) else command, rest


class ListingGroup(PlainGroup):
    """A group that lists what there is, unless one of its commands is named."""

    def parse_args(self, ctx: "Context", args: list[str]) -> list[str]:
        """Take what is no command for words of the one called `list`."""
        first = next(iter(args), "")
        return super().parse_args(ctx, args if first in self.commands or first == "--help" else ["list", *args])


class Later(PlainCommand):
    """A command that is only a name and a line, until it is typed: the help of all of them needs no more."""

    def loaded(self) -> "Command":
        """Load the command itself."""
        load: Callable[[], Command] | None = self.callback
        return self if load is None else load()


def later(place: str, name: str, prepare: "Callable[[str, Command], Command]") -> "Callable[[], Command]":
    """Know where a command is, as in `halter.cli.look:show`: a function, or what builds a group of commands."""

    def load() -> Any:
        # Typer looks the annotations of a command up, and knows nothing of those that only a type check imports.
        module, _, attribute = place.partition(":")
        return prepare(name, _command(name, getattr(import_module(module), attribute)))

    return load


def _command(name: str, found: Callable[..., Any]) -> "Command":
    if found.__name__.startswith("build"):
        command = typer.main.get_group(found())
    else:
        alone = typer.Typer(add_completion=False)
        alone.command(name, cls=PlainCommand)(found)
        command = typer.main.get_command(alone)
    command.name = name
    return command


def _plain(params: "Iterable[Parameter]") -> "list[Parameter]":
    found = list(params)
    for param in found:
        if isinstance(param, TyperOption) and param.is_flag:
            param.metavar = ""
    return found
