"""The state of a channel: who may answer there, which messages are shown, and which worker serves it.

A change is appended only if the stream has not grown since it was folded, so that any number of processes may write. A
slower process folds the events in between, and decides again.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Final

import msgspec
from msgspec.structs import replace

from halter.core.events import (
    AnyEvent,
    ApproverPaired,
    ApproverRemoved,
    ChannelEvent,
    ChannelTaken,
    DecisionShown,
    MessageClosed,
    PairingOffered,
    RepliesRead,
    Unknown,
)
from halter.core.ids import channel_stream
from halter.core.ports import Draft, Rows, Store, Stored, Write, read_stream
from halter.core.rows import StreamRow

MAX_CLOSED_MESSAGES: Final = 500
"""Maximum number of closed messages that are kept, so that a late answer can be told the outcome."""

TOPIC_PREFIX_LENGTH: Final = 12


class Approver(msgspec.Struct, frozen=True):
    """An account of a platform that answers for a person, and the chat that receives the decisions."""

    account: str
    place: str
    name: str
    role: str
    agents: tuple[str, ...] = ()


class ShownMessage(msgspec.Struct, frozen=True):
    """A decision as shown in a chat."""

    place: str
    message: str
    decision: str
    digest: str
    button: str
    cut: bool = False
    closed: bool = False


class ChannelState(msgspec.Struct, frozen=True):
    """A channel as of `head`: `approvers` by account, `offers` by the code's digest, `messages` by chat and message id.

    `messages` is in order, the oldest message first.
    """

    head: int = 0
    worker: str = ""
    mark: str = ""
    approvers: Mapping[str, Approver] = {}
    offers: Mapping[str, PairingOffered] = {}
    messages: Mapping[tuple[str, str], ShownMessage] = {}

    def find_button(self, button: str) -> ShownMessage | None:
        digest = digest_token(button)
        return next((each for each in self.messages.values() if each.button == digest), None)

    def list_chats(self) -> Mapping[str, Sequence[Approver]]:
        """Group the approvers by chat."""
        approvers_by_chat: dict[str, list[Approver]] = {}
        for approver in self.approvers.values():
            approvers_by_chat.setdefault(approver.place, []).append(approver)
        return approvers_by_chat


def digest_token(token: str) -> str:
    """Return the digest of a code or a button token, which can recognise the token but not reproduce it."""
    return hashlib.sha256(b"halter channel\n" + token.encode("utf-8", "replace")).hexdigest()


def hide_topic(channel: str, chat: str) -> str:
    """Return a chat's name for display. An ntfy topic is cut: anyone who knows it can answer as its person."""
    return f"{chat[:TOPIC_PREFIX_LENGTH]}…" if channel == "ntfy" else chat


def fold_channel(state: ChannelState, stored_event: Stored) -> ChannelState:
    return replace(_fold(state, stored_event.event), head=stored_event.seq)


def _fold(state: ChannelState, event: AnyEvent | Unknown) -> ChannelState:
    match event:
        case ChannelTaken():
            return replace(state, worker=event.worker)
        case PairingOffered():
            return replace(state, offers={**state.offers, event.code: event})
        case ApproverPaired():
            approver = Approver(event.account, event.place, event.name, event.role, event.agents)
            offers = {code: each for code, each in state.offers.items() if each.name != event.name}
            return replace(state, approvers={**state.approvers, event.account: approver}, offers=offers)
        case ApproverRemoved():
            approvers = {key: each for key, each in state.approvers.items() if each.name != event.name}
            offers = {code: each for code, each in state.offers.items() if each.name != event.name}
            return replace(state, approvers=approvers, offers=offers)
        case DecisionShown():
            names = ("place", "message", "decision", "digest", "button", "cut")
            message = ShownMessage(**{name: getattr(event, name) for name in names})
            return replace(state, messages={**_bound(state.messages), (event.place, event.message): message})
        case MessageClosed() if message := state.messages.get((event.place, event.message)):
            return replace(
                state, messages={**state.messages, (event.place, event.message): replace(message, closed=True)}
            )
        case RepliesRead():
            return replace(state, mark=event.mark)
        case _:
            return state


def _bound(messages: Mapping[tuple[str, str], ShownMessage]) -> Mapping[tuple[str, str], ShownMessage]:
    closed_keys = [key for key, each in messages.items() if each.closed]
    dropped_keys = frozenset(closed_keys[: max(0, len(closed_keys) - MAX_CLOSED_MESSAGES)])
    return {key: each for key, each in messages.items() if key not in dropped_keys} if dropped_keys else messages


class ChannelLog:
    """The stream of a channel, and its state up to the last event read."""

    def __init__(self, store: Store, channel: str) -> None:
        self._store = store
        self._stream = channel_stream(channel)
        self.state = ChannelState()

    async def refresh(self) -> ChannelState:
        for stored_event in await read_stream(self._store, self._stream, self.state.head):
            if stored_event.seq > self.state.head:  # Another task may have folded it meanwhile.
                self.state = fold_channel(self.state, stored_event)
        return self.state

    async def append(self, key: str, decide: Callable[[ChannelState], Sequence[ChannelEvent]]) -> bool:
        """Append the events decided on the newest state; return whether there were any."""
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

    def _unless_grown(self, head: int, events: Sequence[ChannelEvent]) -> Callable[[Rows], Sequence[Draft]]:
        def decide(rows: Rows) -> Sequence[Draft]:
            row = rows.get(StreamRow, self._stream)
            return [Draft(event) for event in events] if (row.head if row else 0) == head else []

        return decide
