"""Sign-on by an OpenID Connect provider: the authorization code flow with PKCE, state and nonce.

State, nonce and code verifier are derived from a random key in a cookie of the browser that started the login: the
server stores nothing about an unfinished login, and another browser cannot finish it. joserfc verifies the ID token
with the provider's keys. A person is the pair of `iss` and `sub`: names and addresses are only shown, since people may
choose them.
"""

import base64
import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import msgspec
from msgspec import UNSET

from halter.core.clock import MINUTE, SECOND
from halter.core.errors import ConfigError, require_module
from halter.core.ids import name_signed_on_person
from halter.core.text import clean
from halter.core.tools import substitute_secrets
from halter.core.usage import is_encrypted_or_local
from halter.net.client import HttpClient, HttpRequest, make_form_request
from halter.net.failures import HttpFailure
from halter.operations.doctor.check import Check, combine_checks, fail_check, pass_check
from halter.redaction.secrets import read_environment_secrets
from halter.runtime.runtime import Runtime, read_local_fleet
from halter.server.auth import OIDC_CALLBACK, Allowed, AuthRejected, Token
from halter.server.sign_on import MAX_GROUPS, USER_PATTERN, make_group_roles, make_proxy_sign_on
from halter.spec.fleet import OidcSpec, SignOnSpec

ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "Ed25519")
"""Signatures with a private key only: a public key must never be accepted as a shared secret."""
LEEWAY_SECONDS: Final = 60
"""Largest accepted difference between the provider's clock and ours."""
PROVIDER_LIFETIME: Final = 10 * MINUTE
"""Time for which the provider's metadata is cached."""
PENDING_LOGIN_LIFETIME: Final = 10 * MINUTE
"""Time that a browser has to finish a login."""
TIMEOUT_SECONDS: Final = 15
MAX_ANSWER_BYTES: Final = 1024 * 1024
MAX_SUBJECT_LENGTH: Final = 255
SIGN_ON: Final = "sign-on"
BEGIN_AGAIN: Final = "This login was not started in this browser, or has expired. Start again."


class BegunLogin(msgspec.Struct, frozen=True):
    """The start of a login: the address for the browser, and the key for its cookie."""

    location: str
    key: str


class _Provider(msgspec.Struct, frozen=True):
    """The provider's metadata."""

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    token_endpoint_auth_methods_supported: tuple[str, ...] = ("client_secret_basic",)


class _Answer(msgspec.Struct, frozen=True):
    id_token: str


class _SignOnFailed(Exception):
    """The provider failed; the sentence is shown to the person."""


