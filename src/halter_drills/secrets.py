"""A secret in a call, a result, an error, a prompt or a reply appears nowhere afterwards.

The drill leaks made-up secrets in every encoding, and made-up keys of all families, in every way. Then it searches
every byte of the store, and of the checkpoints, output, prompts, answers, and output of commands.
"""

import asyncio
import base64
import html
import json
import logging
import os
import random
import re
import shlex
import string
import sys
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, count, cycle, islice, zip_longest
from pathlib import Path
from textwrap import wrap
from typing import Final
from urllib.parse import quote

import msgspec

from halter.config.definition import AgentDefinition
from halter.core.errors import ConfigError, ModelRejected
from halter.core.ids import WorkerId
from halter.core.messages import Message, Prompt, Reply, Text, TextListener, ToolCall, ToolResult
from halter.core.ports import BLOB_THRESHOLD
from halter.core.tools import Failed, Permit, Tool
from halter.core.usage import ModelName
from halter.dispatch.heartbeat import renew_leases
from halter.guard.prepare import Call
from halter.guard.request import ModelRequest
from halter.redaction.redact import Redactor
from halter.redaction.secrets import SECRET_PREFIX, GivenSecrets
from halter.redaction.stream_redactor import StreamRedactor
from halter.runtime.agent_runtime import make_agent_runtime, make_guard
from halter.runtime.runtime import Runtime, open_runtime
from halter.runtime.session_start import begin_playbook
from halter.settings import Settings
from halter.spec.playbook import Playbook, Step
from halter.tools.function_tool import tool
from halter_drills.children import Children, Pipe, children
from halter_drills.drill import (
    Drill,
    DrillBroken,
    DrillResult,
    Setting,
    Workspace,
    connection,
    own_store,
    result,
    sqlite_file,
    use_memory_file,
)
from halter_drills.workload import PERSON, begin_session, make_guard_runtime, make_session_context, policy_of

# Canaries: made-up secrets, and their spellings.

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


# The drill.

SESSION: Final = "leaks"
WORKER: Final = WorkerId("drill")
CUT: Final = 300
SHORT: Final = 2000
CHUNKS: Final = (1, 3, 17, 64)

Redact = Callable[[str], str]


class Leak(msgspec.Struct, frozen=True):
    """One canary, and the way in which the drill leaks it."""

    canary: Canary
    way: str


class LeakyPlace(msgspec.Struct, frozen=True):
    """The settings and secrets of the agent, and the folder for leaked output."""

    settings: Settings
    secrets: Mapping[str, str]
    folder: Path

    def environ(self) -> dict[str, str]:
        return {f"{SECRET_PREFIX}{name}": value for name, value in self.secrets.items()}

    def naive(self) -> Redact:
        """The teeth: redact plain text only."""

        def redact(text: str) -> str:
            for value in self.secrets.values():
                text = text.replace(value, "[redacted]")
            return text

        return redact


class LeakChannel:
    """A model that replies with a given text, and records its prompts."""

    name = ModelName("scripted", "mouth")
    base_url: None = None

    def __init__(self, sent_file: Path) -> None:
        self._sent = sent_file
        self.says = ""
        self.fails = False

    def count(self, prompt: Prompt) -> int:
        return 100

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        permit.use()
        with self._sent.open("ab") as file:
            file.write(msgspec.json.encode(prompt) + b"\n")
        if self.fails:
            raise ModelRejected(f"BadRequest: the provider repeats {self.says}", billed=False)
        call = ToolCall("c", "echo", msgspec.json.encode({"text": self.says}).decode())
        return Reply((Text(self.says, "model", trusted=False), call))


