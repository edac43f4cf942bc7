"""Playbooks and skills.

A playbook's session runs its steps through the guard, call by call. The journal has its position, so it resumes after a
crash: a step with an outcome is not repeated, and a step without one is recovered first. `make_playbook_verb` makes the
verb with which a model runs a playbook, `make_skill_verb` the one that applies a SKILL.md to an input.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from halter.core.clock import DAY, MINUTE
from halter.core.events import CallSettled
from halter.core.messages import Message, Prompt, Text
from halter.core.money import format_exact_micros
from halter.core.ports import Store, Stored, read_body
from halter.core.provenance import ArgumentUse, Declaration
from halter.core.text import clean, decode_body, join_names, shorten
from halter.core.tools import Failed
from halter.core.vocabulary import State, TerminalReason
from halter.guard.call_answer import Answer
from halter.guard.prepare import Call
from halter.guard.recovery import NOT_DONE_BEFORE_CRASH
from halter.guard.request import AnsweredRequest, FailedRequest, ModelRequest, RefusedRequest
from halter.loop.session_runtime import SessionRuntime
from halter.spec.playbook import MissingReference, Playbook, Results, Step, bind_arguments
from halter.spec.skills import Skill
from halter.tasks.task_tools import READS_ANYONE, Verb


class Task(msgspec.Struct, frozen=True):
    """The task of a playbook's session: the playbook, as of the session's start, and its inputs."""

    playbook: Playbook
    inputs: Mapping[str, Any] = {}


def encode_task(task: Task) -> bytes:
    return msgspec.json.encode(task)


def decode_task(body: bytes) -> Task:
    return msgspec.json.decode(body, type=Task)


class PlaybookOutcome(msgspec.Struct, frozen=True):
    """The result of a playbook. `sentence` describes the failure, if any."""

    state: State
    terminal_reason: TerminalReason
    sentence: str = ""


StepListener = Callable[[Step, Answer], None]
"""Called with each step and its answer."""

PLAYBOOK_COMPLETED: Final = PlaybookOutcome("COMPLETED", "completed")


async def walk_playbook(
    runtime: SessionRuntime, store: Store, task: Task, on_step: StepListener = lambda _, __: None
) -> PlaybookOutcome:
    """Run all steps without an outcome. The first step that is not `ok` ends the playbook."""
    answer_by_call = await _read_outcomes(store, await runtime.resume())
    if task.playbook.max_cost_usd is not None:
        # A playbook has no wrap-up, so it needs no reserve.
        context = msgspec.structs.replace(runtime.context, reserve_usd=0, reserve_tokens=0)
        runtime.context = context.narrow(task.playbook.max_cost_usd, 0)
    results = Results(task.inputs)
    for number, step in enumerate(task.playbook.steps, 1):
        answer = await _step(runtime, step, number, results, answer_by_call)
        if isinstance(answer, PlaybookOutcome):
            return await _end_playbook(runtime, answer)
        on_step(step, answer)
        end = await runtime.find_end(answer)
        if end is not None:
            return await _end_playbook(runtime, PlaybookOutcome(*end, answer.text))
        if answer.outcome != "ok":
            sentence = f"Step {number} ({step.call}, line {step.line}) ended with {answer.outcome}: {answer.text}"
            return await _end_playbook(runtime, PlaybookOutcome("ERROR", "step_failed", sentence))
        results = results.with_step(step.name, answer.text)
    return await _end_playbook(runtime, PLAYBOOK_COMPLETED)


async def _step(
    runtime: SessionRuntime, step: Step, number: int, results: Results, answer_by_call: Mapping[str, Answer]
) -> Answer | PlaybookOutcome:
    """Run a step without an outcome. If a person decided that it did not happen, repeat it as another call."""
    call = f"{runtime.lease.session}.{number}"
    repeat_count = 0
    while call in answer_by_call:
        if answer_by_call[call].text != NOT_DONE_BEFORE_CRASH:
            return answer_by_call[call]
        repeat_count += 1
        call = f"{runtime.lease.session}.{number}.{repeat_count}"
    arguments = bind_arguments(step, results)
    if isinstance(arguments, MissingReference):
        return PlaybookOutcome("ERROR", "step_failed", arguments.sentence)
    return await runtime.call(Call(call, step.call, arguments))


async def _read_outcomes(store: Store, events: Sequence[Stored]) -> Mapping[str, Answer]:
    answer_by_call: dict[str, Answer] = {}
    for stored in events:
        event = stored.event
        if isinstance(event, CallSettled):
            text = event.error or decode_body(await read_body(store, stored))
            answer_by_call[event.call] = Answer(event.call, event.outcome, text, duration_ms=event.duration_ms)
    return answer_by_call


async def _end_playbook(runtime: SessionRuntime, outcome: PlaybookOutcome) -> PlaybookOutcome:
    await runtime.end(outcome.state, outcome.terminal_reason)
    return outcome


RUN_PLAYBOOK: Final = "run_playbook"
MAX_PLAYBOOK_DURATION: Final = 7 * DAY
"""Timeout of the verb, in which a step may wait for a person's answer."""


class _Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    playbook: str
    inputs: Mapping[str, Any] = {}


_PLAYBOOK_DECLARATION: Final = Declaration(
    arguments={"playbook": ArgumentUse("target", "name"), "inputs": ArgumentUse("destination")}
)
"""A person wrote the steps, but the model gives the inputs, which can reach any destination."""

