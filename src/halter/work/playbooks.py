"""Walking a playbook through the guard, call by call, as a task session.

Where it stands is read off the journal, so it goes on after a crash exactly where it was: a step that has its outcome
is not called again, and one that was begun and has none is recovered first.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from halter.brain.session_runtime import SessionRuntime
from halter.core.events import CallSettled
from halter.core.playbook import MissingReference, Playbook, Results, Step, bound
from halter.core.ports import Store, Stored, said
from halter.core.text import from_body
from halter.core.vocabulary import State, TerminalReason
from halter.guard.ask import Call
from halter.guard.chokepoint import Answer
from halter.guard.recovery import NOT_DONE


class Task(msgspec.Struct, frozen=True):
    """What a playbook's session was given: the playbook as it was then, and its inputs."""

    playbook: Playbook
    inputs: Mapping[str, Any] = {}


def written(task: Task) -> bytes:
    """Write a task down as the body of its session's first event."""
    return msgspec.json.encode(task)


def read(body: bytes) -> Task:
    """Read a task again."""
    return msgspec.json.decode(body, type=Task)


class Ended(msgspec.Struct, frozen=True):
    """How a playbook came out; `sentence` says what went wrong, if something did."""

    state: State
    terminal_reason: TerminalReason
    sentence: str = ""


Tell = Callable[[Step, Answer], None]
"""Somebody who wants to see each step as it is done."""

COMPLETED: Final = Ended("COMPLETED", "completed")


async def walk(running: SessionRuntime, store: Store, task: Task, tell: Tell = lambda _, __: None) -> Ended:
    """Take all steps that are left; the first one that does not come out `ok` ends the walk."""
    done = await _outcomes(store, await running.take_up())
    if task.playbook.max_cost_usd is not None:
        # It has no last words, for which something would have to be kept back.
        standing = msgspec.structs.replace(running.standing, kept_usd=0, kept_tokens=0)
        running.standing = standing.within(task.playbook.max_cost_usd, 0)
    results = Results(task.inputs)
    for number, step in enumerate(task.playbook.steps, 1):
        answer = await _step(running, step, number, results, done)
        if isinstance(answer, Ended):
            return await _ended(running, answer)
        tell(step, answer)
        stopped = await running.ended_by(answer)
        if stopped is not None:
            return await _ended(running, Ended(*stopped, answer.text))
        if answer.outcome != "ok":
            where = f"Step {number} ({step.call}, line {step.line}) ended with {answer.outcome}: {answer.text}"
            return await _ended(running, Ended("ERROR", "step_failed", where))
        results = results.with_step(step.name, answer.text)
    return await _ended(running, COMPLETED)


async def _step(
    running: SessionRuntime, step: Step, number: int, results: Results, done: Mapping[str, Answer]
) -> Answer | Ended:
    """Take a step that has no outcome yet. One that a person says was not done is asked for anew, as another call."""
    call = f"{running.lease.session}.{number}"
    again = 0
    while call in done:
        if done[call].text != NOT_DONE:
            return done[call]
        again += 1
        call = f"{running.lease.session}.{number}.{again}"
    arguments = bound(step, results)
    if isinstance(arguments, MissingReference):
        return Ended("ERROR", "step_failed", arguments.sentence)
    return await running.call(Call(call, step.call, arguments))


async def _outcomes(store: Store, events: Sequence[Stored]) -> Mapping[str, Answer]:
    """Read what became of the calls that are settled."""
    found: dict[str, Answer] = {}
    for stored in events:
        event = stored.event
        if isinstance(event, CallSettled):
            text = event.error or from_body(await said(store, stored))
            found[event.call] = Answer(event.call, event.outcome, text, duration_ms=event.duration_ms)
    return found


async def _ended(running: SessionRuntime, ended: Ended) -> Ended:
    await running.end(ended.state, ended.terminal_reason)
    return ended
