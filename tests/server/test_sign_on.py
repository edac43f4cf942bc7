"""A proxy that is listed says who asks; nobody else does, and who has no group is nobody."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from halter.cli.commands import build_command_tree
from halter.core.clock import HOUR, MINUTE
from halter.core.errors import ConfigError, StoreUnavailable
from halter.core.events import PersonSignedOn, SignOnRefused
from halter.core.ids import FLEET
from halter.core.ports import Store
from halter.operations.actor import Principal
from halter.runtime.runtime import open_runtime
from halter.server.auth import (
    Allowed,
    AuthRejected,
    IncomingRequest,
    Keyring,
    Logins,
    authorize_request,
    make_secret,
    make_server_names,
    make_token,
)
from halter.server.middleware import AuthState, ServerLimits
from halter.server.sign_on import SignOnLog, make_proxy_sign_on
from halter.settings import read_settings
from halter.spec.fleet import SignOnSpec
from halter.testing.world import World

NOW = 1_767_225_600_000_000
SECRET = make_secret(lambda size: b"a" * size)
BOB = make_token(SECRET, "bob", "viewer", NOW)
DOOR = make_server_names("127.0.0.1", 8765, ["halter.example"])
SPEC = SignOnSpec(
    proxies=("10.0.0.7", "192.168.0.0/24", "::1"),
    secret="${secret:PROXY}",
    roles={"ops": "operator", "leads": "approver", "all staff": "viewer"},
    people={"Ada@Example.com": "ada"},
)
SHARED = "shared-with-the-proxy"
SIGN_ON = make_proxy_sign_on(SPEC, {"PROXY": SHARED}.__getitem__)
PROXY = "10.0.0.7"
USER, GROUPS = ("x-forwarded-user", "ada@example.com"), ("x-forwarded-groups", "leads,everyone")
OWN = ("origin", "https://halter.example")


def ask(*headers: tuple[str, str], client: str = PROXY, proof: str = SHARED, **more: Any) -> Allowed | AuthRejected:
    fields: Mapping[str, Any] = {"kind": "http", "method": "GET", "path": "/api/home", **more}
    fields = {"first": (("host", "halter.example"), *((("x-halter-proxy", proof),) if proof else ())), **fields}
    raw = [(name.encode(), value.encode("latin-1")) for name, value in (*fields["first"], *headers)]
    incoming_request = IncomingRequest(fields["kind"], fields["method"], fields["path"], b"", raw, client)
    return authorize_request(incoming_request, DOOR, [BOB], {}, NOW, SIGN_ON.identify)


def who(verdict: Allowed | AuthRejected) -> Principal | None:
    return verdict.token.principal if isinstance(verdict, Allowed) and verdict.token else None


def status(verdict: Allowed | AuthRejected) -> int:
    return verdict.status if isinstance(verdict, AuthRejected) else 200


def test_a_listed_proxy_says_who_asks_and_the_highest_role_of_their_groups_counts() -> None:
    assert who(ask(USER, GROUPS)) == Principal("ada", "approver")
    assert who(ask(USER, ("x-forwarded-groups", "all staff, ops ,leads"))) == Principal("ada", "operator")
    assert who(ask(("x-forwarded-user", "Eve.Long@example.com"), GROUPS)) == Principal(
        "eve.long@example.com", "approver"
    )
    assert who(ask(USER, GROUPS, client="192.168.0.99")) == Principal("ada", "approver")
    assert who(ask(USER, GROUPS, client="::ffff:10.0.0.7")) == Principal("ada", "approver")
    assert who(ask(USER, GROUPS, client="::1")) == Principal("ada", "approver")


@pytest.mark.parametrize("client", ["10.0.0.8", "127.0.0.1", "192.168.1.1", "", "proxy", "::ffff:10.0.0.8", "fe80::1"])
def test_from_anywhere_else_the_header_is_not_looked_at(client: str) -> None:
    assert status(ask(USER, GROUPS, client=client)) == 401
    assert status(ask(USER, GROUPS, ("x-forwarded-for", PROXY), client=client)) == 401
    bearer = ("authorization", f"Bearer {SECRET}")
    assert who(ask(USER, GROUPS, bearer, client=client)) == Principal("bob", "viewer")


@pytest.mark.parametrize("proof", ["", "guessed", SHARED.upper(), f"{SHARED} "[:-2]])
def test_an_address_alone_is_no_proof(proof: str) -> None:
    """An agent on the proxy's machine comes from there, too."""
    assert status(ask(USER, GROUPS, proof=proof)) == 401
    assert status(ask(USER, GROUPS, ("x-halter-proxy", SHARED), proof="guessed")) == 401


def test_a_secret_that_is_missing_or_short_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="Set HALTER_SECRET_PROXY"):
        make_proxy_sign_on(SPEC, {}.__getitem__)
    with pytest.raises(ConfigError, match="too short"):
        make_proxy_sign_on(SPEC, {"PROXY": "short"}.__getitem__)


@pytest.mark.parametrize("groups", ["", "everyone", "OPS", "ops leads", "admin"])
def test_who_is_in_no_known_group_is_nobody(groups: str) -> None:
    assert status(ask(USER, ("x-forwarded-groups", groups))) == 403
    assert status(ask(USER)) == 403


