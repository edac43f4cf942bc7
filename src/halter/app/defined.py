"""What defines an agent's sessions, as the store keeps it: its policy, its mind, its pace and its tasks."""

from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import msgspec

from halter.app.agent import Assembled
from halter.config.definition import recorded
from halter.core.clock import HOUR
from halter.core.ids import Digest
from halter.core.ports import Store
from halter.core.spec import Resolved

GOOD_FOR: Final = HOUR
"""How long it is relied upon that the store has it. What no session names is swept away, but not before a day."""


class Defined:
    """Puts an agent's definition away once, not for each of its sessions."""

    def __init__(self) -> None:
        self._kept: tuple[Assembled, Digest, int] | None = None

    async def of(self, agent: Assembled, store: Store, now: int, redact: Callable[[str], str] | None = None) -> Digest:
        """Name the definition; the store has it, without the secrets that somebody wrote into it."""
        if self._kept is not None and self._kept[0] is agent and 0 <= now - self._kept[2] < GOOD_FOR:
            return self._kept[1]
        written = msgspec.json.encode(recorded(agent), order="sorted")
        digest = await store.put(written if redact is None else _without_secrets(written, redact))
        self._kept = (agent, digest, now)
        return digest


async def keep_policy(store: Store, policy: Resolved, redact: Callable[[str], str]) -> Digest:
    """Put away what defines a session that has no mind of its own, without the secrets that somebody wrote into it."""
    return await store.put(_without_secrets(policy.canonical(), redact))


def _without_secrets(written: bytes, redact: Callable[[str], str]) -> bytes:
    return msgspec.json.encode(_masked(msgspec.json.decode(written), redact), order="sorted")


def _masked(value: Any, redact: Callable[[str], str]) -> Any:
    """Take secrets out of every text of a JSON value: instructions, scripts, prompts, settings."""
    match value:
        case str():
            return redact(value)
        case list():
            return [_masked(each, redact) for each in cast("list[Any]", value)]
        case Mapping():
            return {redact(key): _masked(each, redact) for key, each in cast("Mapping[str, Any]", value).items()}
        case _:
            return value
