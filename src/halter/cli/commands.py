"""The tree of commands, their help, and their examples.

A command is a name and a summary; its module is loaded when it is invoked. The help of a flag shows no type. The
examples use one agent, `clerk`, and its first session.
"""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from halter import __version__
from halter.cli.completion import add_completion
from halter.cli.exit_codes import EXIT_MEANINGS

if TYPE_CHECKING:
    from typer._click.core import Command, Context, Parameter


class PlainCommand(TyperCommand):
    def get_params(self, ctx: "Context") -> "list[Parameter]":
        return _clear_flag_metavars(super().get_params(ctx))


class PlainGroup(TyperGroup):
    def get_params(self, ctx: "Context") -> "list[Parameter]":
        return _clear_flag_metavars(super().get_params(ctx))

    def resolve_command(self, ctx: "Context", args: list[str]) -> "tuple[str | None, Command | None, list[str]]":
        name, command, remaining = super().resolve_command(ctx, args)
        return name, command.load() if isinstance(command, LazyCommand) else command, remaining


class ListingGroup(PlainGroup):
    """A group that runs `list`, unless one of its commands is named."""

    DEFAULT = "list"

    def parse_args(self, ctx: "Context", args: list[str]) -> list[str]:
        first_argument = next(iter(args), "")
        return super().parse_args(
            ctx, args if first_argument in self.commands or first_argument == "--help" else [self.DEFAULT, *args]
        )


class EvalGroup(ListingGroup):
    """A group that runs `run`, unless one of its commands is named."""

    DEFAULT = "run"


class LazyCommand(PlainCommand):
    """A command that is a name and a summary until it is invoked."""

    def load(self) -> "Command":
        load: Callable[[], Command] | None = self.callback
        return self if load is None else load()


def make_lazy_loader(target: str, name: str) -> "Callable[[], Command]":
    """Make a loader of a command from its target, such as `halter.cli.sessions:show`: a function or a group."""

    def load() -> Any:
        module, _, attribute = target.partition(":")
        command = add_examples(name, _command(name, getattr(import_module(module), attribute)))
        return name_arguments(add_short_flags(add_completion(command)))

    return load


SHORT_FLAGS: Final[Mapping[str, str]] = {
    "--agent": "-a",
    "--follow": "-f",
    "--json": "-j",
    "--limit": "-n",
    "--model": "-m",
    "--output": "-o",
    "--reason": "-r",
    "--since": "-S",
    "--state": "-s",
    "--tool": "-t",
    "--yes": "-y",
}
"""A letter has the same meaning in every command."""


def add_short_flags(command: "Command") -> "Command":
    for param in command.params:
        param.opts += [SHORT_FLAGS[flag] for flag in param.opts if flag in SHORT_FLAGS]
    if isinstance(command, TyperGroup):
        for inner in command.commands.values():
            add_short_flags(inner)
    return command


def name_arguments(command: "Command") -> "Command":
    """Show every argument by a name in capitals, as options show their values."""
    for param in command.params:
        if isinstance(param, TyperArgument) and not param.metavar:
            param.metavar = (param.name or "").upper()
    if isinstance(command, TyperGroup):
        for inner in command.commands.values():
            name_arguments(inner)
    return command


def _command(name: str, target: typer.Typer | Callable[..., Any]) -> "Command":
    if isinstance(target, typer.Typer):
        command = typer.main.get_group(target)
    else:
        app = typer.Typer(add_completion=False)
        app.command(name, cls=PlainCommand)(target)
        command = typer.main.get_command(app)
    command.name = name
    return command


def _clear_flag_metavars(params: "Iterable[Parameter]") -> "list[Parameter]":
    parameters = list(params)
    for param in parameters:
        if isinstance(param, TyperOption) and param.is_flag:
            param.metavar = ""
    return parameters


