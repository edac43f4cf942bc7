"""The pieces that pages are made of. All text goes through here, and none of it is ever taken for HTML.

Foreign text is never a name of a property nor a part of one: NiceGUI runs what stands under names that begin with a
colon, and reads properties out of strings. It is only ever the value of one, or the text of an element.
"""

from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from nicegui import ui
from nicegui.element import Element
from nicegui.elements.mixins.text_element import TextElement

from halter.app.words.sheet import Facts, Listing, Sheet
from halter.server.dashboard.legible import legible

Click = Callable[[], Awaitable[None] | None]
T = TypeVar("T")


def box(tag: str = "div", style: str = "", label: str = "", **marks: str) -> Element:
    """Make an element that holds others. `marks` are attributes, with `_` for `-`."""
    made = ui.element(tag).classes(style)
    named = {"aria-label": label} if label else {}
    for name, value in {**{mark.replace("_", "-"): value for mark, value in marks.items()}, **named}.items():
        made.props[name] = legible(value)
    return made


class Words(TextElement):
    """An element with text in it, which can be changed."""

    def __init__(self, tag: str, text: str) -> None:
        super().__init__(tag=tag, text=legible(text))

    def say(self, text: str) -> None:
        """Change the text, if it is another one."""
        shown = legible(text)
        if self.text != shown:
            self.text = shown


def words(text: str, style: str = "h-text", tag: str = "div") -> Words:
    """Show text."""
    made = Words(tag, text)
    made.classes(style)
    return made


def pre(text: str) -> Words:
    """Show text as it is written, such as arguments."""
    made = words(text, "h-pre", "pre")
    made.props["tabindex"] = "0"
    return made


def part(title: str, *, card: bool = False) -> Element:
    """Begin a part of a page, under its own heading."""
    section = box("section", "h-part", title)
    with section:
        words(title, "", "h2")
        return box("div", "h-card") if card else section


def link(text: str, to: str, style: str = "h-link") -> Words:
    """Lead to another page of the dashboard; `to` is a path that was made here, never a foreign address."""
    made = words(text, style, "a")
    made.props["href"] = to
    return made


def lead(made: Words, text: str, to: str) -> None:
    """Let a link lead elsewhere, if it does not lead there already."""
    made.say(text)
    props: dict[str, Any] = made.props
    if props["href"] != to:
        props["href"] = to
        made.update()


def button(text: str, on_click: Click, kind: str = "plain", label: str = "") -> ui.button:
    """Make a button: `plain`, `yes` or `stop`."""
    made = ui.button(legible(text), on_click=on_click, color=None).props("no-caps unelevated")
    made.classes(f"h-{kind}")
    if label:
        made.props["aria-label"] = legible(label)
    return made


def submit(text: str, kind: str) -> ui.button:
    """Make the button that sends a form, as the Enter key does."""
    made = ui.button(legible(text), color=None).props("no-caps unelevated type=submit")
    return made.classes(f"h-{kind}")


def chip(text: str, mood: str = "dim") -> Words:
    """Show a word that stands out: by its frame and its colour, and always by the word itself."""
    return words(text, f"h-chip h-{mood}", "span")


def meter(label: str, share: float) -> Element:
    """Show how full something is. The figures stand beside it, so that nobody needs the colour."""
    percent = max(0.0, min(100.0, 100 * share))
    made = box("div", "h-meter", label, role="meter", aria_valuemin="0", aria_valuemax="100")
    made.props["aria-valuenow"] = f"{percent:.0f}"
    fill(made, share)
    return made


def fill(made: Element, share: float) -> None:
    """Fill a meter anew."""
    percent = max(0.0, min(100.0, 100 * share))
    made.clear()
    made.classes(remove="h-near h-full", add="h-full" if share >= 1 else "h-near" if share >= NEARLY else "")
    with made:
        ui.element("div").style(f"width: {percent:.1f}%")


NEARLY = 0.8


def facts(rows: Sequence[tuple[str, str]]) -> Element:
    """Show facts below each other; one that is empty is left out."""
    with box("dl", "h-facts") as made:
        for name, value in rows:
            if value:
                words(name, "", "dt")
                words(value, "", "dd")
    return made


def table(title: str, columns: Sequence[str], right: Sequence[str] = ()) -> Element:
    """Begin a table; what is put into it are its rows."""
    with box("div", "h-scroll"), box("table", "h-table", title):
        with box("thead"), box("tr"):
            for name in columns:
                words(name, "h-num" if name in right else "", "th").props["scope"] = "col"
        return box("tbody")


def cell(text: str = "", style: str = "") -> Words:
    """Put a text into a row."""
    return words(text, style, "td")


def listing(one: Listing) -> None:
    """Show a whole table. A column in which nothing stands is left out: people look for what is there."""
    if not one.rows:
        if one.empty:
            words(one.empty, "h-none")
        return
    numbers = one.right.split()
    used = [place for place in range(len(one.columns)) if any(row[place] for row in one.rows)]
    if one.title:
        words(one.title, "h-sub", "h3")
    with table(one.title or "table", [one.columns[place] for place in used], numbers):
        for row in one.rows:
            with box("tr"):
                for place in used:
                    cell(row[place], "h-num" if one.columns[place] in numbers else "")


def sheet(parts: Sheet) -> None:
    """Show facts and tables, as a terminal would."""
    for one in parts:
        match one:
            case Facts():
                facts(one.facts)
            case Listing():
                listing(one)


class Kept(Generic[T]):
    """Things that are shown one after the other, each under its key: what stays is changed in its place.

    So nobody loses what they are typing, or the button that they are about to press, because something else is new.
    """

    def __init__(self, inside: Element, make: Callable[[T], Callable[[T], None]], empty: str = "") -> None:
        """`make` shows a new thing, and returns what shows it as it is later."""
        self._inside = inside
        self._make = make
        self._shown: dict[Hashable, tuple[Element, Callable[[T], None]]] = {}
        self._empty: Element | None = None
        self._nothing = empty

    def show(self, things: Mapping[Any, T]) -> None:
        """Show exactly these, in this order."""
        for key in [key for key in self._shown if key not in things]:
            self._shown.pop(key)[0].delete()
        for place, (key, thing) in enumerate(things.items()):
            self._one(key, thing, place)
        self._say_if_empty()

    def _one(self, key: Hashable, thing: T, place: int) -> None:
        if key in self._shown:
            self._shown[key][1](thing)
            return
        before = len(self._inside.default_slot.children)
        with self._inside:
            update = self._make(thing)
        made = self._inside.default_slot.children[before]
        self._shown[key] = (made, update)
        if place < before:
            made.move(target_index=place)

    def _say_if_empty(self) -> None:
        if self._shown and self._empty is not None:
            self._empty.delete()
            self._empty = None
        elif not self._shown and self._empty is None and self._nothing:
            with self._inside:
                self._empty = words(self._nothing, "h-none")
