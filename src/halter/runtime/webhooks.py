"""Webhooks: deliveries by HTTP that start sessions, checked as their sender documents it.

What senders do differently is a table, `SCHEMES`. A signature covers the bytes of the body as they arrived.
"""

import base64
import binascii
import hmac
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from types import MappingProxyType
from typing import Any, Final, Literal, cast

import msgspec
from msgspec import UNSET

from halter.core.clock import MINUTE, SECOND, format_duration
from halter.core.events import RunSkipped, RunStarted
from halter.core.text import clean
from halter.core.tools import find_secret_names
from halter.redaction.secrets import SECRET_PREFIX
from halter.runtime.agent_runtime import AgentRuntime
from halter.runtime.trigger_runner import (
    FILE_ACTOR,
    AgentTriggers,
    RunInput,
    make_trigger,
    record_trigger_events,
    start_run,
)
from halter.spec.triggers import SchemeName, Webhook, trigger_id
from halter.state.trigger_records import find_trigger_row

MAX_START_ATTEMPTS: Final = 20
"""Maximum number of attempts while other runs start at the same moment."""
DEFAULT_TOLERANCE: Final = 5 * MINUTE
CHALLENGE_TYPE: Final = "url_verification"
"""The type of the body with which Slack asks whether an address is ours."""
_DELIVERY: Final = re.compile(r"[\x21-\x7e]{1,200}")
_TIME: Final = re.compile(r"[0-9]{1,16}")
_NO_MEMBERS: Final[Mapping[str, Any]] = MappingProxyType({})


class WebhookScheme(msgspec.Struct, frozen=True, kw_only=True):
    """How a sender proves that a delivery is its own.

    Header `proof` carries the token or the signatures, each after `prefix`; `separator` separates several. `signed` is
    the text that is signed; it is empty for a token. The id of a delivery is in the header `id_header` or in the member
    `id_member` of the body. A signed time is in the header `time_header`, beside the signatures after `time_prefix`, or
    in the member `time_member` in milliseconds.
    """

    proof: str
    prefix: str = ""
    separator: str = ""
    signed: str = ""
    encoding: Literal["hex", "base64"] = "hex"
    id_header: str = ""
    id_member: str = ""
    time_header: str = ""
    time_prefix: str = ""
    time_member: str = ""


SCHEMES: Final[Mapping[SchemeName, WebhookScheme]] = MappingProxyType(
    {
        "bearer": WebhookScheme(proof="Authorization", prefix="Bearer ", id_header="Halter-Delivery"),
        "github": WebhookScheme(
            proof="X-Hub-Signature-256", prefix="sha256=", signed="{body}", id_header="X-GitHub-Delivery"
        ),
        "gitlab": WebhookScheme(proof="X-Gitlab-Token", id_header="Idempotency-Key"),
        "linear": WebhookScheme(
            proof="Linear-Signature", signed="{body}", id_header="Linear-Delivery", time_member="webhookTimestamp"
        ),
        "sentry": WebhookScheme(proof="Sentry-Hook-Signature", signed="{body}", id_header="Request-ID"),
        "shopify": WebhookScheme(
            proof="X-Shopify-Hmac-SHA256", signed="{body}", encoding="base64", id_header="X-Shopify-Webhook-Id"
        ),
        "slack": WebhookScheme(
            proof="X-Slack-Signature",
            prefix="v0=",
            signed="v0:{time}:{body}",
            id_member="event_id",
            time_header="X-Slack-Request-Timestamp",
        ),
        "standard": WebhookScheme(
            proof="webhook-signature",
            prefix="v1,",
            separator=" ",
            signed="{id}.{time}.{body}",
            encoding="base64",
            id_header="webhook-id",
            time_header="webhook-timestamp",
        ),
        "stripe": WebhookScheme(
            proof="Stripe-Signature",
            prefix="v1=",
            separator=",",
            signed="{time}.{body}",
            id_member="id",
            time_prefix="t=",
        ),
    }
)


