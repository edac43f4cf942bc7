"""Whom a provider signs on is let in as the account that it is, with the role of its groups, and not for long."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
from msgspec import UNSET
from msgspec.structs import replace

from halter.core.clock import HOUR, MINUTE
from halter.core.errors import ConfigError
from halter.core.ids import FLEET, name_signed_on_person
from halter.core.ports import read_stream
from halter.guard.approval_check import are_two_people
from halter.net.httpx_transport import connect_directly
from halter.net.tls import make_tls_context
from halter.operations.actor import Actor, Principal
from halter.operations.queries import audit_page
from halter.present.events import summarize_event
from halter.runtime.feed import Bus
from halter.server.auth import Keyring, TokenFile, make_secret, make_token
from halter.server.listener import bind, serve_asgi
from halter.server.oidc import OidcSignOn, make_oidc_sign_on
from halter.server.server import ServerExtras, serve_web
from halter.server.sign_on import GroupRoles
from halter.spec.fleet import OidcSpec, SignOnSpec
from tests.server.conftest import QUICK, GroundClock, make_office
from tests.server.provider import CLIENT, SECRET, Provider, signed_by_another, signed_with_the_public_key, unsigned
from tests.story.test_desk import Office


class StillClock(GroundClock):
    """The store's time, which stands still while the server waits."""

    async def sleep(self, duration: int) -> None:
        await asyncio.sleep(0.02)


class Inn:
    """A server that people sign on to, and its provider."""

    def __init__(self, office: Office, folder: Path) -> None:
        self.office = office
        self.app = replace(office.app, clock=StillClock(office.ground))
        self.tokens = TokenFile(folder / "tokens.json")
        self.bob = make_secret()
        self.tokens.add(make_token(self.bob, "bob", "approver", 0))
        listening, provided = bind(port=0), bind(port=0)
        self.port = listening.getsockname()[1]
        self.base = f"http://127.0.0.1:{self.port}"
        self.provider = Provider(f"http://127.0.0.1:{provided.getsockname()[1]}", self.app.clock.now)
        self.spec = SignOnSpec(
            roles={"leads": "approver", "ops": "operator", "staff": "viewer"},
            agents={"ops": ("mine",)},
            people={f"{self.provider.issuer}#grace-7": "grace"},
            oidc=OidcSpec(
                issuer=self.provider.issuer, client_id=CLIENT, url=self.base, client_secret="${secret:CLIENT}"
            ),
        )
        self._providing = asyncio.create_task(serve_asgi(self.provider.app, provided))
        self._serving = self._serve(listening)

    def _serve(self, listening: Any) -> "asyncio.Task[None]":
        oidc = make_oidc_sign_on(self.spec, {"CLIENT": SECRET}.__getitem__, connect_directly)
        extras = ServerExtras(limits=QUICK, pages=False, oidc=oidc)
        bus = Bus(self.app.store, self.app.clock)
        return asyncio.create_task(serve_web(self.app, listening, Keyring(self.tokens), bus, extras))

    async def restart(self) -> None:
        self._serving.cancel()
        await asyncio.wait([self._serving])
        self._serving = self._serve(bind(port=self.port))

    def browser(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=self.base, timeout=30, trust_env=False, verify=make_tls_context())

    async def end(self) -> None:
        self._serving.cancel()
        self._providing.cancel()
        await asyncio.wait([self._serving, self._providing])


@pytest.fixture
async def inn(tmp_path: Path) -> AsyncIterator[Inn]:
    office = await make_office(tmp_path)
    made = Inn(office, tmp_path)
    try:
        yield made
    finally:
        await made.end()
        await office.ground.store.close()


async def visit_provider(browser: httpx2.AsyncClient, path: str = "/login/oidc") -> str:
    """Begin, and return the address that the provider sends the browser back to."""
    response = await browser.get(path)
    assert response.status_code == 303, response.text
    async with httpx2.AsyncClient(trust_env=False, verify=make_tls_context()) as elsewhere:
        return (await elsewhere.get(response.headers["location"])).headers["location"]


async def log_in(browser: httpx2.AsyncClient) -> httpx2.Response:
    return await browser.get(await visit_provider(browser))


async def who(browser: httpx2.AsyncClient) -> Mapping[str, Any] | int:
    response = await browser.get("/api/whoami")
    return response.json() if response.status_code == 200 else response.status_code


