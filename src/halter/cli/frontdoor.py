"""What a person says passes the front door first: what needs no model is answered there."""

from collections.abc import Callable
from typing import Any

import msgspec

from halter.cli.answer import answer_json, answer_line, say, warn
from halter.cli.play import stepped
from halter.cli.screen import Screen
from halter.core.ids import SessionId
from halter.core.vocabulary import SessionKind, State
from halter.guard.chokepoint import NeedsPerson


class Done(msgspec.Struct, frozen=True):
    """A message that was answered at the door."""

    route: str
    strategy: str | None
    why: str
    ok: bool
    text: str
    session: str


class Door:
    """The door of one session."""

    def __init__(
        self,
        speaking: Any,
        screen: Screen,
        waits: Callable[[NeedsPerson, State], None],
        began: Callable[[], None] = lambda: None,
        *,
        routes: bool,
    ) -> None:
        self._speaking = speaking
        self._screen = screen
        self._waits = waits
        self._began = began
        self._routes = routes

    async def hear(
        self, session: SessionId, text: str, kind: SessionKind, *, asked: bool, ahead: bool = False
    ) -> Done | None:
        """Answer a message, or pass it on to the session; None if its agent has to answer.

        One that was typed `ahead` agrees to nothing that was shown meanwhile.
        """
        from halter.app.asking import Showing, ToModel, heard, tell

        told = False
        if self._routes:
            showing = Showing(self._screen.beside_words(), self._waits, self._stepped, self._began)
            done = await heard(self._speaking, session, text, kind=kind, answering=asked, showing=showing, ahead=ahead)
            if not isinstance(done, ToModel):
                routed = done.routed
                return Done(routed.route, routed.strategy, routed.why, done.ok, done.answer, done.session)
            told = done.told
        if not told:
            await tell(self._speaking, session, text, kind)
        self._began()
        return None

    def _stepped(self, step: Any, answer: Any) -> None:
        if not self._screen.quiet:
            stepped(step, answer)


def show_done(done: Done, *, as_json: bool, alone: bool = False) -> None:
    """Show what was answered; `alone` where it is all that there is to show."""
    if as_json:
        (answer_json if alone else answer_line)(done)
    elif done.ok:
        say(done.text, at_once=True)
    else:
        warn(done.text)
