"""An agent in a world: its loop, its scripted model and its tools, as one process would run them."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from halter.autonomy.hot_state import HotState, LiveFacts
from halter.autonomy.pace import AutonomousPace, PaceTerms
from halter.config.agent_files import parse_agent
from halter.config.merge import FleetConfig
from halter.config.resolve import resolve_policy
from halter.config.yaml_reader import load_bytes
from halter.core.clock import SECOND
from halter.core.events import SessionStarted
from halter.core.ids import SessionId, make_worker_id, session_stream
from halter.core.messages import Message, Model, Reply, StreamChunk, Text, ToolCall, ToolResult
from halter.core.ports import Store, Stored
from halter.core.tools import Failed, Tool
from halter.core.usage import FREE_PRICE, ModelName, Price, Usage
from halter.core.vocabulary import SessionKind
from halter.dispatch.heartbeat import acquire_lease, renew_leases
from halter.guard.guard import GuardRuntime
from halter.guard.prepare import SessionContext
from halter.loop.decide import TurnLimits
from halter.loop.loop import TurnLoop
from halter.loop.observer import LiveContext, LoopObserver
from halter.loop.prompt import LoopSettings
from halter.loop.session_runtime import SessionRuntime
from halter.models.prices import Prices
from halter.models.scripted import Scripted, ScriptedFailure, ScriptLine
from halter.policy.evaluation import ResolvedPolicy
from halter.provenance.check import ActiveMode, ProvenanceCheck
from halter.redaction.answer_stream import StreamMask
from halter.redaction.secrets import GivenSecrets
from halter.spec.autonomy import Autonomy, Pacing
from halter.spec.models import BrainSpec
from halter.state import lifecycle
from halter.state.receipt import Receipt, make_receipt
from halter.tasks.conversation import AttendedTurnPolicy, Conclusion, Conversation, TurnPolicy
from halter.tasks.task_tools import make_verbs
from halter.testing.world import World
from halter.tools.function_tool import tool

PRICED = "scripted:priced"


def policy(text: str = "") -> ResolvedPolicy:
    return resolve_policy(FleetConfig(), parse_agent(load_bytes(f"name: desk\n{text}".encode(), "agent.yaml")))


def says(text: str, **more: Any) -> ScriptLine:
    return ScriptLine(
        reply=Reply((Text(text, "model", trusted=False),), more.pop("stop", "end"), more.pop("usage", None)), **more
    )


def calls(*asked: tuple[str, Any] | str, text: str = "", **more: Any) -> ScriptLine:
    """A reply that asks for calls, each a name or a name with arguments."""
    tool_calls = tuple(
        ToolCall(f"m{number}", each, "{}")
        if isinstance(each, str)
        else ToolCall(
            f"m{number}", each[0], each[1] if isinstance(each[1], str) else msgspec.json.encode(each[1]).decode()
        )
        for number, each in enumerate(asked)
    )
    words = (Text(text, "model", trusted=False),) if text else ()
    return ScriptLine(reply=Reply((*words, *tool_calls), more.pop("stop", "calls"), more.pop("usage", None)), **more)


def fails(
    kind: str = "Overloaded",
    *,
    retry: bool = True,
    after: int | None = None,
    takes: int = 0,
    usage: Usage | None = None,
    **more: Any,
) -> ScriptLine:
    failure = ScriptedFailure(kind=kind, message="the provider says no", unavailable=retry, retry_after=after, **more)
    return ScriptLine(reply=Reply((), usage=usage), fails=failure, takes=takes)


class Desk:
    """An agent's tools, which count in the world outside what they really did."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        self.together = self.most_together = 0
        self.stuck = asyncio.Event()
        self.prices = iter(range(1_000_000))

    def tools(self) -> Sequence[Tool]:
        return [
            tool(self.look, level="SAFE", effect="read"),
            tool(self.price, level="SAFE", effect="read"),
            tool(self.send, level="SAFE"),
            tool(self.pay, level="SAFE", cost="0.25"),
            tool(self.wipe, level="RESTRICTED"),
            tool(self.hang, level="SAFE", timeout=600),
            tool(self.fail, level="SAFE"),
            tool(self.long, level="SAFE", effect="read"),
            tool(self.slow, level="SAFE", effect="read"),
        ]

    async def look(self, at: str = "") -> str:
        self.done[f"look {at}".strip()] += 1
        return f"nothing new at {at}"

    async def price(self) -> str:
        return f"{next(self.prices)}"

    async def send(self, text: str = "") -> str:
        self.done[f"send {text}"] += 1
        return "sent"

    async def pay(self) -> str:
        self.done["pay"] += 1
        return "paid"

    async def wipe(self, path: str = "") -> str:
        self.done[f"wipe {path}"] += 1
        return "wiped"

    async def hang(self) -> str:
        self.stuck.set()
        await asyncio.Event().wait()
        return "never"

    async def fail(self) -> str:
        raise Failed("NoLuck", "it did not work", partial="so far so good")

    async def long(self, size: int = 50_000) -> str:
        return "".join(f"line {number}\n" for number in range(size // 8))

    async def slow(self, name: str = "") -> str:
        self.together += 1
        self.most_together = max(self.most_together, self.together)
        await asyncio.sleep(1)
        self.together -= 1
        return f"slow {name}"


class Story:
    """One session of one agent. After a crash or a rest it is attended again, from its events alone."""

    def __init__(
        self,
        world: World,
        lines: Sequence[ScriptLine] = (),
        *,
        kind: SessionKind = "chat",
        policy_yaml: str = "",
        mind: BrainSpec | None = None,
        fallbacks: Sequence[Sequence[ScriptLine]] = (),
        **rules: Any,
    ) -> None:
        self.world = world
        self.desk = Desk()
        self.policy = policy(policy_yaml)
        self.mind = mind or BrainSpec(model="scripted:script", instructions="You are a clerk.")
        self.models: list[Scripted] = [
            Scripted(each, world.clock, ModelName("scripted", f"m{number}" if number else "script"))
            for number, each in enumerate((lines, *fallbacks))
        ]
        self.kind: SessionKind = kind
        self.rules = rules
        self.price: Price = FREE_PRICE
        self.prices: dict[str, Price] = {}
        self.window = 100_000
        self.chunks: list[StreamChunk] = []
        self.watching = LoopObserver(self.chunks.append)
        self.senses = LiveContext()
        self.loop: TurnLoop | None = None
        self.extra: list[Tool] = []
        self.summarizer: Model | None = None
        self.simulates: Model | None = None
        self.redact: Callable[[str], str] = redact
        self.stream_mask: Callable[[], StreamMask] | None = None
        self.came: Conclusion | None = None
        self.interrupted = False
        """Whether a cancelled task means that a person interrupted the answer."""
        self.pacing = Pacing(autonomy=Autonomy(enabled=True))
        self.provenance: ActiveMode | None = None
        """The mode of the injection brake; without one there is none."""

    def brake(self) -> ProvenanceCheck | None:
        if self.provenance is None:
            return None
        tools = self.tools(self.world.store.patient(self.world.clock))
        session_brake = ProvenanceCheck(self.provenance, self.policy, {name: each.spec for name, each in tools.items()})
        session_brake.trust(self.mind.instructions, "the instructions")
        return session_brake

    @property
    def model(self) -> Scripted:
        return self.models[0]

    async def begin(self, task: str = "") -> None:
        event = SessionStarted(session="s", agent="desk", kind=self.kind, started_by="ada")
        await self.world.store.patient(self.world.clock).commit(lifecycle.start_session(event, task.encode()))

    async def says(self, text: str) -> Conclusion:
        """Say something to the session, and let it answer."""
        await self.world.send_message("s", text)
        return await self.attend()

    async def run(self, task: str) -> Conclusion:
        await self.begin(task)
        return await self.attend()

    async def attend(self) -> Conclusion:
        store, clock = self.world.store.patient(self.world.clock), self.world.clock
        worker = make_worker_id("loop", self.world.ids)
        async with renew_leases(store, clock, worker, self.world.lease - SECOND):
            lease = await acquire_lease(store, clock, worker, SessionId("s"), 20 * SECOND)
            assert lease is not None, "the session is over, or somebody has it"
            outcomes = [*self.models, *([self.simulates] if self.simulates else [])]
            prices = Prices({**{str(model.name): self.price for model in outcomes}, **self.prices})
            secrets = GivenSecrets({})
            guard = GuardRuntime(
                store,
                clock,
                redact=self.redact,
                secrets=secrets,
                prices=prices,
                simulates=self.simulates,
                stream_mask=self.stream_mask,
            )
            running = SessionRuntime(store, clock, guard, lease, self.standing(), self.tools(store))
            self.loop = TurnLoop(
                running,
                clock,
                self.thinking(running),
                random.Random(self.world.seed),
                self.senses,
                self.watching,
                self.brake,
            )
            conversation = Conversation(running, self.loop, clock, self.pace(running, self.loop))
            try:
                self.came = await conversation.run_until_parked()
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not self.interrupted or task is None:
                    raise
                task.uncancel()
                self.came = await conversation.interrupt()
            assert self.came is not None
            return self.came

    def pace(self, running: SessionRuntime, loop: TurnLoop) -> TurnPolicy:
        if self.kind != "autonomous":
            return AttendedTurnPolicy(loop)
        aware = LiveFacts(HotState({}), self.world.clock)
        return AutonomousPace(running, loop, self.world.clock, PaceTerms(pacing=self.pacing), aware)

    def standing(self) -> SessionContext:
        caps = self.policy.caps.session.max_cost_usd
        kept = round((caps or 0) * self.policy.reserve_cost_fraction) if self.policy.on_cap == "wrap_up" else 0
        tokens = self.policy.reserve_tokens if self.policy.on_cap == "wrap_up" else 0
        digest = str(self.policy.digest())
        return SessionContext(
            "s", "desk", self.policy.phases[0], self.policy, digest, reserve_usd=kept, reserve_tokens=tokens
        )

    def tools(self, store: Store) -> Mapping[str, Tool]:
        made: list[Tool] = [*self.desk.tools(), *make_verbs(store, self.kind), *self.extra]
        return {each.spec.name: each for each in made}

    def thinking(self, running: SessionRuntime) -> LoopSettings:
        policy = self.policy
        rules = TurnLimits(
            kind=self.kind,
            timeout=policy.timeout,
            max_steps=policy.max_steps,
            max_retries=self.mind.max_retries,
            model_count=len(self.models),
            max_tokens_recoveries=self.mind.max_tokens_recoveries,
            max_repeated_tool_steps=self.mind.max_repeated_tool_steps,
            on_cap=policy.on_cap,
            **self.rules,
        )
        offered = tuple(each.spec for each in self.tools(self.world.store.patient(self.world.clock)).values())
        return LoopSettings(
            brain=self.mind,
            rules=rules,
            models=tuple(self.models),
            offered_tools=offered,
            window=self.window,
            summarizer=self.summarizer,
        )

    async def events(self) -> list[Stored]:
        return await self.world.events(session_stream("s"))

    async def kinds(self) -> list[str]:
        return [event.kind for event in await self.events()]

    async def receipt(self) -> Receipt:
        return make_receipt(await self.events())

    @property
    def messages(self) -> list[Message]:
        assert self.loop is not None
        return list(self.loop.messages)

    def results(self) -> list[ToolResult]:
        return [part for message in self.messages for part in message.parts if isinstance(part, ToolResult)]

    def predictions(self) -> list[Text]:
        """What the model was shown of predictions, beside the results."""
        parts = (part for message in self.messages for part in message.parts)
        return [part for part in parts if isinstance(part, Text) and part.reason == "simulation"]

    def told(self) -> list[str]:
        """What the runtime said to the model."""
        parts = (part for message in self.messages for part in message.parts)
        return [part.reason for part in parts if isinstance(part, Text) and part.reason]


def redact(text: str) -> str:
    return text.replace("hunter2-hunter2", "[redacted]")


def used(inputs: int = 100, outputs: int = 20) -> Usage:
    return Usage(inputs, outputs)
