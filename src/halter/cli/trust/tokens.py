"""`halter tokens`: tokens for the server."""

from collections.abc import Sequence
from typing import Annotated

import typer

from halter.cli.command import (
    JsonOption,
    fail,
    group,
    read_cli_settings,
    report_errors,
)
from halter.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from halter.cli.output import answer_json, answer_table, print_sentence
from halter.core.clock import SystemClock
from halter.core.errors import ConfigError
from halter.core.ids import can_decide
from halter.present.moments import format_moment
from halter.server.auth import Token, TokenFile, make_secret, make_token, render_token
from halter.settings import Settings

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the token, recorded in every event.")]


def show(*, as_json: JsonOption = False) -> None:
    """List tokens. Only digests are stored: remove a lost token, and make another.

    Each has a role and the agents that it sees: a viewer reads, an approver decides and stops, an operator steers and
    spends, an admin does everything.
    """
    tokens = report_errors(lambda: find_token_file(read_cli_settings(None)).tokens())
    if as_json:
        answer_json([render_token(token) for token in tokens])
        return
    if not tokens:
        print_sentence(
            "There are no tokens. `halter serve` makes the first one; make others with `halter tokens add NAME --role "
            "ROLE`."
        )
        return
    rows = [
        [token.name, token.role, ", ".join(token.agents) or "all", format_moment(token.made_at)] for token in tokens
    ]
    answer_table("Tokens", ["name", "role", "agents", "created"], rows)


def add(
    name: NameArgument,
    *,
    role: Annotated[str, typer.Option("--role", metavar="ROLE", help="viewer, approver, operator or admin.")],
    agent: Annotated[
        list[str] | None, typer.Option("--agent", metavar="AGENT", help="The token sees only this agent. Repeatable.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a token. It is shown once, and works immediately on a running server, too.

    Its name is in every event that it causes. With --agent, it sees no other agents.
    """
    secret, token = report_errors(lambda: create_token(_require_person_settings(), name, role, agent or ()), EXIT_USAGE)
    if as_json:
        answer_json({**render_token(token), "token": secret})
        return
    print_sentence(secret)
    sees = f"sees only {', '.join(token.agents)}" if token.agents else "sees every agent"
    print_sentence(f"Token {name}: {role}, {sees}. It is shown only once; only its digest is stored.")


def create_token(settings: Settings, name: str, role: str, agents: Sequence[str] = ()) -> tuple[str, Token]:
    """Make a token and store its digest; return the secret, which is shown once."""
    secret = make_secret()
    token = make_token(secret, name, role, SystemClock().now(), agents)
    find_token_file(settings).add(token)
    return secret, token


def remove(name: NameArgument, *, as_json: JsonOption = False) -> None:
    """Remove a token. It stops working immediately, and its open connections are closed within seconds.

    Use this after a token was lost. Exits 2 if there is no token of that name.
    """
    was_removed = report_errors(lambda: find_token_file(_require_person_settings()).remove(name))
    if not was_removed:
        fail(f"There is no token {name!r}. See `halter tokens`.", EXIT_USAGE)
    if as_json:
        answer_json({"subject": name, "done": True})
    else:
        print_sentence(f"Removed token {name}.")


def _require_person_settings() -> Settings:
    settings = read_cli_settings(None)
    if not can_decide(settings.person):
        fail(f"Only a person can change tokens; this command runs inside an agent ({settings.person}).", EXIT_FAILED)
    return settings


def find_token_file(settings: Settings) -> TokenFile:
    if settings.tokens is None:
        raise ConfigError("No home folder, and HALTER_TOKENS is not set. Set HALTER_TOKENS or HOME.")
    return TokenFile(settings.tokens)


tokens = group("List tokens for the server; make or remove one.", {"list": show, "add": add, "remove": remove})
