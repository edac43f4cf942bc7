"""What a person can say through the API. Who says it, and what they may, comes with their token and nowhere else."""

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
from fastapi import Body

from halter.app.desk import decisions, left, money, rules, steering, triggers, waiting
from halter.app.desk.decisions import Answer, Said
from halter.core.clock import SECOND
from halter.core.errors import NotDone
from halter.server import bodies
from halter.server.answers import Name
from halter.server.bodies import Approval, Cap, Halt, Message, Reason, Resume, Retry, Settle, Switch
from halter.server.reading import AtDesk

Why = Annotated[Reason | None, Body()]


class Done(msgspec.Struct, frozen=True):
    """What was done, in a sentence."""

    subject: str
    sentence: str


async def approve(desk: AtDesk, decision: Name, body: Annotated[Approval | None, Body()] = None) -> Said:
    """Say yes to a decision: as it is, to other arguments, always, or with a higher cap."""
    said = body or Approval()
    desk.demand("approver", "approve anything")
    open_now = {one.decision: one.digest for one in await waiting.waiting(desk)}
    demand_whole(decision, open_now, "There is no open decision")
    if said.digest is not None and said.digest != open_now[decision]:
        raise NotDone(f"{decision} is not what you were shown: look at it again.", "refused")
    return await decisions.approve(desk, decision, _answer(said))


def _answer(said: Approval) -> Answer:
    always = said.always or bodies.Always()
    return Answer(
        edit=None if said.edit is None else decisions.arguments(_json(said.edit), ""),
        always=said.always is not None,
        match=always.match,
        scope=always.scope,
        lasts=always.seconds * SECOND,
        cap=None if said.cap is None else (money.amount_of(said.cap),),
        reason=said.reason,
    )


def _json(value: dict[str, Any]) -> bytes:
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise NotDone(f"The arguments cannot be written as JSON: {error}.", "wrong") from None


async def deny(desk: AtDesk, decision: Name, body: Why = None) -> Said:
    """Say no to a decision."""
    desk.demand("approver", "deny anything")
    demand_whole(decision, (one.decision for one in await waiting.waiting(desk)), "There is no open decision")
    return await decisions.deny(desk, decision, _reason(body))


def demand_whole(name: str, known: Iterable[str], none: str) -> None:
    """Refuse the mere beginning of a name: a person may mean the one that begins so, a program must say it."""
    if name not in known:
        raise NotDone(f"{none} {name!r}.", "missing")


def _reason(body: Reason | None) -> str:
    return "" if body is None else body.reason


async def halt(desk: AtDesk, body: Halt) -> Done:
    """Stop everything in a scope, from this moment."""
    ran = await steering.halt(desk, body.scope, body.reason)
    return Done(body.scope, f"{body.scope} is halted{'' if ran else ', though nothing ever ran there'}.")


async def resume(desk: AtDesk, body: Resume) -> Done:
    """Let a halted scope act again."""
    over = None if body.over_seconds is None else body.over_seconds * SECOND
    ramp = await steering.resume(desk, body.scope, over, body.reason)
    return Done(body.scope, f"{body.scope} acts again, over {ramp // SECOND} s.")


async def cancel(desk: AtDesk, session: Name, body: Why = None) -> steering.Cancelled:
    """End a session for good."""
    return await steering.cancel(desk, session, _reason(body))


async def tell(desk: AtDesk, session: Name, body: Message) -> Done:
    """Say something to a session: it wakes, and sees it in its next turn."""
    await steering.tell(desk, session, body.text)
    return Done(session, f"{session} was told.")


async def switch(desk: AtDesk, agent: Name, body: Switch) -> Done:
    """Let an agent run by itself, or stop it."""
    desk.demand("operator", f"switch an agent {'on' if body.on else 'off'}")
    demand_whole(agent, await steering.known_agents(desk), "There is no agent")
    stopped: Sequence[str] = await steering.switch(desk, agent, on=body.on, reason=body.reason)
    ended = f"; stopped: {', '.join(stopped)}" if stopped else ""
    return Done(agent, f"{agent} is {'on' if body.on else 'off'}{ended}.")


async def change_cap(desk: AtDesk, body: Cap) -> Done:
    """Raise or lower a cap."""
    desk.demand("operator", "change a cap")
    await money.change_cap(desk, body.direction, body.scope, money.amount_of(body.cap), body.window, body.reason)
    return Done(body.scope, f"The cap of {body.scope} is {body.cap} now.")


async def retry(desk: AtDesk, agent: Name, name: Name, body: Retry) -> Done:
    """Let a document be tried anew that was left to people."""
    item = await triggers.retry(desk, f"{agent}/{name}", body.item)
    return Done(f"{agent}/{name}", f"{item} is tried anew.")


async def end_trigger(desk: AtDesk, agent: Name, name: Name, body: Why = None) -> Done:
    """Let a trigger start nothing any more."""
    await triggers.end(desk, f"{agent}/{name}", _reason(body))
    return Done(f"{agent}/{name}", f"{agent}/{name} starts nothing any more.")


async def settle_finding(desk: AtDesk, finding: Name, body: Settle) -> Done:
    """Keep or dismiss what a session found."""
    return await _settle(desk, finding, body, "findings")


async def settle_proposal(desk: AtDesk, proposal: Name, body: Settle) -> Done:
    """Keep or dismiss what a session proposes."""
    return await _settle(desk, proposal, body, "proposals")


async def _settle(desk: AtDesk, wanted: str, body: Settle, among: left.Among) -> Done:
    desk.demand("approver", "decide what is kept")
    found = await (left.findings(desk) if among == "findings" else left.proposals(desk))
    demand_whole(wanted, (each.id for each in found), "There is nothing called")
    await left.settle(desk, wanted, body.status, among, body.reason)
    return Done(wanted, f"{wanted} is {body.status}.")


async def end_rule(desk: AtDesk, rule: Name, body: Why = None) -> Done:
    """Take an "always" back."""
    desk.demand("operator", "end a rule")
    demand_whole(rule, (row.rule for row in await rules.rules(desk)), "There is no rule")
    row = await rules.end(desk, rule, _reason(body))
    return Done(row.rule, f"The rule is over: {row.tool} is asked about again.")
