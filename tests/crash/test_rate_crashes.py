"""A crash at any commit of a session that waits for the rate of its model: nothing is lost, and no minute has more."""

from collections import Counter

import msgspec

from halter.core.clock import MINUTE
from halter.core.events import RequestStarted
from halter.core.messages import Prompt, Reply
from halter.core.rates import RateLimit
from halter.guard.prepare import SessionContext
from halter.journal.verify import verify_store
from halter.testing.world import World
from tests.crash.test_loop_crashes import EVERY, TEN, Sensible, check_outcome, check_sent_once, everywhere, last, reply
from tests.story.loops import Story, calls, says

SLOWLY = {"scripted:script": RateLimit(requests=1), "scripted:*": RateLimit(tokens=100_000)}


class Slow(Story):
    """A session whose model may be asked once in a minute."""

    def standing(self) -> SessionContext:
        return msgspec.structs.replace(super().standing(), rate_limits=SLOWLY)


def clerk(prompt: Prompt, _: int) -> Reply:
    text = last(prompt)
    if "result:send" in text:
        return reply(says("Done."))
    return reply(calls(("send", {"text": "1"})) if "result:look" in text else calls(("look", {"at": "a"})))


@EVERY
def test_a_session_that_waits_for_a_rate_resumes_after_a_crash_at_any_commit(every: int) -> None:
    def make(world: World) -> Story:
        story = Slow(world, kind="task")
        story.models, story.price = [Sensible(world, clerk)], TEN
        return story

    async def program(world: World, story: Story) -> None:
        await story.begin("Look, then send.")
        if not (await world.session("s")).ended:
            await story.attend()

    for world, story in everywhere(make, program, every):
        receipt = world.run(check_outcome(world, story))
        assert (receipt.state, receipt.terminal_reason) == ("COMPLETED", "completed"), world
        check_sent_once(story, "1")
        counts = Counter(each.at // MINUTE for each in world.history if isinstance(each.event, RequestStarted))
        assert counts.total() >= 3
        assert max(counts.values()) == 1, world
        assert world.run(verify_store(world.journal)).ok, world
