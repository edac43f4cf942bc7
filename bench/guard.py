"""The guard: the cost of a call or request through the guard, and the speed of redaction.

Every guarded row makes two commits: the intent, with its hold if the tool has a cost, and the settlement. The bare row
is the same function called directly.
"""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from bench import anonymous, texts
from bench.measure import Contender, Measured, Sample, compare, timed
from halter.config.agent_files import parse_agent
from halter.config.merge import parse_fleet
from halter.config.resolve import resolve_policy
from halter.config.yaml_reader import load_bytes
from halter.core.clock import SystemClock
from halter.core.events import SessionStarted
from halter.core.ids import SortableIds, WorkerId
from halter.core.messages import Prompt, make_user_message
from halter.core.ports import Lease
from halter.core.usage import ModelName, Usage
from halter.guard.call_answer import Answer
from halter.guard.guard import GuardRuntime
from halter.guard.prepare import Call, SessionContext
from halter.guard.request import AnsweredRequest, ModelRequest
from halter.journal.engine import Engine
from halter.journal.memory import MemoryEngine
from halter.journal.sqlite import SqliteEngine
from halter.journal.store import JournalStore
from halter.models.prices import Prices
from halter.models.scripted import Scripted, say
from halter.policy.evaluation import ResolvedPolicy
from halter.redaction.anonymize import anonymize_prompt
from halter.redaction.personal_data import compile_names
from halter.redaction.redact import Redactor
from halter.redaction.secrets import GivenSecrets
from halter.state import lifecycle
from halter.tools.function_tool import tool

CLOCK = SystemClock()
IDS = SortableIds(CLOCK.now)
ARGUMENTS = b'{"query": "status of order 4711", "limit": 10}'
PROMPT = Prompt(system="Be brief.", messages=(make_user_message("What became of order 4711?"),), max_output_tokens=1000)
MODEL = ModelName("test", "paid")
RICH = "max_cost_usd_per_day: 1000000"
FLEET = f"limits: {{{RICH}}}\nmodels: {{'{MODEL}': {{price: {{input: 1, output: 1}}}}}}\n"
AGENT = f"name: desk\nlimits: {{max_cost_usd: 1000000, {RICH}}}\n"
CALLS = 500
WARM = 20
MEGABYTES = 5


async def look_up(query: str, limit: int = 10) -> str:
    """Look something up."""
    return f'{{"status": "shipped", "carrier": "post", "query": "{query}", "of": {limit}}}'


TOOLS = {
    "look_up": tool(look_up, level="SAFE", effect="read"),
    "order": tool(look_up, name="order", level="CONTROLLED", cost="0.001"),
}

Act = Callable[[str], Awaitable[None]]
"""Causes one effect with the given id."""


class Desk:
    """A session with its guard."""

    def __init__(self, store: JournalStore, lease: Lease, policy: ResolvedPolicy) -> None:
        self._lease = lease
        self._standing = SessionContext("s", "desk", policy.phases[0], policy, str(policy.digest()))
        self._model = Scripted([say("It was shipped.", Usage(100, 20))] * (WARM + CALLS), CLOCK, MODEL)
        self._guard = GuardRuntime(
            store,
            CLOCK,
            redact=Redactor(texts.SECRETS).redact,
            secrets=GivenSecrets({}),
            prices=Prices(policy.prices),
        )

    async def look_up(self, name: str) -> None:
        """Call the tool that is SAFE and free."""
        await self._call(name, "look_up")

    async def order(self, name: str) -> None:
        """Call the tool that is CONTROLLED, audited and has a cost."""
        await self._call(name, "order")

    async def look(self, name: str) -> None:
        """Poll the tool that is SAFE and free, as a sensor does."""
        answer = await self._guard.call_read_only(self._lease, self._standing, Call(name, "look_up", ARGUMENTS), TOOLS)
        if not isinstance(answer, Answer) or answer.outcome != "ok":
            raise TypeError(answer)

    async def _call(self, name: str, tool_name: str) -> None:
        answer = await self._guard.call(self._lease, self._standing, Call(name, tool_name, ARGUMENTS), TOOLS)
        if not isinstance(answer, Answer) or answer.outcome != "ok":
            raise TypeError(answer)

    async def request(self, name: str) -> None:
        """Ask the scripted model."""
        model_request = ModelRequest(id=name, prompt=PROMPT)
        answer = await self._guard.request(self._lease, self._standing, model_request, self._model)
        if not isinstance(answer, AnsweredRequest):
            raise TypeError(answer)


