"""What people do from phones and in pairs is the same in every store: one process serves, one person is first."""

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from halter.core.events import (
    ApproverPaired,
    ApproverRemoved,
    ChannelEvent,
    ChannelTaken,
    DecisionAsked,
    DecisionMade,
    DecisionShown,
    MessageClosed,
    PairingOffered,
)
from halter.core.ids import FLEET
from halter.core.ports import Draft, Query, Write
from halter.core.rows import DecisionRow
from halter.guard.approvals import answer_decision, list_pending_decisions
from halter.journal.store import JournalStore
from halter.state.channel import ChannelLog, ChannelState

CHANNEL = "telegram"


def take_channel(worker: str) -> ChannelTaken:
    return ChannelTaken(channel=CHANNEL, worker=worker)


async def test_of_many_processes_one_takes_a_channel(store: JournalStore) -> None:
    def take(worker: str) -> "asyncio.Future[bool]":
        def decide(state: ChannelState) -> Sequence[ChannelEvent]:
            return [] if state.worker else [take_channel(worker)]

        return asyncio.ensure_future(ChannelLog(store, CHANNEL).append(f"take/{worker}", decide))

    won = await asyncio.gather(*(take(f"w{number}") for number in range(8)))
    assert sum(won) == 1
    state = await ChannelLog(store, CHANNEL).refresh()
    assert (state.worker, state.head) == (f"w{won.index(True)}", 1)


async def test_a_channel_is_folded_from_its_stream_by_any_process(store: JournalStore) -> None:
    offer = PairingOffered(channel=CHANNEL, code="c", name="ada", role="approver", by="root", expires_at=1)
    paired = ApproverPaired(channel=CHANNEL, account="41", place="7", name="ada", role="approver", by="root")
    decision_shown = DecisionShown(channel=CHANNEL, place="7", message="1", decision="d", digest="x", button="b")
    closed = MessageClosed(channel=CHANNEL, place="7", message="1")
    log = ChannelLog(store, CHANNEL)
    for number, event in enumerate((take_channel("w"), offer, paired, decision_shown)):
        assert await log.append(f"k{number}", lambda _, e=event: [e])
    channel_state = await ChannelLog(store, CHANNEL).refresh()
    assert channel_state == log.state
    assert (
        channel_state.offers,
        [*channel_state.list_chats()],
        [each.closed for each in channel_state.messages.values()],
    ) == ({}, ["7"], [False])
    await log.append("closed", lambda _: [closed])
    await log.append("gone", lambda _: [ApproverRemoved(channel=CHANNEL, name="ada", by="root")])
    last = await ChannelLog(store, CHANNEL).refresh()
    assert (last.approvers, [each.closed for each in last.messages.values()]) == ({}, [True])


async def test_of_people_who_agree_at_once_one_is_first_and_one_second(store: JournalStore) -> None:
    asked = DecisionAsked(
        decision="d",
        about="changed_tool",
        subject="s",
        name="n",
        digest="x",
        expires_at=1 << 52,
        agent="desk",
        approvers=2,
    )
    await store.commit(Write(FLEET, "asked", lambda _: [Draft(asked, b"shown")], [(DecisionRow, "d")]))
    (pending_decision,) = await list_pending_decisions(store)
    assert (pending_decision.approvers, pending_decision.first_by) == (2, "")
    call = replace(pending_decision, about="approval")
    names = ("ada", "ada.phone", "bob", "agent:desk", "ada")
    writes = [answer_decision(call, "approve", name, f"{number}/{name}") for number, name in enumerate(names)]
    results = await asyncio.gather(*map(store.commit, writes))
    made = [
        each.event
        for pending_decision in results
        for each in pending_decision.events
        if isinstance(each.event, DecisionMade)
    ]
    assert {each.people for each in made} <= {"ada and bob", "ada.phone and bob", "bob and ada", "bob and ada.phone"}
    assert len(made) == 1
    (row,) = await store.ask(Query("all_decisions", DecisionRow))
    assert row.people == made[0].people
