"""A page: its person and rights, its frame with the halt button, dialogs, and live refresh.

One listener on the bus serves all pages. A page is told which streams grew, and queries what it shows. So a slow
browser costs a set of names, and the agents nothing.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from nicegui import Client, ui
from nicegui.element import Element

from halter.core.clock import SECOND, Clock, parse_duration
from halter.core.errors import HalterError, StoreError
from halter.core.ids import FLEET, StreamId
from halter.core.rows import HaltRow
from halter.core.text import format_count
from halter.dashboard.icons import MANIFEST_PATH, TOUCH_ICON_PATH, write_icon_styles
from halter.dashboard.labels import format_age
from halter.dashboard.parts import (
    KeyedList,
    TextLabel,
    add_box,
    add_button,
    add_icon,
    add_link,
    add_submit,
    add_text,
    make_legible,
)
from halter.operations import control, money, queries
from halter.operations.agents import AgentFolders
from halter.operations.desk import Actor, Principal, Role
from halter.operations.money import Direction
from halter.present.events import format_moment, format_relative_moment
from halter.runtime.feed import Bus, FeedEvent, FeedGap, LiveUpdate
from halter.runtime.runtime import Runtime

MAX_NAMED_STREAMS: Final = 200
"""Most streams that are named; beyond that, everything counts as changed."""
MIN_REFRESH_INTERVAL: Final = SECOND // 4
"""Shortest time between two refreshes."""
MAX_REFRESH_INTERVAL: Final = 5 * SECOND
"""Longest time between two refreshes: ages on the page change."""
LIVE_RETRY_DELAY: Final = SECOND


class FeedChanges(msgspec.Struct, frozen=True):
    """What has changed since the last refresh: streams, sessions with live updates, or everything."""

    streams: frozenset[StreamId] = frozenset()
    pulses: frozenset[str] = frozenset()
    everything: bool = False

    @property
    def has_news(self) -> bool:
        """Whether there was any news, and not only time that passed."""
        return self.has_commits or bool(self.pulses)

    @property
    def has_commits(self) -> bool:
        """Whether anything was committed, and not only a live update."""
        return self.everything or bool(self.streams)

    def concerns(self, stream: StreamId) -> bool:
        return self.everything or stream in self.streams


class PageListener:
    """Collects the changes for one page."""

    def __init__(self) -> None:
        self.has_news = asyncio.Event()
        self._streams: set[StreamId] = set()
        self._pulses: set[str] = set()
        self._all_changed = False

    def add_item(self, item: FeedEvent | LiveUpdate | FeedGap) -> None:
        """Notes what an item is about. Never blocks."""
        match item:
            case FeedEvent():
                self._streams.add(item.stored.stream)
            case LiveUpdate():
                self._pulses.add(item.session)
            case FeedGap():
                self._all_changed = True
        if self._all_changed or len(self._streams) + len(self._pulses) > MAX_NAMED_STREAMS:
            self.mark_all_changed()
        self.has_news.set()

    def mark_all_changed(self) -> None:
        self._streams.clear()
        self._pulses.clear()
        self._all_changed = True
        self.has_news.set()

    def drain(self) -> FeedChanges:
        changes = FeedChanges(frozenset(self._streams), frozenset(self._pulses), self._all_changed)
        self._streams.clear()
        self._pulses.clear()
        self._all_changed = False
        self.has_news.clear()
        return changes


class LiveFeed:
    """Listens to the bus while a page is open."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._listeners: set[PageListener] = set()
        self._listening: asyncio.Task[None] | None = None

    @property
    def pages(self) -> int:
        return len(self._listeners)

    @contextmanager
    def listen(self) -> Generator[PageListener]:
        """Listens for one page. The first page starts the listener on the bus, and the last one ends it."""
        ear = PageListener()
        self._listeners.add(ear)
        if self._listening is None:
            self._listening = asyncio.get_running_loop().create_task(self._run(), name="halter-dashboard")
        try:
            yield ear
        finally:
            self._listeners.discard(ear)
            self._pause()

    def _pause(self) -> None:
        if self._listening is not None and not self._listeners:
            self._listening.cancel()
            self._listening = None

    async def changes(self) -> AsyncGenerator[FeedChanges]:
        """Yields changes to a page: at once, then within the two refresh intervals."""
        with self.listen() as ear:
            ear.has_news.set()
            while True:
                await self._news(ear)
                yield ear.drain()
                await self._clock.sleep(MIN_REFRESH_INTERVAL)

    async def _news(self, ear: PageListener) -> None:
        """Waits for news, or for the longest interval."""
        aging = asyncio.ensure_future(self._clock.sleep(MAX_REFRESH_INTERVAL))
        heard = asyncio.ensure_future(ear.has_news.wait())
        try:
            await asyncio.wait({aging, heard}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in (aging, heard):
                waiting.cancel()
                with suppress(asyncio.CancelledError):
                    await waiting

    async def _run(self) -> None:
        """Passes on what the bus yields. While the store is unavailable it retries; then everything may be new."""
        while True:
            try:
                async with aclosing(self._bus.listen()) as items:
                    async for item in items:
                        for ear in self._listeners:
                            ear.add_item(item)
            except StoreError:
                await self._clock.sleep(LIVE_RETRY_DELAY)
            for ear in self._listeners:
                ear.mark_all_changed()


RefreshPage = Callable[[FeedChanges], Awaitable[None]]
"""Shows what has changed."""


@dataclass(frozen=True, slots=True)
class OpenPage:
    """One page, open in one browser."""

    app: Runtime
    principal: Principal
    live: LiveFeed
    client: Client
    agents: AgentFolders | None = None
    moments: list[tuple[TextLabel, int]] = field(default_factory=list[tuple[TextLabel, int]])
    """The moments on the page: how long ago they were changes while it is open."""

    @property
    def actor(self) -> Actor:
        """Makes a desk for one query or action: rights are checked there each time."""
        return Actor(self.app, self.principal, agents=self.agents)

    def add_moment(self, at: int | None, style: str = "") -> TextLabel:
        """Shows how long ago a moment was; its exact time is shown on hover."""
        made = add_text("", style, "time")
        self.set_moment(made, at)
        return made

    def set_moment(self, made: TextLabel, at: int | None) -> None:
        self.moments[:] = [each for each in self.moments if each[0] is not made]
        if at is not None:
            self.moments.append((made, at))
        made.show_text("" if at is None else format_age(at, self.now))
        props: dict[str, Any] = made.props
        exact = "" if at is None else format_moment(at)
        if "title" not in props or props["title"] != exact:
            props["title"] = exact

    def age_moments(self) -> None:
        self.moments[:] = [each for each in self.moments if not each[0].is_deleted]
        for made, at in self.moments:
            made.show_text(format_age(at, self.now))

    @property
    def now(self) -> int:
        return self.app.clock.now()

    def query_value(self, name: str) -> str:
        """Returns a value of the address, as in `?agent=shop`."""
        return self.client.request.query_params.get(name, "")

    def has_role(self, role: Role) -> bool:
        return self.principal.has_role(role)

    def show_message(self, sentence: str, *, bad: bool = False) -> None:
        if not self.client.is_deleted:
            with self.client:
                ui.notify(
                    make_legible(sentence, 600),
                    type="negative" if bad else "positive",
                    multi_line=True,
                    close_button="OK",
                    timeout=12_000 if bad else 6_000,
                )

    async def perform(self, doing: Awaitable[str]) -> bool:
        """Does what the person asked for, and shows the result."""
        try:
            self.show_message(await doing)
        except HalterError as error:
            self.show_message(str(error), bad=True)
            return False
        return True

    def follow_changes(self, refresh: RefreshPage, lost: Callable[[str], None]) -> None:
        """Refreshes the page on changes, while its browser is connected.

        `lost` gets the sentence while that fails, and "" when it works again.
        """
        running: list[asyncio.Task[None]] = []
        client: Any = self.client

        def start() -> None:
            if not running:
                following = self._following(refresh, lost)
                running.append(asyncio.get_running_loop().create_task(following, name="halter-page"))

        def end() -> None:
            for task in running:
                task.cancel()

        client.on_connect(start)
        client.on_delete(end)

    async def _following(self, refresh: RefreshPage, lost: Callable[[str], None]) -> None:
        # Changes before the browser connected, or while it was away, are not shown yet.
        missed = True
        async with aclosing(self.live.changes()) as grown:
            async for each in grown:
                if self.client.has_socket_connection:
                    await self._refresh(refresh, lost, FeedChanges(everything=True) if missed else each)
                missed = not self.client.has_socket_connection

    async def _refresh(self, refresh: RefreshPage, lost: Callable[[str], None], changes: FeedChanges) -> None:
        try:
            with self.client:
                await refresh(changes)
        except HalterError as error:
            lost(str(error))
        else:
            lost("")


THEME_STORAGE_KEY: Final = "halter-theme"
"""The browser's storage key of the chosen theme."""

THEME_SCRIPT: Final = f"""
const halterTheme = localStorage.getItem("{THEME_STORAGE_KEY}");
if (halterTheme) setDark(halterTheme === "dark");
"""
"""Applies the chosen theme before the page is shown."""

THEME_TOGGLE: Final = f"""() => {{
  const dark = !document.body.classList.contains("body--dark");
  localStorage.setItem("{THEME_STORAGE_KEY}", dark ? "dark" : "light");
  setDark(dark);
}}"""
"""Switches the theme and stores it."""


def read_style_sheet() -> str:
    return f"{Path(__file__).with_name('style.css').read_text()}\n{write_icon_styles()}"


HEAD: Final = (
    f'<link rel="manifest" href="{MANIFEST_PATH}" crossorigin="use-credentials">'
    f'<link rel="apple-touch-icon" href="{TOUCH_ICON_PATH}">'
    '<meta name="theme-color" content="#ffffff" media="(prefers-color-scheme: light)">'
    '<meta name="theme-color" content="#161a23" media="(prefers-color-scheme: dark)">'
    '<meta name="mobile-web-app-capable" content="yes">'
)
"""What a phone reads that installs the dashboard."""


FormValues = Mapping[str, str]
"""The values of a form's fields."""
SubmitForm = Callable[[FormValues], Awaitable[str]]
"""Performs the action and returns its result in words."""


@dataclass(frozen=True, slots=True)
class FormField:
    """A field of a form: a line, a text of several lines, or a choice from a list or from buttons."""

    name: str
    label: str
    value: str = ""
    kind: Literal["line", "text", "choice", "radio"] = "line"
    choices: tuple[str, ...] = ()


REASON = FormField("reason", "Reason")


def open_dialog(
    page: OpenPage, title: str, says: str, fields: Sequence[FormField], yes: str, do: SubmitForm, kind: str = "yes"
) -> None:
    """Opens a dialog. It closes when the action succeeded, or when the person leaves it."""
    with page.client.content, ui.dialog() as dialog, add_box("div"), add_box("form", "h-dialog", title) as form:
        add_text(title, "", "h2")
        add_text(says).style("white-space: pre-wrap")
        inputs = {field.name: _input(field, first=field is fields[0]) for field in fields}
        wrong = add_text("", "h-bad h-text")
        wrong.props["role"] = "alert"

        async def submit() -> None:
            try:
                sentence = await do({name: str(each.value or "") for name, each in inputs.items()})
            except HalterError as error:
                wrong.show_text(str(error))
                return
            dialog.close()
            page.show_message(sentence)

        with add_box("div", "h-end"):
            add_button("Cancel", dialog.close)
            add_submit(yes, kind)
    form.on("submit.prevent", submit)
    dialog.on("hide", dialog.delete)
    dialog.open()


def _input(field: FormField, *, first: bool) -> Any:
    value, label = make_legible(field.value), make_legible(field.label)
    match field.kind:
        case "line":
            made: Any = ui.input(label, value=value)
        case "text":
            made = ui.textarea(label, value=value)
        case "choice":
            made = ui.select(list(field.choices), label=label, value=field.value)
        case "radio":
            with add_box("div", "", label, role="group"):
                add_text(label, "h-dim h-small")
                return ui.radio(list(field.choices), value=field.value)
    made.props("outlined dense autofocus" if first else "outlined dense")
    return made


NAVIGATION = (
    ("/", "Home", "home"),
    ("/fleet", "Fleet", "fleet"),
    ("/sessions", "Sessions", "sessions"),
    ("/findings", "Findings", "findings"),
    ("/triggers", "Triggers", "triggers"),
    ("/budgets", "Budgets", "budgets"),
    ("/audit", "Audit", "audit"),
)
TABS: Final = 4
"""How many pages a phone shows as tabs; the others are behind "More"."""

PageBuilder = Callable[[OpenPage], Awaitable[RefreshPage]]
"""Builds a page inside the frame, and returns its refresh function."""


async def build_frame(page: OpenPage, title: str, here: str, build: PageBuilder) -> None:
    counts = _navigation(page, here)
    banner = add_box("div", role="status")
    halts = KeyedList(banner, lambda row: _build_halt_row(page, row))
    lost = _top(page, title)
    # Also a page that has nothing to show says what waits.
    await _show_halts(page, halts)
    await _show_counts(page, title, counts)
    with add_box("div", "h-body", id="body"):
        refresh = await build(page)

    async def refresh_frame(changes: FeedChanges) -> None:
        if changes.concerns(FLEET):
            await _show_halts(page, halts)
        if changes.has_commits:
            await _show_counts(page, title, counts)
        await refresh(changes)
        page.age_moments()

    page.follow_changes(refresh_frame, lost.show_text)


async def _show_counts(page: OpenPage, title: str, counts: Mapping[str, TextLabel]) -> None:
    """Shows in navigation and title how much waits for a person, and how many findings are urgent."""
    needs = len(await queries.read_needs(page.actor))
    urgent = await queries.count_urgent_findings(page.actor)
    for path, count in (("/", needs), ("/findings", urgent)):
        counts[path].show_text(f"{min(count, 99)}" if count else "")
    whole = f"({needs}) {title} · Halter" if needs else f"{title} · Halter"
    if page.client.title != whole:
        ui.page_title(make_legible(whole))


def _navigation(page: OpenPage, here: str) -> Mapping[str, TextLabel]:
    counts: dict[str, TextLabel] = {}
    with page.client.layout:
        skip = add_link("To the content", "#body", "h-skip")
        with add_box("nav", "h-nav", "Pages") as nav:
            with add_box("div", "h-brand"):
                add_box("span", "h-logo", aria_hidden="true")
                add_text("Halter", "", "span")
            for place, (path, name, icon) in enumerate(NAVIGATION):
                counts[path] = _page_link(path, name, icon, here, "h-rare" if place >= TABS else "")
            _account(page)
            with add_box("details", "h-more"):
                with add_box("summary"):
                    add_icon("more")
                    add_text("More", "", "span")
                with add_box("div", "h-more-items"):
                    for path, name, icon in NAVIGATION[TABS:]:
                        _page_link(path, name, icon, here, "")
                    _account(page)
    nav.move(target_index=0)
    skip.move(target_index=0)
    return counts


def _page_link(path: str, name: str, icon: str, here: str, style: str) -> TextLabel:
    with add_box("a", style, href=path) as element:
        add_icon(icon)
        add_text(name, "", "span")
        count = add_text("", "h-count", "span")
    if path == here:
        element.props["aria-current"] = "page"
    return count


def _account(page: OpenPage) -> None:
    with add_box("form", "h-who", method="post", action="/logout"):
        add_icon("person")
        add_text(f"{page.principal.name} ({page.principal.role})", "h-text", "span")
        leave = add_submit("", "bare")
        leave.props["aria-label"] = "Log out"
        leave.props["title"] = "Log out"
        with leave:
            add_icon("leave")


def _top(page: OpenPage, title: str) -> TextLabel:
    with add_box("header", "h-top"):
        add_text(title, "", "h1")
        add_box("div", "h-space")
        lost = add_text("", "h-lost h-text")
        lost.props["role"] = "status"
        theme: Element = add_button("", lambda: None, "bare", "Change between light and dark", "theme")
        theme.on("click", js_handler=THEME_TOGGLE)
        if page.has_role("approver"):
            add_button("HALT ALL", lambda: _halt_all(page), "stop")
    return lost


async def _show_halts(page: OpenPage, halts: KeyedList[HaltRow]) -> None:
    rows = await control.halts_now(page.actor)
    halts.show({(row.scope, row.at): row for row in rows if row.scope in _list_all_scopes(page)})


def _list_all_scopes(page: OpenPage) -> tuple[str, ...]:
    return tuple(f"agent:{name}" for name in page.principal.agents) or ("fleet",)


def _build_halt_row(page: OpenPage, row: HaltRow) -> Callable[[HaltRow], None]:
    what = "Everything is" if row.scope == "fleet" else f"{row.scope.removeprefix('agent:')} is"
    because = f": {row.reason}" if row.reason else "."
    with add_box("div", "h-banner"):
        add_text(f"{what} halted since {format_relative_moment(row.at, page.now)}, by {row.by}{because}")
        if page.has_role("operator"):
            add_button("Resume…", lambda: ask_to_resume(page, row.scope))
    return lambda _: None


async def _halt_all(page: OpenPage) -> None:
    under_way = await queries.sessions_under_way(page.actor)
    working = sum(row.state == "RUNNING" for row in under_way)

    async def do(values: FormValues) -> str:
        for scope in _list_all_scopes(page):
            await control.halt(page.actor, scope, values["reason"])
        return "Everything is halted: nothing starts, and what is in flight is stopped within a second."

    says = (
        f"This stops {format_count(len(under_way), 'session')} under way, {working} of them at work at this moment. "
        "What is in flight is stopped within a second; nothing starts again until it is resumed."
    )
    open_dialog(page, "Halt everything?", says, (REASON,), "Halt everything", do, "stop")


def ask_to_resume(page: OpenPage, scope: str) -> None:
    async def do(values: FormValues) -> str:
        over = parse_duration(values["over"]) // SECOND if values["over"].strip() else None
        return (await control.resume(page.actor, scope, over, values["reason"])).sentence

    says = "Its sessions go on where they stand. A fleet takes a second for each of them, unless you name another time."
    over = FormField("over", "Let sessions go one after the other, over", "")
    open_dialog(page, f"Resume {scope}?", says, (over, REASON), "Resume", do)


def ask_cap(page: OpenPage, scope: str, direction: Direction = "raise", window: str = "", stands: str = "") -> None:
    """Asks for another cap of a scope, of the window that stands or of a named one."""

    async def do(values: FormValues) -> str:
        await money.set_cap(page.actor, direction, scope, values["cap"].strip(), window, values["reason"])
        return f"The cap of {scope} was changed."

    cap = FormField("cap", "New cap in dollars, or none")
    title, yes = f"{direction.capitalize()} the cap of {scope}?", direction.capitalize()
    open_dialog(page, title, f"{stands}The change is recorded with your name.", (cap, REASON), yes, do)