MakeCall = Callable[[Call, int | None], Awaitable[Answer]]
"""Makes a call through the guard with a spending limit, and waits for its answer."""
ReadSpent = Callable[[str], Awaitable[int]]
"""Returns the cost so far of everything inside a call, in any process."""


def make_playbook_verb(playbooks: Mapping[str, Playbook], make_call: MakeCall, read_spent: ReadSpent) -> Verb:
    """Make the verb that runs a playbook. Its steps together cost at most the playbook's cap."""
    playbook_by_call: dict[str, str] = {}

    async def act(request: _Asked, call: str) -> str:
        if any(call.startswith(f"{outer}/") for outer, name in playbook_by_call.items() if name == request.playbook):
            raise Failed("PlaysItself", f"{request.playbook} is already running: a playbook cannot run itself")
        playbook_by_call[call] = request.playbook
        try:
            return await play_step(request, call)
        finally:
            del playbook_by_call[call]

    async def play_step(request: _Asked, call: str) -> str:
        playbook = playbooks[request.playbook]
        results, sentences = Results(request.inputs), list[str]()
        for number, step in enumerate(playbook.steps, 1):
            arguments = bind_arguments(step, results)
            if isinstance(arguments, MissingReference):
                raise Failed("StepFailed", arguments.sentence, "\n".join(sentences))
            cap = playbook.max_cost_usd
            remaining = None if cap is None else cap - await read_spent(call)
            if cap is not None and remaining is not None and remaining <= 0:
                raise Failed(
                    "CostCapReached",
                    f"step {number} was not started: {format_exact_micros(cap)} is spent",
                    "\n".join(sentences),
                )
            answer = await make_call(Call(f"{call}/{number}", step.call, arguments), remaining)
            sentences.append(f"{number}. {step.call}: {answer.outcome}\n{answer.text}")
            if answer.outcome != "ok":
                raise Failed("StepFailed", f"step {number} ({step.call}): {answer.outcome}", "\n".join(sentences))
            results = results.with_step(step.name, answer.text)
        return "\n".join(sentences)

    def flaw(request: _Asked) -> str:
        playbook = playbooks.get(request.playbook)
        if playbook is None:
            name = shorten(clean(request.playbook))
            return f"Unknown playbook {name!r}. Available: {join_names(playbooks) or 'none'}."
        missing = [name for name in playbook.inputs if name not in request.inputs]
        return f"{request.playbook} needs {join_names(missing)} in `inputs`." if missing else ""

    descriptions = " ".join(_describe_playbook(name, each) for name, each in playbooks.items())
    description = f"Run the steps of a playbook. {descriptions}".strip()
    return Verb(
        RUN_PLAYBOOK, description, _Asked, act, flaw, timeout=MAX_PLAYBOOK_DURATION, declaration=_PLAYBOOK_DECLARATION
    )


def _describe_playbook(name: str, playbook: Playbook) -> str:
    inputs_text = f" takes {join_names(playbook.inputs)} and" if playbook.inputs else ""
    cap_text = "" if playbook.max_cost_usd is None else f", for at most {format_exact_micros(playbook.max_cost_usd)}"
    return f"{name}{inputs_text} calls {join_names(playbook.tools)}{cap_text}."


RUN_SKILL: Final = "run_skill"
MAX_SKILL_ATTEMPTS: Final = 3
SKILL_TIMEOUT: Final = 10 * MINUTE


class _SkillArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    skill: str
    input: Annotated[str, Meta(max_length=200_000)]


AskForSkill = Callable[[ModelRequest, int], Awaitable[AnsweredRequest | RefusedRequest | FailedRequest]]
"""Makes a request through the guard, with its attempt number."""


def make_skill_verb(
    skills: Mapping[str, Skill], ask_for_skill: AskForSkill, max_output_tokens: int, timeout: int = SKILL_TIMEOUT
) -> Verb:
    """Make the verb that applies a skill's instructions to an input, with a separate request."""

    async def act(skill_arguments: _SkillArguments, call: str) -> str:
        skill = skills[skill_arguments.skill]
        prompt = Prompt(
            system=skill.instructions,
            # The model wrote the input, perhaps from untrusted content.
            messages=(Message("user", (Text(skill_arguments.input, "model", trusted=False),)),),
            max_output_tokens=max_output_tokens,
        )
        for attempt in range(MAX_SKILL_ATTEMPTS):
            answer = await ask_for_skill(ModelRequest(id=f"{call}/skill", prompt=prompt, purpose="skill"), attempt)
            match answer:
                case AnsweredRequest(reply=reply):
                    return reply.text.strip() or "(the skill returned no text)"
                case FailedRequest(may_retry=True) if attempt < MAX_SKILL_ATTEMPTS - 1:
                    continue
                case FailedRequest(error=reason) | RefusedRequest(sentence=reason):
                    raise Failed("SkillFailed", f"{skill.name}: {reason}")
        raise AssertionError("every attempt has an outcome")

    def flaw(skill_arguments: _SkillArguments) -> str:
        if skill_arguments.skill in skills:
            return ""
        return f"Unknown skill {shorten(clean(skill_arguments.skill))!r}. Available: {join_names(skills) or 'none'}."

    description = "Apply the instructions of a skill to an input. " + " ".join(
        f"{skill.name}: {skill.description}" for skill in skills.values()
    )
    return Verb(RUN_SKILL, description.strip(), _SkillArguments, act, flaw, timeout=timeout, declaration=READS_ANYONE)
