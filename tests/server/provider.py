"""An OpenID Connect provider on 127.0.0.1 that signs with its own key, and lies where a test says so."""

import base64
import hashlib
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode

from joserfc import jwt
from joserfc.jwk import OctKey, RSAKey
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from halter.core.clock import SECOND

CLIENT, SECRET = "halter", "of the client: 100%"
KEY = RSAKey.generate_key(2048, {"kid": "first", "use": "sig", "alg": "RS256"})
OTHER_KEY = RSAKey.generate_key(2048, {"kid": "first", "use": "sig", "alg": "RS256"})


def unsigned(claims: Mapping[str, Any]) -> str:
    import json

    parts = ({"alg": "none"}, claims)
    return (
        ".".join(base64.urlsafe_b64encode(json.dumps(values).encode()).decode().rstrip("=") for values in parts) + "."
    )


def signed(claims: Mapping[str, Any]) -> str:
    return jwt.encode({"alg": "RS256", "kid": "first"}, dict(claims), KEY)


def signed_by_another(claims: Mapping[str, Any]) -> str:
    return jwt.encode({"alg": "RS256", "kid": "first"}, dict(claims), OTHER_KEY)


def signed_with_the_public_key(claims: Mapping[str, Any]) -> str:
    shared = OctKey.import_key(base64.urlsafe_b64encode(KEY.as_pem(private=False)).decode())
    return jwt.encode({"alg": "HS256", "kid": "first"}, dict(claims), shared)


class Provider:
    """`person` are the claims of whoever is logged in there; `forge` changes those of an ID token."""

    def __init__(self, issuer: str, now: Callable[[], int]) -> None:
        self.issuer = self.described_as = issuer
        self.person: dict[str, Any] = {"sub": "ada-1", "email": "ada@example.com", "groups": ["leads"]}
        self.forge: Callable[[dict[str, Any]], dict[str, Any]] = lambda claims: claims
        self.sign: Callable[[Mapping[str, Any]], str] = signed
        self.authorization: dict[str, str] = {}
        self.tokens_given = 0
        self._now = now
        self._codes: dict[str, dict[str, str]] = {}
        self.app = Starlette(
            routes=[
                Route("/.well-known/openid-configuration", self._describe),
                Route("/authorize", self._authorize),
                Route("/token", self._token, methods=["POST"]),
                Route("/keys", self._keys),
            ]
        )

    async def _describe(self, _: Request) -> Response:
        places = {"authorization_endpoint": "authorize", "token_endpoint": "token", "jwks_uri": "keys"}
        return JSONResponse(
            {"issuer": self.described_as, **{name: f"{self.issuer}/{path}" for name, path in places.items()}}
        )

    async def _authorize(self, request: Request) -> Response:
        self.authorization = dict(request.query_params)
        code = f"code-{len(self._codes)}"
        self._codes[code] = self.authorization
        text = urlencode({"code": code, "state": self.authorization["state"], "iss": self.issuer})
        return RedirectResponse(f"{self.authorization['redirect_uri']}?{text}", 303)

    async def _token(self, request: Request) -> Response:
        values = dict(parse_qsl((await request.body()).decode()))
        asked = self._codes.get(values["code"])
        challenge = base64.urlsafe_b64encode(hashlib.sha256(values["code_verifier"].encode()).digest()).decode()
        proof = base64.b64encode(f"{CLIENT}:of%20the%20client%3A%20100%25".encode()).decode()
        if (
            asked is None
            or asked["code_challenge"] != challenge.rstrip("=")
            or asked["redirect_uri"] != values["redirect_uri"]
            or request.headers.get("authorization") != f"Basic {proof}"
        ):
            return JSONResponse({"error": "invalid_grant"}, 400)
        self._codes[values["code"]] = {**asked, "code_challenge": "used"}
        self.tokens_given += 1
        at = self._now() // SECOND
        claims = {"iss": self.issuer, "aud": CLIENT, "iat": at, "exp": at + 300, "nonce": asked["nonce"], **self.person}
        return JSONResponse({"id_token": self.sign(self.forge(claims)), "access_token": "a", "token_type": "Bearer"})

    async def _keys(self, _: Request) -> Response:
        return JSONResponse({"keys": [KEY.as_dict(private=False)]})