class Delivery(msgspec.Struct, frozen=True):
    """A webhook delivery: its headers, with names in lower case, and the bytes of its body."""

    headers: Mapping[str, str]
    body: bytes = b""

    def read_header(self, name: str) -> str:
        return self.headers.get(name.lower(), "").strip() if name else ""

    def list_proofs(self, scheme: WebhookScheme, prefix: str) -> Sequence[str]:
        """Return the items of the header that proves the sender, as far as they have this prefix, without it."""
        text = self.read_header(scheme.proof)
        items = [item.strip() for item in text.split(scheme.separator)] if scheme.separator else [text]
        found = (item[len(prefix) :].strip() for item in items if item[: len(prefix)].lower() == prefix.lower())
        return [item for item in found if item]

    def read_members(self) -> Mapping[str, Any]:
        """Return the members of a JSON object; none for any other body."""
        try:
            value = msgspec.json.decode(self.body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return _NO_MEMBERS
        return cast("Mapping[str, Any]", value) if isinstance(value, dict) else _NO_MEMBERS

    def read_time(self, scheme: WebhookScheme) -> str:
        """Return the time of a delivery as it was written; "" if there is none."""
        if scheme.time_member:
            return str(self.read_members().get(scheme.time_member, ""))
        times = self.list_proofs(scheme, scheme.time_prefix) if scheme.time_prefix else ()
        return times[0] if times else self.read_header(scheme.time_header)

    def list_signed_parts(self, scheme: WebhookScheme) -> Sequence[bytes]:
        """Return what the sender has signed, in parts: a body may be large."""
        before, _, after = scheme.signed.partition("{body}")
        values = {"id": self.read_header(scheme.id_header), "time": self.read_time(scheme)} if before else {}
        return (before.format(**values).encode(), self.body, after.encode())

    def identify(self, scheme: WebhookScheme) -> str:
        """Return the id that the sender gave; for a body without one, a digest of what was signed."""
        if scheme.id_header:
            return self.read_header(scheme.id_header)
        name = self.read_members().get(scheme.id_member)
        if isinstance(name, str) and _DELIVERY.fullmatch(name):
            return name
        return sha256(b"".join(self.list_signed_parts(scheme))).hexdigest()


class HookAccepted(msgspec.Struct, frozen=True):
    """The delivery started a session, now or when it was first sent."""

    session: str
    repeated: bool = False


class HookChallenged(msgspec.Struct, frozen=True):
    """The delivery only asks whether the address is ours; the answer repeats its challenge."""

    challenge: str


class HookRejected(msgspec.Struct, frozen=True):
    """The delivery started no session: the HTTP status and a sentence."""

    status: int
    sentence: str
    retry_after: int | None = None


HookAnswer = HookAccepted | HookChallenged | HookRejected
UNKNOWN_SENDER: Final = HookRejected(
    401,
    "No webhook accepts this delivery. Check its address and the secret of its token or signature. A webhook without "
    "a `scheme` takes `Authorization: Bearer TOKEN`.",
)
"""The answer to all that nothing authenticates, so that it reveals nothing else."""


class WebhookReceiver:
    """Receives deliveries for the webhooks of the agents of this process."""

    def __init__(self, agents: Mapping[str, AgentRuntime], triggers: Mapping[str, AgentTriggers]) -> None:
        self._agents = agents
        self._triggers = triggers

    def has_webhooks(self) -> bool:
        return any(context.definition.tasks.webhooks for context in self._agents.values())

    def max_bytes(self, agent: str, name: str, headers: Mapping[str, str]) -> int:
        """Return the maximum length of a body; 0 without a valid token or any signature, so that no body is read."""
        hook, context = self._hook(agent, name), self._agents.get(agent)
        if hook is None or context is None:
            return 0
        scheme, delivery = SCHEMES[hook.scheme], Delivery(headers)
        may_prove = (
            delivery.list_proofs(scheme, scheme.prefix) if scheme.signed else _is_proven(context, hook, delivery)
        )
        return hook.max_bytes if may_prove else 0

    def name_credential(self, agent: str, name: str, headers: Mapping[str, str]) -> str:
        """Name what attempts are counted by: the token, or the webhook alone for signatures, which all differ."""
        hook = self._hook(agent, name)
        scheme = SCHEMES["bearer" if hook is None else hook.scheme]
        return f"{agent}/{name} {'' if scheme.signed else Delivery(headers).read_header(scheme.proof)}"

    async def receive(self, agent: str, name: str, delivery: Delivery) -> HookAnswer:
        """Start a session for a delivery. Without a valid token or signature, the reply reveals nothing else."""
        hook = self._hook(agent, name)
        context = self._agents.get(agent)
        if hook is None or context is None:
            return UNKNOWN_SENDER
        if len(delivery.body) > hook.max_bytes:
            return HookRejected(413, f"The body is longer than the maximum of {hook.max_bytes:,} bytes.")
        if not _is_proven(context, hook, delivery):
            return UNKNOWN_SENDER
        identity = delivery.identify(SCHEMES[hook.scheme])
        flaw = _find_time_flaw(hook, delivery, context.app.clock.now()) or _find_delivery_flaw(hook, delivery, identity)
        if flaw is not None:
            return flaw
        challenge = _find_challenge(hook, delivery)
        return HookChallenged(challenge) if challenge else await self._start_run(context, hook, delivery, identity)

    def _hook(self, agent: str, name: str) -> Webhook | None:
        context = self._agents.get(agent)
        hooks = () if context is None else context.definition.tasks.webhooks
        return next((hook for hook in hooks if hook.name == name), None)

    async def _start_run(
        self, agent: AgentRuntime, hook: Webhook, delivery: Delivery, name: str
    ) -> HookAccepted | HookRejected:
        """Start the run of the delivery of this name."""
        identity = trigger_id(agent.policy.name, hook.name)
        store, key = agent.store, f"delivery/{name}"
        for _ in range(MAX_START_ATTEMPTS):
            row = await find_trigger_row(store, identity)
            if row is None or row.ended_at is not None:
                await store.commit(
                    make_trigger(identity, agent.policy.name, hook, FILE_ACTOR, None, row.made_seq if row else 0)
                )
                continue
            run = RunStarted(trigger=identity, session="", cause="webhook")
            run_input = RunInput(delivery.body.decode("utf-8", "replace"), f"webhook:{clean(name)}", "webhook")
            write = await start_run(agent, row, hook, run, key, run_input)
            obstacle = await self._find_obstacle(agent, hook, identity, write.key)
            if obstacle is not None:
                return obstacle
            result = await store.commit(write)
            for stored in result.events:
                if isinstance(stored.event, RunStarted):
                    return HookAccepted(stored.event.session, result.is_repeated)
        return HookRejected(503, "Too many deliveries at the same time. Send it again in a moment.", SECOND)

    async def _find_obstacle(
        self, agent: AgentRuntime, hook: Webhook, identity: str, key: str
    ) -> HookAccepted | HookRejected | None:
        """Return the answer to a delivery that starts no run, or None. A repeated one gets its first answer."""
        session = await self._triggers[agent.policy.name].find_delivery(identity, key)
        if session:
            return HookAccepted(session, repeated=True)
        obstacle = await self._triggers[agent.policy.name].find_obstacle(identity, hook)
        if obstacle is None:
            return None
        reason, sentence, until = obstacle
        now = agent.app.clock.now()
        event = RunSkipped(trigger=identity, why=reason, due_at=now, sentence=sentence)
        await agent.store.commit(record_trigger_events(identity, f"skip/{key}/{now}", event))
        is_temporary = reason == "cost_cap_reached" or until is not None
        return HookRejected(429 if is_temporary else 409, sentence, None if until is None else until - now)


def list_webhook_problems(agent: AgentRuntime) -> Iterator[str]:
    """List webhooks that accept nothing, or less than their file says, because of a secret."""
    for hook in agent.definition.tasks.webhooks:
        for name in _list_secret_names(hook):
            problem = ""
            if name not in agent.secrets.names():
                problem = f"{SECRET_PREFIX}{name} is not set. Set it and restart."
            elif _decode_key(hook.scheme, agent.secrets.value(name)) is None:
                problem = f"{SECRET_PREFIX}{name} is not in Base64. Copy it as the sender shows it, and restart."
            if problem:
                yield f"The webhook {hook.name} accepts nothing with one of its secrets: {problem}"


def _list_secret_names(hook: Webhook) -> Sequence[str]:
    references = [reference for reference in (hook.token, hook.previous_token) if reference is not UNSET]
    return [name for reference in references for name in find_secret_names(reference.encode())]


def _decode_key(scheme: SchemeName, secret: str) -> bytes | None:
    """Return the key that a secret writes; None if it writes none. The secrets of Standard Webhooks are in Base64."""
    if scheme != "standard":
        return secret.encode()
    text = secret.removeprefix("whsec_")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True) or None
    except (binascii.Error, ValueError):
        return None


