"""Sign-on by an OpenID Connect provider: the authorization code flow with PKCE, state and nonce.

State, nonce and code verifier are derived from a random key in a cookie of the browser that began: the server keeps
nothing of a login that was only begun, and another browser cannot finish it. The ID token is verified with the
provider's keys by joserfc. A person is the pair of `iss` and `sub`: names and addresses are only shown, since people
may choose them.
"""

import asyncio
import base64
import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import msgspec
from msgspec import UNSET

from halter.core.clock import MINUTE, SECOND
from halter.core.errors import ConfigError, explain_extra
from halter.core.ids import name_signed_on_person
from halter.core.spec import OidcSpec, SignOnSpec
from halter.core.text import clean
from halter.core.tools import substitute_secrets
from halter.core.usage import is_encrypted_or_local
from halter.operations.health import Check, combine_checks, fail_check, pass_check
from halter.redaction.secrets import read_environment_secrets
from halter.runtime.runtime import Runtime, read_local_fleet
from halter.server.auth import OIDC_CALLBACK, Allowed, AuthRejected, Token
from halter.server.sign_on import MAX_GROUPS, USER_PATTERN, make_group_roles, make_proxy_sign_on

if TYPE_CHECKING:
    from httpx2 import AsyncClient

ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "Ed25519")
"""Signatures with a private key of the provider only: a public key must never serve as a shared one."""
LEEWAY_SECONDS: Final = 60
"""How far the provider's clock may be from ours."""
PROVIDER_LIFETIME: Final = 10 * MINUTE
"""How long the provider's description of itself is not fetched again."""
BEGUN_LIFETIME: Final = 10 * MINUTE
"""How long a browser remembers a login that it began."""
TIMEOUT_SECONDS: Final = 15
LONGEST_ANSWER: Final = 1024 * 1024
LONGEST_SUBJECT: Final = 255
SIGN_ON: Final = "sign-on"
BEGIN_AGAIN: Final = "This login was not begun in this browser, or too long ago: begin again."


class BegunLogin(msgspec.Struct, frozen=True):
    """Where to send the browser, and the key that it keeps."""

    location: str
    key: str


class _Provider(msgspec.Struct, frozen=True):
    """The provider's description of itself."""

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    token_endpoint_auth_methods_supported: tuple[str, ...] = ("client_secret_basic",)


class _Answer(msgspec.Struct, frozen=True):
    id_token: str


class _SignOnFailed(Exception):
    """The provider did not do its part; the sentence is shown to the person."""


