"""Who may answer decisions over a channel: codes pair an account of a platform with a person."""

import base64
import secrets
from collections.abc import Callable, Sequence
from typing import Final, cast

import msgspec

from halter.core.clock import MINUTE
from halter.core.errors import NotDone
from halter.core.events import ApproverRemoved, PairingOffered
from halter.core.ids import PERSON_NAME, may_decide
from halter.operations.desk import ROLES, Actor, Done, Principal, Role, fail_invalid
from halter.state.channel import Approver, ChannelLog, ChannelState, digest_token, hide_topic

CHANNELS: Final = ("telegram", "ntfy", "slack")
CODE_LIFETIME: Final = 10 * MINUTE
_CODE_BYTES: Final = 8
_CODE_PART: Final = 4
_PLACE_BYTES: Final = 20


class PairingCode(msgspec.Struct, frozen=True):
    """A code that is shown once. `place` is the topic where the person is asked, if the channel needs one."""

    channel: str
    code: str
    name: str
    role: str
    expires_at: int
    place: str = ""


class PairedApprover(msgspec.Struct, frozen=True):
    """A person who answers over a channel; without agents they see all of them."""

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
    """Make a code; the first account that sends it within ten minutes answers for this person from then on."""
    actor.demand("admin", "pair anybody")
    actor.require_all_agents("pair anybody")
    if channel not in CHANNELS:
        fail_invalid(f"{channel!r} is no channel: write {', '.join(CHANNELS[:-1])} or {CHANNELS[-1]}.")
    if role not in ROLES:
        fail_invalid(f"{role!r} is no role: write {', '.join(ROLES[:-1])} or {ROLES[-1]}.")
    if not PERSON_NAME.fullmatch(name) or not may_decide(name):
        fail_invalid(
            f"{name!r} cannot be a name: write small letters, digits, dots, dashes or underscores, up to 64 of them."
        )
    letters = base64.b32encode(randomly(_CODE_BYTES)).decode()
    code = "-".join(letters[start : start + _CODE_PART] for start in range(0, 3 * _CODE_PART, _CODE_PART))
    place = f"halter-{randomly(_PLACE_BYTES).hex()}" if channel == "ntfy" else ""
    offer = PairingOffered(
        channel=channel,
        code=digest_token(code),
        name=name,
        role=role,
        by=actor.principal.name,
        expires_at=actor.app.clock.now() + CODE_LIFETIME,
        agents=tuple(agents),
        place=place,
    )
    await ChannelLog(actor.app.store, channel).append(f"pairing/{actor.app.ids.make()}", lambda _: [offer])
    return PairingCode(channel, code, name, role, offer.expires_at, place)


async def list_approvers(actor: Actor) -> Sequence[PairedApprover]:
    """List who may answer over which channel."""
    actor.require_all_agents("see who answers decisions")
    return [
        PairedApprover(channel, each.name, each.role, hide_topic(channel, each.account), each.agents)
        for channel in CHANNELS
        for each in (await ChannelLog(actor.app.store, channel).refresh()).approvers.values()
    ]


async def remove_approver(actor: Actor, channel: str, name: str, reason: str = "") -> Done:
    """Remove a person from a channel: their replies count no longer, and their unused codes neither."""
    actor.demand("admin", "remove anybody")
    actor.require_all_agents("remove anybody")
    removed = ApproverRemoved(channel=channel, name=name, by=actor.principal.name, reason=reason)
    log = ChannelLog(actor.app.store, channel)

    def decide(state: ChannelState) -> Sequence[ApproverRemoved]:
        known = (*state.approvers.values(), *state.offers.values())
        return [removed] if any(each.name == name for each in known) else []

    if channel not in CHANNELS or not await log.append(f"removed/{actor.app.ids.make()}", decide):
        raise NotDone(f"No one called {name} answers over {channel}: look at `halter channels`.", "missing")
    return Done(name, f"{name} answers over {channel} no longer.")
