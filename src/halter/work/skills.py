"""`run_skill`: a folder with a SKILL.md, used as instructions over some input, by one request of its own."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from halter.core.clock import MINUTE
from halter.core.messages import Message, Prompt, Text
from halter.core.tasks import Skill
from halter.core.text import clean, listed, shorten
from halter.core.tools import Failed
from halter.guard.request import Answered, FailedRequest, RefusedRequest, Request
from halter.work.verbs import Verb

RUN_SKILL: Final = "run_skill"
TRIES: Final = 3
TIMEOUT: Final = 10 * MINUTE


class _Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    skill: str
    input: Annotated[str, Meta(max_length=200_000)]


Ask = Callable[[Request, int], Awaitable[Answered | RefusedRequest | FailedRequest]]
"""Takes a request to the guard, with the number of its attempt."""


def run_skill(skills: Mapping[str, Skill], ask: Ask, max_output_tokens: int) -> Verb:
    """Make the verb that lets a model work by a skill's instructions. What it costs is that request's cost."""

    async def act(asked: _Asked, call: str) -> str:
        skill = skills[asked.skill]
        prompt = Prompt(
            system=skill.instructions,
            # It is a model that put this together, from whatever it has read.
            messages=(Message("user", (Text(asked.input, "model", trusted=False),)),),
            max_output_tokens=max_output_tokens,
        )
        for attempt in range(TRIES):
            answer = await ask(Request(id=f"{call}/skill", prompt=prompt, purpose="skill"), attempt)
            match answer:
                case Answered(reply=reply):
                    return reply.text.strip() or "(the skill gave no words)"
                case FailedRequest(may_retry=True) if attempt < TRIES - 1:
                    continue
                case FailedRequest(error=why) | RefusedRequest(sentence=why):
                    raise Failed("SkillFailed", f"{skill.name}: {why}")
        raise AssertionError("every attempt comes to something")

    def flaw(asked: _Asked) -> str:
        if asked.skill in skills:
            return ""
        return f"There is no skill {shorten(clean(asked.skill))!r}: there is {listed(skills) or 'none'}."

    about = "Work on some input by the instructions of a skill. " + " ".join(
        f"{skill.name}: {skill.description}" for skill in skills.values()
    )
    return Verb(RUN_SKILL, about.strip(), _Asked, act, flaw, timeout=TIMEOUT)
