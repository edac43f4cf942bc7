"""The events of the fleet: its halts, caps, policy and prices, what people do to its store, and who signs on."""

from halter.core.money import Unit
from halter.core.vocabulary import AuditedVisit, Note, RowEvent, SignOnRefusal, Visit


class AgentSwitched(RowEvent, frozen=True, kw_only=True):
    """A person switched an agent on, to run unattended, or off."""

    KIND = "agent_switched"
    IMMEDIATE = True

    agent: str
    on: bool
    by: str
    reason: str = ""


class HaltRequested(RowEvent, frozen=True, kw_only=True):
    """A person or a limit halted a scope. With `cancels`, a person ended one session."""

    KIND = "halt_requested"
    IMMEDIATE = True

    scope: str
    by: str
    reason: str = ""
    cancels: bool = False


class HaltLifted(RowEvent, frozen=True, kw_only=True):
    """A halt was lifted. The sessions of the scope resume one after the other over `ramp` microseconds."""

    KIND = "halt_lifted"
    IMMEDIATE = True

    scope: str
    by: str
    ramp: int = 0
    reason: str = ""


class CapChanged(RowEvent, frozen=True, kw_only=True):
    """A person set the cap of a scope, for one window or for the scope's whole life."""

    KIND = "cap_changed"
    IMMEDIATE = True

    scope: str
    window: str
    unit: Unit
    cap: int | None
    by: str
    overrun: int = 0
    reason: str = ""


class FleetPolicyAdopted(RowEvent, frozen=True, kw_only=True):
    """A person applied a fleet file as the policy of the store. It binds every process on the store at least.

    `policy` is the contents of the file, as JSON. `digest` names it, and `replaces` names the previous policy, if any.
    `loosens` lists the keys in which it allows more than the previous one. `day_cap` and `month_cap` are the fleet's
    caps in micro-dollars, defaults included; every hold is checked against the current ones.
    """

    KIND = "fleet_policy_adopted"
    IMMEDIATE = True

    policy: str
    digest: str
    by: str
    day_cap: int | None = None
    month_cap: int | None = None
    replaces: str = ""
    loosens: tuple[str, ...] = ()
    reason: str = ""


class PricesChanged(RowEvent, frozen=True, kw_only=True):
    """A fetched price table was kept, or a person let it count as it is.

    `digest` names the file, and `prices` the blob of all that processes use from now on. New models and higher prices
    count at once; with `accepted`, lower prices and free models do too. The first models of each kind are named, and
    all are counted.
    """

    KIND = "prices_changed"
    IMMEDIATE = True

    digest: str
    prices: str
    by: str
    source: str = ""
    accepted: bool = False
    added: tuple[str, ...] = ()
    added_count: int = 0
    raised: tuple[str, ...] = ()
    raised_count: int = 0
    waiting: tuple[str, ...] = ()
    waiting_count: int = 0
    reason: str = ""


class BodiesErased(RowEvent, frozen=True, kw_only=True):
    """The bodies of a stream were erased up to a sequence number. Its facts and its hash chain remain."""

    KIND = "bodies_erased"

    stream: str
    through: int
    by: str
    reason: str = ""


class StoreAccepted(Note, frozen=True, kw_only=True):
    """A person accepted a store that lacks events of its checkpoints: `events` of them, up to `known_at`.

    `lacks` describes what is missing.
    """

    KIND = "store_accepted"
    IMMEDIATE = True

    by: str
    lacks: str
    events: int = 0
    known_at: int = 0
    reason: str = ""


class PersonSignedOn(Visit, frozen=True, kw_only=True):
    """A person signed on `via` a provider, a proxy or a token. `account` is their name at the first two."""

    KIND = "person_signed_on"

    name: str
    role: str
    via: str
    account: str = ""
    agents: tuple[str, ...] = ()

    @property
    def audited(self) -> AuditedVisit:
        return AuditedVisit(f"sign_on {self.via}", "ok", self.name, self.role)


class SignOnRefused(Visit, frozen=True, kw_only=True):
    """A sign-on through a provider or a proxy was refused."""

    KIND = "sign_on_refused"

    via: str
    why: SignOnRefusal
    account: str = ""

    @property
    def audited(self) -> AuditedVisit:
        return AuditedVisit(f"sign_on {self.via}", self.why, self.account)


class PersonSignedOff(Visit, frozen=True, kw_only=True):
    """A person logged out of the server, or logged in again in the same browser."""

    KIND = "person_signed_off"

    name: str

    @property
    def audited(self) -> AuditedVisit:
        return AuditedVisit("sign_off", "ok", self.name)
