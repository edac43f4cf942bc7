"""`halter tokens`: who may come in through the server, and what they may do there."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from halter.app.words.moments import written
from halter.cli.answer import answer_json, answer_table, say
from halter.cli.command import NOT_FINE, WRONG_USE, JsonOption, fail, saying_errors, settings_for
from halter.cli.plain import ListingGroup, PlainCommand
from halter.core.clock import SystemClock
from halter.core.errors import ConfigError
from halter.core.ids import may_decide
from halter.settings import Settings

if TYPE_CHECKING:
    from halter.server.tokens import Token, TokenFile

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A token's name; it stands in every event.")]


def build() -> typer.Typer:
    """Make the group of commands."""
    help_text = "Show the tokens for the server; make or remove one."
    group = typer.Typer(name="tokens", cls=ListingGroup, help=help_text)
    for name, command in (("list", show), ("add", add), ("remove", remove)):
        group.command(name, cls=PlainCommand)(command)
    return group


def show(*, as_json: JsonOption = False) -> None:
    """List the tokens. What they are is not kept: a lost one is removed, and another made.

    Each with its role, and with the agents that it sees: a viewer looks, an approver decides and stops, an operator
    steers and spends, an admin does all of it.
    """
    from halter.server.tokens import shown

    tokens = saying_errors(lambda: file_of(settings_for(None)).tokens())
    if as_json:
        answer_json([shown(token) for token in tokens])
        return
    if not tokens:
        say("There are no tokens: `halter serve` makes the first, `halter tokens add NAME --role ROLE` any other.")
        return
    rows = [[token.name, token.role, ", ".join(token.agents) or "all", written(token.made_at)] for token in tokens]
    answer_table("Tokens", ["name", "role", "agents", "made"], rows)


def add(
    name: NameArgument,
    *,
    role: Annotated[str, typer.Option("--role", metavar="ROLE", help="viewer, approver, operator or admin.")],
    agent: Annotated[
        list[str] | None, typer.Option("--agent", metavar="AGENT", help="Only this agent is seen; may be repeated.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a token. It is shown once, now; it counts at once, also where a server runs.

    Its name stands in every event that it brings about. With --agent all other agents do not exist for it.
    """
    from halter.server.tokens import shown

    secret, token = saying_errors(lambda: made(_of_a_person(), name, role, agent or ()), WRONG_USE)
    if as_json:
        answer_json({**shown(token), "token": secret})
        return
    say(secret)
    sees = f"sees only {', '.join(token.agents)}" if token.agents else "sees every agent"
    say(f"This is the token {name}: {role}, {sees}. It is shown this once and kept nowhere; only its digest is.")


def made(settings: Settings, name: str, role: str, agents: Sequence[str] = ()) -> "tuple[str, Token]":
    """Make a token and keep its digest; return what is shown once."""
    from halter.server.tokens import new_secret, token_of

    secret = new_secret()
    token = token_of(secret, name, role, SystemClock().now(), agents)
    file_of(settings).add(token)
    return secret, token


def remove(name: NameArgument, *, as_json: JsonOption = False) -> None:
    """End a token: from this moment it opens nothing, and what it has open is closed within seconds.

    That is what to do with a token that was lost. Leaves with 2 if there is none of that name.
    """
    was_there = saying_errors(lambda: file_of(_of_a_person()).remove(name))
    if not was_there:
        fail(f"There is no token called {name!r}: look at `halter tokens`.", WRONG_USE)
    if as_json:
        answer_json({"subject": name, "done": True})
    else:
        say(f"The token {name} opens nothing any more.")


def _of_a_person() -> Settings:
    settings = settings_for(None)
    if not may_decide(settings.person):
        fail(f"Only a person may change tokens, and this was started by an agent ({settings.person}).", NOT_FINE)
    return settings


def file_of(settings: Settings) -> "TokenFile":
    """Find the file of tokens. Raises ConfigError where there is no place for one."""
    from halter.server.tokens import TokenFile

    if settings.tokens is None:
        raise ConfigError("You have no home folder, and HALTER_TOKENS is not set: set it, or HOME.")
    return TokenFile(settings.tokens)