COMMANDS: Final[Mapping[str, Mapping[str, tuple[str, str]]]] = {
    "Run": {
        "init": ("run.init:init", "Write a new agent: its file, instructions and a tool."),
        "run": ("run.talk:run", "Give an agent a task and wait for the result."),
        "chat": ("run.talk:chat", "Chat with an agent in the terminal."),
        "play": ("run.play:play", "Run a playbook through the guard, call by call."),
        "eval": ("run.evals:evals", "Run an agent's eval cases under one cap; compare runs."),
        "demo": ("run.demo:demo", "Show a demo night, then run an agent on this machine."),
    },
    "Run unattended": {
        "up": ("unattended.up:up", "Run autonomous agents until interrupted."),
        "worker": ("unattended.worker:worker", "Run agents as one of several workers on PostgreSQL."),
        "serve": ("unattended.serve:serve", "Serve the dashboard and the HTTP API, and run agents."),
        "hook": ("unattended.hook:hook", "Guard the tool calls of Claude Code, Codex and others."),
        "proxy": ("unattended.proxy:proxy", "Guard the model requests of other programs' agents."),
        "gateway": ("unattended.gateway:gateway", "Guard the calls of other programs to MCP servers."),
        "on": ("unattended.switch:on", "Switch an agent on."),
        "off": ("unattended.switch:off", "Switch an agent off and stop its session."),
    },
    "Inspect": {
        "status": ("inspect.status:status", "Show the state of all agents, and what needs you."),
        "sessions": ("inspect.sessions:sessions", "List sessions, the newest first."),
        "show": ("inspect.show:show", "Show a session: conversation, receipt, or live events."),
        "report": ("inspect.report:report", "Report what happened in the last day."),
        "export": ("inspect.export:export", "Export a session's journal to a verifiable file."),
        "findings": ("inspect.artifacts:findings", "List findings of sessions; accept or dismiss one."),
        "proposals": ("inspect.artifacts:proposals", "List proposals of agents; accept or dismiss one."),
    },
    "Control": {
        "inbox": ("control.decisions:inbox", "Show what needs you."),
        "approve": ("control.decisions:approve", "Approve a decision: once, edited, or with a rule."),
        "deny": ("control.decisions:deny", "Deny a decision."),
        "tell": ("control.messages:tell", "Send a message to a session, or answer its question."),
        "fork": ("control.forks:fork", "Create a session from any point of another one."),
        "halt": ("control.halts:halt", "Halt the fleet, an agent or a session within a second."),
        "resume": ("control.halts:resume", "Lift the halt of the fleet, an agent or a session."),
        "cancel": ("control.halts:cancel", "End a session. Running calls are cancelled."),
        "budget": ("control.budget:budget", "Show spending against every cap; raise or lower one."),
        "policy": ("control.policy:policy", "Show, test or change the store's policy."),
        "prices": ("control.prices:prices", "Show or update the price table; accept lower prices."),
        "rules": ("control.decisions:rules", "List standing rules; end one."),
    },
    "Plan": {
        "triggers": ("plan.triggers:triggers", "List triggers; run or end one."),
        "route": ("plan.route:route", "Show how a message to an agent would be routed."),
    },
    "Trust": {
        "audit": ("trust.audit:audit", "List tool calls with caller, outcome and approver."),
        "verify": ("trust.journal:verify", "Verify the journal's hash chain; rebuild tables."),
        "store": ("trust.journal:store", "Check the store for missing events; accept a loss."),
        "erase": ("trust.journal:erase", "Erase the bodies of ended sessions."),
        "drill": ("trust.drill:drill", "Test Halter's promises on this machine."),
        "doctor": ("trust.doctor:doctor", "Check everything that unattended agents need."),
        "tools": ("trust.tools:tools", "Show the declared and inferred properties of each tool."),
        "schema": ("trust.schema:schema", "Print the JSON Schema of agent.yaml or halter.yaml."),
        "tokens": ("trust.tokens:tokens", "List tokens for the server; make or remove one."),
        "channels": ("trust.channels:channels", "List who answers decisions by phone; pair or unpair."),
        "keys": ("trust.keys:keys", "List virtual keys for the proxy; make or revoke one."),
        "trust": ("trust.trust:trust", "Trust the current code of an agent folder."),
    },
}
"""Commands by panel and name: the target of each, and its summary, which fits a help of 80 columns."""

FORMER_COMMANDS: Final[Mapping[str, str]] = {
    "top": "inspect.status:top",
    "tail": "inspect.show:tail",
    "receipt": "inspect.show:receipt",
    "schedules": "plan.triggers:triggers",
}
"""Commands of earlier versions and their targets. They work for ever, and no help shows them."""

EXIT_CODES_TEXT: Final = "\n".join(f"{code:>5}  {meaning}" for code, meaning in EXIT_MEANINGS.items())
EPILOG: Final = f"halter COMMAND --help shows more, with examples.\n\nExit codes:\n{EXIT_CODES_TEXT}"


