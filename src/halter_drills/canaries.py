"""Canaries: made-up secrets in every encoding, and the fragments to search for afterwards.

Nothing here is shared with the code that redacts secrets: the standard library makes the encodings, and the keys follow
their issuers' documentation.
"""

import base64
import html
import json
import random
import re
import shlex
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Final
from urllib.parse import quote

ALNUM: Final = string.ascii_letters + string.digits
ALPHABETS: Final[Mapping[str, str]] = {
    "A": ALNUM,
    "U": string.ascii_uppercase + string.digits,
    "d": string.digits,
    "h": string.hexdigits[:16],
    "l": string.ascii_lowercase + string.digits,
    "w": ALNUM + "_-",
}
"""Alphanumeric, upper case, digits, hex, lower case, and URL-safe."""

WIDTH: Final = 12
"""Number of consecutive characters of a secret that count as a leak; fewer could be coincidence."""

_PIECE: Final = re.compile(r"\{(~?)([AUdhlmw])(\d+)\}")
_RUN: Final = re.compile(rf"[A-Za-z0-9]{{{WIDTH},}}")

KEYS: Final[Sequence[tuple[str, str]]] = (
    ("private-key", "-----BEGIN RSA PRIVATE KEY-----\n{A64}\n{A64}\n-----END RSA PRIVATE KEY-----"),
    ("private-key", "-----BEGIN OPENSSH PRIVATE KEY-----\\n{A64}\\n-----END OPENSSH PRIVATE KEY-----"),
    ("anthropic", "sk-ant-api03-{w80}AA"),
    ("openrouter", "sk-or-v1-{h64}"),
    ("langfuse", "sk-lf-{h32}"),
    ("openai", "sk-proj-{w60}"),
    ("openai", "sk-svcacct-{w60}"),
    ("openai", "sk-{A48}"),
    ("google", "AIza{w35}"),
    ("google", "GOCSPX-{w28}"),
    ("google", "ya29.{w60}"),
    ("aws", "AKIA{U16}"),
    ("aws", "ASIA{U16}"),
    ("aws", "ABSK{A110}"),
    ("stripe", "sk_live_{A24}"),
    ("stripe", "rk_test_{A24}"),
    ("stripe", "whsec_{A32}"),
    ("github", "ghp_{A36}"),
    ("github", "ghs_{A36}"),
    ("github", "github_pat_{A22}_{A59}"),
    ("gitlab", "glpat-{w20}"),
    ("gitlab", "glrt-{w20}"),
    ("slack", "xoxb-{d12}-{d12}-{A24}"),
    ("slack", "xapp-1-{U11}-{d13}-{h64}"),
    ("slack", "https://hooks.slack.com/services/T{U10}/B{U10}/{A24}"),
    ("twilio", "SK{h32}"),
    ("sendgrid", "SG.{w22}.{w43}"),
    ("npm", "npm_{A36}"),
    ("pypi", "pypi-AgEIcHlwaS5vcmc{w70}"),
    ("azure", "{~A3}8Q~{w34}"),
    ("azure", "https://store.example.net/box?sv=2024-11-04&sig={A43}%3D"),
    ("jwt", "eyJhbGciOiJIUzI1NiJ9.eyJ{A60}.{w43}"),
    ("huggingface", "hf_{A34}"),
    ("digitalocean", "dop_v1_{h64}"),
    ("heroku", "HRKU-{w60}"),
    ("mailgun", "key-{h32}"),
    ("shopify", "shpat_{h32}"),
    ("square", "sq0atp-{w22}"),
    ("square", "EAAAE{w60}"),
    ("telegram", "{~d10}:AA{w33}"),
    ("discord", "M{~A24}.{~A6}.{w38}"),
    ("discord", "https://discord.com/api/webhooks/{~d18}/{w68}"),
    ("datadog", "ddapi_{h32}"),
    ("newrelic", "NRAK-{U27}"),
    ("cloudflare", "v1.0-{h24}-{h146}"),
    ("cloudflare", "cfut_{A40}"),
    ("linear", "lin_api_{A40}"),
    ("notion", "ntn_{A46}"),
    ("notion", "secret_{A43}"),
    ("okta", "SSWS 00{w40}"),
    ("vault", "hvs.{w90}"),
    ("databricks", "dapi{h32}"),
    ("grafana", "glsa_{A32}_{~h8}"),
    ("grafana", "eyJrIjoi{A70}"),
    ("postman", "PMAK-{h24}-{h34}"),
    ("terraform", "{~A14}.atlasv1.{w67}"),
    ("doppler", "dp.pt.{A43}"),
    ("sentry", "sntrys_{A80}"),
    ("fly", "fm2_{A100}"),
    ("supabase", "sbp_{h40}"),
    ("groq", "gsk_{A52}"),
    ("replicate", "r8_{A37}"),
    ("xai", "xai-{A80}"),
    ("perplexity", "pplx-{A48}"),
    ("pulumi", "pul-{h40}"),
    ("atlassian", "ATATT3{w180}"),
    ("figma", "figd_{w40}"),
    ("airtable", "pat{A14}.{h64}"),
    ("dropbox", "sl.u.{w140}"),
    ("brevo", "xkeysib-{h64}-{A16}"),
    ("planetscale", "pscale_tkn_{w43}"),
    ("contentful", "CFPAT-{w43}"),
    ("dynatrace", "dt0c01.{U24}.{U64}"),
    ("easypost", "EZAK{A54}"),
    ("prefect", "pnu_{A36}"),
    ("rubygems", "rubygems_{h48}"),
    ("typeform", "tfp_{w59}"),
    ("age", "AGE-SECRET-KEY-1{U58}"),
    ("onepassword", "ops_eyJ{A250}"),
    ("artifactory", "AKCp{A69}"),
    ("buildkite", "bkua_{A40}"),
    ("circleci", "CCIPAT_{A22}_{h40}"),
    ("clojars", "CLOJARS_{A60}"),
    ("netlify", "nfp_{A36}"),
    ("tailscale", "tskey-auth-{A11}-{A32}"),
    ("langsmith", "lsv2_pt_{h32}_{h10}"),
    ("docker", "dckr_pat_{w27}"),
    ("shippo", "shippo_live_{h40}"),
    ("readme", "rdme_{A70}"),
    ("alibaba", "LTAI{A20}"),
    ("apify", "apify_api_{A36}"),
    ("braintree", "access_token$production${l16}${h32}"),
    ("cerebras", "csk-{l48}"),
    ("crates", "cargo login cio{A32}"),
    ("elevenlabs", "sk_{h48}"),
    ("facebook", "EAA{A160}"),
    ("firecrawl", "fc-{h32}"),
    ("fireworks", "fw_{A24}"),
    ("flutterwave", "FLWSECK-{l32}"),
    ("hubspot", "pat-na1-{h8}-{h4}-{h4}-{h4}-{h12}"),
    ("jina", "jina_{A64}"),
    ("kubernetes", "kubeadm join --token {~l6}.{l16}"),
    ("launchdarkly", "sdk-{h8}-{h4}-{h4}-{h4}-{h12}"),
    ("mailchimp", "{h32}-us12"),
    ("mapbox", "sk.eyJ{A80}.{w22}"),
    ("mnemonic", "seed phrase: {m12}"),
    ("neon", "napi_{l60}"),
    ("nuget", "oy2{l43}"),
    ("openshift", "sha256~{w43}"),
    ("pinecone", "pcsk_{A60}"),
    ("plaid", "access-production-{h8}-{h4}-{h4}-{h4}-{h12}"),
    ("posthog", "phx_{A43}"),
    ("resend", "re_{~A8}_{A24}"),
    ("signature", "https://example.com/f?X-Amz-Signature={h64}"),
    ("tavily", "tvly-{A32}"),
    ("tencent", "AKID{A32}"),
    ("together", "tgp_v1_{w43}"),
    ("token", "acme_live_{A40}"),
    ("trello", "ATTA{h72}"),
    ("twitch", "oauth:{l30}"),
    ("twitter", "AAAAAAAAAAAAAAAAAAAAA{A80}"),
    ("url-parameter", "https://example.com/run?code={A54}&n=1"),
    ("vercel", "vcp_{A40}"),
    ("wandb", "wandb_v1_{w70}"),
    ("webhook", "https://acme.webhook.office.com/webhookb2/{h32}@{h32}/IncomingWebhook/{h32}"),
    ("yandex", "y0_{w55}"),
    ("bearer", "Authorization: Bearer {w40}"),
    ("basic-auth", "Basic {A32}"),
    ("url-password", "postgresql://ada:{A20}@db.example.com/orders"),
    ("private-key", 'PRIVATE_KEY="-----BEGIN RSA PRIVATE KEY-----\n{A64}\n{A64}\n-----END RSA PRIVATE KEY-----"'),
    ("private-key", '{{"private_key": "-----BEGIN PRIVATE KEY-----\\n{A64}\\n{A64}\\n-----END PRIVATE KEY-----\\n"}}'),
    ("private-key", "PuTTY-User-Key-File-3: ssh-rsa\nPrivate-Lines: 2\n{A64}\n{A40}\nPrivate-MAC: {h64}"),
    ("private-key", "client-key-data: LS0tLS1CRUdJTiBSU0EgUFJJVkFURSBLRVktLS0tLQo{A90}"),
    ("halter", "halter_{w43}"),
    ("nvidia", "nvapi-{w64}"),
    ("sourcegraph", "sgp_{h40}"),
    ("sonarqube", "squ_{h40}"),
    ("razorpay", "rzp_live_{A14}"),
    ("aws", "FwoGZXIvYXdzE{A200}"),
    ("password-hash", "root:$6${A16}${A86}:19000:0:99999:7:::"),
    ("password-hash", "$2b$12${A53}"),
    ("password-hash", "$argon2id$v=19$m=65536,t=3,p=4${A22}${A43}"),
    ("cookie", "Set-Cookie: sid={A32}; Path=/; HttpOnly"),
    ("cookie", "Cookie: theme=dark; sessionid={h32}; lang=de"),
    ("password", "DB_PASS={A20}"),
    ("password", '{{"user": "ada", "pass": "{A20}"}}'),
    ("password", "connect --password {A20} --verbose"),
    ("password", "machine git.example.com login ada password {A20}"),
    ("password", "db.example.com:5432:orders:ada:{A20}"),
    ("password", '{{"auths": {{"ghcr.io": {{"auth": "{A40}"}}}}}}'),
    ("password", "curl -u ada:{A20} https://example.com"),
    ("password", "sshpass -p {A20} ssh ada@example.com"),
    ("password", "The password of the new account is {A20}, and it expires."),
    ("password", "<password>{A20}</password>"),
    ("password", 'password = "{A20}"'),
    ("password", "api_key: {A24}"),
    ("password", '{{"client_secret": "{A30}"}}'),
)
"""At least one made-up key of every family.

`{A20}` stands for twenty random letters or digits, and so on, `{m12}` for twelve words; with `~` it is not secret,
such as an account number.
"""