async def test_a_person_signs_on_and_logs_out(inn: Inn) -> None:
    async with inn.browser() as browser:
        assert (
            f'<a href="/login/oidc">Log in with 127.0.0.1:{urlsplit(inn.provider.issuer).port}</a>'
            in (await browser.get("/login")).text
        )
        response = await log_in(browser)
        assert (response.status_code, 'content="0; url=/"' in response.text) == (200, True), response.text
        cookies = response.headers.get_list("set-cookie")
        assert [each.partition("=")[0] for each in cookies] == [f"halter_{inn.port}", f"halter_{inn.port}_oidc"]
        assert cookies[0].endswith("; Max-Age=3600; Path=/; HttpOnly; SameSite=Strict")
        name = name_signed_on_person("ada@example.com", inn.provider.issuer, "ada-1")
        principal = await who(browser)
        assert isinstance(principal, Mapping)
        assert (principal["name"], principal["role"]) == (name, "approver")
        assert name.startswith("ada@example.com~")
        out = await browser.post("/logout", headers={"origin": inn.base})
        assert (out.status_code, await who(browser)) == (303, 401)
    assert inn.provider.authorization["code_challenge_method"] == "S256"
    assert inn.provider.authorization["scope"] == "openid profile email"


async def audited(inn: Inn) -> list[tuple[str, str, str, str]]:
    entries = await audit_page(
        Actor(inn.app, Principal("root")), tool=f"sign_on {urlsplit(inn.provider.issuer).netloc}"
    )
    return [
        (audit_entry.tool, audit_entry.outcome, audit_entry.decided_by, audit_entry.capability_level)
        for audit_entry in reversed(entries)
    ]


async def test_each_login_and_each_refusal_is_in_the_audit_and_no_token_in_the_journal(inn: Inn) -> None:
    texts: list[str] = []
    sign = inn.provider.sign

    def note(claims: Mapping[str, Any]) -> str:
        texts.append(sign(claims))
        return texts[-1]

    inn.provider.sign = note
    name, via = (
        name_signed_on_person("ada@example.com", inn.provider.issuer, "ada-1"),
        f"sign_on {urlsplit(inn.provider.issuer).netloc}",
    )
    async with inn.browser() as browser:
        await log_in(browser)
        inn.provider.person = {"sub": "eve-1", "email": "eve@example.com", "groups": ["guests"]}
        refused = await log_in(browser)
        assert "None of your groups has a role" in refused.text
        inn.provider.forge = lambda claims: {**claims, "aud": "another"}
        await log_in(browser)
        await log_in(browser)
    eve = f"{inn.provider.issuer}#eve-1"
    assert await audited(inn) == [
        (via, "ok", name, "approver"),
        (via, "no_role", eve, ""),
        (via, "invalid_token", "", ""),
    ]
    events = await read_stream(inn.app.store, FLEET)
    content = b"".join(each.facts + (each.body or b"") for each in events)
    codes = [f"code-{number}" for number in range(4)]
    assert len(texts) == 4
    assert not any(output.encode() in content for token in texts for output in (*token.split("."), *codes))
    lines = [summarize_event(each).text for each in events if each.kind in ("person_signed_on", "sign_on_refused")]
    assert lines[0].startswith(f"{name} signs on by 127.0.0.1:")
    assert lines[1].endswith(f"{eve}, no group with a role")


async def test_a_stranger_who_is_refused_again_and_again_does_not_fill_the_journal(inn: Inn) -> None:
    async with inn.browser() as browser:
        for number in range(4):
            text = await visit_provider(browser)
            state = parse_qs(urlsplit(text).query)["state"][0]
            response = await browser.get("/login/oidc/callback", params={"state": state, "error": f"denied-{number}"})
            assert response.status_code == 403
    assert [outcome for _, outcome, _, _ in await audited(inn)] == ["declined"]


async def test_whom_some_agents_belong_to_sees_no_sign_ons(inn: Inn) -> None:
    async with inn.browser() as browser:
        await log_in(browser)
    assert await audit_page(Actor(inn.app, Principal("carl", "admin", ("mine",))), text="sign_on") == []


async def test_a_logout_ends_the_login_on_the_server_also_for_a_copied_cookie(inn: Inn) -> None:
    async with inn.browser() as browser, inn.browser() as thief:
        await log_in(browser)
        thief.cookies.set(f"halter_{inn.port}", browser.cookies[f"halter_{inn.port}"])
        assert await who(thief) != 401
        await browser.post("/logout", headers={"origin": inn.base})
        assert await who(thief) == 401


