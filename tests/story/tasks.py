"""Agents that review documents: their folders, their scripts, and what their journals hold afterwards."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from halter.core.events import AnyEvent, SessionEnded
from halter.core.ids import StreamId, session_stream, trigger_stream
from halter.core.money import BudgetRow, micros_to_usd
from halter.core.ports import Query, Stored
from halter.core.rows import ItemRow, SessionRow, SpendRow, TriggerRow
from halter.journal.verify import verify_store
from halter.spec.tasks import VERBS
from halter.state.receipt import Receipt, make_receipt
from halter.testing.world import World
from tests.story.autonomous import Fleet

PRICED = """
models:
  "scripted:script": {price: {input: 10, output: 10}}
"""
USED = "usage: {input_tokens: 100, output_tokens: 50}"
"""What a reply of the script costs at that price: $0.0015."""
STEP = 1500

REVIEW = """
model: scripted
script: script.yaml
autonomy: {enabled: false}
phases: review
anonymize: {enabled: false}
limits: {max_output_tokens: 500}
"""

UNBRAKED = "policy: {provenance: off}\n"
"""For stories in which a model may use what it read, without a question."""
ALL_VERBS = f"verbs: [{', '.join(VERBS)}]\n"
WORK = REVIEW.replace("phases: review\n", ALL_VERBS)
"""The same with a single phase, in which everything may be used."""

READS = f"""
- when: "begins: intake"
  finds: 'The document is (?P<name>[^\\n]+)\\.\\n'
  repeat: true
  {USED}
  calls: [{{tool: retrieve_chunks, arguments: {{file: "${{name}}"}}}}]
"""
FINDS = f"""
- when: "begins: drafting"
  finds: 'The document is (?P<name>[^\\n]+)\\.\\n(?s:.*?)(?P<quote>[^.\\n]*without limit[^.\\n]*)'
  repeat: true
  {USED}
  calls:
    - tool: emit_finding
      arguments: {{title: No limit, severity: high, document: "${{name}}", quote: "${{quote}}"}}
"""
JUDGES = f"""
- when: "The data: "
  repeat: true
  {USED}
  calls: [{{tool: answer, arguments: {{release: true, reason: It says so.}}}}]
"""
WITHHOLDS = JUDGES.replace("release: true", "release: false")
NOTIFIES = f"""
- when: "begins: delivery"
  finds: 'Recorded as (?P<finding>f-[0-9a-f]+)'
  repeat: true
  {USED}
  calls: [{{tool: notify, arguments: {{text: Look at this., findings: ["${{finding}}"]}}}}]
"""
DONE = f"""
- repeat: true
  {USED}
  text: That is done.
"""
SCRIPT = READS + FINDS + JUDGES + NOTIFIES + DONE


def watch(text: str = "", path: str = "inbox") -> str:
    """Write a watch of a folder into an agent's file."""
    return f"watches:\n  - {{name: papers, path: {path}, prompt: A paper has come in., {text or 'debounce: 2s'}}}\n"


def paper(number: int, words: str = "") -> str:
    return f"Paper {number}.\nThe supplier {number} is liable without limit for all of it.\n{words}"


class Office(Fleet):
    """One process whose agent works on documents."""

    def reviewer(self, text: str = "", script: str = SCRIPT, tools: str = "", head: str = REVIEW) -> Path:
        folder = self.agent("clerk", head + (text or watch()), tools, script_yaml=script)
        (folder / "inbox").mkdir(exist_ok=True)
        return folder

    def drop(self, name: str, text: str | bytes) -> Path:
        file = self.home / "clerk" / "inbox" / name
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file

    async def trigger(self, name: str = "papers") -> TriggerRow:
        (row,) = await self.world.journal.ask(Query("trigger", TriggerRow, {"trigger": f"clerk/{name}"}))
        return row

    async def items(self, name: str = "papers") -> Sequence[ItemRow]:
        return await self.world.journal.ask(Query("items_of", ItemRow, {"trigger": f"clerk/{name}"}))

    async def happened(self, name: str = "papers") -> Sequence[Stored]:
        """What the trigger's own stream holds."""
        return await self.world.events(trigger_stream(f"clerk/{name}"))

    async def told_of(self, kind: type[AnyEvent], name: str = "papers") -> list[AnyEvent]:
        return [stored.event for stored in await self.happened(name) if isinstance(stored.event, kind)]

    async def runs(self) -> list[SessionRow]:
        return sorted(await self.sessions("clerk"), key=lambda row: (row.started_at, row.session))

    async def states(self) -> Counter[str]:
        return Counter(row.state for row in await self.runs())

    async def receipt(self, session: str) -> Receipt:
        return make_receipt(await self.events(session), await self.inbox(session))

    async def calls(self, session: str) -> list[tuple[str, str]]:
        """Which tools a session asked for, and what became of it."""
        found: list[tuple[str, str]] = []
        names: dict[str, str] = {}
        for stored in await self.events(session):
            match stored.kind:
                case "call_started":
                    names[stored.event.call] = stored.event.tool
                case "call_settled":
                    found.append((names[stored.event.call], stored.event.outcome))
                case "call_refused":
                    found.append((stored.event.tool, stored.event.outcome))
                case _:
                    pass
        return found


async def all_is_well(world: World) -> None:
    """Every session ended and has a receipt, and what they say of money is what the tables say."""
    rows = await world.journal.ask(Query("all_sessions", SessionRow))
    receipts = [make_receipt(await world.events(session_stream(row.session))) for row in rows]
    assert all(each.ended_at is not None and each.in_doubt == () for each in receipts)
    charged = 0
    for row in rows:
        events = [stored.event for stored in await world.events(session_stream(row.session))]
        assert sum(isinstance(event, SessionEnded) for event in events) >= 1
        charged += sum(event.charge.usd for event in events if getattr(event, "charge", None) is not None)
    spends = await world.journal.ask(Query("all_spends", SpendRow))
    budgets = await world.journal.ask(Query("budgets", BudgetRow))
    assert (
        sum(each.cost_usd for each in receipts)
        == micros_to_usd(charged)
        == micros_to_usd(sum(spend.usd for spend in spends))
    )
    assert {budget.held for budget in budgets} <= {0}
    assert (await verify_store(world.journal)).findings == ()


async def stream(world: World, name: StreamId) -> list[str]:
    return [event.kind for event in await world.events(name)]