class OidcSignOn:
    """Sign-on by one provider. `bound_to` changes with the configuration, which ends its logins."""

    def __init__(
        self,
        spec: SignOnSpec,
        oidc: OidcSpec,
        secret: str,
        connect: Callable[[], HttpClient],
        randomly: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self.provider_name = urlsplit(oidc.issuer).netloc
        self.is_secure = oidc.url.startswith("https:")
        self.lifetime = spec.lifetime
        self.bound_to = hashlib.sha256(b"halter oidc\n" + msgspec.json.encode(spec, order="sorted")).hexdigest()
        self._oidc = oidc
        self._roles = make_group_roles(spec)
        self._people = dict(spec.people)
        self._secret = secret
        self._connect = connect
        self._randomly = randomly
        self.redirect = oidc.url.rstrip("/") + OIDC_CALLBACK
        self._cached_provider: tuple[_Provider, int] | None = None

    async def check(self, now: int) -> str:
        """Return why sign-on fails; "" if the provider's metadata can be read."""
        try:
            await self._find_provider(now)
        except _SignOnFailed as failed:
            return str(failed)
        return ""

    async def start_login(self, now: int) -> BegunLogin | AuthRejected:
        try:
            provider = await self._find_provider(now)
        except _SignOnFailed as failed:
            return AuthRejected(502, str(failed))
        key = _encode(self._randomly(32))
        query = {
            "response_type": "code",
            "client_id": self._oidc.client_id,
            "redirect_uri": self.redirect,
            "scope": " ".join(dict.fromkeys(("openid", *self._oidc.scopes))),
            "state": _derive(key, "state"),
            "nonce": _derive(key, "nonce"),
            "code_challenge": _encode(hashlib.sha256(_derive(key, "verifier").encode()).digest()),
            "code_challenge_method": "S256",
        }
        separator = "&" if "?" in provider.authorization_endpoint else "?"
        return BegunLogin(f"{provider.authorization_endpoint}{separator}{urlencode(query)}", key)

    async def finish(self, keys: Sequence[str], query: bytes, now: int) -> Allowed | AuthRejected:
        """Finish a login: check that the callback belongs to the browser's key, and return the person."""
        callback = parse_callback(query)
        if callback is None or len(keys) != 1 or not _is_same(callback.get("state", ""), _derive(keys[0], "state")):
            return AuthRejected(400, BEGIN_AGAIN)
        if callback.get("iss", self._oidc.issuer) != self._oidc.issuer:
            return AuthRejected(400, "Another provider answered. Start again.")
        if "error" in callback or not callback.get("code"):
            sentence = f"{self.provider_name} did not sign you on: {clean(callback.get('error', 'no code'))}."
            return AuthRejected(403, sentence, why="declined")
        try:
            provider = await self._find_provider(now)
            async with self._connect() as client:
                token = await self._exchange(client, provider, callback["code"], _derive(keys[0], "verifier"))
                key_set = await _fetch(client, HttpRequest("GET", provider.jwks_uri))
        except _SignOnFailed as failed:
            return AuthRejected(502, str(failed))
        claims = verify_id_token(token, key_set, self._oidc, _derive(keys[0], "nonce"), now)
        return claims if isinstance(claims, AuthRejected) else self.identify(claims)

    def identify(self, claims: Mapping[str, Any]) -> Allowed | AuthRejected:
        """Return the person of verified claims, with the role of their groups."""
        issuer, subject = self._oidc.issuer, claims["sub"]
        if not 0 < len(subject) <= MAX_SUBJECT_LENGTH:
            return AuthRejected(403, "The provider sent no valid user name.", why="no_person")
        account = f"{issuer}#{subject}"
        role_and_agents = self._roles.find(_list_groups(claims.get(self._oidc.groups_claim)))
        if role_and_agents is None:
            sentence = (
                "None of your groups has a role: see `sign_on.roles` in halter.yaml. Your account at the provider"
            )
            return AuthRejected(403, f"{sentence} is {clean(account)}.", why="no_role", account=clean(account))
        role, agents = role_and_agents
        name = self._people.get(account) or name_signed_on_person(_find_label(claims), issuer, subject)
        return Allowed(Token(name, role, "", 0, agents), account=clean(account))

    async def _find_provider(self, now: int) -> _Provider:
        if self._cached_provider is not None and now < self._cached_provider[1]:
            return self._cached_provider[0]
        address = f"{self._oidc.issuer.rstrip('/')}/.well-known/openid-configuration"
        try:
            async with self._connect() as client:
                metadata = await _fetch(client, HttpRequest("GET", address))
            provider = msgspec.json.decode(metadata, type=_Provider)
        except msgspec.DecodeError:
            raise _SignOnFailed(f"{address} does not describe a provider. Check `sign_on.oidc.issuer`.") from None
        if provider.issuer != self._oidc.issuer:
            sentence = clean(provider.issuer)
            raise _SignOnFailed(
                f"{address} describes the issuer {sentence}. If you trust it, set `sign_on.oidc.issuer` to it."
            )
        for url in (provider.authorization_endpoint, provider.token_endpoint, provider.jwks_uri):
            if not is_encrypted_or_local(url):
                raise _SignOnFailed(f"The provider names {clean(url)}, which is not encrypted.")
        self._cached_provider = (provider, now + PROVIDER_LIFETIME)
        return provider

    async def _exchange(self, client: HttpClient, provider: _Provider, code: str, verifier: str) -> str:
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self.redirect,
            "client_id": self._oidc.client_id,
            "code_verifier": verifier,
        }
        headers: dict[str, str] = {}
        if self._secret and "client_secret_basic" in provider.token_endpoint_auth_methods_supported:
            credentials = f"{quote(self._oidc.client_id, safe='')}:{quote(self._secret, safe='')}"
            headers["Authorization"] = f"Basic {base64.b64encode(credentials.encode()).decode()}"
        elif self._secret:
            form["client_secret"] = self._secret
        try:
            answer = await _fetch(client, make_form_request(provider.token_endpoint, form, headers))
            return msgspec.json.decode(answer, type=_Answer).id_token
        except msgspec.DecodeError:
            raise _SignOnFailed(
                "The provider returned no ID token. Allow the scope `openid` for this client."
            ) from None


async def _fetch(client: HttpClient, request: HttpRequest) -> bytes:
    address = clean(request.url.partition("?")[0])
    try:
        answer = await client.fetch(request, max_bytes=MAX_ANSWER_BYTES, max_wait=TIMEOUT_SECONDS)
    except HttpFailure as failure:
        raise _SignOnFailed(f"Cannot reach {address} ({clean(failure.reason)}).") from None
    if answer.status != 200:  # noqa: PLR2004 The status of HTTP for this.
        raise _SignOnFailed(f"{address} answered with status {answer.status}. Start again.")
    return answer.body