async def test_a_wrong_state_a_missing_cookie_and_another_browser_are_refused(inn: Inn) -> None:
    async with inn.browser() as browser, inn.browser() as victim, inn.browser() as fresh:
        text = await visit_provider(browser)
        state = parse_qs(urlsplit(text).query)["state"][0]
        for wrong in (text.replace(state, "x" * 43), text.replace(f"state={state}", ""), f"{text}&state={state}"):
            assert (await browser.get(wrong)).status_code == 400
        # An attacker gives their own answer of the provider to someone else, to have them work under their name.
        text = await visit_provider(browser)
        await visit_provider(victim)
        assert (await victim.get(text)).status_code == 400
        assert (await fresh.get(text)).status_code == 400
        assert [await who(each) for each in (browser, victim, fresh)] == [401, 401, 401]
    assert inn.provider.tokens_given == 0


async def test_two_begun_logins_in_one_request_are_refused(inn: Inn) -> None:
    async with inn.browser() as browser, inn.browser() as bare:
        text = await visit_provider(browser)
        name = f"halter_{inn.port}_oidc"
        output = browser.cookies[name]
        assert (await bare.get(text, headers={"cookie": f"{name}={output}; {name}=planted"})).status_code == 400


async def test_a_code_counts_once(inn: Inn) -> None:
    async with inn.browser() as browser:
        text = await visit_provider(browser)
        output = browser.cookies[f"halter_{inn.port}_oidc"]
        assert (await browser.get(text)).status_code == 200
        assert (await browser.get(text)).status_code == 400
    async with inn.browser() as async_client:
        async_client.cookies.set(f"halter_{inn.port}_oidc", output)
        assert (await async_client.get(text)).status_code == 502
        assert await who(async_client) == 401


LIES: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "nonce": lambda claims: {**claims, "nonce": "of another login"},
    "no nonce": lambda claims: {name: value for name, value in claims.items() if name != "nonce"},
    "audience": lambda claims: {**claims, "aud": "another-client"},
    "audience with our own party": lambda claims: {**claims, "aud": "another-client", "azp": CLIENT},
    "no audience": lambda claims: {name: value for name, value in claims.items() if name != "aud"},
    "one of several audiences": lambda claims: {**claims, "aud": [CLIENT, "another-client"]},
    "authorized party": lambda claims: {**claims, "azp": "another-client"},
    "issuer": lambda claims: {**claims, "iss": "https://evil.example"},
    "no issuer": lambda claims: {name: value for name, value in claims.items() if name != "iss"},
    "expired": lambda claims: {**claims, "exp": claims["iat"] - 120},
    "no end": lambda claims: {name: value for name, value in claims.items() if name != "exp"},
    "from the future": lambda claims: {**claims, "iat": claims["iat"] + 3600},
    "not yet": lambda claims: {**claims, "nbf": claims["iat"] + 3600},
    "no subject": lambda claims: {name: value for name, value in claims.items() if name != "sub"},
    "an empty subject": lambda claims: {**claims, "sub": ""},
    "a subject that is no text": lambda claims: {**claims, "sub": ["ada-1"]},
    "no groups": lambda claims: {name: value for name, value in claims.items() if name != "groups"},
    "unknown groups": lambda claims: {**claims, "groups": ["everyone", "LEADS", "admin"]},
    "groups that are no list": lambda claims: {**claims, "groups": {"leads": True}},
    "groups in groups": lambda claims: {**claims, "groups": [["leads"]]},
}


async def test_an_id_token_that_is_not_for_this_login_lets_nobody_in(inn: Inn) -> None:
    for lie, forge in LIES.items():
        inn.provider.forge = forge
        inn.office.ground.time += MINUTE
        async with inn.browser() as browser:
            response = await log_in(browser)
            assert (lie, response.status_code, await who(browser)) == (lie, 403, 401)
            assert f"halter_{inn.port}" not in browser.cookies


def no_signature(_: Mapping[str, Any]) -> str:
    return "a.b.c"


async def test_what_the_provider_s_own_key_did_not_sign_lets_nobody_in(inn: Inn) -> None:
    for sign in (unsigned, signed_with_the_public_key, signed_by_another, no_signature):
        inn.provider.sign = sign
        async with inn.browser() as browser:
            assert (sign, (await log_in(browser)).status_code, await who(browser)) == (sign, 403, 401)


async def test_a_provider_that_describes_another_is_not_followed(inn: Inn) -> None:
    inn.provider.described_as = "https://evil.example"
    async with inn.browser() as browser:
        response = await browser.get("/login/oidc")
        assert (response.status_code, "location" in response.headers) == (502, False)