Spell = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Canary:
    """A text that contains a secret, and the parts that must not appear anywhere."""

    name: str
    text: str
    secrets: tuple[str, ...]

    def fragments(self) -> frozenset[bytes]:
        """List the fragments to search for: any WIDTH consecutive characters of a secret, in every encoding."""
        return frozenset(
            data[at : at + WIDTH]
            for secret in self.secrets
            for data in (*_spellings(secret), *(run.encode() for run in _RUN.findall(secret)))
            for at in range(len(data) - WIDTH + 1)
        )


def draw(rng: random.Random, alphabet: str, length: int) -> str:
    if alphabet == "m":
        return " ".join("".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(length))
    return "".join(rng.choices(ALPHABETS[alphabet], k=length))


def values(rng: random.Random) -> dict[str, str]:
    """Make up an agent's secrets: a plain one, one with special characters, and one with several lines."""
    signs = ['"', "\\", "/", "+", " ", "&", "é", "<", "'", "🔑"]
    odd = "".join(f"{sign}{draw(rng, 'A', WIDTH)}" for sign in signs)
    lines = "\n".join(draw(rng, "A", 40) for _ in range(3))
    return {"PLAIN": draw(rng, "A", 40), "ODD": odd, "LINES": lines}


def key(rng: random.Random, family: str, form: str) -> Canary:
    secrets: list[str] = []

    def fill(match: re.Match[str]) -> str:
        value = draw(rng, match[2], int(match[3]))
        if not match[1] and len(value) >= WIDTH:
            secrets.append(value)
        return value

    text = _PIECE.sub(fill, form).replace("{{", "{").replace("}}", "}")
    return Canary(f"A key of {family}", text, tuple(secrets))


