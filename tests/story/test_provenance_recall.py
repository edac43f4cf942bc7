"""A session that is recalled from its events decides as the live one; what is erased never makes it looser."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from halter.core.messages import Text, ToolCall
from halter.core.ports import Stored, read_body
from halter.core.tools import Tool
from halter.core.vocabulary import SessionKind
from halter.guard.approvals import AnyCondition, EachArgument, make_equals_condition
from halter.journal.retention import erase_session_bodies
from halter.loop.history import SessionHistory
from halter.provenance.check import ProvenanceCheck
from halter.testing.world import World
from halter.tools.function_tool import tool
from tests.story.loops import Story, calls, says
from tests.story.test_provenance import READ, TO_BOB, TO_MALLORY, Post, answer, answer_always, send

TASK: Final = "Read my letters, find Carol in the directory, and send the report to bob@house.example and to Carol."
AGAIN: Final = "Send the report to bob@house.example, to Carol and to zoe@house.example."
LOOK_UP: Final = calls(("find_contact", {"name": "Carol"}))
LINES: Final = (READ, LOOK_UP, TO_BOB, send("carol@house.example"), TO_MALLORY, says("Done."), says("Again."))
PROBES: Final = tuple(
    msgspec.json.encode({"to": to, "text": text})
    for to in (
        "bob@house.example",
        "carol@house.example",
        "mallory@evil.example",
        "zoe@house.example",
        "eve@evil.example",
    )
    for text in ("the report", "the code is 4471")
)


class Directory:
    def tools(self) -> Sequence[Tool]:
        fields: dict[str, Any] = {"reads": "trusted", "arguments": {"name": "detail"}, "mints": {"mail": "address"}}
        return [tool(self.find_contact, level="SAFE", effect="read", **fields)]

    async def find_contact(self, name: str) -> str:
        return f"name: {name}\nmail: carol@house.example"


async def play(world: World, kind: SessionKind = "chat") -> Story:
    """Two turns: letters are read, a contact is looked up, and letters sent; then the person asks for more."""
    story = Story(world, LINES, kind=kind, policy_yaml="policy: {lock_after_denial: false}")
    story.provenance, story.extra = "ask", [*Post().tools(), *Directory().tools()]
    answering = world.spawn(answer(world, "deny"))
    await story.run(TASK)
    if kind == "chat":
        await story.says(AGAIN)
    answering.cancel()
    return story


class Recaller:
    """Recalls a story's session from its events; each body is read once."""

    def __init__(self, story: Story) -> None:
        self.story = story
        tools = story.tools(story.world.store.patient(story.world.clock))
        self._specs = {name: each.spec for name, each in tools.items()}

    async def __call__(
        self, events: Sequence[Stored], brakes: type[ProvenanceCheck] = ProvenanceCheck
    ) -> ProvenanceCheck:
        assert self.story.provenance is not None
        brake = brakes(self.story.provenance, self.story.policy, self._specs)
        brake.trust(self.story.mind.instructions, "the instructions")
        await SessionHistory("s", provenance_check=brake).apply(events, self._read)
        return brake

    async def _read(self, event: Stored) -> bytes:
        if event.body is None and event.blob is None:
            return b""
        return await read_body(self.story.world.journal, event)


def decide(brake: ProvenanceCheck) -> list[frozenset[tuple[str, str]]]:
    """The flaws of each probe, by argument and reason."""
    return [frozenset((flaw.argument, flaw.reason) for flaw in brake.judge("send_letter", probe)) for probe in PROBES]


def without_body(event: Stored) -> Stored:
    return msgspec.structs.replace(event, body=None, salt=None)


def find_looser(whole: ProvenanceCheck, erased: ProvenanceCheck) -> list[bytes]:
    """The probes that a person is asked about in the whole session, and not in the erased one."""
    pairs = zip(PROBES, decide(whole), decide(erased), strict=True)
    return [probe for probe, before, after in pairs if before and not after]


class AmnesiacBrake(ProvenanceCheck):
    """Broken on purpose: it ignores the calls of an earlier process."""

    def apply(self, *_: Any) -> None:
        """Forget."""


async def test_a_recalled_session_decides_as_the_live_one(world: World) -> None:
    story = await play(world)
    recall, events = Recaller(story), await story.events()
    assert story.loop is not None
    live = story.loop.provenance_check
    assert live is not None
    session_brake = await recall(events)
    assert (decide(session_brake), session_brake.clean, session_brake.locked) == (decide(live), live.clean, live.locked)
    assert any(decide(session_brake))
    assert not all(decide(session_brake))
    assert decide(await recall(events, AmnesiacBrake)) != decide(live)


async def test_a_recalled_session_takes_a_rule_for_no_word_of_a_person_as_the_live_one_does(world: World) -> None:
    lines = (READ, TO_MALLORY, LOOK_UP, READ, says("Done."))
    story = Story(world, lines, kind="task", policy_yaml="policy: {lock_after_denial: false}")
    story.provenance, story.extra = "ask", [*Post("anyone").tools(), *Directory().tools()]
    to = make_equals_condition("to", "mallory@evil.example")
    answering = world.spawn(answer_always(world, EachArgument((to, AnyCondition("text")))))
    await story.run(TASK)
    answering.cancel()
    assert story.loop is not None
    live, session_brake = story.loop.provenance_check, await Recaller(story)(await story.events())
    assert live is not None
    assert decide(session_brake) == decide(live)


async def test_two_sessions_that_part_after_any_event_decide_alike_until_then_and_apart_from_then_on(
    world: World,
) -> None:
    """A fork of a session shares what came before, and nothing that comes after."""
    story = await play(world)
    recall, events = Recaller(story), await story.events()
    for end in range(1, len(events) + 1):
        session_brake, other = await recall(events[:end]), await recall(events[:end])
        before = decide(session_brake)
        assert before == decide(other), end
        other.observe_erased(ToolCall("c", "read_letters", "{}"))
        assert decide(session_brake) == before, end
        assert not other.clean


class ForgivingBrake(ProvenanceCheck):
    """Broken on purpose: what is erased never was."""

    def mark_erased(self) -> None:
        """Forget."""

    def observe_erased(self, call: ToolCall) -> None:
        """Forget."""


async def test_whatever_is_erased_no_question_is_lost(world: World) -> None:
    story = await play(world)
    recall, events = Recaller(story), await story.events()
    whole = await recall(events)
    for place, stored in enumerate(events):
        if stored.body is None and stored.blob is None:
            continue
        for erased in (range(place + 1), (place,)):
            remaining_events = [without_body(each) if number in erased else each for number, each in enumerate(events)]
            assert find_looser(whole, await recall(remaining_events)) == [], (erased, stored.event)
    forgiving = await recall([without_body(each) for each in events], ForgivingBrake)
    assert find_looser(whole, forgiving)


async def test_a_session_whose_bodies_are_really_erased_asks_no_less_when_it_resumes(world: World) -> None:
    story = await play(world, "task")
    recall = Recaller(story)
    whole = await recall(await story.events())
    erasure = await erase_session_bodies(world.journal, ["s"], "ada", "The person wants it.")
    assert erasure.erased == ("s",)
    erased = await recall(await story.events())
    assert not erased.clean
    for brake in (whole, erased):
        brake.add_text(Text(AGAIN, "person", trusted=True))
    assert find_looser(whole, erased) == []