async def test_another_provider_s_answer_is_refused(inn: Inn) -> None:
    async with inn.browser() as browser:
        text = (await visit_provider(browser)).partition("&iss=")[0]
        assert (await browser.get(f"{text}&iss=https%3A%2F%2Fevil.example")).status_code == 400
    assert inn.provider.tokens_given == 0


async def test_who_is_removed_from_a_group_is_out_when_the_login_ends(inn: Inn) -> None:
    async with inn.browser() as browser:
        await log_in(browser)
        inn.provider.person["groups"] = []
        inn.office.ground.time += HOUR - MINUTE
        assert await who(browser) != 401
        inn.office.ground.time += MINUTE
        assert await who(browser) == 401
        assert (await log_in(browser)).status_code == 403


async def test_a_login_survives_a_restart_and_ends_when_the_sign_on_changes(inn: Inn) -> None:
    async with inn.browser() as browser:
        await log_in(browser)
        await inn.restart()
        assert await who(browser) != 401
        inn.spec = replace(inn.spec, roles={"leads": "viewer"}, agents={})
        await inn.restart()
        assert await who(browser) == 401


async def test_after_the_login_the_browser_goes_home_wherever_the_address_wanted_it(inn: Inn) -> None:
    async with inn.browser() as browser:
        path = "/login/oidc?next=https://evil.example&redirect_uri=https://evil.example"
        output = await visit_provider(browser, path)
        assert output.startswith(f"{inn.base}/login/oidc/callback?")
        response = await browser.get(f"{output}&next=https%3A%2F%2Fevil.example")
        assert (response.status_code, "evil" in response.text, "location" in response.headers) == (200, False, False)


async def test_a_forged_host_does_not_choose_where_the_code_goes(inn: Inn) -> None:
    async with inn.browser() as browser:
        assert (await browser.get("/login/oidc", headers={"host": "evil.example"})).status_code == 421


async def test_a_foreign_page_cannot_act_with_the_login(inn: Inn) -> None:
    async with inn.browser() as browser:
        await log_in(browser)
        halt = {"scope": "agent:mine", "reason": "stop"}
        assert (await browser.post("/api/halts", json=halt)).status_code == 403
        foreign = {"origin": "https://evil.example"}
        assert (await browser.post("/api/halts", json=halt, headers=foreign)).status_code == 403
        assert (await browser.post("/api/halts", json=halt, headers={"origin": inn.base})).status_code == 200


async def test_a_name_that_a_token_has_is_not_that_token_s_person(inn: Inn) -> None:
    inn.provider.person = {"sub": "eve-1", "preferred_username": "bob", "groups": ["leads"]}
    async with inn.browser() as browser:
        await log_in(browser)
        principal = await who(browser)
        assert isinstance(principal, Mapping)
        assert principal["name"] == name_signed_on_person("bob", inn.provider.issuer, "eve-1") != "bob"
        inn.tokens.remove("bob")
        assert await who(browser) == principal


async def test_one_account_is_one_person_whatever_it_calls_itself(inn: Inn) -> None:
    names: list[str] = []
    for subject, called in (("eve-1", "eve@example.com"), ("eve-1", "ada"), ("ada-1", "ada@example.com")):
        inn.provider.person = {"sub": subject, "preferred_username": called, "groups": ["leads"]}
        async with inn.browser() as browser:
            await log_in(browser)
            principal = await who(browser)
            assert isinstance(principal, Mapping)
            names.append(principal["name"])
    eve, eve_as_ada, ada = names
    assert not are_two_people(eve, eve_as_ada)
    assert are_two_people(eve_as_ada, ada)
    assert are_two_people(eve, ada)


def test_an_account_and_a_token_are_two_people_only_where_the_file_says_so() -> None:
    account = name_signed_on_person("eve@example.com", "https://id.example", "eve-1")
    for token in ("eve", "bob", "zoe@example.com", "bob.phone"):
        assert not are_two_people(account, token)
        assert not are_two_people(token, account)
    assert are_two_people("bob", "grace")


SHOWN: Sequence[tuple[dict[str, Any], str]] = [
    ({"email": "Ada@Example.com"}, "ada@example.com"),
    ({"email": "boss@example.com", "email_verified": False, "preferred_username": "eve"}, "eve"),
    ({"preferred_username": "agent:desk"}, "person"),
    ({"preferred_username": "bob~0123456789abcdef"}, "person"),
    ({"name": "Ada\nLovelace"}, "person"),
    ({"name": ["ada"]}, "person"),
    ({}, "person"),
]


