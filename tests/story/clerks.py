"""A home in which everything stands that the examples of the help speak of: the agent `clerk`, and its sessions."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from halter.cli.trust.tokens import create_token
from halter.config.trust import TrustFile, digest_folder
from halter.core.clock import DAY, HOUR
from halter.core.events import (
    CallStarted,
    DecisionAsked,
    FindingEmitted,
    ItemQuarantined,
    ItemSeen,
    MemoryProposed,
    RuleMade,
    SessionParked,
    SessionStarted,
    TurnStarted,
)
from halter.core.ids import FLEET, WorkerId, session_stream
from halter.core.messages import make_user_message
from halter.core.money import Caps, Spender, make_legs
from halter.core.ports import Draft, Lease, Write
from halter.core.project import rows_of_event
from halter.core.rows import DecisionRow, RuleRow
from halter.guard.ledger import ActualResult
from halter.runtime.runtime import Runtime, open_runtime
from halter.runtime.trigger_runner import make_trigger, record_trigger_events
from halter.settings import read_settings
from halter.spec.triggers import Schedule, Watch
from halter.state import lifecycle
from halter.testing.fakes import HoldTaken, hold

FILES: Final = {
    "clerk/agent.yaml": """\
name: clerk
model: reflex
reflex:
  - {when: 'message.contains("hello")', say: Hello.}
  - {say: All is quiet., yield: {mode: sleep, sleep: 1h, reason: all quiet}}
autonomy: {enabled: true}
schedules:
  - {name: nightly, prompt: Look around., cron: "0 3 * * *"}
""",
    "clerk/AGENTS.md": "You are a clerk.\n",
    "clerk/tools.py": '''\
from halter import tool


@tool(level="SAFE", effect="read")
def greet(who: str) -> str:
    """Word a greeting."""
    return f"Hello {who}."
''',
    "clerk/welcome.yaml": '- call: greet\n  with: {who: "${inputs.who}"}\n',
    "clerk/evals.yaml": "max_cost_usd: 0.10\ncases:\n  - {name: greets, input: hello, expect: {equals: Hello.}}\n",
    "fleet/halter.yaml": "limits: {max_cost_usd_per_month: 200}\n",
    "letter.json": '{"to": "carol"}',
}

ITEM: Final = "0123456789abcdef" * 4


def environment(home: Path) -> dict[str, str]:
    """Everything that commands look for, below this home."""
    return {
        "HOME": str(home),
        "XDG_STATE_HOME": str(home / "state"),
        "XDG_CONFIG_HOME": str(home / "config"),
        "HALTER_PERSON": "ada",
        "COLUMNS": "80",
    }


def furnish(home: Path) -> None:
    """Write the agent, trust it, and fill the store."""
    environ = environment(home)
    for name, text in FILES.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    trust = TrustFile(home / "config" / "halter" / "trust.json")
    trust.trust(home / "clerk", digest_folder(home / "clerk"), "ada", 0)
    create_token(read_settings(environ, home), "carol", "viewer")
    asyncio.run(_filled(environ, home))


async def _filled(environ: Mapping[str, str], home: Path) -> None:
    async with open_runtime(read_settings(environ, home), environ=environ, lease=1) as app:
        await _worked(app)
        await _waits(app)
        await _planned(app)


async def _begun(app: Runtime, session: str) -> Lease:
    event = SessionStarted(session=session, agent="clerk", kind="task", started_by="ada")
    await app.store.commit(lifecycle.start_session(event, b"write to bob"))
    (lease,) = await app.store.claim(WorkerId(f"{session} worker"), 1)
    return lease


async def _worked(app: Runtime) -> None:
    """Have a session that called a tool, spent money and ended."""
    lease = await _begun(app, "clerk-2")
    await _write(app, lease, TurnStarted(turn=1), msgspec.json.encode(make_user_message("write to bob")))
    held = make_legs(Caps(), Spender("clerk-2", "clerk"), app.clock.now(), usd=600_000)
    event = CallStarted(call="clerk-2.1", tool="look", legs=held)
    answer = await hold(app.ledger, lease, event, b'{"at":"it"}')
    assert isinstance(answer, HoldTaken)
    await app.ledger.settle(lease, answer.flight, ActualResult("ok", usd=500_000, body=b"seen"))
    assert (await app.store.commit(lifecycle.end_session(lease, "COMPLETED", "completed"))).events


async def _waits(app: Runtime) -> None:
    """Have a session that found and learned something, and waits for a person."""
    lease = await _begun(app, "clerk-1")
    now = app.clock.now()
    event = FindingEmitted(finding="clerk-1.f1", agent="clerk", severity="high", support="supported")
    await _write(app, lease, event, b'{"title":"A leak","severity":"high","text":"Water on the floor."}')
    learned = MemoryProposed(memory="clerk-1.m1", agent="clerk")
    await _write(app, lease, learned, b"Bob is on holiday in May.")
    asked = DecisionAsked(
        decision="clerk-1.1/approval",
        about="approval",
        subject="clerk-1.1",
        name="send",
        digest="d",
        expires_at=now + DAY,
        level="RESTRICTED",
        risk="LOW",
        same="x",
        keys=("to",),
    )
    await _write(app, lease, asked, b'send {"to":"bob"}')
    rests = SessionParked(state="WAITING_FOR_APPROVAL", wake_at=now + DAY)
    await app.store.commit(lifecycle.park_session(lease, "clerk-1/park", rests))


async def _write(
    app: Runtime, lease: Lease, event: FindingEmitted | MemoryProposed | DecisionAsked | TurnStarted, body: bytes
) -> None:
    stream, key = session_stream(lease.session), f"{lease.session}/{event.KIND}"
    asked = [(DecisionRow, event.decision)] if isinstance(event, DecisionAsked) else []
    reads = [*asked, *rows_of_event(event)]
    await app.store.commit(Write(stream, key, lambda _: [Draft(event, body)], reads, lease=lease))


async def _planned(app: Runtime) -> None:
    now = app.clock.now()
    rule = RuleMade(
        rule="r1",
        tool="send",
        scope="agent",
        owner="clerk",
        matcher='{"by":"same","digest":"x"}',
        keys=("to",),
        by="ada",
        expires_at=now + HOUR,
    )
    await app.store.commit(Write(FLEET, "rule", lambda _: [Draft(rule)], [(RuleRow, "r1")]))
    weekly = Schedule(name="weekly", prompt="Look around.", cron="0 3 * * 1")
    await app.store.commit(make_trigger("clerk/weekly", "clerk", weekly, "ada"))
    letters = Watch(name="letters", prompt="Read it.", path="letters")
    await app.store.commit(make_trigger("clerk/letters", "clerk", letters, "ada"))
    seen = ItemSeen(trigger="clerk/letters", item=ITEM, name="letter.txt", size=3)
    left = ItemQuarantined(trigger="clerk/letters", item=ITEM, attempts=3, sentence="It was tried too often.")
    for event in (seen, left):
        await app.store.commit(record_trigger_events("clerk/letters", event.KIND, event))
