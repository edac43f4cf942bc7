"""The processes that work on sessions, as each of them says it of itself."""

import msgspec


class About(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker says of itself with each heartbeat.

    `agents` are the agents that it has, each with the version of its files; `waiting` are those of which another worker
    has a newer one. `problem` is a sentence for people, while there is one.
    """

    kind: str = ""
    host: str = ""
    pid: int = 0
    version: str = ""
    started_at: int = 0
    agents: dict[str, str] = {}
    waiting: tuple[str, ...] = ()
    concurrency: int = 0
    awake: int = 0
    residents: int = 0
    closing: bool = False
    problem: str = ""

    def said(self) -> str:
        """Write it down."""
        return msgspec.json.encode(self).decode()


class WorkerRow(msgspec.Struct, frozen=True):
    """A worker, and until when its leases hold."""

    worker: str
    alive_until: int
    about: str = ""

    def alive(self, now: int) -> bool:
        """Tell whether it works."""
        return self.alive_until >= now

    def told(self) -> About:
        """Read what it says; one that says nothing, or something that cannot be read, has nothing to say."""
        try:
            return msgspec.json.decode(self.about, type=About) if self.about else About()
        except msgspec.DecodeError:
            return About()
