"""`halter keys`: virtual keys for the proxy."""

from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any

import typer

from halter.cli.command import (
    JsonOption,
    fail,
    group,
    read_cli_settings,
    report_errors,
    run_with_app,
)
from halter.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from halter.cli.output import answer_json, answer_table, print_sentence, warn
from halter.config.merge import FleetConfig
from halter.core.clock import SystemClock
from halter.core.errors import ConfigError
from halter.core.ids import can_decide
from halter.core.money import format_usd
from halter.journal.open import store_file_exists
from halter.present.moments import format_moment
from halter.proxy.keys import KeyFile, KeyLimits, make_key_secret, make_virtual_key, render_key
from halter.runtime.runtime import (
    DEFAULT_FLEET,
    Runtime,
    read_local_fleet,
    resolve_effective_policy,
)
from halter.settings import Settings, find_keys_file


def list_keys(*, as_json: JsonOption = False) -> None:
    """List the virtual keys of the proxy. Only digests are stored: revoke a lost key, and make another.

    Each has an agent whose account it spends from, a daily cap, and the models that it may use.
    """
    keys = report_errors(lambda: find_key_file(read_cli_settings(None)).read_keys())
    if as_json:
        answer_json([render_key(key) for key in keys])
        return
    if not keys:
        print_sentence("There are no virtual keys. Make one with `halter keys new --agent NAME`.")
        return
    rows = [
        [
            key.name,
            key.agent,
            _dollars(key.limits.max_cost_usd_per_day),
            ", ".join(key.limits.models) or "all",
            format_moment(key.made_at),
            "revoked" if key.revoked_at is not None else "",
        ]
        for key in keys
    ]
    answer_table("Keys", ["name", "agent", "per day", "models", "created", "status"], rows)


def _dollars(amount: Decimal | None) -> str:
    return "" if amount is None else format_usd(amount)


def new_key(
    *,
    agent: Annotated[str, typer.Option("--agent", metavar="AGENT", help="Agent whose account it spends from.")],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the key (default: the agent's).")] = "",
    per_day: Annotated[
        str, typer.Option("--max-cost-usd-per-day", metavar="USD", help="Daily cap of the agent (default: 5).")
    ] = "",
    per_hour: Annotated[
        str, typer.Option("--max-cost-usd-per-hour", metavar="USD", help="Hourly cap of the agent.")
    ] = "",
    per_session: Annotated[
        str, typer.Option("--max-cost-usd", metavar="USD", help="Cap of one session of its client.")
    ] = "",
    tokens: Annotated[
        int | None,
        typer.Option("--tokens-per-hour", metavar="N", min=1, help="Token limit of the agent per hour."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="MODEL", help="Allowed model pattern, such as anthropic:claude-*. Repeatable."),
    ] = None,
    mask_secrets: Annotated[
        bool, typer.Option("--mask-secrets", help="Mask secrets in requests of its clients to the provider.")
    ] = False,
    max_body: Annotated[
        int | None,
        typer.Option("--max-body-mb", metavar="N", min=1, max=64, help="Largest request, in megabytes (default: 8)."),
    ] = None,
    allow_member: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-member",
            metavar="NAME",
            help="Member or tool of requests to pass on, whatever it costs. Repeatable.",
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Set the agent's caps of this key for all other keys of the agent, too.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a virtual key for a client of the proxy. It is shown once, and works immediately on a running proxy, too.

    Keys of one agent spend from one account and share its caps: a key without caps keeps those of the agent's other
    keys. The fleet's caps apply to all keys together.
    """
    from halter.proxy.key_terms import describe_lower_cap, resolve_key

    settings = _require_person_settings()
    secret = make_key_secret()
    fleet = _read_fleet(settings)

    def create_key() -> Any:
        amounts = _read_usd(per_session), _read_usd(per_hour), _read_usd(per_day)
        limits = KeyLimits(*amounts, tokens, tuple(model or ()), mask_secrets, max_body, tuple(allow_member or ()))
        key = make_virtual_key(secret, name or agent, agent, SystemClock().now(), settings.person, limits)
        resolve_key(fleet, key)
        return find_key_file(settings).add(key, replaces_limits=replace)

    key = report_errors(create_key, EXIT_USAGE)
    if notice := describe_lower_cap(resolve_key(fleet, key)):
        warn(notice)
    if as_json:
        answer_json({**render_key(key), "key": secret})
        return
    print_sentence(secret)
    print_sentence(
        f"Virtual key {key.name}, which spends as {agent}. It is shown only once; only its digest is stored."
    )
    if not per_day and key.limits.max_cost_usd_per_day is not None:
        print_sentence(f"It shares the cap of {agent}'s other keys: {_dollars(key.limits.max_cost_usd_per_day)} a day.")


def _read_fleet(settings: Settings) -> FleetConfig:
    """Read the policy that binds the proxy: the store's, if there is a store, and the local file where it is stricter.

    Nothing is adopted.
    """
    local_fleet = report_errors(lambda: read_local_fleet(settings))
    if not store_file_exists(settings.store):
        return local_fleet or DEFAULT_FLEET

    async def job(app: Runtime) -> FleetConfig:
        return (await resolve_effective_policy(app.store, local_fleet)).fleet

    return run_with_app(None, job, warn_uncovered=False, despite_doubt=True)


def _read_usd(text: str) -> Decimal | None:
    try:
        return Decimal(text.removeprefix("$")) if text else None
    except InvalidOperation:
        raise ConfigError(f"Invalid amount {text!r}. Use dollars, such as 2.00.") from None


def revoke_key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the key.")], *, as_json: JsonOption = False
) -> None:
    """Revoke a virtual key. The next request of its clients is refused; running requests continue.

    `halter halt agent:NAME` stops running requests, too. Exits 2 if there is no key of that name.
    """
    was_revoked = report_errors(lambda: find_key_file(_require_person_settings()).revoke(name, SystemClock().now()))
    if not was_revoked:
        fail(f"There is no virtual key {name!r}. See `halter keys`.", EXIT_USAGE)
    if as_json:
        answer_json({"subject": name, "done": True})
    else:
        print_sentence(f"Revoked virtual key {name}.")


def _require_person_settings() -> Settings:
    settings = read_cli_settings(None)
    if not can_decide(settings.person):
        fail(f"Only a person can change keys; this command runs inside an agent ({settings.person}).", EXIT_FAILED)
    return settings


def find_key_file(settings: Settings) -> KeyFile:
    if settings.tokens is None:
        raise ConfigError("No home folder, and HALTER_TOKENS is not set. Set HALTER_TOKENS or HOME.")
    return KeyFile(Path(find_keys_file(settings.tokens)))


keys = group(
    "List virtual keys for the proxy; make or revoke one.", {"list": list_keys, "new": new_key, "revoke": revoke_key}
)
