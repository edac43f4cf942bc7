"""The people who can answer decisions over a channel. A code pairs an account of a platform with a person."""

import base64
import secrets
from collections.abc import Callable, Sequence
from typing import Final, cast

import msgspec

from halter.core.clock import MINUTE
from halter.core.errors import NotDone
from halter.core.events import ApproverRemoved, PairingOffered
from halter.core.ids import PERSON_NAME, can_decide
from halter.operations.actor import ROLES, Actor, Done, Principal, Role, fail_invalid
from halter.state.channel import Approver, ChannelLog, ChannelState, digest_token, hide_topic

CHANNELS: Final = ("telegram", "ntfy", "slack")
CODE_LIFETIME: Final = 10 * MINUTE
_CODE_BYTES: Final = 8
_CODE_PART: Final = 4
_PLACE_BYTES: Final = 20


class PairingCode(msgspec.Struct, frozen=True):
    """A pairing code, shown once. `place` is the topic on which the person is asked, if the channel needs one."""

    channel: str
    code: str
    name: str
    role: str
    expires_at: int
    place: str = ""


class PairedApprover(msgspec.Struct, frozen=True):
    """A person who answers over a channel. Without `agents`, they see every agent."""

    channel: str
    name: str
    role: str
    account: str
    agents: Sequence[str] = ()


def read_who(approver: Approver) -> Principal:
    return Principal(approver.name, cast("Role", approver.role), approver.agents)


async def offer_pairing(
    actor: Actor,
    channel: str,
    name: str,
    role: str,
    agents: Sequence[str] = (),
    randomly: Callable[[int], bytes] = secrets.token_bytes,
) -> PairingCode:
    """Make a pairing code. The first account that sends it within ten minutes is paired with this person."""
    actor.require_person("admin", "pair a person")
    actor.require_all_agents("pair a person")
    if channel not in CHANNELS:
        fail_invalid(f"Unknown channel {channel!r}. Use {', '.join(CHANNELS[:-1])} or {CHANNELS[-1]}.")
    if role not in ROLES:
        fail_invalid(f"Unknown role {role!r}. Use {', '.join(ROLES[:-1])} or {ROLES[-1]}.")
    if not PERSON_NAME.fullmatch(name) or not can_decide(name):
        fail_invalid(f"Invalid name {name!r}: use up to 64 lowercase letters, digits, dots, dashes or underscores.")
    letters = base64.b32encode(randomly(_CODE_BYTES)).decode()
    code = "-".join(letters[start : start + _CODE_PART] for start in range(0, 3 * _CODE_PART, _CODE_PART))
    topic = f"halter-{randomly(_PLACE_BYTES).hex()}" if channel == "ntfy" else ""
    offer = PairingOffered(
        channel=channel,
        code=digest_token(code),
        name=name,
        role=role,
        by=actor.principal.name,
        expires_at=actor.app.clock.now() + CODE_LIFETIME,
        agents=tuple(agents),
        place=topic,
    )
    await ChannelLog(actor.app.store, channel).append(f"pairing/{actor.app.ids.make()}", lambda _: [offer])
    return PairingCode(channel, code, name, role, offer.expires_at, topic)


async def list_approvers(actor: Actor) -> Sequence[PairedApprover]:
    """List the people who can answer over each channel."""
    actor.require_all_agents("list the people who answer decisions")
    return [
        PairedApprover(channel, approver.name, approver.role, hide_topic(channel, approver.account), approver.agents)
        for channel in CHANNELS
        for approver in (await ChannelLog(actor.app.store, channel).refresh()).approvers.values()
    ]


async def remove_approver(actor: Actor, channel: str, name: str, reason: str = "") -> Done:
    """Remove a person from a channel. Their replies and unused codes become invalid."""
    actor.require_person("admin", "remove a person")
    actor.require_all_agents("remove a person")
    event = ApproverRemoved(channel=channel, name=name, by=actor.principal.name, reason=reason)
    log = ChannelLog(actor.app.store, channel)

    def decide(state: ChannelState) -> Sequence[ApproverRemoved]:
        candidates = (*state.approvers.values(), *state.offers.values())
        return [event] if any(each.name == name for each in candidates) else []

    if channel not in CHANNELS or not await log.append(f"removed/{actor.app.ids.make()}", decide):
        raise NotDone(f"There is no person {name} on {channel}. See `halter channels`.", "missing")
    return Done(name, f"Removed {name} from {channel}.")
