"""Deliveries by HTTP: each starts one session of a webhook, once, however often it is sent."""

import hmac
import re
from collections.abc import Mapping
from typing import Final

import msgspec

from halter.app import runs
from halter.app.agent_context import AgentContext
from halter.app.runs import FROM_FILE, Given
from halter.app.triggered import trigger_row
from halter.app.triggers import Triggers
from halter.core.clock import SECOND
from halter.core.events import RunSkipped, RunStarted
from halter.core.tasks import Webhook, trigger_id
from halter.core.text import clean
from halter.core.tools import secret_names
from halter.core.triggered import SkipReason

TRIES: Final = 20
"""So often it is tried to be the next run, where others come at the same moment."""
_DELIVERY: Final = re.compile(r"[\x21-\x7e]{1,200}")


class Delivery(msgspec.Struct, frozen=True):
    """What came in: its token, its name, what kind of body it says to have, and the body."""

    token: str
    delivery: str
    content_type: str
    body: bytes


class Accepted(msgspec.Struct, frozen=True):
    """A session was started for it, just now or when it came before."""

    session: str
    repeated: bool = False


class Rejected(msgspec.Struct, frozen=True):
    """Nothing was started: the status of HTTP that says why, and a sentence."""

    status: int
    sentence: str
    retry_after: int | None = None


class Hooks:
    """Takes deliveries for the webhooks of the agents of this process."""

    def __init__(self, agents: Mapping[str, AgentContext], triggers: Mapping[str, Triggers]) -> None:
        self._agents = agents
        self._triggers = triggers

    def any(self) -> bool:
        """Tell whether there is any webhook."""
        return any(speaking.agent.tasks.webhooks for speaking in self._agents.values())

    def most_bytes(self, agent: str, name: str, token: str) -> int:
        """Tell how long a body may be; of one that nobody has a right to deliver, nothing is read."""
        hook, speaking = self._hook(agent, name), self._agents.get(agent)
        if hook is None or speaking is None or not _token_fits(speaking, hook, token):
            return 0
        return hook.max_bytes

    async def receive(self, agent: str, name: str, delivery: Delivery) -> Accepted | Rejected:
        """Start a session for a delivery. Who has no right to it is told no more than that."""
        hook = self._hook(agent, name)
        speaking = self._agents.get(agent)
        if hook is None or speaking is None or not _token_fits(speaking, hook, delivery.token):
            return Rejected(401, "There is no webhook for that token: send it as `Authorization: Bearer TOKEN`.")
        flaw = _flaw(hook, delivery)
        if flaw is not None:
            return flaw
        return await self._started(speaking, hook, delivery)

    def _hook(self, agent: str, name: str) -> Webhook | None:
        speaking = self._agents.get(agent)
        hooks = () if speaking is None else speaking.agent.tasks.webhooks
        return next((hook for hook in hooks if hook.name == name), None)

    async def _started(self, speaking: AgentContext, hook: Webhook, delivery: Delivery) -> Accepted | Rejected:
        identity = trigger_id(speaking.agent.policy.name, hook.name)
        store, key = speaking.store, f"delivery/{delivery.delivery}"
        for _ in range(TRIES):
            row = await trigger_row(store, identity)
            if row is None or row.ended_at is not None:
                await store.commit(
                    runs.make(identity, speaking.agent.policy.name, hook, FROM_FILE, None, row.made_seq if row else 0)
                )
                continue
            run = RunStarted(trigger=identity, session="", cause="webhook")
            words = Given(delivery.body.decode("utf-8", "replace"), f"webhook:{clean(delivery.delivery)}", "webhook")
            write = await runs.start(speaking, row, hook, run, key, words)
            before = await self._against(speaking, hook, identity, write.key)
            if before is not None:
                return before
            committed = await store.commit(write)
            for stored in committed.events:
                if isinstance(stored.event, RunStarted):
                    return Accepted(stored.event.session, committed.repeated)
        return Rejected(503, "Too much comes at once: send it again in a moment.", SECOND)

    async def _against(
        self, speaking: AgentContext, hook: Webhook, identity: str, key: str
    ) -> Accepted | Rejected | None:
        """Tell what stands against a run. A delivery that came before is answered as it was then."""
        seen = await self._triggers[speaking.agent.policy.name].delivered(identity, key)
        if seen:
            return Accepted(seen, repeated=True)
        against = await self._triggers[speaking.agent.policy.name].against(identity, hook)
        if against is None:
            return None
        why, sentence, until = against
        now = speaking.app.clock.now()
        event = RunSkipped(trigger=identity, why=why, due_at=now, sentence=sentence)
        await speaking.store.commit(runs.tell(identity, f"skip/{key}/{now}", event))
        return Rejected(429 if why == "cost_cap_reached" else 409, sentence, None if until is None else until - now)


Against = tuple[SkipReason, str, int | None]


def _token_fits(speaking: AgentContext, hook: Webhook, token: str) -> bool:
    names = secret_names(hook.token.encode())
    secrets = speaking.agent.secrets
    expected = [secrets.value(name) for name in names if name in secrets.names()]
    given = token.encode("utf-8", "replace")
    return any(hmac.compare_digest(given, each.encode()) for each in expected if each)


def _flaw(hook: Webhook, delivery: Delivery) -> Rejected | None:
    if not _DELIVERY.fullmatch(delivery.delivery):
        return Rejected(400, "Name the delivery, as in `Halter-Delivery: 42`: sent twice, it is taken once.")
    if len(delivery.body) > hook.max_bytes:
        return Rejected(413, f"The body is longer than the {hook.max_bytes:,} bytes that are taken.")
    if not delivery.body.strip():
        return Rejected(400, "The body is empty: there is nothing to work on.")
    try:
        delivery.body.decode()
    except UnicodeDecodeError:
        return Rejected(400, "The body is no text: send JSON or text as UTF-8.")
    if "json" in delivery.content_type.lower():
        try:
            msgspec.json.decode(delivery.body)
        except (msgspec.DecodeError, RecursionError):
            return Rejected(400, "The body says that it is JSON, and is not.")
    return None
