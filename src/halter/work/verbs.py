"""Tools that every agent may have without anybody writing them: to ask a person, to read on, to answer, to yield.

They only look or record, so they are free, and safe to repeat.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final, TypeVar

import msgspec

from halter.brain.transcript import SHOWN
from halter.brain.turn import ASK_USER, YIELD, seconds
from halter.core.events import CallSettled
from halter.core.ids import session_stream
from halter.core.ports import Store, said
from halter.core.text import clean, from_body, listed
from halter.core.tools import TIMEOUT, Failed, Happened, Invalid, Level, Locked, Output, Permit, ToolSpec, Valid, sealed
from halter.core.vocabulary import SessionKind, YieldMode

READ_OUTPUT: Final = "read_output"
PAGE: Final = 1000

T = TypeVar("T", bound=msgspec.Struct)


class Verb:
    """A tool whose arguments are a struct. It fulfils the port `Tool`.

    What it does is told which call it is. It gives text, or also what is to be written down with it.
    """

    def __init__(
        self,
        name: str,
        description: str,
        takes: type[T],
        act: Callable[[T, str], Awaitable[str | Output]],
        flaw: Callable[[T], str] = lambda _: "",
        *,
        level: Level = "SAFE",
        timeout: int = TIMEOUT,
    ) -> None:
        self._takes: type[Any] = takes
        self._act: Locked[Callable[[Any, str], Awaitable[str | Output]]] = Locked(act)
        self._flaw: Callable[[Any], str] = flaw
        self._spec = sealed(
            ToolSpec(
                name=name,
                description=description,
                schema=_schema(takes),
                level=level,
                effect="read",
                idempotent=True,
                timeout=timeout,
            )
        )

    @property
    def spec(self) -> ToolSpec:
        """What is known of it."""
        return self._spec

    def validate(self, arguments: bytes) -> Valid | Invalid:
        """Check arguments as a model wrote them."""
        try:
            read = msgspec.json.decode(arguments or b"{}", type=self._takes)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            return Invalid(f"The arguments of {self._spec.name} do not fit: {clean(str(error))}.")
        flaw = self._flaw(read)
        if flaw:
            return Invalid(flaw)
        values: Mapping[str, Any] = msgspec.structs.asdict(read)
        return Valid(values, msgspec.json.encode(read, order="sorted"))

    async def run(self, arguments: Valid, permit: Permit) -> Output:
        """Do it."""
        act = self._act.open(permit)
        made = await act(self._takes(**arguments.values), permit.id)
        return Output(made) if isinstance(made, str) else made

    async def check(self, arguments: Valid, permit: Permit) -> Happened:
        """Nothing outside is changed, so nobody has to know."""
        return "unknown"


@cache
def _schema(takes: type[msgspec.Struct]) -> bytes:
    """Write down what a struct looks like: once, since every session makes its verbs anew."""
    (described,), components = msgspec.json.schema_components([takes], ref_template="{name}")
    return msgspec.json.encode(components[described["$ref"]])


class _Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    question: str


def ask_user() -> Verb:
    """Make the tool by which a model asks the person that it works for; its turn ends with it."""

    async def act(_: _Question, __: str) -> str:
        return "The question was put to the person. Their answer comes as their next message."

    about = (
        "Ask the person you work for a question that only they can answer. Your turn ends, and their answer follows."
    )
    return Verb(ASK_USER, about, _Question, act)


class _Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    call: str
    offset: int = 0


def read_output(output: Callable[[str], Awaitable[str | None]]) -> Verb:
    """Make the tool by which a model reads on in a result that was too long to be shown at once."""

    async def act(place: _Place, _: str) -> str:
        text = await output(place.call)
        if text is None:
            raise Failed("NoSuchCall", f"there is no result of a call {place.call!r} in this session")
        offset = max(0, place.offset)
        shown = text[offset : offset + SHOWN - 200]
        left = max(0, len(text) - offset - len(shown))
        return f"{shown}\n[{left} characters follow, from offset={offset + len(shown)} on.]" if left else shown

    about = "Read on in a result that was shown only in part, from an offset in characters."
    return Verb(READ_OUTPUT, about, _Place, act)


async def output_of(store: Store, session: str, call: str) -> str | None:
    """Find what a call gave, by the name that its model knows it by."""
    stream, wanted, after = session_stream(session), f"{session}.{call}", 0
    while page := await store.read(stream, after, PAGE):
        for stored in page:
            if isinstance(stored.event, CallSettled) and stored.event.call == wanted:
                return from_body(await said(store, stored))
        after = page[-1].seq
    return None


class _Yield(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mode: YieldMode = "continue"
    sleep: float | str = 0
    wake_early_if: tuple[str, ...] = ()
    reason: str = ""

    def __post_init__(self) -> None:
        if seconds(self.sleep) is None:
            raise ValueError("`sleep` is a number of seconds from 0 up, or a duration as in 15m")


def yields(names: Sequence[str] | None = None) -> Verb:
    """Make the tool by which an autonomous agent says how it goes on after its turn.

    It may wait for those names; without them, for whatever it says.
    """

    async def act(_: _Yield, __: str) -> str:
        return "Your turn ends here."

    def flaw(asked: _Yield) -> str:
        unknown = [] if names is None else [name for name in asked.wake_early_if if name not in names]
        if not unknown:
            return ""
        wrong = listed(map(clean, unknown))
        return f"Nothing called {wrong} can wake you: `wake_early_if` may name {listed(names or ())}."

    about = (
        "End your turn, and say how to go on: `continue` at once, `sleep` for so many seconds, or `shutdown`. "
        "`wake_early_if` names what wakes you before."
    )
    return Verb(YIELD, about, _Yield, act, flaw)


def verbs(store: Store, session: str, kind: SessionKind, wake_names: Sequence[str] | None = None) -> Sequence[Verb]:
    """Make the verbs of one session; one that runs by itself may wait for those names."""
    common = (ask_user(), read_output(partial(output_of, store, session)))
    return (*common, yields(wake_names)) if kind == "autonomous" else common


async def _nothing(_: str) -> str | None:
    return None


def verb_specs() -> tuple[ToolSpec, ...]:
    """List what an agent's file may name beside the agent's own tools."""
    return tuple(verb.spec for verb in (ask_user(), read_output(_nothing), yields()))
