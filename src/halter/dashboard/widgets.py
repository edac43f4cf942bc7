"""The elements of pages and charts. All text goes through here, and none of it is ever HTML.

Untrusted text is never a property name or part of one: NiceGUI evaluates properties whose names begin with a colon, and
parses properties from strings. It is only a property value or the text of an element. Text in a chart is drawn, and
tooltips are rich text. Charts are pure functions of rows; colours are names of the page's theme.
"""

import json
import re
from collections.abc import Awaitable, Callable, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import msgspec
from nicegui import ui
from nicegui.element import Element
from nicegui.elements.mixins.text_element import TextElement

from halter.dashboard.icons import make_data_url
from halter.dashboard.labels import Label, shorten_id
from halter.present.sheet import Facts, Listing, Sheet

_STEERING: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
"""Invisible characters, and those that change the direction of text: they could mislead a person who decides."""

_HALF: Final = re.compile("[\ud800-\udfff]")

MAX_SHOWN_LENGTH: Final = 20_000
"""Maximum number of characters shown of one text, so that the browser stays fast."""


def make_legible(text: str, limit: int = MAX_SHOWN_LENGTH) -> str:
    """Make text safe to show: invisible characters become visible, and long text is cut."""
    cut = text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit:,} characters more)"
    return _STEERING.sub(_name_character, _HALF.sub("\ufffd", cut))


def make_single_line(text: str, limit: int = 200) -> str:
    """Make text fit for a single line, such as a name in a chart."""
    return make_legible(" ".join(text.split()), limit)


def make_file_name(text: str) -> str:
    """Make a file name for a download: letters, digits, dots, underscores and dashes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:80] or "halter"


def _name_character(match: re.Match[str]) -> str:
    return f"⟨U+{ord(match[0]):04X}⟩"


Click = Callable[[], Awaitable[None] | None]
T = TypeVar("T")


def add_box(tag: str = "div", style: str = "", label: str = "", **marks: str) -> Element:
    """Add a container. `marks` are attributes, with `_` for `-`."""
    element = ui.element(tag).classes(style)
    aria_label = {"aria-label": label} if label else {}
    for name, value in {**{mark.replace("_", "-"): value for mark, value in marks.items()}, **aria_label}.items():
        element.props[name] = make_legible(value)
    _label_cell(element)
    return element


class TextLabel(TextElement):
    def __init__(self, tag: str, text: str) -> None:
        super().__init__(tag=tag, text=make_legible(text))

    def show_text(self, text: str) -> None:
        """Change the text, if it differs."""
        legible = make_legible(text)
        if self.text != legible:
            self.text = legible


def add_text(text: str, style: str = "h-text", tag: str = "div") -> TextLabel:
    element = TextLabel(tag, text)
    element.classes(style)
    _label_cell(element)
    return element


def add_icon(name: str, mood: str = "") -> Element:
    """Add an icon; the text next to it carries the meaning."""
    element = ui.element("span").classes(f"i i-{name} {f'h-{mood}' if mood else ''}")
    element.props["aria-hidden"] = "true"
    return element


def add_badge(label: Label) -> None:
    """Add an icon on a background in the colour of its mood."""
    with add_box("span", f"h-badge h-{label.mood}", aria_hidden="true"):
        add_icon(label.icon or "bell")


def add_preformatted(text: str) -> TextLabel:
    element = add_text(text, "h-pre", "pre")
    element.props["tabindex"] = "0"
    return element


def add_section(title: str, *, card: bool = False, heading: bool = True) -> Element:
    """Start a section, with a heading unless the page's own heading says the same."""
    section = add_box("section", "h-part", title)
    with section:
        if heading:
            add_text(title, "", "h2")
        return add_box("div", "h-card") if card else section


def add_link(text: str, to: str, style: str = "h-link") -> TextLabel:
    """Add a link to another page of the dashboard; `to` is a path made here, never an untrusted address."""
    element = add_text(text, style, "a")
    element.props["href"] = to
    return element


def set_link(element: TextLabel, text: str, to: str) -> None:
    """Change a link, if it differs."""
    element.show_text(text)
    props: dict[str, Any] = element.props
    if props["href"] != to:
        props["href"] = to
        element.update()


def add_button(text: str, on_click: Click, kind: str = "plain", label: str = "", icon: str = "") -> ui.button:
    """Add a button: `plain`, `bare`, `go`, `yes` or `stop`."""
    element = ui.button(make_legible(text), on_click=on_click, color=None).props("no-caps unelevated")
    element.classes(f"h-{kind}")
    if icon:
        with element:
            add_icon(icon)
    if label:
        element.props["aria-label"] = make_legible(label)
    return element


