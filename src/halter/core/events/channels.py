"""The events of channels: who may answer decisions there, which messages were sent, and which worker reads replies.

Each channel has its own stream. None of these events has a body: the text of a message is in the decision.
"""

from halter.core.vocabulary import Note


class ChannelTaken(Note, frozen=True, kw_only=True):
    """A worker took over reading and writing the channel, until another worker takes it."""

    KIND = "channel_taken"

    channel: str
    worker: str


class PairingOffered(Note, frozen=True, kw_only=True):
    """A pairing code was offered: the first person who sends it before it expires becomes this approver.

    Only the digest of the code is stored. `place` is the chat to which the code is sent, on a channel where people
    cannot write first.
    """

    KIND = "pairing_offered"

    channel: str
    code: str
    name: str
    role: str
    by: str
    expires_at: int
    agents: tuple[str, ...] = ()
    place: str = ""


class ApproverPaired(Note, frozen=True, kw_only=True):
    """An account of a platform was paired with a person. `place` is the chat that receives their decisions."""

    KIND = "approver_paired"

    channel: str
    account: str
    place: str
    name: str
    role: str
    by: str
    agents: tuple[str, ...] = ()


class ApproverRemoved(Note, frozen=True, kw_only=True):
    """A person's accounts on a channel and their unused codes were revoked."""

    KIND = "approver_removed"
    IMMEDIATE = True

    channel: str
    name: str
    by: str
    reason: str = ""


class DecisionShown(Note, frozen=True, kw_only=True):
    """A decision was sent to a chat in a message.

    `digest` is that of the decision, `button` the digest of the token in the message's buttons. Without a `button` the
    decision was too long to show completely, and cannot be approved in the chat.
    """

    KIND = "decision_shown"

    channel: str
    place: str
    message: str
    decision: str
    digest: str
    button: str
    cut: bool = False


class MessageClosed(Note, frozen=True, kw_only=True):
    """The buttons of a message were replaced by the outcome of its decision."""

    KIND = "message_closed"

    channel: str
    place: str
    message: str


class RepliesRead(Note, frozen=True, kw_only=True):
    """Replies were processed up to a mark. A reply that the platform sends again is not processed twice."""

    KIND = "replies_read"

    channel: str
    mark: str