class OidcSignOn:
    """Signs people on by one provider. `bound_to` changes with the configuration, which ends its logins."""

    def __init__(
        self,
        spec: SignOnSpec,
        oidc: OidcSpec,
        secret: str,
        connect: "Callable[[], AsyncClient]",
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
        """Says why nobody could sign on; nothing where the provider describes itself as it should."""
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
        asks = {
            "response_type": "code",
            "client_id": self._oidc.client_id,
            "redirect_uri": self.redirect,
            "scope": " ".join(dict.fromkeys(("openid", *self._oidc.scopes))),
            "state": _derive(key, "state"),
            "nonce": _derive(key, "nonce"),
            "code_challenge": _encode(hashlib.sha256(_derive(key, "verifier").encode()).digest()),
            "code_challenge_method": "S256",
        }
        joint = "&" if "?" in provider.authorization_endpoint else "?"
        return BegunLogin(f"{provider.authorization_endpoint}{joint}{urlencode(asks)}", key)

    async def finish(self, keys: Sequence[str], query: bytes, now: int) -> Allowed | AuthRejected:
        """Returns who was signed on, where the browser comes back with the key that it began with."""
        said = parse_callback(query)
        if said is None or len(keys) != 1 or not _is_same(said.get("state", ""), _derive(keys[0], "state")):
            return AuthRejected(400, BEGIN_AGAIN)
        if said.get("iss", self._oidc.issuer) != self._oidc.issuer:
            return AuthRejected(400, "Another provider answered than was asked: begin again.")
        if "error" in said or not said.get("code"):
            sentence = f"{self.provider_name} did not sign you on: {clean(said.get('error', 'no code'))}."
            return AuthRejected(403, sentence, why="declined")
        try:
            provider = await self._find_provider(now)
            async with await self._open() as client:
                token = await self._exchange(client, provider, said["code"], _derive(keys[0], "verifier"))
                published = await _fetch(client, "GET", provider.jwks_uri)
        except _SignOnFailed as failed:
            return AuthRejected(502, str(failed))
        claims = verify_id_token(token, published, self._oidc, _derive(keys[0], "nonce"), now)
        return claims if isinstance(claims, AuthRejected) else self.identify(claims)

    def identify(self, claims: Mapping[str, Any]) -> Allowed | AuthRejected:
        """Returns the person whom verified claims name, with the role of their groups."""
        issuer, subject = self._oidc.issuer, claims["sub"]
        if not 0 < len(subject) <= LONGEST_SUBJECT:
            return AuthRejected(403, "The provider names nobody who could be a person here.", why="no_person")
        account = f"{issuer}#{subject}"
        held = self._roles.find(_list_groups(claims.get(self._oidc.groups_claim)))
        if held is None:
            sentence = "You are in no group that has a role here: see `sign_on.roles` in halter.yaml. To the provider"
            return AuthRejected(403, f"{sentence} you are {clean(account)}.", why="no_role", account=clean(account))
        role, agents = held
        name = self._people.get(account) or name_signed_on_person(_find_label(claims), issuer, subject)
        return Allowed(Token(name, role, "", 0, agents), account=clean(account))

    async def _find_provider(self, now: int) -> _Provider:
        if self._cached_provider is not None and now < self._cached_provider[1]:
            return self._cached_provider[0]
        place = f"{self._oidc.issuer.rstrip('/')}/.well-known/openid-configuration"
        try:
            async with await self._open() as client:
                found = msgspec.json.decode(await _fetch(client, "GET", place), type=_Provider)
        except msgspec.DecodeError:
            raise _SignOnFailed(f"{place} does not describe a provider: check `sign_on.oidc.issuer`.") from None
        if found.issuer != self._oidc.issuer:
            sentence = clean(found.issuer)
            raise _SignOnFailed(f"{place} describes {sentence}: write that as `sign_on.oidc.issuer`, if you trust it.")
        for url in (found.authorization_endpoint, found.token_endpoint, found.jwks_uri):
            if not is_encrypted_or_local(url):
                raise _SignOnFailed(f"The provider names {clean(url)}, which is not encrypted.")
        self._cached_provider = (found, now + PROVIDER_LIFETIME)
        return found

    async def _open(self) -> "AsyncClient":
        # The certificates are read from the disk, and agents must not wait for it.
        return await asyncio.to_thread(self._connect)

    async def _exchange(self, client: "AsyncClient", provider: _Provider, code: str, verifier: str) -> str:
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self.redirect,
            "client_id": self._oidc.client_id,
            "code_verifier": verifier,
        }
        headers: dict[str, str] = {}
        if self._secret and "client_secret_basic" in provider.token_endpoint_auth_methods_supported:
            both = f"{quote(self._oidc.client_id, safe='')}:{quote(self._secret, safe='')}"
            headers["Authorization"] = f"Basic {base64.b64encode(both.encode()).decode()}"
        elif self._secret:
            form["client_secret"] = self._secret
        try:
            answer = await _fetch(client, "POST", provider.token_endpoint, headers, form)
            return msgspec.json.decode(answer, type=_Answer).id_token
        except msgspec.DecodeError:
            raise _SignOnFailed("The provider gave no ID token: allow the scope `openid` for this client.") from None


async def _fetch(
    client: "AsyncClient",
    method: str,
    url: str,
    headers: Mapping[str, str] | None = None,
    form: Mapping[str, str] | None = None,
) -> bytes:
    from httpx2 import HTTPError, InvalidURL

    where, body = clean(url.partition("?")[0]), bytearray()
    try:
        async with (
            asyncio.timeout(TIMEOUT_SECONDS),
            client.stream(method, url, headers=headers, data=form, follow_redirects=False) as response,
        ):
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > LONGEST_ANSWER:
                    raise _SignOnFailed(f"{where} answers with more than {LONGEST_ANSWER:,} bytes.")
    except (HTTPError, InvalidURL, TimeoutError, OSError) as error:
        raise _SignOnFailed(f"Cannot reach {where} ({clean(str(error)) or type(error).__name__}).") from None
    if response.status_code != 200:  # noqa: PLR2004 The status of HTTP for this.
        raise _SignOnFailed(f"{where} answers with the status {response.status_code}: begin again.")
    return bytes(body)