@asynccontextmanager
async def open_desk(engine: Engine) -> AsyncGenerator[Desk]:
    policy = resolve_policy(
        parse_fleet(load_bytes(FLEET.encode(), "halter.yaml")), parse_agent(load_bytes(AGENT.encode(), "agent.yaml"))
    )
    store = JournalStore(engine)
    await store.commit(
        lifecycle.start_session(SessionStarted(session="s", agent="desk", kind="task", started_by="bench"))
    )
    (lease,) = await store.claim(WorkerId("bench"), 1)
    try:
        yield Desk(store, lease, policy)
    finally:
        await store.close()


async def repeated(act: Act, name: str, times: int) -> int:
    for number in range(times):
        await act(f"{name}.{number}")
    return times


def guarded(open_engine: Callable[[], Engine], choose_act: Callable[[Desk], Act]) -> Sample:
    """Measure one kind of effect in a session that is open and warmed up."""
    with asyncio.Runner() as runner:
        desk_context = open_desk(open_engine())
        act = choose_act(runner.run(desk_context.__aenter__()))
        runner.run(repeated(act, "warm", WARM))
        sample = timed(lambda: runner.run(repeated(act, "s", CALLS)))
        runner.run(desk_context.__aexit__(None, None, None))
    return sample


def bare() -> Sample:
    """Measure the function of both tools, called directly."""

    async def act(_: str) -> None:
        await look_up(query="status of order 4711", limit=10)

    return timed(lambda: asyncio.run(repeated(act, "s", CALLS)))


def in_memory() -> Engine:
    return MemoryEngine(now=CLOCK.now, new_id=IDS.make)


def redacted(text: str, times: int) -> Sample:
    """Measure the redaction of a megabyte."""
    redactor = Redactor(texts.SECRETS)
    redactor.redact(text)

    def job() -> int:
        for _ in range(times):
            redactor.redact(text)
        return times

    return timed(job)


def hidden(text: str) -> Sample:
    """Measure the anonymization of one prompt, with the agent's names compiled before."""
    compile_names(anonymous.NAMES)
    anonymize_prompt(Prompt(messages=(make_user_message(anonymous.letter(1000)),)), "salt", anonymous.NAMES)

    def job() -> int:
        anonymize_prompt(Prompt(messages=(make_user_message(text),)), "salt", anonymous.NAMES)
        return 1

    return timed(job)


def run(rounds: int, report: Callable[[str], None]) -> Measured:
    """Measure the guard rows."""
    with tempfile.TemporaryDirectory(prefix="halter-bench-", dir=Path.cwd()) as folder:

        def on_sqlite() -> Engine:
            return SqliteEngine(str(Path(folder) / f"{IDS.make()}.db"), now=CLOCK.now, new_id=IDS.make)

        contenders = [Contender("bare call of the tool", "calls", "call", bare)]
        for location, open_engine in (("in memory", in_memory), ("on SQLite", on_sqlite)):
            acts: list[tuple[str, str, Callable[[Desk], Act]]] = [
                ("SAFE tool", "call", lambda desk: desk.look_up),
                ("CONTROLLED tool with a cost", "call", lambda desk: desk.order),
                ("request to a scripted model", "request", lambda desk: desk.request),
            ]
            contenders += [
                Contender(
                    f"{title}, {location}",
                    "calls",
                    unit,
                    lambda open_engine=open_engine, chosen=chosen: guarded(open_engine, chosen),
                )
                for title, unit, chosen in acts
            ]
        for group, texts_by_name, times in (("usual", texts.USUAL, MEGABYTES), ("hostile", texts.HOSTILE, 1)):
            contenders += [
                Contender(title, group, "MB", lambda make=make, times=times: redacted(make(), times))
                for title, make in texts_by_name.items()
            ]
        prompts = {"100 kB with 1,000 names": anonymous.letter(), **anonymous.HOSTILE}
        contenders += [
            Contender(f"anonymizing: {title}", "anonymizing", "prompt", lambda text=text: hidden(text))
            for title, text in prompts.items()
        ]
        return compare(contenders, rounds, report), {}