def _is_proven(agent: AgentRuntime, hook: Webhook, delivery: Delivery) -> bool:
    """Return True if one of the webhook's secrets is the token, or made one of the signatures."""
    scheme, secrets = SCHEMES[hook.scheme], agent.secrets
    values = [secrets.value(name) for name in _list_secret_names(hook) if name in secrets.names()]
    keys = [key for key in (_decode_key(hook.scheme, value) for value in values) if key]
    expected = [_sign(scheme, key, delivery) for key in keys] if scheme.signed else keys
    proofs = [proof.encode("utf-8", "replace") for proof in delivery.list_proofs(scheme, scheme.prefix)]
    return any(hmac.compare_digest(proof, each) for proof in proofs for each in expected)


def _sign(scheme: WebhookScheme, key: bytes, delivery: Delivery) -> bytes:
    signature = hmac.new(key, digestmod=sha256)
    for part in delivery.list_signed_parts(scheme):
        signature.update(part)
    return base64.b64encode(signature.digest()) if scheme.encoding == "base64" else signature.hexdigest().encode()


def _find_time_flaw(hook: Webhook, delivery: Delivery, now: int) -> HookRejected | None:
    """Refuse a delivery that was signed too long ago, which may be a recorded one, or in the future."""
    scheme = SCHEMES[hook.scheme]
    if not (scheme.time_header or scheme.time_prefix or scheme.time_member):
        return None
    text = delivery.read_time(scheme)
    if not _TIME.fullmatch(text):
        return HookRejected(401, "The delivery has no time, so it may be a recorded one. Send it with its time.")
    tolerance = DEFAULT_TOLERANCE if hook.tolerance is UNSET else hook.tolerance
    age = now - int(text) * (SECOND // 1000 if scheme.time_member else SECOND)
    if abs(age) <= tolerance:
        return None
    sentence = f"is more than {format_duration(tolerance)} {'before' if age > 0 else 'after'} the time of this server"
    return HookRejected(401, f"The time of the delivery {sentence}. Send it again, and check the clocks of both.")


def _find_challenge(hook: Webhook, delivery: Delivery) -> str:
    members = delivery.read_members() if hook.scheme == "slack" else _NO_MEMBERS
    challenge = members.get("challenge") if members.get("type") == CHALLENGE_TYPE else ""
    return challenge if isinstance(challenge, str) else ""


def _find_delivery_flaw(hook: Webhook, delivery: Delivery, identity: str) -> HookRejected | None:
    if not _DELIVERY.fullmatch(identity):
        header = SCHEMES[hook.scheme].id_header
        return HookRejected(400, f"Give the delivery an id, as in `{header}: 42`. A repeated id is handled once.")
    if not delivery.body.strip():
        return HookRejected(400, "The body is empty.")
    try:
        delivery.body.decode()
    except UnicodeDecodeError:
        return HookRejected(400, "The body is not text. Send JSON or text in UTF-8.")
    if "json" in delivery.read_header("content-type").lower():
        try:
            msgspec.json.decode(delivery.body)
        except (msgspec.DecodeError, RecursionError):
            return HookRejected(400, "The content type is JSON, but the body is not valid JSON.")
    return None