def verify_id_token(
    token: str, published: bytes, oidc: OidcSpec, nonce: str, now: int
) -> Mapping[str, Any] | AuthRejected:
    """Returns the claims of an ID token that the provider signed for this client and this login."""
    from joserfc import jwt
    from joserfc.errors import JoseError
    from joserfc.jwk import KeySet

    checks = jwt.JWTClaimsRegistry(
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
        checks.validate(claims)
    except (JoseError, ValueError, TypeError, KeyError) as error:
        sentence = f"The provider's ID token is not valid here ({clean(str(error))}): begin again."
        return AuthRejected(403, sentence, why="invalid_token")
    several = claims["aud"] not in (oidc.client_id, [oidc.client_id])
    if claims.get("azp", "" if several else oidc.client_id) != oidc.client_id:
        sentence = "The provider's ID token was made for another client: begin again."
        return AuthRejected(403, sentence, why="invalid_token")
    return claims


def _select_keys(published: bytes) -> Any:
    """Reads the public keys that sign. Raises ValueError."""
    keys = msgspec.json.decode(published, type=dict[str, Any]).get("keys", [])
    kinds = ("RSA", "EC", "OKP")
    return {"keys": [key for key in keys if key.get("kty") in kinds and key.get("use", "sig") == "sig"]}


def parse_callback(query: bytes) -> Mapping[str, str] | None:
    """Reads what a browser brings back; None where it is unreadable, or says something twice."""
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
    """What a person is shown as, beside what tells them from others."""
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
    spec: SignOnSpec, reveal: Callable[[str], str], connect: "Callable[[], AsyncClient]"
) -> OidcSignOn | None:
    """Returns None without a provider. Raises ConfigError where the secret is not set, or the extra not installed."""
    if spec.oidc is UNSET:
        return None
    try:
        import joserfc
    except ImportError:
        raise ConfigError(explain_extra("oidc")) from None
    del joserfc
    try:
        secret = "" if spec.oidc.client_secret is UNSET else substitute_secrets(spec.oidc.client_secret, reveal)
    except KeyError as missing:
        name = missing.args[0]
        raise ConfigError(f"`sign_on.oidc.client_secret` needs the secret {name}: set HALTER_SECRET_{name}.") from None
    return OidcSignOn(spec, spec.oidc, secret, connect)


async def check_sign_on(app: Runtime, connect: "Callable[[], AsyncClient]") -> Check | None:
    """Check that people can sign on as the fleet's file says; None where it says nothing of that."""
    try:
        written = read_local_fleet(app.settings)
    except ConfigError:
        return None  # The file is a finding of its own.
    if written is None or written.spec.sign_on is UNSET:
        return None
    spec, reveal, checks = written.spec.sign_on, read_environment_secrets(app.environ).value, list[Check]()
    try:
        if spec.proxies:
            make_proxy_sign_on(spec, reveal)
            sentence = f"A proxy at {', '.join(spec.proxies)} names people, with a secret that is set."
            checks.append(pass_check(SIGN_ON, sentence))
        oidc = make_oidc_sign_on(spec, reveal, connect)
    except ConfigError as error:
        return fail_check(SIGN_ON, str(error))
    if oidc is not None:
        problem = await oidc.check(app.clock.now())
        sentence = f"{oidc.provider_name} signs people on. It must know the address {oidc.redirect}."
        checks.append(fail_check(SIGN_ON, problem) if problem else pass_check(SIGN_ON, sentence))
    if "admin" not in spec.roles.values():
        checks.append(pass_check(SIGN_ON, "No group is admin: that takes a token."))
    return combine_checks(SIGN_ON, checks)
