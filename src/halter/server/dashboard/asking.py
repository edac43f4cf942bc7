"""Dialogs: what is about to be done is said, the words for it are asked for, and a no of the runtime stays in sight."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nicegui import ui

from halter.core.errors import HalterError
from halter.server.dashboard.legible import legible
from halter.server.dashboard.parts import box, button, submit, words
from halter.server.dashboard.room import Room

Given = Mapping[str, str]
"""What a person wrote into the fields."""
Do = Callable[[Given], Awaitable[str]]
"""Does what was asked for, and says what came of it."""


@dataclass(frozen=True, slots=True)
class Field:
    """Something to write into: a line, a text of several lines, or one of some choices."""

    name: str
    label: str
    value: str = ""
    kind: Literal["line", "text", "choice"] = "line"
    choices: tuple[str, ...] = ()


REASON = Field("reason", "Reason")


def ask(room: Room, title: str, says: str, fields: Sequence[Field], yes: str, do: Do, kind: str = "yes") -> None:
    """Open a dialog. It closes when what it is for was done, or when the person leaves it."""
    with room.client.content, ui.dialog() as dialog, box("div"), box("form", "h-dialog", title) as form:
        words(title, "", "h2")
        words(says).style("white-space: pre-wrap")
        inputs = {field.name: _input(field, first=field is fields[0]) for field in fields}
        wrong = words("", "h-bad h-text")
        wrong.props["role"] = "alert"

        async def go() -> None:
            try:
                sentence = await do({name: str(each.value or "") for name, each in inputs.items()})
            except HalterError as error:
                wrong.say(str(error))
                return
            dialog.close()
            room.say(sentence)

        with box("div", "h-end"):
            button("Cancel", dialog.close)
            submit(yes, kind)
    form.on("submit.prevent", go)
    dialog.on("hide", dialog.delete)
    dialog.open()


def _input(field: Field, *, first: bool) -> Any:
    value, label = legible(field.value), legible(field.label)
    match field.kind:
        case "line":
            made: Any = ui.input(label, value=value)
        case "text":
            made = ui.textarea(label, value=value)
        case "choice":
            made = ui.select(list(field.choices), label=label, value=field.value)
    made.props("outlined dense autofocus" if first else "outlined dense")
    return made