def add_submit(text: str, kind: str) -> ui.button:
    """Add the button that submits a form, like the Enter key."""
    element = ui.button(make_legible(text), color=None).props("no-caps unelevated type=submit")
    return element.classes(f"h-{kind}")


def add_chip(text: str, mood: str = "dim") -> TextLabel:
    """Add a short label with a coloured background."""
    return add_text(text, f"h-chip h-{mood}", "span")


MOODS: Final = ("bad", "look", "good", "calm", "dim")


def set_chip(element: TextLabel, label: Label) -> None:
    """Change a chip, if it differs."""
    if element.text != label.text:
        element.show_text(label.text)
        element.classes(remove=" ".join(f"h-{mood}" for mood in MOODS), add=f"h-{label.mood}")


COPY_HANDLER: Final = """(event) => {
  const button = event.currentTarget, text = button.dataset.copy;
  const done = () => { button.classList.add("h-copied"); setTimeout(() => button.classList.remove("h-copied"), 1200); };
  if (navigator.clipboard) navigator.clipboard.writeText(text).then(done);
}"""
"""Copies the button's own attribute: no untrusted text is part of the script."""


def add_id(text: str) -> Element:
    """Show a shortened id; a click copies the full one."""
    short = shorten_id(text)
    # The name contains the visible text, for people who use voice control.
    name = f"Copy {text}" if short == text else f"Copy {short}, in full {text}"
    with add_box("button", "h-id", name, type="button", title=f"Copy {text}", data_copy=text) as element:
        add_text(short, "", "span")
        add_icon("copy")
    element.on("click", js_handler=COPY_HANDLER)
    return element


def add_command(text: str) -> None:
    """Show a command to type; a click copies it."""
    with add_box("button", "h-id h-command", f"Copy {text}", type="button", title="Copy", data_copy=text) as element:
        add_text(text, "", "span")
        add_icon("copy")
    element.on("click", js_handler=COPY_HANDLER)


def add_stat(name: str, value: str = "", more: str = "") -> tuple[TextLabel, TextLabel]:
    """Add a figure with its name above and a remark below; return the labels of figure and remark."""
    with add_box("div", "h-stat"):
        add_text(name, "h-name")
        return add_text(value, "h-value"), add_text(more, "h-more-text")


@contextmanager
def add_fold(style: str = "") -> Generator[Element]:
    """Add a folded section. The block builds its summary; the content is added inside the yielded element."""
    with add_box("details", f"h-fold {style}") as element, add_box("summary"):
        yield element


MAX_ARGUMENTS: Final = 40


def split_arguments(text: str) -> tuple[dict[str, Any], str]:
    """Split the JSON object at the start of a decision's text from the text after it."""
    try:
        value, end = cast("tuple[object, int]", json.JSONDecoder().raw_decode(text))
    except (ValueError, RecursionError):
        return {}, text
    return (cast("dict[str, Any]", value), text[end:].strip()) if isinstance(value, dict) else ({}, text)


def _add_quote(text: str) -> None:
    add_text(text, "h-quote h-text").props["tabindex"] = "0"


def add_arguments(text: str) -> None:
    """Show a JSON object as names and values, the text after it as a quote, and any other text unchanged."""
    values, rest = split_arguments(text)
    if not 0 < len(values) <= MAX_ARGUMENTS:
        _add_quote(text)
        return
    with add_box("dl", "h-args", "Arguments", tabindex="0"):
        for name, value in values.items():
            add_text(name, "", "dt")
            add_text(value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False), "", "dd")
    if rest:
        _add_quote(rest)


SPARK_HEIGHT: Final = 28


