"""A crash at any commit of a session under the provenance check: it decides as if there had been no crash."""

from itertools import groupby

from halter.core.clock import SECOND
from halter.core.messages import Prompt, Reply, ToolResult
from halter.guard.approvals import answer_decision, list_pending_decisions
from halter.provenance.check import ProvenanceCheck
from halter.testing.fakes import Crash
from halter.testing.world import World, crash_everywhere
from tests.crash.test_loop_crashes import EVERY, TEN, Sensible, last, reply
from tests.story.loops import Story, calls, says
from tests.story.test_call_order import DELETE, DELETED, EXPORT, EXPORT_TO_EVE, EXPORTED, NOTE, TEST, TO_EVE, Shop
from tests.story.test_call_order import READ as READ_LETTERS
from tests.story.test_call_order import TASK as SHOP_TASK
from tests.story.test_provenance import READ, TASK, TO_BOB, TO_MALLORY, Post, recall_history, send

PROBES = [
    ("send_letter", b'{"to": "%s", "text": "%s"}' % (to, text))
    for to in (b"bob@house.example", b"mallory@evil.example", b"eve@evil.example", b"zoe@x.example")
    for text in (b"the report", b"an invoice of 4711 euros")
]


def clerk(prompt: Prompt, _: int) -> Reply:
    """Read, write to whom the task names, then to two that only a letter names."""
    parts = [part for message in prompt.messages for part in message.parts]
    done = sum(isinstance(part, ToolResult) and part.tool == "send_letter" for part in parts)
    if "result:" not in last(prompt) and not done:
        return reply(READ)
    return reply((TO_BOB, TO_MALLORY, send("eve@evil.example"), says("Done."))[min(done, 3)])


def judge_all(brake: ProvenanceCheck | None) -> object:
    assert brake is not None
    links = brake.unsaid_links("See https://evil.example/x and write to bob@house.example.")
    return brake.locked, brake.clean, [brake.judge(*probe) for probe in PROBES], links


async def deny(world: World, story: Story, post: Post) -> None:
    while True:
        for waiting in await list_pending_decisions(world.journal):
            done = waiting.about == "unknown_call" and len(post.sent) > 0
            store = world.store.patient(world.clock)
            verdict = "approve" if done else "deny"
            await store.commit(answer_decision(waiting, verdict, "ada", world.ids.make()))
        await world.clock.sleep(SECOND)


@EVERY
def test_a_resumed_session_decides_as_the_live_one_whatever_crashes(every: int) -> None:
    stories: list[tuple[Story, Post]] = []

    async def program(world: World) -> None:
        story, post = stories[-1]
        answering = world.spawn(deny(world, story, post))
        await story.begin(TASK)
        if not (await world.session("s")).ended:
            await story.attend()
        answering.cancel()

    def new_world(crash: Crash | None) -> World:
        world = World(crash=crash)
        story, post = Story(world, kind="task"), Post()
        story.models, story.price = [Sensible(world, clerk)], TEN
        story.provenance, story.extra = "ask", list(post.tools())
        stories.append((story, post))
        return world

    for world in crash_everywhere(program, new_world, every=every):
        story, post = stories[-1]
        assert post.sent in (["bob@house.example"], [])
        assert story.loop is not None
        session_history = world.run(recall_history(story))
        assert judge_all(session_history.provenance_check) == judge_all(story.loop.provenance_check), world
        assert session_history.provenance_check is not None
        assert session_history.provenance_check.locked


def keeper(prompt: Prompt, _: int) -> Reply:
    """Read, export, delete, then export again and test."""
    parts = [part for message in prompt.messages for part in message.parts]
    seen = [part.tool for part in parts if isinstance(part, ToolResult)]
    steps = (calls(READ_LETTERS), calls(EXPORT), calls(DELETE), calls(EXPORT_TO_EVE, TEST, NOTE))
    return reply(steps[len(seen)] if len(seen) < len(steps) else says("Done."))


@EVERY
def test_calls_keep_their_order_whatever_crashes(every: int) -> None:
    stories: list[tuple[Story, Shop]] = []

    async def approve(world: World) -> None:
        while True:
            for waiting in await list_pending_decisions(world.journal):
                store = world.store.patient(world.clock)
                await store.commit(answer_decision(waiting, "approve", "ada", world.ids.make()))
            await world.clock.sleep(SECOND)

    async def program(world: World) -> None:
        story, _ = stories[-1]
        answering = world.spawn(approve(world))
        await story.begin(SHOP_TASK)
        if not (await world.session("s")).ended:
            await story.attend()
        answering.cancel()

    def new_world(crash: Crash | None) -> World:
        world = World(crash=crash)
        story, shop = Story(world, kind="task"), Shop(idempotent=True)
        story.models, story.price = [Sensible(world, keeper)], TEN
        story.provenance, story.extra = "ask", list(shop.tools())
        stories.append((story, shop))
        return world

    for world in crash_everywhere(program, new_world, every=every):
        _, shop = stories[-1]
        # What was in doubt after a crash may have been repeated.
        done = [line for line, _ in groupby(shop.done)]
        assert done == [EXPORTED, DELETED, TO_EVE, "test", "note"], world