async def test_what_a_person_is_shown_as_is_only_shown(inn: Inn) -> None:
    for claims, label in SHOWN:
        inn.provider.person = {"sub": "s", "groups": "staff", **claims}
        async with inn.browser() as browser:
            await log_in(browser)
            principal = await who(browser)
            assert isinstance(principal, Mapping)
            assert principal["name"] == name_signed_on_person(label, inn.provider.issuer, "s")


async def test_the_file_says_by_account_what_a_person_is_called(inn: Inn) -> None:
    for subject, name in (("grace-7", "grace"), ("GRACE-7", "person~")):
        inn.provider.person = {"sub": subject, "groups": ["ops", "staff"]}
        async with inn.browser() as browser:
            await log_in(browser)
            principal = await who(browser)
            assert isinstance(principal, Mapping)
            assert principal["name"].startswith(name)
            assert (principal["role"], list(principal["agents"])) == ("operator", ["mine"])


def test_a_lower_role_for_all_agents_does_not_widen_a_higher_one_for_some() -> None:
    group_roles = GroupRoles(
        {"a": "admin", "b": "admin", "all": "viewer", "c": "admin"}, {"a": ("one",), "b": ("two",)}
    )
    assert group_roles.find(["a", "all"]) == ("admin", ("one",))
    assert group_roles.find(["a", "b"]) == ("admin", ("one", "two"))
    assert group_roles.find(["a", "c"]) == ("admin", ())
    assert group_roles.find(["all"]) == ("viewer", ())
    assert group_roles.find(["none"]) is None


async def test_an_agent_s_program_that_guesses_codes_gets_nowhere_and_is_slowed_down(inn: Inn) -> None:
    async with inn.browser() as program:
        response = await program.get("/login/oidc")
        state = parse_qs(urlsplit(response.headers["location"]).query)["state"][0]
        values = {"cookie": f"halter_{inn.port}_oidc={program.cookies[f'halter_{inn.port}_oidc']}"}
        program.cookies.clear()
        numbers: list[int] = []
        for number in range(2 * QUICK.failures):
            path = f"/login/oidc/callback?code=guess-{number}&state={state}"
            numbers.append((await program.get(path, headers=values)).status_code)
        assert (numbers[0], numbers[-1], {*numbers}) == (502, 429, {502, 429})
        assert (await program.post("/login/oidc/callback", data={"code": "c", "state": state})).status_code == 401
        assert await who(program) == 401


async def test_without_a_provider_the_way_leads_nowhere_and_its_logins_end(inn: Inn) -> None:
    async with inn.browser() as browser:
        await log_in(browser)
        inn.spec = replace(inn.spec, oidc=UNSET)
        await inn.restart()
        assert await who(browser) == 401
        for path in ("/login/oidc", "/login/oidc/callback?code=c"):
            assert (await browser.get(path)).status_code == 404
        assert "oidc" not in (await browser.get("/login")).text


async def test_a_person_who_declines_sees_it_and_markup_is_not_passed_on(inn: Inn) -> None:
    async with inn.browser() as browser:
        state = parse_qs(urlsplit((await browser.get("/login/oidc")).headers["location"]).query)["state"][0]
        refused = await browser.get(f"/login/oidc/callback?error=%3Cb%3Edenied&state={state}")
        assert (refused.status_code, "&lt;b&gt;denied" in refused.text, "<b>" in refused.text) == (403, True, False)


def test_a_secret_that_is_missing_is_refused_at_the_start() -> None:
    none: dict[str, str] = {}
    oidc = OidcSpec(issuer="https://id.example", client_id="c", url="https://h.example", client_secret="${secret:X}")
    with pytest.raises(ConfigError, match="Set HALTER_SECRET_X"):
        make_oidc_sign_on(SignOnSpec(roles={"a": "admin"}, oidc=oidc), none.__getitem__, connect_directly)
    assert make_oidc_sign_on(SignOnSpec(roles={"a": "admin"}), none.__getitem__, connect_directly) is None


def test_behind_tls_the_cookies_are_for_tls_only() -> None:
    oidc = OidcSpec(issuer="https://id.example", client_id="c", url="https://halter.example")
    assert OidcSignOn(SignOnSpec(roles={"a": "admin"}, oidc=oidc), oidc, "", connect_directly).is_secure