@pytest.mark.parametrize("user", ["agent:desk", "a b", "ada\x00", "@example.com", "ada@ex ample", "x" * 300, "añ"])
def test_what_cannot_be_a_person_is_refused(user: str) -> None:
    raw = user.encode("utf-8").decode("latin-1")
    assert status(ask(("x-forwarded-user", raw), GROUPS)) == 403


def test_a_person_is_recorded_once() -> None:
    assert status(ask(USER, ("x-forwarded-user", "root@example.com"), GROUPS)) == 400


def test_a_wrong_token_is_not_made_good_by_the_proxy_and_a_right_one_counts() -> None:
    assert status(ask(USER, GROUPS, ("authorization", "Bearer halter_wrong"))) == 401
    assert who(ask(USER, GROUPS, ("authorization", f"Bearer {SECRET}"))) == Principal("bob", "viewer")


def test_a_cookie_that_has_ended_does_not_lock_a_person_out() -> None:
    assert who(ask(USER, GROUPS, ("cookie", f"halter_8765={'x' * 43}"))) == Principal("ada", "approver")


def test_a_foreign_page_cannot_make_a_browser_act_through_the_proxy() -> None:
    assert status(ask(USER, GROUPS, method="POST")) == 403
    assert status(ask(USER, GROUPS, kind="websocket", path="/api/ws")) == 403
    assert status(ask(USER, GROUPS, ("origin", "https://evil.example"), method="POST")) == 403
    assert who(ask(USER, GROUPS, OWN, method="POST")) == Principal("ada", "approver")
    assert who(ask(USER, GROUPS, OWN, kind="websocket", path="/api/ws")) == Principal("ada", "approver")


def test_an_open_stream_ends_after_its_lifetime_and_no_other_token_is_lent_to_it() -> None:
    checks = AuthState(Keyring(extra=[BOB]), Logins(), ServerLimits(), SIGN_ON.identify)
    allowed = ask(USER, GROUPS)
    assert isinstance(allowed, Allowed)
    assert checks.count(allowed, NOW + HOUR - MINUTE)
    assert not checks.count(allowed, NOW + HOUR)
    assert not checks.count(Allowed(allowed.token), NOW)


async def test_a_proxy_s_people_are_recorded_once_an_hour_and_refusals_with_why(world: World) -> None:
    log = SignOnLog(world.journal, world.ids, world.clock)

    async def recorded() -> list[PersonSignedOn | SignOnRefused]:
        kinds = (PersonSignedOn, SignOnRefused)
        results = [one.event for one in await world.events(FLEET) if isinstance(one.event, kinds)]
        assert len({event.id for event in results}) == len(results)
        return [replace(event, id="") for event in results]

    for _ in range(3):
        await log.record_request(ask(USER, GROUPS), PROXY)
    nobody = ("x-forwarded-groups", "guests")
    for _ in range(3):
        await log.record_request(ask(USER, nobody), PROXY)
        await log.record_request(ask(), PROXY)
        await log.record_request(ask(("authorization", f"Bearer {SECRET}")), PROXY)
    ada = PersonSignedOn(id="", name="ada", role="approver", via="proxy 10.0.0.7", account="ada@example.com")
    assert await recorded() == [
        ada,
        SignOnRefused(id="", via="proxy 10.0.0.7", why="no_role", account="ada@example.com"),
    ]
    await log.record_request(ask(USER, ("x-forwarded-groups", "ops")), PROXY)
    await world.advance(HOUR)
    await log.record_request(ask(USER, GROUPS), PROXY)
    assert [event.role for event in await recorded() if isinstance(event, PersonSignedOn)] == [
        "approver",
        "operator",
        "approver",
    ]


async def test_sign_ons_are_exported_with_the_calls_once(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "HALTER_PERSON": "ada"}
    store, export = str(tmp_path / "halter.db"), tmp_path / "audit.jsonl"
    async with open_runtime(read_settings(environ, tmp_path, store), environ=environ) as app:
        log = SignOnLog(app.store, app.ids, app.clock)
        await log.record_request(ask(USER, GROUPS), PROXY)
        await log.record_request(ask(USER, ("x-forwarded-groups", "guests")), PROXY)
    words = ["audit", "--store", store, "--export", str(export), "--cursor", "siem"]
    for _ in range(2):
        result = await asyncio.to_thread(CliRunner().invoke, build_command_tree(), words, env=environ)
        assert result.exit_code == 0, result.output
    rows = [msgspec.json.decode(line) for line in export.read_bytes().splitlines()]
    assert [(row["tool"], row["outcome"], row["decided_by"], row["capability_level"]) for row in rows] == [
        ("sign_on proxy 10.0.0.7", "ok", "ada", "approver"),
        ("sign_on proxy 10.0.0.7", "no_role", "ada@example.com", ""),
    ]


async def test_without_the_store_a_proxy_s_request_still_reports_it(world: World) -> None:
    class Away:
        async def commit(self, _: Any) -> Any:
            raise StoreUnavailable("The store is away.")

    log = SignOnLog(cast("Store", Away()), world.ids, world.clock)
    await log.record_request(ask(USER, GROUPS), PROXY)
    with pytest.raises(StoreUnavailable):
        await log.record_login(ask(USER, GROUPS), "provider")