class LeakyAgent:
    """One session that leaks secrets in every way."""

    def __init__(self, app: Runtime, setup: LeakyPlace, *, naive: bool) -> None:
        self._app = app
        self._answers = setup.folder / "answers"
        self._mouth = LeakChannel(setup.folder / "sent")
        self._policy = policy_of("leaky", secrets=tuple(setup.secrets))
        self._context = make_session_context(SESSION, self._policy)
        self._secrets = GivenSecrets(setup.secrets)
        self._redactor = Redactor(setup.secrets, app.environ)
        self._naive = setup.naive() if naive else None
        self._doors = (
            make_guard(app, self._policy, self._secrets, self._mouth)
            if self._naive is None
            else make_guard_runtime(
                app.store, app.clock, redact=self._naive, secrets=self._secrets, simulates=self._mouth
            )
        )
        self._tools = self._toolbox()
        self._planted = ""
        self._number = 0

    def _toolbox(self) -> Mapping[str, Tool]:
        """Make tools that leak the planted canary."""

        async def echo(text: str) -> str:
            return f"I heard {text}"

        async def give() -> str:
            return f"The setting is {self._planted} as you can see."

        async def flood() -> str:
            return f"{'so much ' * (BLOB_THRESHOLD // 8)} {self._planted} {'so much ' * 100}"

        async def cut() -> str:
            return f"{'x ' * (SHORT // 4 - 10)} {self._planted} {'y ' * SHORT}"

        async def fail() -> str:
            raise ValueError(f"cannot log in with {self._planted}")

        async def fail_at_length() -> str:
            raise ValueError("x" * (CUT - len("ValueError: ") - len(self._planted) * 2 // 3 - 1) + " " + self._planted)

        async def fail_late() -> str:
            raise Failed("Late", "it took too long", f"so far: {self._planted}")

        async def fetch(url: str, headers: dict[str, str]) -> str:
            return f"asked {url} with {sorted(headers)}"

        async def write_file(path: str) -> str:
            return f"wrote {path}"

        async def chatter() -> str:
            leak_text(self._planted)
            await asyncio.to_thread(leak_text, self._planted)
            return "It is said."

        def mutter() -> str:
            leak_text(self._planted)
            return "It is said."

        plain = (echo, give, flood, fail, fail_at_length, fail_late, fetch, chatter, mutter)
        tools = [*map(tool, plain), tool(cut, max_output=SHORT), tool(write_file, level="RESTRICTED")]
        return {each.spec.name: each for each in tools}

    async def leak(self, leak: Leak) -> None:
        self._planted = self._mouth.says = leak.canary.text
        self._mouth.fails = False
        answer = await WAYS[leak.way](self, leak.canary.text)
        with self._answers.open("ab") as file:
            file.write(answer.encode("utf-8", "surrogatepass") + b"\n")

    async def start(self) -> None:
        self._lease = await begin_session(self._app.store, WORKER, SESSION, self._policy)

    async def call(self, name: str, **arguments: object) -> str:
        self._number += 1
        call = Call(f"{SESSION}.{self._number}", name, msgspec.json.encode(arguments))
        answer = await self._doors.call(self._lease, self._context, call, self._tools)
        return msgspec.json.encode(answer).decode()

    async def request(self, *parts: Text | ToolCall | ToolResult, system: str = "") -> str:
        self._number += 1
        prompt = Prompt(system=system, messages=(Message("user", parts),))
        request = ModelRequest(id=f"{SESSION}.{self._number}", prompt=prompt)
        reply = await self._doors.request(self._lease, self._context, request, self._mouth)
        return msgspec.json.encode(reply).decode()

    async def ask_with(self, text: str) -> str:
        """Send a secret to the model in every part of a prompt; the reply is harmless."""
        self._mouth.says = "I see."
        parts = (Text(text), ToolCall("c", "echo", text), ToolResult("c", "echo", "ok", text))
        return await self.request(*parts, system=f"You may use {text}.")

    async def ask_for(self, _: str) -> str:
        return await self.request(Text("What is it?"))

    async def ask_in_vain(self, _: str) -> str:
        self._mouth.fails = True
        return await self.request(Text("Are you there?"))

    async def stream(self, text: str) -> str:
        whole = f"and then it said: {text} and that was all. "
        return "".join(self._stream(whole, size) for size in CHUNKS)

    def _stream(self, text: str, size: int) -> str:
        chunks = [text[at : at + size] for at in range(0, len(text), size)]
        if self._naive is not None:
            return "".join(map(self._naive, chunks))
        redactor = StreamRedactor(self._redactor)
        return "".join([*map(redactor.feed, chunks), redactor.finish()])

    async def print(self, _: str) -> str:
        """Let tools print a secret: on the loop, in a thread and in a fork."""
        return await self.call("chatter") + await self.call("mutter")

    async def play_with(self, text: str) -> str:
        """Start a playbook with a secret as input, which must be rejected."""
        step = Step("echo", b'{"text":"${inputs.text}"}')
        definition = AgentDefinition(policy=self._policy)
        agent = make_agent_runtime(self._app, definition, self._tools, self._secrets)
        try:
            return await begin_playbook(agent, Playbook((step,), "playbook.yaml", ("text",)), {"text": text})
        except ConfigError as refused:
            return str(refused)


def leak_text(text: str) -> None:
    """Print, log and warn with a text, also in pieces."""
    sys.stdout.write(f"It is {text}.\n")
    for at in range(0, len(text), CHUNKS[1]):
        sys.stderr.write(text[at : at + CHUNKS[1]])
    sys.stderr.write("\n")
    logging.getLogger("halter.drill").warning("It is %s.", text)
    warnings.warn(f"It is {text}.", stacklevel=1)


Way = Callable[[LeakyAgent, str], Awaitable[str]]

WAYS: Final[Mapping[str, Way]] = {
    "an argument": lambda leaky, text: leaky.call("echo", text=text),
    "an output": lambda leaky, _: leaky.call("give"),
    "an error": lambda leaky, _: leaky.call("fail"),
    "what a model is sent": LeakyAgent.ask_with,
    "what a model says": LeakyAgent.ask_for,
    "a large output": lambda leaky, _: leaky.call("flood"),
    "an output that is cut": lambda leaky, _: leaky.call("cut"),
    "an error that is cut": lambda leaky, _: leaky.call("fail_at_length"),
    "a partial output": lambda leaky, _: leaky.call("fail_late"),
    "a URL": lambda leaky, text: leaky.call("fetch", url=f"https://example.com/?q={text}", headers={}),
    "a header": lambda leaky, text: leaky.call("fetch", url="https://example.com/", headers={"X-Token": text}),
    "the name of a tool": lambda leaky, text: leaky.call(text),
    "the name of an argument": lambda leaky, text: leaky.call("echo", **{text: 1}),
    "what a person is shown": lambda leaky, text: leaky.call("write_file", path=f"/etc/{text}"),
    "a model that fails": LeakyAgent.ask_in_vain,
    "a stream": LeakyAgent.stream,
    "the input of a playbook": LeakyAgent.play_with,
    "what a tool prints": LeakyAgent.print,
}
"""Every way in which a secret can leak."""

FEW_WAYS: Final = tuple(WAYS)[:5]
"""The ways in which keys of every family are leaked."""


async def leak(pipe: Pipe, setup: LeakyPlace, leaks: Sequence[Leak], naive: bool) -> None:  # noqa: FBT001  passed to a process
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(setup.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    async with open_runtime(setup.settings, environ=setup.environ()) as app, renew_leases(app.store, app.clock, WORKER):
        leaky = LeakyAgent(app, setup, naive=naive)
        await leaky.start()
        for planned_leak in leaks:
            await leaky.leak(planned_leak)
        app.checkpointer.flush()
    pipe.send("done")


TIMEOUT_SECONDS: Final = 120.0
CHUNK: Final = 1 << 18
EXCERPT_CHARACTERS: Final = 60
"""Number of characters before a fragment in a violation; they are made up, too."""

AGENT: Final = "name: leaky\nsecrets: [PLAIN, ODD, LINES]\n"
TOOLS: Final = '''
import base64

from halter.tools.function_tool import tool


@tool
async def echo(text: str) -> str:
    """Say it again."""
    return text


@tool
async def encode(text: str) -> str:
    """Say it in base64."""
    return base64.b64encode(text.encode()).decode()


@tool
async def fail(text: str) -> str:
    """Fail."""
    raise ValueError(text)
'''
PLAYBOOK: Final = """
- {call: echo, arguments: {text: "${secret:PLAIN}"}}
- {call: echo, arguments: {text: "${secret:ODD}"}}
- {call: echo, arguments: {text: "before ${secret:LINES} after"}, as: lines}
- {call: echo, arguments: {text: "${steps.lines.text}"}}
- {call: encode, arguments: {text: "${secret:PLAIN}"}}
- {call: encode, arguments: {text: "${secret:ODD}"}}
- {call: fail, arguments: {text: "${secret:ODD}"}}
"""
COMMANDS: Final = (
    ("show", SESSION),
    ("show", SESSION, "--json"),
    ("receipt", SESSION, "--json"),
    ("audit", "--json"),
    ("inbox", "--json"),
)


class SearchedPlace(msgspec.Struct, frozen=True):
    """One channel in which secrets could appear, and all its bytes."""

    name: str
    data: bytes


def plan_leaks(secrets: Mapping[str, str], rng: random.Random) -> list[Leak]:
    """List leaks of each secret in every way and encoding, interleaved with keys of each family in the usual ways."""
    turns = cycle(secrets.items())
    secret_leaks = (Leak(spell(*next(turns), spelling), way) for spelling in SPELLINGS for way in WAYS)
    keys = [key(rng, family, form) for family, form in KEYS]
    key_leaks = (Leak(each, way) for way in FEW_WAYS for each in keys)
    return [leak for pair in zip_longest(secret_leaks, key_leaks) for leak in pair if leak is not None]


def run(setting: Setting) -> DrillResult:
    rng = random.Random(0)
    secrets = values(rng)
    endless_leaks = chain.from_iterable(plan_leaks(secrets, rng) for _ in count())
    leaks = plan_leaks(secrets, rng) if setting.seeds is None else list(islice(endless_leaks, setting.seeds))
    setting.progress(0, len(leaks), "leaking secrets")
    with own_store(use_memory_file(setting)) as workspace:
        folder = workspace.folder
        settings = Settings(
            workspace.url, folder / "checkpoints", folder / "signing.key", PERSON, folder / "trust.json"
        )
        setup = LeakyPlace(settings, secrets, folder)
        with children(__name__) as processes:
            _run_leaks(setup, processes, leaks, teeth=setting.teeth)
            command_outputs = (_command(setup, processes, *words, "--store", workspace.url) for words in COMMANDS)
            channels = [
                *_play(setup, processes),
                *command_outputs,
                *_read_store(workspace),
                *_read_outside_store(setup),
            ]
    violations = find_leaks(channels, [each.canary for each in leaks])
    setting.progress(len(leaks), len(leaks), "searched")
    counts = {
        "ways": len({each.way for each in leaks}),
        "spellings": len(SPELLINGS),
        "key_forms": len(KEYS),
        "key_families": len({family for family, _ in KEYS}),
        "bytes_searched": sum(len(channel.data) for channel in channels),
    }
    return result(DRILL.name, workspace.kind, len(leaks), violations, counts)


def _run_leaks(setup: LeakyPlace, children: Children, leaks: Sequence[Leak], *, teeth: bool) -> None:
    for name in NAMES:
        (setup.folder / name).touch()
    child = children.start(leak, setup, leaks, teeth)
    child.receive(TIMEOUT_SECONDS)
    child.wait()


def _play(setup: LeakyPlace, children: Children) -> Iterator[SearchedPlace]:
    """Play a playbook that uses secrets from the command line, and yield its output."""
    agent = setup.folder / "agent"
    agent.mkdir()
    for name, text in (("agent.yaml", AGENT), ("tools.py", TOOLS), ("play.yaml", PLAYBOOK)):
        (agent / name).write_text(text)
    yield _command(setup, children, "trust", str(agent))
    output = _command(setup, children, "play", str(agent / "play.yaml"), "--store", setup.settings.store)
    if b"step_failed" not in output.data or b"[redacted:" not in output.data:
        text = output.data.decode("utf-8", "replace")[-500:]
        raise DrillBroken(f"The playbook of the drill failed: {text}")
    yield output


def _command(setup: LeakyPlace, children: Children, *words: str) -> SearchedPlace:
    settings, output_file = setup.settings, setup.folder / "printed"
    environ = {
        **setup.environ(),
        "HALTER_CHECKPOINTS": str(settings.checkpoints),
        "HALTER_SIGNING_KEY": str(settings.signing_key),
        "HALTER_TRUST": str(settings.trust),
        "HALTER_PERSON": PERSON,
    }
    children.start(run_command, words, environ, output_file).wait(TIMEOUT_SECONDS)
    return SearchedPlace(f"halter {' '.join(words[:1])}", output_file.read_bytes())


def run_command(_: Pipe, words: Sequence[str], environ: Mapping[str, str], output_file: Path) -> None:
    """Run the program `halter`, with its output in a file."""
    from halter.cli import main

    output = os.open(output_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for number in (1, 2):
        os.dup2(output, number)
    os.environ.update(environ)
    os.chdir(output_file.parent)
    sys.argv = ["halter", *words]
    main()


def _read_store(workspace: Workspace) -> Iterator[SearchedPlace]:
    """Read every column of every table, and on SQLite every byte of its files."""
    if workspace.kind == "sqlite":
        file = sqlite_file(workspace.url)
        yield from (
            SearchedPlace(f"the file {each.name}", each.read_bytes()) for each in file.parent.glob(f"{file.name}*")
        )
    with closing(connection(workspace.url)) as database:
        names = (
            "SELECT name FROM sqlite_master WHERE type = 'table'"
            if workspace.kind == "sqlite"
            else "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()"
        )
        for (table,) in database.execute(names).fetchall():
            for row in database.execute(f'SELECT * FROM "{table}"').fetchall():  # noqa: S608  a name of our own
                values = [
                    each if isinstance(each, bytes) else str(each).encode("utf-8", "surrogatepass") for each in row
                ]
                yield SearchedPlace(f"the table {table}", b"\0".join(values))


def _read_outside_store(setup: LeakyPlace) -> Iterator[SearchedPlace]:
    """Read everything outside the store: checkpoints, output, prompts and answers."""
    for name, title in NAMES.items():
        yield SearchedPlace(title, (setup.folder / name).read_bytes())
    for file in setup.settings.checkpoints.rglob("*"):
        if file.is_file():
            yield SearchedPlace("the checkpoints", file.read_bytes())


NAMES: Final = {
    "stdout": "the output of the process",
    "stderr": "the error output of the process",
    "sent": "the prompts",
    "answers": "the answers",
}


def find_leaks(channels: Sequence[SearchedPlace], canaries: Sequence[Canary]) -> list[str]:
    """Search all channels for any fragment of a canary; each canary counts once per channel."""
    names_by_fragment = {fragment: canary.name for canary in canaries for fragment in canary.fragments()}
    excerpts: dict[tuple[str, str], str] = {}
    for channel in channels:
        for fragment in _find_fragments(channel.data, names_by_fragment.keys()):
            where = (channel.name, names_by_fragment[fragment])
            if where not in excerpts:
                at = channel.data.index(fragment)
                excerpts[where] = ascii(
                    channel.data[max(0, at - EXCERPT_CHARACTERS) : at + WIDTH].decode("utf-8", "replace")
                )
    return [f"{name} appears in {channel}: {excerpt}" for (channel, name), excerpt in excerpts.items()]


def _find_fragments(data: bytes, fragments: AbstractSet[bytes]) -> Iterator[bytes]:
    """Find fragments in time linear in the data, for any number of fragments."""
    last = len(data) - WIDTH + 1
    for start in range(0, last, CHUNK):
        yield from fragments & {data[at : at + WIDTH] for at in range(start, min(start + CHUNK, last))}


DRILL: Final = Drill(
    "secrets", "A secret in a call, a result, an error, a prompt or a reply appears in no record and no answer.", run
)