def verify_id_token(
    token: str, published: bytes, oidc: OidcSpec, nonce: str, now: int
) -> Mapping[str, Any] | AuthRejected:
    """Return the claims of an ID token that the provider signed for this client and this login."""
    from joserfc import jwt
    from joserfc.errors import JoseError
    from joserfc.jwk import KeySet

    registry = jwt.JWTClaimsRegistry(
        now=now // SECOND,
        leeway=LEEWAY_SECONDS,
        iss={"essential": True, "value": oidc.issuer},
        sub={"essential": True},
        aud={"essential": True, "value": oidc.client_id},
        exp={"essential": True},
        iat={"essential": True},
        nonce={"essential": True, "value": nonce},
    )
    try:
        claims = jwt.decode(token, KeySet.import_key_set(_select_keys(published)), algorithms=ALGORITHMS).claims
        registry.validate(claims)
    except (JoseError, ValueError, TypeError, KeyError) as error:
        sentence = f"Invalid ID token from the provider ({clean(str(error))}). Start again."
        return AuthRejected(403, sentence, why="invalid_token")
    has_other_audiences = claims["aud"] not in (oidc.client_id, [oidc.client_id])
    if claims.get("azp", "" if has_other_audiences else oidc.client_id) != oidc.client_id:
        sentence = "The provider's ID token is for another client. Start again."
        return AuthRejected(403, sentence, why="invalid_token")
    return claims


def _select_keys(published: bytes) -> Any:
    """Select the public keys for signatures. Raises ValueError."""
    keys = msgspec.json.decode(published, type=dict[str, Any]).get("keys", [])
    kinds = ("RSA", "EC", "OKP")
    return {"keys": [key for key in keys if key.get("kty") in kinds and key.get("use", "sig") == "sig"]}


def parse_callback(query: bytes) -> Mapping[str, str] | None:
    """Parse the query of a callback; None if it is malformed or repeats a parameter."""
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, max_num_fields=20)
    except ValueError:
        return None
    raw = dict(pairs)
    return raw if len(raw) == len(pairs) else None


def _list_groups(claim: object) -> Sequence[str]:
    groups = cast("list[object]", claim) if isinstance(claim, list) else [claim]
    return [group for group in groups[:MAX_GROUPS] if isinstance(group, str)]


def _find_label(claims: Mapping[str, Any]) -> str:
    """Find the readable part of a person's name: email, user name or name; "person" without one."""
    email = claims.get("email") if claims.get("email_verified", True) is True else None
    for label in (email, claims.get("preferred_username"), claims.get("name")):
        if isinstance(label, str) and USER_PATTERN.fullmatch(label):
            return label.lower()
    return "person"


def _derive(key: str, purpose: str) -> str:
    return _encode(hmac.digest(key.encode("utf-8", "replace"), f"halter oidc {purpose}".encode(), "sha256"))


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _is_same(text: str, expected: str) -> bool:
    return hmac.compare_digest(text.encode("utf-8", "replace"), expected.encode())


def make_oidc_sign_on(
    spec: SignOnSpec, reveal: Callable[[str], str], connect: Callable[[], HttpClient]
) -> OidcSignOn | None:
    """Make the sign-on of the configured provider; None without one.

    Raises ConfigError if the secret is not set or the extra is not installed.
    """
    if spec.oidc is UNSET:
        return None
    require_module("joserfc", "oidc", "Sign-on by a provider")
    try:
        secret = "" if spec.oidc.client_secret is UNSET else substitute_secrets(spec.oidc.client_secret, reveal)
    except KeyError as missing:
        name = missing.args[0]
        raise ConfigError(f"`sign_on.oidc.client_secret` needs the secret {name}. Set HALTER_SECRET_{name}.") from None
    return OidcSignOn(spec, spec.oidc, secret, connect)


async def check_sign_on(app: Runtime, connect: Callable[[], HttpClient]) -> Check | None:
    """Check the sign-on that the fleet's file configures; None without one."""
    try:
        fleet_file = read_local_fleet(app.settings)
    except ConfigError:
        return None  # Another check reports the file.
    if fleet_file is None or fleet_file.spec.sign_on is UNSET:
        return None
    spec, reveal, checks = fleet_file.spec.sign_on, read_environment_secrets(app.environ).value, list[Check]()
    try:
        if spec.proxies:
            make_proxy_sign_on(spec, reveal)
            sentence = f"A proxy at {', '.join(spec.proxies)} signs people on; its secret is set."
            checks.append(pass_check(SIGN_ON, sentence))
        oidc = make_oidc_sign_on(spec, reveal, connect)
    except ConfigError as error:
        return fail_check(SIGN_ON, str(error))
    if oidc is not None:
        problem = await oidc.check(app.clock.now())
        sentence = f"{oidc.provider_name} signs people on. Its redirect URI for this client must be {oidc.redirect}."
        checks.append(fail_check(SIGN_ON, problem) if problem else pass_check(SIGN_ON, sentence))
    if "admin" not in spec.roles.values():
        checks.append(pass_check(SIGN_ON, "No group has the role admin; an admin needs a token."))
    return combine_checks(SIGN_ON, checks)
