"""Playbooks and skills.

A playbook's session runs its steps through the guard, call by call. Its position is in the journal, so it resumes after
a crash: a step with an outcome is not repeated, and one without is recovered first. `run_playbook` is the same as a
verb of the model; `run_skill` applies a SKILL.md to some input with one request.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from halter.core.agent_spec import MissingReference, Playbook, Results, Skill, Step, bind_arguments
from halter.core.clock import DAY, MINUTE
from halter.core.events import CallSettled
from halter.core.messages import Message, Prompt, Text
from halter.core.money import format_micros
from halter.core.ports import Store, Stored, read_body
from halter.core.provenance import ArgumentUse, Declaration
from halter.core.text import clean, from_body, join_names, shorten
from halter.core.tools import Failed
from halter.core.vocabulary import State, TerminalReason
from halter.guard.model_door import AnsweredRequest, FailedRequest, ModelRequest, RefusedRequest
from halter.guard.prepare import Call
from halter.guard.tool_door import NOT_DONE_BEFORE_CRASH, Answer
from halter.loop.session_runtime import SessionRuntime
from halter.tasks.task_tools import READS_ANYONE, Verb


class Task(msgspec.Struct, frozen=True):
    """What a playbook's session was given: the playbook as it was then, and its inputs."""

    playbook: Playbook
    inputs: Mapping[str, Any] = {}


def encode_task(task: Task) -> bytes:
    return msgspec.json.encode(task)


def decode_task(body: bytes) -> Task:
    return msgspec.json.decode(body, type=Task)


class PlaybookOutcome(msgspec.Struct, frozen=True):
    """The result of a playbook; `sentence` says what went wrong."""

    state: State
    terminal_reason: TerminalReason
    sentence: str = ""


StepListener = Callable[[Step, Answer], None]
"""Called with each step and its answer."""

PLAYBOOK_COMPLETED: Final = PlaybookOutcome("COMPLETED", "completed")


async def walk_playbook(
    runtime: SessionRuntime, store: Store, task: Task, tell: StepListener = lambda _, __: None
) -> PlaybookOutcome:
    """Runs all steps that are left; the first one that is not `ok` ends the playbook."""
    done = await _read_outcomes(store, await runtime.resume())
    if task.playbook.max_cost_usd is not None:
        # A playbook has no last words, so it needs no reserve.
        context = msgspec.structs.replace(runtime.context, kept_usd=0, kept_tokens=0)
        runtime.context = context.narrow(task.playbook.max_cost_usd, 0)
    results = Results(task.inputs)
    for number, step in enumerate(task.playbook.steps, 1):
        answer = await _step(runtime, step, number, results, done)
        if isinstance(answer, PlaybookOutcome):
            return await _end_playbook(runtime, answer)
        tell(step, answer)
        stopped = await runtime.find_end(answer)
        if stopped is not None:
            return await _end_playbook(runtime, PlaybookOutcome(*stopped, answer.text))
        if answer.outcome != "ok":
            where = f"Step {number} ({step.call}, line {step.line}) ended with {answer.outcome}: {answer.text}"
            return await _end_playbook(runtime, PlaybookOutcome("ERROR", "step_failed", where))
        results = results.with_step(step.name, answer.text)
    return await _end_playbook(runtime, PLAYBOOK_COMPLETED)


async def _step(
    runtime: SessionRuntime, step: Step, number: int, results: Results, done: Mapping[str, Answer]
) -> Answer | PlaybookOutcome:
    """Runs a step without an outcome. One that a person says was not done is repeated as another call."""
    call = f"{runtime.lease.session}.{number}"
    again = 0
    while call in done:
        if done[call].text != NOT_DONE_BEFORE_CRASH:
            return done[call]
        again += 1
        call = f"{runtime.lease.session}.{number}.{again}"
    arguments = bind_arguments(step, results)
    if isinstance(arguments, MissingReference):
        return PlaybookOutcome("ERROR", "step_failed", arguments.sentence)
    return await runtime.call(Call(call, step.call, arguments))


async def _read_outcomes(store: Store, events: Sequence[Stored]) -> Mapping[str, Answer]:
    found: dict[str, Answer] = {}
    for stored in events:
        event = stored.event
        if isinstance(event, CallSettled):
            text = event.error or from_body(await read_body(store, stored))
            found[event.call] = Answer(event.call, event.outcome, text, duration_ms=event.duration_ms)
    return found


async def _end_playbook(runtime: SessionRuntime, ended: PlaybookOutcome) -> PlaybookOutcome:
    await runtime.end(ended.state, ended.terminal_reason)
    return ended


RUN_PLAYBOOK: Final = "run_playbook"
MAX_PLAYBOOK_DURATION: Final = 7 * DAY
"""A step may wait for a person's answer."""


class _Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    playbook: str
    inputs: Mapping[str, Any] = {}


_PLAYBOOK_DECLARATION: Final = Declaration(
    arguments={"playbook": ArgumentUse("target", "name"), "inputs": ArgumentUse("destination")}
)
"""A person wrote the steps, but the model gives the inputs, and they may go anywhere."""