def set_spark(element: Element, values: Sequence[float]) -> None:
    """Draw columns as the mask of one element, which keeps the page small."""
    top = max(values, default=0) or 1
    step = 240 / max(1, len(values))
    bars = ""
    for index, value in enumerate(values):
        bar_height = max(1.5, SPARK_HEIGHT * value / top)
        bars += f'<rect x="{index * step + 1:.1f}" y="{SPARK_HEIGHT - bar_height:.1f}" height="{bar_height:.1f}"'
        bars += f' width="{max(1.0, step - 2):.1f}" rx="1"/>'
    size = f'viewBox="0 0 240 {SPARK_HEIGHT}" preserveAspectRatio="none"'
    element.style["--spark"] = make_data_url(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{bars}</svg>')


def add_spark(label: str, values: Sequence[float]) -> Element:
    element = add_box("div", "h-spark", label, role="img")
    set_spark(element, values)
    return element


def add_meter(label: str, share: float) -> Element:
    """Add a bar. Figures next to it carry the same information as its colour."""
    percent = max(0.0, min(100.0, 100 * share))
    element = add_box("div", "h-meter", label, role="meter", aria_valuemin="0", aria_valuemax="100")
    element.props["aria-valuenow"] = f"{percent:.0f}"
    set_meter(element, share)
    return element


def set_meter(element: Element, share: float, *, highlights: bool = True) -> None:
    """Change a bar; with `highlights`, a nearly full or full bar is highlighted."""
    percent = max(0.0, min(100.0, 100 * share))
    element.clear()
    full = "" if not highlights else "h-full" if share >= 1 else "h-near" if share >= NEARLY_FULL else ""
    element.classes(remove="h-near h-full", add=full)
    with element:
        ui.element("div").style(f"width: {percent:.1f}%")


NEARLY_FULL = 0.8


class RunBar(NamedTuple):
    """A session as a bar; `size` is its height relative to the other bars."""

    path: str
    title: str
    mood: str
    size: float


class RunBars:
    """The newest sessions as a row of bars, newest last, coloured by outcome."""

    def __init__(self, label: str) -> None:
        # The table below has the same for screen readers, and for the keyboard.
        self._box = add_box("div", "h-runs", aria_hidden="true", title=label)
        self._bars: Sequence[RunBar] = ()

    def show(self, runs: Sequence[RunBar]) -> None:
        if runs == self._bars:
            return
        self._bars = runs
        self._box.clear()
        top = max((run.size for run in runs), default=0.0) or 1.0
        with self._box:
            for run in runs:
                element = add_box("a", f"h-run h-{run.mood}", href=run.path, title=run.title, tabindex="-1")
                element.style(f"height: {18 + 82 * run.size / top:.0f}%")


def add_facts(rows: Sequence[tuple[str, str]]) -> Element:
    """Show facts as a list; empty ones are left out."""
    with add_box("dl", "h-facts") as element:
        for name, value in rows:
            if value:
                add_text(_name_column(name), "", "dt")
                if _DIGEST.fullmatch(value):
                    with add_box("dd"):
                        add_id(value)
                else:
                    add_text(value, "", "dd")
    return element


_DIGEST: Final = re.compile("[0-9a-f]{40,}")


def add_table(title: str, columns: Sequence[str], right: Sequence[str] = ()) -> Element:
    with add_box("div", "h-scroll", tabindex="0"), add_box("table", "h-table", title):
        with add_box("thead"), add_box("tr"):
            for name in columns:
                add_text(_name_column(name), "h-num" if name in right else "", "th").props["scope"] = "col"
        body = add_box("tbody")
        _COLUMNS[body] = tuple(columns)
        return body


_COLUMNS: Final[WeakKeyDictionary[Element, tuple[str, ...]]] = WeakKeyDictionary()
"""The columns of each table, by its body: on a phone, each cell shows the name of its column."""


def _label_cell(element: Element) -> None:
    row = element.parent_slot.parent if element.tag == "td" and element.parent_slot else None
    body = row.parent_slot.parent if row is not None and row.parent_slot else None
    columns = _COLUMNS.get(body, ()) if body is not None else ()
    index = len(row.default_slot.children) - 1 if row is not None else 0
    if index < len(columns):
        element.props["data-label"] = _name_column(columns[index])


def _name_column(name: str) -> str:
    return f"{name[:1].upper()}{name[1:]}"


def add_cell(text: str = "", style: str = "") -> TextLabel:
    return add_text(text, style, "td")


def add_listing(listing: Listing) -> None:
    """Show a whole table. Empty columns are left out."""
    if not listing.rows:
        if listing.empty:
            add_text(listing.empty, "h-none")
        return
    numbers = listing.right.split()
    used = [index for index in range(len(listing.columns)) if any(row[index] for row in listing.rows)]
    if listing.title:
        add_text(listing.title, "h-sub", "h3")
    with add_table(listing.title or "table", [listing.columns[index] for index in used], numbers):
        for row in listing.rows:
            with add_box("tr"):
                for index in used:
                    add_cell(row[index], "h-num" if listing.columns[index] in numbers else "")


def add_sheet(sheet: Sheet) -> None:
    for part in sheet:
        match part:
            case Facts():
                add_facts(part.facts)
            case Listing():
                add_listing(part)
            case str():
                add_text(part)


class KeyedList(Generic[T]):
    """A list whose items have keys: an item that stays is updated in place.

    Typed text and the button under the pointer survive a refresh.
    """

    def __init__(self, inside: Element, make: Callable[[T], Callable[[T], None]], empty: str = "") -> None:
        """Take `make`, which shows a new item and returns its update function."""
        self._inside = inside
        self._make = make
        self._items: dict[Hashable, tuple[Element, Callable[[T], None]]] = {}
        self._empty: Element | None = None
        self._empty_label = empty

    def show(self, item_by_key: Mapping[Any, T]) -> None:
        """Show exactly these items, in this order."""
        for key in [key for key in self._items if key not in item_by_key]:
            self._items.pop(key)[0].delete()
        for index, (key, item) in enumerate(item_by_key.items()):
            self._show_item(key, item, index)
        self._show_empty()

    def _show_item(self, key: Hashable, item: T, index: int) -> None:
        if key in self._items:
            self._items[key][1](item)
            return
        count = len(self._inside.default_slot.children)
        with self._inside:
            update = self._make(item)
        element = self._inside.default_slot.children[count]
        self._items[key] = (element, update)
        if index < count:
            element.move(target_index=index)

    def _show_empty(self) -> None:
        if self._items and self._empty is not None:
            self._empty.delete()
            self._empty = None
        elif not self._items and self._empty is None and self._empty_label:
            with self._inside:
                self._empty = add_text(self._empty_label, "h-none", "li" if self._inside.tag in ("ol", "ul") else "div")


ChartOptions = dict[str, Any]

INK: Final = "var(--ink)"
DIM: Final = "var(--dim)"
LINE: Final = "var(--line)"
CARD: Final = "var(--card)"
GOOD: Final = "var(--good)"
LOOK: Final = "var(--look)"
BAD: Final = "var(--bad)"
MARK: Final = "var(--mark)"

MAX_POINTS: Final = 500
"""Maximum number of points in one series, so that the browser stays fast."""
SHADES: Final = (MARK, LOOK, GOOD, BAD, DIM)
SHAPES: Final = ("circle", "rect", "triangle", "diamond", "roundRect")

Point = tuple[int, float]
"""A time in microseconds, and a value."""


class ChartSpan(msgspec.Struct, frozen=True):
    """A span of time on a chart; without an end, a moment."""

    lane: str
    name: str
    start: int
    end: int | None = None
    mood: str = MARK


FAR_FROM_CAP: Final = 8.0
"""A cap of more than this many times the spending is left out: its line would flatten the other."""


def chart_spending(points: Sequence[Point], cap: float | None, until: int) -> ChartOptions:
    """Chart cumulative spending in dollars as steps, against the cap."""
    total = 0.0
    steps: list[list[float]] = []
    for at, usd in points:
        total += usd
        steps.append([_millis(at), round(total, 6)])
    if steps:
        steps.append([_millis(until), steps[-1][1]])
    line: ChartOptions = {**_line("spent", thin_points(steps), MARK), "step": "end", "areaStyle": {"opacity": 0.12}}
    is_near_cap = cap is not None and total * FAR_FROM_CAP >= cap
    if cap is not None and is_near_cap:
        label = {"formatter": "cap", "color": BAD, "position": "insideEndTop"}
        line["markLine"] = {
            "symbol": "none",
            "silent": True,
            "data": [
                {"yAxis": round(cap, 6), "lineStyle": {"color": BAD, "type": "dashed", "width": 2}, "label": label}
            ],
        }
    top = max(total, cap if cap and is_near_cap else 0.0) * 1.08 or 1.0
    axis = _value_axis("$")
    axis["axisLabel"]["showMaxLabel"] = False
    return {**_base_options(), "yAxis": {**axis, "min": 0, "max": round(top, 6)}, "series": [line]}


def chart_columns(points: Sequence[Point], size: int) -> ChartOptions:
    """Chart amounts in equal parts of a time, as columns in dollars."""
    half = size // 2
    data = [[_millis(at + half), round(value, 6)] for at, value in points]
    ends = {"min": _millis(points[0][0]), "max": _millis(points[-1][0] + size)} if points else {}
    options = _base_options()
    columns: ChartOptions = {"type": "bar", "data": data, "barMaxWidth": 44, "itemStyle": {"color": MARK}}
    columns["itemStyle"]["borderRadius"] = [3, 3, 0, 0]
    return {**options, "xAxis": options["xAxis"] | ends, "yAxis": {**_value_axis("$"), "min": 0}, "series": [columns]}


def chart_timeline(spans: Sequence[ChartSpan], lanes: Sequence[str]) -> ChartOptions:
    """Chart spans as bars and moments as points, by lane."""
    series = [each for mood in dict.fromkeys(span.mood for span in spans) for each in _series_of_mood(spans, mood)]
    return {
        **_base_options(remaining=84),
        "yAxis": {
            "type": "category",
            "data": [make_single_line(lane, 40) for lane in reversed(lanes)],
            "axisLabel": {"color": INK, "width": 76, "overflow": "truncate"},
            "axisLine": {"lineStyle": {"color": LINE}},
            "axisTick": {"show": False},
        },
        "series": series,
    }


def _series_of_mood(spans: Sequence[ChartSpan], mood: str) -> list[ChartOptions]:
    """Make the series of one colour: spans are one line with gaps, moments are points with a shape per colour."""
    matching = [span for span in spans if span.mood == mood][-MAX_POINTS:]
    bars: list[Any] = []
    for span in matching:
        if span.end is not None:
            lane, name = make_single_line(span.lane, 40), make_single_line(span.name, 120)
            ends = (span.start, max(span.end, span.start))
            bars += [*({"value": [_millis(at), lane], "name": name} for at in ends), [_millis(ends[1]), None]]
    dots = [
        {"value": [_millis(span.start), make_single_line(span.lane, 40)], "name": make_single_line(span.name, 120)}
        for span in matching
        if span.end is None
    ]
    shape = SHAPES[SHADES.index(mood) % len(SHAPES)]
    series: list[ChartOptions] = []
    if bars:
        series.append(_line("", bars, mood) | {"lineStyle": {"color": mood, "width": 8}, **_marks(shape)})
    if dots:
        series.append(
            {"type": "scatter", "data": dots, "symbol": shape, "symbolSize": 10, "itemStyle": {"color": mood}}
        )
    return series


def _marks(shape: str) -> ChartOptions:
    """Mark both ends, so that a span without duration is visible."""
    return {"connectNulls": False, "showSymbol": True, "symbol": shape, "symbolSize": 9}


def thin_points(points: Sequence[Any], limit: int = MAX_POINTS) -> list[Any]:
    """Thin out points, but keep the last."""
    if len(points) <= limit:
        return list(points)
    stride = -(-len(points) // limit)
    return [*points[:-1:stride], points[-1]]


def _base_options(top: int = 16, remaining: int = 56) -> ChartOptions:
    return {
        "animation": False,
        "textStyle": {"color": INK},
        "grid": {"left": remaining, "right": 20, "top": top, "bottom": 28},
        "tooltip": {
            "trigger": "item",
            "renderMode": "richText",
            "confine": True,
            "backgroundColor": CARD,
            "borderColor": LINE,
            "textStyle": {"color": INK, "width": 320, "overflow": "break"},
        },
        "xAxis": {
            "type": "time",
            "axisLabel": {"color": DIM, "hideOverlap": True},
            "axisLine": {"lineStyle": {"color": LINE}},
            "splitLine": {"show": False},
        },
    }


def _value_axis(unit: str) -> ChartOptions:
    return {
        "type": "value",
        "axisLabel": {"color": DIM, "formatter": f"{unit}{{value}}"},
        "splitLine": {"lineStyle": {"color": LINE}},
    }


def _line(name: str, data: Sequence[Any], colour: str) -> ChartOptions:
    return {
        "type": "line",
        "name": name,
        "data": list(data),
        "showSymbol": False,
        "lineStyle": {"color": colour, "width": 2},
        "itemStyle": {"color": colour},
    }


def _millis(at: int) -> int:
    return at // 1000


class Plot:
    """A chart, or a sentence if there is nothing to draw."""

    def __init__(self, label: str, empty: str) -> None:
        self._label = label
        self._empty_label = add_text(empty, "h-none")
        self._chart: Any = None
        self._slot = ui.element("div")
        self._options: ChartOptions | None = None

    def show(self, options: ChartOptions, *, empty: bool, lanes: int = 0) -> None:
        self._empty_label.set_visibility(empty)
        self._slot.set_visibility(not empty)
        if empty or options == self._options:
            return
        self._options = options
        if self._chart is None:
            with self._slot:
                self._chart = ui.echart(options, renderer="svg").classes("h-chart")
            self._chart.style(f"height: {4 + 1.8 * lanes:.1f}rem" if lanes else "")
            self._chart.props["role"] = "img"
            self._chart.props["aria-label"] = self._label
            return
        self._chart.options.clear()
        self._chart.options.update(options)
        self._chart.update()