SPELLINGS: Final[Mapping[str, Spell]] = {
    "base64": lambda value: base64.b64encode(value.encode()).decode(),
    "base64 in the middle": lambda value: base64.b64encode(f"a{value}b".encode()).decode(),
    "base64 for URLs": lambda value: base64.urlsafe_b64encode(f"ab{value}".encode()).decode(),
    "base64 in lines": lambda value: "\n".join(wrap(base64.b64encode(value.encode()).decode(), 24)),
    "base64 of UTF-16": lambda value: base64.b64encode(value.encode("utf-16")).decode(),
    "base32": lambda value: base64.b32encode(f"a{value}".encode()).decode(),
    "hex": lambda value: value.encode().hex(),
    "HEX": lambda value: value.encode().hex().upper(),
    "hex in pairs": lambda value: value.encode().hex(":"),
    "URL-encoded": lambda value: quote(value, safe=""),
    "URL-encoded twice": lambda value: quote(quote(value, safe=""), safe=""),
    "percent signs only": lambda value: "".join(f"%{byte:02X}" for byte in value.encode()),
    "entities": html.escape,
    "numbered entities": lambda value: "".join(f"&#{ord(letter)};" for letter in value),
    "escapes": lambda value: "".join(f"\\x{byte:02x}" for byte in value.encode()),
    "octal": lambda value: "".join(f"\\{byte:03o}" for byte in value.encode()),
    "capitals": str.upper,
    "small letters": str.lower,
    "reversed": lambda value: value[::-1],
    "UTF-16": "\0".join,
    "quoted for a shell": shlex.quote,
    "JSON-escaped": lambda value: json.dumps(value)[1:-1],
    "JSON": lambda value: json.dumps({"key": value}, ensure_ascii=False),
    "plain": lambda value: value,
}


def spell(name: str, value: str, spelling: str) -> Canary:
    return Canary(f"The secret {name}", SPELLINGS[spelling](value), (value,))


_WHOLE: Final = (
    *("hex", "HEX", "hex in pairs", "URL-encoded", "URL-encoded twice", "percent signs only", "numbered entities"),
    *("escapes", "octal", "capitals", "small letters", "reversed", "UTF-16", "JSON-escaped", "plain"),
)
"""The encodings of which every part encodes a part of the secret."""


def _spellings(secret: str) -> Iterator[bytes]:
    for name in _WHOLE:
        yield SPELLINGS[name](secret).encode()
    data, wide = secret.encode(), secret.encode("utf-16-le")
    # The characters at both ends share bits with their neighbours.
    for shift in range(3):
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            yield encode(b"\0" * shift + data)[4 if shift else 0 : (shift + len(data)) // 3 * 4]
        yield base64.b64encode(b"\0" * shift + wide)[4 if shift else 0 : (shift + len(wide)) // 3 * 4]
    for shift in range(5):
        yield base64.b32encode(b"\0" * shift + data)[8 if shift else 0 : (shift + len(data)) // 5 * 8]
