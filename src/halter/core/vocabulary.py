"""The closed vocabularies of events, rows and policies, and the base classes of events and rows."""

from typing import Any, ClassVar, Final, Literal, TypeVar

import msgspec

SessionKind = Literal["chat", "autonomous", "task", "hooked", "proxied", "gated"]
"""The last three are external sessions, whose calls pass the guard through hooks, the proxy or the gateway."""

State = Literal[
    "RUNNING",
    "WAITING_FOR_TOOL",
    "WAITING_FOR_INPUT",
    "WAITING_FOR_APPROVAL",
    "WAITING_FOR_BUDGET",
    "SLEEPING",
    "PAUSED",
    "COMPLETED",
    "CANCELLED",
    "TIMED_OUT",
    "MAX_STEPS",
    "BUDGET_EXCEEDED",
    "HALTED",
    "ERROR",
]
ShownState = Literal[State, "NOT_RUNNING"]
"""The state of a session as people and programs see it: `NOT_RUNNING` if it is to run, and no process will."""
END_STATES: Final[frozenset[State]] = frozenset(
    ("COMPLETED", "CANCELLED", "TIMED_OUT", "MAX_STEPS", "BUDGET_EXCEEDED", "HALTED", "ERROR")
)
Outcome = Literal[
    "ok",
    "error",
    "timeout",
    "cancelled",
    "external_halt",
    "tool_not_granted",
    "invalid_arguments",
    "unknown_tool",
    "disabled",
    "quarantined",
    "rate_limited",
    "approval_denied",
    "approval_expired",
    "cost_cap_reached",
    "unknown",
    "untrusted",
]
REFUSAL_OUTCOMES: Final = frozenset(
    {
        *("external_halt", "tool_not_granted", "invalid_arguments", "unknown_tool", "disabled", "quarantined"),
        *("rate_limited", "approval_denied", "approval_expired", "cost_cap_reached", "untrusted"),
    }
)
"""The outcomes of refused calls; an admitted call may also end with `external_halt`."""
Purpose = Literal["turn", "gate", "signal", "simulation", "judge", "summary", "skill", "sensor"]
Origin = Literal["person", "config", "model", "tool", "sensor", "document", "agent"]
Audit = Literal["", "arguments", "full"]
"""The part of a call that the audit shows: nothing, its arguments, or its arguments and result."""

RiskLevel = Literal["LOW", "MEDIUM", "HIGH", "CRITICAL"]
DecisionKind = Literal[
    "approval", "unknown_call", "cap_raise", "changed_tool", "changed_server", "proposal", "schedule"
]
Verdict = Literal["approve", "deny", "edit"]
SignOnRefusal = Literal["no_role", "no_person", "declined", "invalid_token"]
RuleScope = Literal["session", "agent", "fleet"]
TerminalReason = Literal[
    "completed",
    "cost_cap_reached",
    "overrun",
    "external_halt",
    "cancelled",
    "idle_timeout",
    "timed_out",
    "max_steps",
    "repetition",
    "model_error",
    "step_failed",
    "error",
]

TurnEnd = Literal[
    "ended",
    "asked",
    "yielded",
    "max_steps",
    "timed_out",
    "repetition",
    "model_error",
    "cost_cap_reached",
    "overrun",
    "external_halt",
    "cancelled",
]
"""The reason why a turn ended: the model finished, asked a person or yielded, or something stopped it."""

MessageReason = Literal[
    "max_tokens_recovery",
    "repetition",
    "near_budget",
    "wrap_up",
    "empty_answer",
    "output_expected",
    "cut_call",
    "staged",
]
"""The reason for a message from the runtime to the model, which is not shown to people."""

Guardrail = Literal[
    "max_consecutive_turns",
    "token_budget_per_hour",
    "max_actions_per_minute",
    "idle_timeout",
    "active_hours",
    "idle_halt",
    "model_rate",
]
"""The mechanical limits of an unattended agent; `model_rate` applies to every session."""

ActionLimit = tuple[str, int]
"""The stream of a session, and how many calls that change something it may make in any minute, with those of the agents
that it asks."""

ProviderTrouble = Literal["outage", "needs_person"]
"""The reason why no model answers: a temporary outage, or a key, a model's name or an account to be fixed."""

GateStage = Literal["change", "expression", "model"]
"""The part of a gate that skipped a turn."""

YieldMode = Literal["continue", "sleep", "shutdown"]

WakeCause = Literal["timer", "signal", "message", "decision", "trigger", "child", "webhook"]


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A fact of the journal, with what its kind is, once for all: its name, its version, and what it changes."""

    KIND: ClassVar[str]
    VERSION: ClassVar[int] = 1
    IMMEDIATE: ClassVar[bool] = False
    """True if it is checkpointed with its own commit: an older copy of the store must not undo a person's decision."""


class Note(Event, frozen=True, kw_only=True):
    """An event that changes no row and no session; people see it, and what asks for it reads it."""


class RowEvent(Event, frozen=True, kw_only=True):
    """An event that changes rows, and no session's state."""


class Visit(RowEvent, frozen=True, kw_only=True):
    """A person came to the server, left it, or was turned away. The audit shows it beside the calls, by its `id`."""

    id: str

    @property
    def audited(self) -> "AuditedVisit":
        raise NotImplementedError


class AuditedVisit(msgspec.Struct, frozen=True):
    """A visit in the columns of the audit."""

    tool: str
    outcome: str
    person: str
    role: str = ""


RowKey = tuple["type[Row]", *tuple[Any, ...]]
"""A table and the values of its key, in a flat tuple because it is hashed at every access."""


class Row(msgspec.Struct, frozen=True, gc=False):
    """One row of a table: the fields are the columns, and the first ones are the key.

    It has plain values only, so it cannot be part of a cycle, and the garbage collector skips it.
    """

    TABLE: ClassVar[str]
    KEY: ClassVar[tuple[str, ...]]
    APPEND_ONLY: ClassVar[bool] = False

    def key(self) -> RowKey:
        return (type(self), *(getattr(self, name) for name in self.KEY))


R = TypeVar("R", bound=Row)


def lock_order(key: RowKey) -> tuple[str, tuple[Any, ...]]:
    """Return the sort key of a row key. All writers lock in this order, so there are no deadlocks."""
    return (key[0].TABLE, key[1:])
