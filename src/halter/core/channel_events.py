"""The events of channels: who may answer decisions from a phone, what they were shown, and which process reads replies.

Each channel has a stream of its own. None of these events has a body: what a message said is in the question.
"""

from typing import ClassVar

from halter.core.vocabulary import Event


class ChannelTaken(Event, frozen=True, kw_only=True):
    """A worker reads and writes the channel from now on, until another takes it."""

    KIND: ClassVar[str] = "channel_taken"

    channel: str
    worker: str


class PairingOffered(Event, frozen=True, kw_only=True):
    """The first person who sends a code before it expires becomes this approver. Only the code's digest is kept.

    `place` is where the code is sent, on a channel where people cannot write first.
    """

    KIND: ClassVar[str] = "pairing_offered"

    channel: str
    code: str
    name: str
    role: str
    by: str
    expires_at: int
    agents: tuple[str, ...] = ()
    place: str = ""


class ApproverPaired(Event, frozen=True, kw_only=True):
    """An account of a platform may answer for a person. `place` is the chat in which they are asked."""

    KIND: ClassVar[str] = "approver_paired"

    channel: str
    account: str
    place: str
    name: str
    role: str
    by: str
    agents: tuple[str, ...] = ()


class ApproverRemoved(Event, frozen=True, kw_only=True):
    """A person's accounts on a channel, and their unused codes, count no longer."""

    KIND: ClassVar[str] = "approver_removed"

    channel: str
    name: str
    by: str
    reason: str = ""


class DecisionShown(Event, frozen=True, kw_only=True):
    """A decision was put to the people of a chat in a message.

    `digest` is the question's, and `button` the digest of what its buttons carry; without one it could not be shown
    whole, and cannot be approved there.
    """

    KIND: ClassVar[str] = "decision_shown"

    channel: str
    place: str
    message: str
    decision: str
    digest: str
    button: str
    cut: bool = False


class MessageClosed(Event, frozen=True, kw_only=True):
    """A message shows the outcome of its decision, and has no buttons any more."""

    KIND: ClassVar[str] = "message_closed"

    channel: str
    place: str
    message: str


class RepliesRead(Event, frozen=True, kw_only=True):
    """What people sent was dealt with up to a mark: it counts once, also where the platform sends it again."""

    KIND: ClassVar[str] = "replies_read"

    channel: str
    mark: str
