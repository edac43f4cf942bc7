"""Deliveries by HTTP: each starts one session of a webhook, once, however often it is sent."""

import hmac
import re
from collections.abc import Mapping
from typing import Final

import msgspec

from halter.core.agent_spec import Webhook, trigger_id
from halter.core.clock import SECOND
from halter.core.effect_events import SkipReason
from halter.core.events import RunSkipped, RunStarted
from halter.core.text import clean
from halter.core.tools import find_secret_names
from halter.runtime import triggers
from halter.runtime.agent_context import AgentContext
from halter.runtime.session_builder import find_trigger_row
from halter.runtime.triggers import FILE_ACTOR, AgentTriggers, RunInput

MAX_START_ATTEMPTS: Final = 20
"""So often it is tried to be the next run, where others come at the same moment."""
_DELIVERY: Final = re.compile(r"[\x21-\x7e]{1,200}")


class Delivery(msgspec.Struct, frozen=True):
    """What came in: its token, its name, what kind of body it says to have, and the body."""

    token: str
    delivery: str
    content_type: str
    body: bytes


class HookAccepted(msgspec.Struct, frozen=True):
    """A session was started for it, just now or when it came before."""

    session: str
    repeated: bool = False


class HookRejected(msgspec.Struct, frozen=True):
    """Nothing was started: the status of HTTP that says why, and a sentence."""

    status: int
    sentence: str
    retry_after: int | None = None


class WebhookReceiver:
    """Takes deliveries for the webhooks of the agents of this process."""

    def __init__(self, agents: Mapping[str, AgentContext], triggers: Mapping[str, AgentTriggers]) -> None:
        self._agents = agents
        self._triggers = triggers

    def any(self) -> bool:
        """Tell whether there is any webhook."""
        return any(context.agent.tasks.webhooks for context in self._agents.values())

    def most_bytes(self, agent: str, name: str, token: str) -> int:
        """Tell how long a body may be; of one that nobody has a right to deliver, nothing is read."""
        hook, context = self._hook(agent, name), self._agents.get(agent)
        if hook is None or context is None or not _token_fits(context, hook, token):
            return 0
        return hook.max_bytes

    async def receive(self, agent: str, name: str, delivery: Delivery) -> HookAccepted | HookRejected:
        """Start a session for a delivery. Who has no right to it is told no more than that."""
        hook = self._hook(agent, name)
        context = self._agents.get(agent)
        if hook is None or context is None or not _token_fits(context, hook, delivery.token):
            return HookRejected(401, "There is no webhook for that token: send it as `Authorization: Bearer TOKEN`.")
        flaw = _find_delivery_flaw(hook, delivery)
        if flaw is not None:
            return flaw
        return await self._started(context, hook, delivery)

    def _hook(self, agent: str, name: str) -> Webhook | None:
        context = self._agents.get(agent)
        hooks = () if context is None else context.agent.tasks.webhooks
        return next((hook for hook in hooks if hook.name == name), None)

    async def _started(self, context: AgentContext, hook: Webhook, delivery: Delivery) -> HookAccepted | HookRejected:
        identity = trigger_id(context.agent.policy.name, hook.name)
        store, key = context.store, f"delivery/{delivery.delivery}"
        for _ in range(MAX_START_ATTEMPTS):
            row = await find_trigger_row(store, identity)
            if row is None or row.ended_at is not None:
                await store.commit(
                    triggers.make_trigger(
                        identity, context.agent.policy.name, hook, FILE_ACTOR, None, row.made_seq if row else 0
                    )
                )
                continue
            run = RunStarted(trigger=identity, session="", cause="webhook")
            words = RunInput(delivery.body.decode("utf-8", "replace"), f"webhook:{clean(delivery.delivery)}", "webhook")
            write = await triggers.start_run(context, row, hook, run, key, words)
            before = await self._against(context, hook, identity, write.key)
            if before is not None:
                return before
            committed = await store.commit(write)
            for stored in committed.events:
                if isinstance(stored.event, RunStarted):
                    return HookAccepted(stored.event.session, committed.repeated)
        return HookRejected(503, "Too much comes at once: send it again in a moment.", SECOND)

    async def _against(
        self, context: AgentContext, hook: Webhook, identity: str, key: str
    ) -> HookAccepted | HookRejected | None:
        """Tell what stands against a run. A delivery that came before is answered as it was then."""
        seen = await self._triggers[context.agent.policy.name].delivered(identity, key)
        if seen:
            return HookAccepted(seen, repeated=True)
        against = await self._triggers[context.agent.policy.name].against(identity, hook)
        if against is None:
            return None
        why, sentence, until = against
        now = context.app.clock.now()
        event = RunSkipped(trigger=identity, why=why, due_at=now, sentence=sentence)
        await context.store.commit(triggers.record_trigger_events(identity, f"skip/{key}/{now}", event))
        return HookRejected(429 if why == "cost_cap_reached" else 409, sentence, None if until is None else until - now)


DeliveryObjection = tuple[SkipReason, str, int | None]


def _token_fits(context: AgentContext, hook: Webhook, token: str) -> bool:
    names = find_secret_names(hook.token.encode())
    secrets = context.agent.secrets
    expected = [secrets.value(name) for name in names if name in secrets.names()]
    given = token.encode("utf-8", "replace")
    return any(hmac.compare_digest(given, each.encode()) for each in expected if each)


def _find_delivery_flaw(hook: Webhook, delivery: Delivery) -> HookRejected | None:
    if not _DELIVERY.fullmatch(delivery.delivery):
        return HookRejected(400, "Name the delivery, as in `Halter-Delivery: 42`: sent twice, it is taken once.")
    if len(delivery.body) > hook.max_bytes:
        return HookRejected(413, f"The body is longer than the {hook.max_bytes:,} bytes that are taken.")
    if not delivery.body.strip():
        return HookRejected(400, "The body is empty: there is nothing to work on.")
    try:
        delivery.body.decode()
    except UnicodeDecodeError:
        return HookRejected(400, "The body is no text: send JSON or text as UTF-8.")
    if "json" in delivery.content_type.lower():
        try:
            msgspec.json.decode(delivery.body)
        except (msgspec.DecodeError, RecursionError):
            return HookRejected(400, "The body says that it is JSON, and is not.")
    return None