def build_command_tree() -> typer.Typer:
    app = typer.Typer(
        name="halter", cls=PlainGroup, no_args_is_help=True, pretty_exceptions_enable=False, epilog=EPILOG
    )
    app.callback()(_root)
    for panel, commands in COMMANDS.items():
        for name, (target, summary) in commands.items():
            load = make_lazy_loader(f"halter.cli.{target}", name)
            app.command(name, help=summary, rich_help_panel=panel, cls=LazyCommand)(load)
    for name, target in FORMER_COMMANDS.items():
        app.command(name, hidden=True, cls=LazyCommand)(make_lazy_loader(f"halter.cli.{target}", name))
    return app


PANEL: Final = "rich_help_panel"


def load_all_commands() -> TyperGroup:
    group = typer.main.get_group(build_command_tree())
    for name, command in group.commands.items():
        if isinstance(command, LazyCommand):
            loaded_command = group.commands[name] = command.load()
            loaded_command.hidden = command.hidden
            setattr(loaded_command, PANEL, getattr(command, PANEL))
    return group


def _show_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"halter {__version__}")
        raise typer.Exit


def _root(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Let agents work while you sleep: they cannot overspend, overstep or lose what they did."""


EXAMPLES: Final[Mapping[str, tuple[str, ...]]] = {
    "init": ("halter init night-watch", "halter init writer --model openai:gpt-6-luna"),
    "run": ('halter run clerk "What is 17 * 23?"', 'halter run clerk "hello" --json'),
    "chat": ("halter chat clerk",),
    "play": ("halter play clerk/welcome.yaml --input who=Ada",),
    "eval": ("halter eval clerk", "halter eval clerk --json"),
    "eval run": ("halter eval clerk",),
    "eval add": ("halter eval add clerk-2 clerk",),
    "demo": ("halter demo", "halter demo --night-only --json"),
    "up": ("halter up clerk", "halter up clerk --json"),
    "worker": ("halter worker", "halter worker clerk --concurrency 20 --json"),
    "serve": ("halter serve", "halter serve clerk --json"),
    "hook": ("halter hook install --for claude", "halter hook status"),
    "hook install": ("halter hook install --for claude --agent coder --wait 2m",),
    "hook uninstall": ("halter hook uninstall --for claude",),
    "hook status": ("halter hook status --json",),
    "hook serve": ("halter hook serve",),
    "on": ("halter on clerk", 'halter on ./clerk --reason "back from holiday"'),
    "off": ('halter off clerk --reason "too many letters"',),
    "status": ("halter status", "halter status --json", "halter status --live --once"),
    "sessions": (
        "halter sessions",
        "halter sessions --agent clerk --state sleeping --since 7d",
        "halter sessions -n 5 -j",
    ),
    "show": ("halter show clerk-1 --events", "halter show clerk-2 --receipt", "halter show clerk-1 --follow"),
    "report": ("halter report", "halter report --since 7d --html week.html"),
    "export": ("halter export clerk-2 --output clerk-2.jsonl",),
    "findings": ("halter findings", "halter findings clerk-1 --json"),
    "findings list": ("halter findings", "halter findings list clerk-1"),
    "findings accept": ('halter findings accept clerk-1.f1 --reason "seen on the wall, too"',),
    "findings dismiss": ("halter findings dismiss clerk-1.f1",),
    "proposals": ("halter proposals",),
    "proposals list": ("halter proposals --json",),
    "proposals accept": ("halter proposals accept clerk-1.m1",),
    "proposals dismiss": ('halter proposals dismiss clerk-1.m1 --reason "not so any more"',),
    "proposals promote": ("halter proposals promote clerk-1.m1 clerk --yes",),
    "inbox": ("halter inbox", "halter inbox --json"),
    "approve": (
        "halter approve clerk-1.1/approval",
        "halter approve clerk-1.1/approval --edit letter.json",
        "halter approve clerk-1.1/approval --always --match same --for 1h",
    ),
    "deny": ('halter deny clerk-1.1/approval --reason "not today"',),
    "tell": ('halter tell clerk-1 "the blue one"',),
    "fork": ("halter fork clerk-2 --at 2", 'halter fork clerk-2 --at 2 "Try it another way."'),
    "halt": ("halter halt fleet", 'halter halt clerk --reason "looks odd"'),
    "resume": ("halter resume fleet", "halter resume fleet --over 5m"),
    "cancel": ("halter cancel clerk-1",),
    "budget": ("halter budget", "halter budget raise fleet 30"),
    "budget show": ("halter budget show --everything",),
    "budget raise": ('halter budget raise fleet 30 --reason "launch day"',),
    "budget lower": ("halter budget lower agent:clerk 2",),
    "policy": ("halter policy", "halter policy apply fleet/halter.yaml --yes"),
    "policy show": ("halter policy show --json",),
    "policy apply": ('halter policy apply fleet/halter.yaml --yes --reason "agreed on Monday"',),
    "prices": ("halter prices", "halter prices update"),
    "prices show": ("halter prices show --json",),
    "prices update": ("halter prices update",),
    "prices accept": ('halter prices accept 3f1c09a2b7de --reason "as on the maker\'s page"',),
    "policy backtest": (
        "halter policy backtest --agent clerk --cap 0.50",
        "halter policy backtest --agent clerk --cap 0.50 --since 30d --fail-on loosened",
    ),
    "policy suggest": ("halter policy suggest --agent clerk --since 30d",),
    "policy diff": ("halter policy diff fleet/halter.yaml fleet/halter.yaml",),
    "rules": ("halter rules",),
    "rules end": ("halter rules end r1",),
    "rules offer": ("halter rules offer clerk-1.1/approval",),
    "triggers": ("halter triggers", "halter triggers run clerk/nightly"),
    "triggers list": ("halter triggers list clerk",),
    "triggers run": ("halter triggers run clerk/nightly",),
    "triggers cancel": ("halter triggers cancel clerk/weekly",),
    "triggers retry": ("halter triggers retry clerk/letters 0123456789abcdef",),
    "route": ('halter route clerk "What is 17 * 23?"',),
    "audit": (
        "halter audit --since 24h",
        "halter audit --agent clerk --outcome approval_denied --limit 20",
        "halter audit --export audit.jsonl --cursor siem",
    ),
    "verify": ("halter verify", "halter verify --rebuild"),
    "store": ("halter store", 'halter store accept --reason "restored the backup of Monday"'),
    "store accept": ("halter store accept", 'halter store accept --reason "restored the backup of Monday" --yes'),
    "erase": ("halter erase --session clerk-2 --yes", "halter erase --older-than 90d --yes"),
    "drill": ("halter drill race --seeds 5", "halter drill tamper --json", "halter drill inject --agent clerk"),
    "doctor": ("halter doctor", "halter doctor clerk --json"),
    "tools": ("halter tools clerk", "halter tools clerk --json"),
    "schema": ("halter schema agent > agent.schema.json",),
    "tokens": ("halter tokens", "halter tokens add bob --role approver --agent clerk"),
    "tokens list": ("halter tokens --json",),
    "tokens add": ("halter tokens add ada --role admin", "halter tokens add bob --role approver --agent clerk"),
    "tokens remove": ("halter tokens remove carol",),
    "channels": ("halter channels", "halter channels pair telegram ada"),
    "channels list": ("halter channels --json",),
    "channels pair": (
        "halter channels pair telegram ada",
        "halter channels pair telegram bob --role operator --agent clerk --json",
    ),
    "channels unpair": ('halter channels unpair telegram ada --reason "lost the phone"',),
    "proxy": ("halter proxy", "halter proxy --json"),
    "gateway": ("halter gateway --agent desk", "halter gateway --agent desk --config .mcp.json --http :8767"),
    "proxy env": ("halter proxy env claude", "halter proxy env codex --key KEY"),
    "proxy check": ("halter proxy check claude --key KEY",),
    "keys": ("halter keys", "halter keys new --agent desk --max-cost-usd-per-day 2"),
    "keys list": ("halter keys --json",),
    "keys new": (
        "halter keys new --agent desk --max-cost-usd-per-day 2",
        "halter keys new --agent night --model 'anthropic:claude-*' --json",
    ),
    "keys revoke": ("halter keys revoke desk",),
    "trust": ("halter trust clerk",),
}
"""Examples by command. A test runs each of them."""


def add_examples(name: str, command: "Command") -> "Command":
    examples = EXAMPLES.get(name, ())
    if examples:
        command.epilog = "\n".join((f"Example{'s' * (len(examples) > 1)}:", *(f"  {line}" for line in examples)))
    if isinstance(command, TyperGroup):
        for inner_name, inner in command.commands.items():
            add_examples(f"{name} {inner_name}", inner)
    return command
