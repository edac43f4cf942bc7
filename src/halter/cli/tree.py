"""All commands, grouped as the help shows them. None is loaded before it is typed, so that the help comes at once."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Final

import typer
from typer.core import TyperGroup

from halter import __version__
from halter.cli.codes import MEANINGS
from halter.cli.plain import Later, PlainGroup, later

if TYPE_CHECKING:
    from typer._click.core import Command

COMMANDS: Final[Mapping[str, Mapping[str, tuple[str, str]]]] = {
    "Run": {
        "init": ("init:init", "Write a new agent: its file, instructions and a tool."),
        "run": ("talk:run", "Give an agent something to do, and wait until it is done."),
        "chat": ("talk:chat", "Talk with an agent, line by line."),
        "play": ("play:play", "Run a playbook through the guard, call by call."),
        "demo": ("demo:demo", "Show what Halter is for, then watch this machine."),
    },
    "Run by themselves": {
        "up": ("up:up", "Run agents by themselves until you interrupt it."),
        "worker": ("worker:worker", "Run agents as one of many workers on a PostgreSQL store."),
        "serve": ("serve:serve", "Serve the dashboard and the HTTP API, and run agents."),
        "on": ("up:on", "Switch an agent on."),
        "off": ("up:off", "Switch an agent off, and stop its session."),
    },
    "Look": {
        "sessions": ("look:sessions", "List sessions, the newest first."),
        "show": ("look:show", "Show every event of a session, in order."),
        "tail": ("tail:tail", "Show events as they are committed."),
        "receipt": ("receipt:receipt", "Show what a session did, spent and saw, and why it ended."),
        "report": ("report:report", "Tell what happened since yesterday, and what needs you."),
        "export": ("exporting:export", "Write a session's journal to a file that can be checked."),
        "findings": ("findings:build", "Show what sessions found; keep or dismiss it."),
        "proposals": ("proposals:build", "Show what agents want remembered; keep or dismiss it."),
    },
    "Steer": {
        "inbox": ("decide:inbox", "Show what needs you."),
        "approve": ("decide:approve", "Say yes: once, with other arguments, or always."),
        "deny": ("decide:deny", "Say no."),
        "halt": ("steer:halt", "Stop everything in a scope within a second."),
        "resume": ("steer:resume", "Let a halted scope act again."),
        "cancel": ("steer:cancel", "End a session for good."),
        "budget": ("budget:build", "Show what is spent against every cap; raise or lower one."),
        "policy": ("policy:build", "Show the policy that binds the store; change it."),
        "rules": ("rules:build", 'Show the rules by which somebody said "always"; end one.'),
    },
    "Plan": {
        "schedules": ("schedules:build", "Show what starts sessions; run it now, or end it."),
        "route": ("route:route", "Show which way a message to an agent would take."),
    },
    "Trust": {
        "audit": ("audit:audit", "Show who called which tool, and who agreed to it."),
        "verify": ("journal:verify", "Look for events that were altered, and mend tables."),
        "store": ("store:build", "Tell whether the store lacks anything; go on without it."),
        "erase": ("journal:erase", "Erase what was said in sessions that have ended."),
        "drill": ("drill:drill", "Prove a promise on this machine."),
        "doctor": ("doctor:doctor", "Check all that a night without anybody watching needs."),
        "schema": ("schema:schema", "Print the JSON Schema of agent.yaml or halter.yaml."),
        "tokens": ("tokens:build", "Show who may use the server; make or end a token."),
        "trust": ("play:trust", "Let the code of an agent's folder run, as it is now."),
    },
}
"""Each command by its name: where it is, and what it does in one line of a help of 80 columns."""

CODES: Final = "\n".join(f"{code:>5}  {meaning}" for code, meaning in MEANINGS.items())
EPILOG: Final = f"halter COMMAND --help tells more, with examples.\n\nA command leaves with one of these:\n{CODES}"


def tree() -> typer.Typer:
    """Make the commands, grouped as the help shows them."""
    app = typer.Typer(
        name="halter", cls=PlainGroup, no_args_is_help=True, pretty_exceptions_enable=False, epilog=EPILOG
    )
    app.callback()(_root)
    for panel, commands in COMMANDS.items():
        for name, (place, line) in commands.items():
            load = later(f"halter.cli.{place}", name, _prepared)
            app.command(name, help=line, rich_help_panel=panel, cls=Later)(load)
    return app


def whole() -> TyperGroup:
    """Load every command, for those who look at all of them."""
    group = typer.main.get_group(tree())
    for name, command in group.commands.items():
        group.commands[name] = command.loaded() if isinstance(command, Later) else command
    return group


def _prepared(name: str, command: "Command") -> "Command":
    """Give a command its examples, and what its words are completed by."""
    from halter.cli.completing import completed
    from halter.cli.examples import shown_below

    return completed(shown_below(name, command))


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"halter {__version__}")
        raise typer.Exit


def _root(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave."),
    ] = False,
) -> None:
    """Let agents work while you sleep: they cannot overspend, overstep or lose what they did."""
