"""What may stand in the body of a request, and nothing else: an unknown key is refused, and none says who asks."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from halter.app.desk.steering import LONGEST_WORDS
from halter.core.clock import DAY, SECOND
from halter.server.answers import Name, Words

YEAR = 366 * DAY // SECOND


class Body(BaseModel):
    """A body of which everything is known."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Reason(Body):
    """Why; it stands in the journal."""

    reason: Words = ""


class Always(Body):
    """For which calls a yes is meant from now on, where, and for how many seconds."""

    match: Words = "same"
    scope: Literal["session", "agent", "fleet"] = "session"
    seconds: Annotated[int, Field(ge=1, le=YEAR)] = 7 * DAY // SECOND


class Approval(Reason):
    """A yes: plain, to other arguments, always, or with a higher cap (dollars as in "2.50", or "none").

    A `digest` binds it to the decision as it was shown.
    """

    edit: dict[str, Any] | None = None
    always: Always | None = None
    cap: Annotated[str, StringConstraints(max_length=40)] | None = None
    digest: Name | None = None


class Halt(Reason):
    """What to stop: fleet, agent:NAME, trigger:NAME or session:ID."""

    scope: Name


class Resume(Halt):
    """What may act again, and over how many seconds it comes back."""

    over_seconds: Annotated[int, Field(ge=0, le=DAY // SECOND)] | None = None


class Switch(Reason):
    """Whether an agent runs by itself."""

    on: bool


class Message(Body):
    """Words for a session."""

    text: Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_WORDS)]


class Cap(Reason):
    """A cap in dollars, as in "2.50", or "none"; for one window where a scope has several."""

    direction: Literal["raise", "lower"]
    scope: Name
    cap: Annotated[str, StringConstraints(max_length=40)]
    window: Name = ""


class Retry(Body):
    """Which document is to be tried anew."""

    item: Annotated[Name, StringConstraints(min_length=1)]


class Settle(Reason):
    """What becomes of something that a session left behind."""

    status: Literal["kept", "dismissed"]