MakeCall = Callable[[Call, int | None], Awaitable[Answer]]
"""Makes a call through the guard with a spending limit, and waits for it."""
ReadSpent = Callable[[str], Awaitable[int]]
"""Returns what everything inside of a call has cost so far, in any process."""


def run_playbook(playbooks: Mapping[str, Playbook], make: MakeCall, spent: ReadSpent) -> Verb:
    """Makes the verb that runs a playbook. The steps carry the cost, together below the playbook's cap."""
    under_way: dict[str, str] = {}

    async def act(asked: _Asked, call: str) -> str:
        if any(call.startswith(f"{outer}/") for outer, name in under_way.items() if name == asked.playbook):
            raise Failed("PlaysItself", f"{asked.playbook} is being played already: it would never come to its end")
        under_way[call] = asked.playbook
        try:
            return await play_step(asked, call)
        finally:
            del under_way[call]

    async def play_step(asked: _Asked, call: str) -> str:
        playbook = playbooks[asked.playbook]
        results, sentences = Results(asked.inputs), list[str]()
        for number, step in enumerate(playbook.steps, 1):
            arguments = bind_arguments(step, results)
            if isinstance(arguments, MissingReference):
                raise Failed("StepFailed", arguments.sentence, "\n".join(sentences))
            cap = playbook.max_cost_usd
            remaining = None if cap is None else cap - await spent(call)
            if cap is not None and remaining is not None and remaining <= 0:
                raise Failed(
                    "CostCapReached",
                    f"step {number} was not begun: {format_micros(cap)} is spent",
                    "\n".join(sentences),
                )
            answer = await make(Call(f"{call}/{number}", step.call, arguments), remaining)
            sentences.append(f"{number}. {step.call}: {answer.outcome}\n{answer.text}")
            if answer.outcome != "ok":
                raise Failed("StepFailed", f"step {number} ({step.call}): {answer.outcome}", "\n".join(sentences))
            results = results.with_step(step.name, answer.text)
        return "\n".join(sentences)

    def flaw(asked: _Asked) -> str:
        playbook = playbooks.get(asked.playbook)
        if playbook is None:
            return (
                f"There is no playbook {shorten(clean(asked.playbook))!r}: there is {join_names(playbooks) or 'none'}."
            )
        missing = [name for name in playbook.inputs if name not in asked.inputs]
        return f"{asked.playbook} needs {join_names(missing)} in `inputs`." if missing else ""

    known = " ".join(_describe_playbook(name, each) for name, each in playbooks.items())
    about = f"Let the steps of a playbook be done. {known}".strip()
    return Verb(
        RUN_PLAYBOOK, about, _Asked, act, flaw, timeout=MAX_PLAYBOOK_DURATION, declaration=_PLAYBOOK_DECLARATION
    )


def _describe_playbook(name: str, playbook: Playbook) -> str:
    takes = f" takes {join_names(playbook.inputs)} and" if playbook.inputs else ""
    most = "" if playbook.max_cost_usd is None else f", for at most {format_micros(playbook.max_cost_usd)}"
    return f"{name}{takes} calls {join_names(playbook.tools)}{most}."


RUN_SKILL: Final = "run_skill"
MAX_SKILL_ATTEMPTS: Final = 3
SKILL_TIMEOUT: Final = 10 * MINUTE


class _SkillArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    skill: str
    input: Annotated[str, Meta(max_length=200_000)]


AskForSkill = Callable[[ModelRequest, int], Awaitable[AnsweredRequest | RefusedRequest | FailedRequest]]
"""Makes a request through the guard, with its attempt number."""


def run_skill(
    skills: Mapping[str, Skill], ask: AskForSkill, max_output_tokens: int, timeout: int = SKILL_TIMEOUT
) -> Verb:
    """Makes the verb that applies a skill's instructions with a request of its own."""

    async def act(asked: _SkillArguments, call: str) -> str:
        skill = skills[asked.skill]
        prompt = Prompt(
            system=skill.instructions,
            # A model wrote this, from content that is not trusted.
            messages=(Message("user", (Text(asked.input, "model", trusted=False),)),),
            max_output_tokens=max_output_tokens,
        )
        for attempt in range(MAX_SKILL_ATTEMPTS):
            answer = await ask(ModelRequest(id=f"{call}/skill", prompt=prompt, purpose="skill"), attempt)
            match answer:
                case AnsweredRequest(reply=reply):
                    return reply.text.strip() or "(the skill gave no words)"
                case FailedRequest(may_retry=True) if attempt < MAX_SKILL_ATTEMPTS - 1:
                    continue
                case FailedRequest(error=why) | RefusedRequest(sentence=why):
                    raise Failed("SkillFailed", f"{skill.name}: {why}")
        raise AssertionError("every attempt comes to something")

    def flaw(asked: _SkillArguments) -> str:
        if asked.skill in skills:
            return ""
        return f"There is no skill {shorten(clean(asked.skill))!r}: there is {join_names(skills) or 'none'}."

    about = "Work on some input by the instructions of a skill. " + " ".join(
        f"{skill.name}: {skill.description}" for skill in skills.values()
    )
    return Verb(RUN_SKILL, about.strip(), _SkillArguments, act, flaw, timeout=timeout, declaration=READS_ANYONE)
