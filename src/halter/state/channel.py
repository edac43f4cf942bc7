"""What the events of a channel fold into: who may answer there, what is shown, and who serves it.

A change is appended only if the stream still stands where it was folded, so that any number of processes may write:
the one that was slower folds what came between, and decides anew.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Final

import msgspec
from msgspec.structs import replace

from halter.core import events as ev
from halter.core.ids import channel_stream
from halter.core.ports import Draft, Rows, Store, Stored, Write, read_stream
from halter.core.rows import StreamRow

MAX_REMEMBERED: Final = 500
"""So many closed messages are remembered, so that a late press is answered with what became of it."""

SHOWN_OF_TOPIC: Final = 12


class Approver(msgspec.Struct, frozen=True):
    """An account of a platform that answers for a person, and the chat in which they are asked."""

    account: str
    place: str
    name: str
    role: str
    agents: tuple[str, ...] = ()


class ShownMessage(msgspec.Struct, frozen=True):
    """A decision as it was shown in a chat."""

    place: str
    message: str
    decision: str
    digest: str
    button: str
    cut: bool = False
    closed: bool = False


class ChannelState(msgspec.Struct, frozen=True):
    """A channel as of `head`. `offers` are codes by digest, `shown` messages by chat and id, the oldest first."""

    head: int = 0
    worker: str = ""
    mark: str = ""
    approvers: Mapping[str, Approver] = {}
    offers: Mapping[str, ev.PairingOffered] = {}
    shown: Mapping[tuple[str, str], ShownMessage] = {}

    def find_button(self, button: str) -> ShownMessage | None:
        digest = digest_token(button)
        return next((each for each in self.shown.values() if each.button == digest), None)

    def list_chats(self) -> Mapping[str, Sequence[Approver]]:
        """The chats in which people are asked, with who answers there."""
        found: dict[str, list[Approver]] = {}
        for each in self.approvers.values():
            found.setdefault(each.place, []).append(each)
        return found


def digest_token(token: str) -> str:
    """What is kept of a code or a button: enough to know it again, and nothing to make one of."""
    return hashlib.sha256(b"halter channel\n" + token.encode("utf-8", "replace")).hexdigest()


def hide_topic(channel: str, place: str) -> str:
    """A place as it may be shown: on ntfy, who knows all of it answers as its person."""
    return f"{place[:SHOWN_OF_TOPIC]}…" if channel == "ntfy" else place


def fold_channel(state: ChannelState, stored: Stored) -> ChannelState:
    return replace(_fold(state, stored.event), head=stored.seq)


def _fold(state: ChannelState, event: ev.AnyEvent | ev.Unknown) -> ChannelState:
    match event:
        case ev.ChannelTaken():
            return replace(state, worker=event.worker)
        case ev.PairingOffered():
            return replace(state, offers={**state.offers, event.code: event})
        case ev.ApproverPaired():
            made = Approver(event.account, event.place, event.name, event.role, event.agents)
            offers = {code: each for code, each in state.offers.items() if each.name != event.name}
            return replace(state, approvers={**state.approvers, event.account: made}, offers=offers)
        case ev.ApproverRemoved():
            left = {key: each for key, each in state.approvers.items() if each.name != event.name}
            offers = {code: each for code, each in state.offers.items() if each.name != event.name}
            return replace(state, approvers=left, offers=offers)
        case ev.DecisionShown():
            names = ("place", "message", "decision", "digest", "button", "cut")
            made = ShownMessage(**{name: getattr(event, name) for name in names})
            return replace(state, shown={**_bound(state.shown), (event.place, event.message): made})
        case ev.MessageClosed() if found := state.shown.get((event.place, event.message)):
            return replace(state, shown={**state.shown, (event.place, event.message): replace(found, closed=True)})
        case ev.RepliesRead():
            return replace(state, mark=event.mark)
        case _:
            return state


def _bound(shown: Mapping[tuple[str, str], ShownMessage]) -> Mapping[tuple[str, str], ShownMessage]:
    closed = [key for key, each in shown.items() if each.closed]
    gone = frozenset(closed[: max(0, len(closed) - MAX_REMEMBERED)])
    return {key: each for key, each in shown.items() if key not in gone} if gone else shown


class ChannelLog:
    """The stream of a channel, folded as far as it was read."""

    def __init__(self, store: Store, channel: str) -> None:
        self._store = store
        self._stream = channel_stream(channel)
        self.state = ChannelState()

    async def refresh(self) -> ChannelState:
        for stored in await read_stream(self._store, self._stream, self.state.head):
            if stored.seq > self.state.head:  # Another task may have read it meanwhile.
                self.state = fold_channel(self.state, stored)
        return self.state

    async def append(self, key: str, decide: Callable[[ChannelState], Sequence[ev.ChannelEvent]]) -> bool:
        """Append what is decided about the newest state; returns whether anything was."""
        for attempt in count():
            state = await self.refresh()
            events = decide(state)
            if not events:
                return False
            write = Write(self._stream, f"{key}/{attempt}", self._unless_grown(state.head, events))
            if (await self._store.commit(write)).events:
                await self.refresh()
                return True
        raise AssertionError  # `count` does not end.

    def _unless_grown(self, head: int, events: Sequence[ev.ChannelEvent]) -> Callable[[Rows], Sequence[Draft]]:
        def decide(rows: Rows) -> Sequence[Draft]:
            row = rows.get(StreamRow, self._stream)
            return [Draft(event) for event in events] if (row.head if row else 0) == head else []

        return decide
