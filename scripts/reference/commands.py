"""The page about the command line: every command, what can follow it, and how it leaves."""

from collections.abc import Iterator, Sequence

from typer._click.core import Command, Parameter
from typer.core import TyperGroup, TyperOption

from halter.cli import exit_codes
from halter.cli.commands import load_all_commands
from scripts.reference.sheet import code, head, table, told


def page() -> str:
    """Describe all commands, in the groups of `halter --help`."""
    root = load_all_commands()
    first = head(
        "The command line",
        "`halter.cli`",
        "`halter COMMAND --help` tells the same. `--json` answers for programs, on one "
        "line each where more may follow.",
    )
    codes = (exit_codes.__doc__ or "").partition("\n\n")[2]
    return "\n".join((first, *_panels(root), "## Exit codes\n", codes.strip() + "\n"))


def _panels(root: TyperGroup) -> Iterator[str]:
    panels: dict[str, list[Command]] = {}
    for each in root.commands.values():
        panels.setdefault(str(getattr(each, "rich_help_panel", "") or "More"), []).append(each)
    for panel, members in panels.items():
        yield f"## {panel}\n"
        for member in members:
            yield from _commands(member, ("halter",))


def _commands(member: Command, before: Sequence[str]) -> Iterator[str]:
    """Describe a command and those below it."""
    if member.hidden:
        return
    path = (*before, member.name or "")
    yield f"### {' '.join(path)}\n\n{told(member.help)}\n"
    yield _usage(member, path)
    if rows := [*_parameters(member)]:
        yield table(("word", "meaning"), rows)
    if isinstance(member, TyperGroup):
        for below in member.commands.values():
            yield from _commands(below, path)


def _usage(member: Command, path: Sequence[str]) -> str:
    options = ["[OPTIONS]"] if any(isinstance(each, TyperOption) for each in member.params) else []
    arguments = [_argument(each) for each in member.params if not isinstance(each, TyperOption)]
    below = ["COMMAND"] if isinstance(member, TyperGroup) else []
    return f"```text\n{' '.join((*path, *options, *arguments, *below))}\n```\n"


def _argument(argument: Parameter) -> str:
    word = _called(argument) + ("…" if argument.nargs != 1 and not _called(argument).endswith("…") else "")
    return word if argument.required else f"[{word}]"


def _called(argument: Parameter) -> str:
    return str(argument.metavar or argument.name).strip("[]").upper()


def _parameters(member: Command) -> Iterator[tuple[str, str]]:
    for parameter in member.params:
        words = str(getattr(parameter, "help", "") or "")
        if getattr(parameter, "hidden", False) or parameter.name == "help":
            continue
        if isinstance(parameter, TyperOption):
            yield code(_option(parameter)), words
        else:
            yield code(_called(parameter)), words


def _option(option: TyperOption) -> str:
    names = ", ".join((*option.opts, *option.secondary_opts))
    return names if option.is_flag else f"{names} {option.metavar or option.name.upper()}"
