"""A page: its person and rights, its frame with the halt button, dialogs, and live refresh.

One listener on the bus serves all pages. It tells a page which streams grew, and the page queries what it shows. A slow
browser costs a set of names and does not slow the agents.
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
from halter.dashboard.widgets import (
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
from halter.operations.actor import Actor, Principal, Role
from halter.operations.agent_folders import AgentFolders
from halter.operations.money import Direction
from halter.present.moments import format_moment, format_relative_moment
from halter.runtime.feed import Bus, FeedEvent, FeedGap, LiveUpdate
from halter.runtime.runtime import Runtime

MAX_NAMED_STREAMS: Final = 200
"""Maximum number of named streams; beyond that, everything counts as changed."""
MIN_REFRESH_INTERVAL: Final = SECOND // 4
"""Shortest time between two refreshes."""
MAX_REFRESH_INTERVAL: Final = 5 * SECOND
"""Longest time between two refreshes; ages on the page change without events."""
LIVE_RETRY_DELAY: Final = SECOND


class FeedChanges(msgspec.Struct, frozen=True):
    """The changes since the last refresh: streams, sessions with live updates, or everything."""

    streams: frozenset[StreamId] = frozenset()
    pulses: frozenset[str] = frozenset()
    everything: bool = False

    @property
    def has_changes(self) -> bool:
        """Return True if anything changed, and not only time passed."""
        return self.has_commits or bool(self.pulses)

    @property
    def has_commits(self) -> bool:
        """Return True if anything was committed; live updates do not count."""
        return self.everything or bool(self.streams)

    def concerns(self, stream: StreamId) -> bool:
        return self.everything or stream in self.streams


class PageListener:
    """Collects the changes for one page."""

    def __init__(self) -> None:
        self.change_event = asyncio.Event()
        self._streams: set[StreamId] = set()
        self._pulses: set[str] = set()
        self._all_changed = False

    def add_item(self, item: FeedEvent | LiveUpdate | FeedGap) -> None:
        """Add the stream or session of an item. Never blocks."""
        match item:
            case FeedEvent():
                self._streams.add(item.stored.stream)
            case LiveUpdate():
                self._pulses.add(item.session)
            case FeedGap():
                self._all_changed = True
        if self._all_changed or len(self._streams) + len(self._pulses) > MAX_NAMED_STREAMS:
            self.mark_all_changed()
        self.change_event.set()

    def mark_all_changed(self) -> None:
        self._streams.clear()
        self._pulses.clear()
        self._all_changed = True
        self.change_event.set()

    def drain(self) -> FeedChanges:
        changes = FeedChanges(frozenset(self._streams), frozenset(self._pulses), self._all_changed)
        self._streams.clear()
        self._pulses.clear()
        self._all_changed = False
        self.change_event.clear()
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
        """Listen for one page. The first page starts the listener on the bus, and the last one ends it."""
        listener = PageListener()
        self._listeners.add(listener)
        if self._listening is None:
            self._listening = asyncio.get_running_loop().create_task(self._run(), name="halter-dashboard")
        try:
            yield listener
        finally:
            self._listeners.discard(listener)
            self._pause()

    def _pause(self) -> None:
        if self._listening is not None and not self._listeners:
            self._listening.cancel()
            self._listening = None

    async def changes(self) -> AsyncGenerator[FeedChanges]:
        """Yield changes for a page: first immediately, then between the shortest and the longest interval."""
        with self.listen() as listener:
            listener.change_event.set()
            while True:
                await self._wait_for_change(listener)
                yield listener.drain()
                await self._clock.sleep(MIN_REFRESH_INTERVAL)

    async def _wait_for_change(self, listener: PageListener) -> None:
        """Wait for a change, or for the longest interval."""
        timeout = asyncio.ensure_future(self._clock.sleep(MAX_REFRESH_INTERVAL))
        change_task = asyncio.ensure_future(listener.change_event.wait())
        try:
            await asyncio.wait({timeout, change_task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (timeout, change_task):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _run(self) -> None:
        """Pass on the items of the bus. While the store is unavailable, retry; then everything counts as changed."""
        while True:
            try:
                async with aclosing(self._bus.listen()) as items:
                    async for item in items:
                        for listener in self._listeners:
                            listener.add_item(item)
            except StoreError:
                await self._clock.sleep(LIVE_RETRY_DELAY)
            for listener in self._listeners:
                listener.mark_all_changed()


RefreshPage = Callable[[FeedChanges], Awaitable[None]]
"""Shows the changes on a page."""


@dataclass(frozen=True, slots=True)
class OpenPage:
    """One page, open in one browser."""

    app: Runtime
    principal: Principal
    live: LiveFeed
    client: Client
    agents: AgentFolders | None = None
    moments: list[tuple[TextLabel, int]] = field(default_factory=list[tuple[TextLabel, int]])
    """The moments on the page; their ages are updated while it is open."""

    @property
    def actor(self) -> Actor:
        """An actor for one query or action; it checks the rights each time."""
        return Actor(self.app, self.principal, agents=self.agents)

    def add_moment(self, at: int | None, style: str = "") -> TextLabel:
        """Show the age of a moment, and its exact time on hover."""
        label = add_text("", style, "time")
        self.set_moment(label, at)
        return label

    def set_moment(self, label: TextLabel, at: int | None) -> None:
        self.moments[:] = [each for each in self.moments if each[0] is not label]
        if at is not None:
            self.moments.append((label, at))
        label.show_text("" if at is None else format_age(at, self.now))
        props: dict[str, Any] = label.props
        exact = "" if at is None else format_moment(at)
        if "title" not in props or props["title"] != exact:
            props["title"] = exact

    def age_moments(self) -> None:
        self.moments[:] = [each for each in self.moments if not each[0].is_deleted]
        for label, at in self.moments:
            label.show_text(format_age(at, self.now))

    @property
    def now(self) -> int:
        return self.app.clock.now()

    def query_value(self, name: str) -> str:
        """Return a value of the address, as in `?agent=shop`."""
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

    async def perform(self, action: Awaitable[str]) -> bool:
        """Await an action of the person, and show its result or error."""
        try:
            self.show_message(await action)
        except HalterError as error:
            self.show_message(str(error), bad=True)
            return False
        return True

    def follow_changes(self, refresh: RefreshPage, on_problem: Callable[[str], None]) -> None:
        """Refresh the page on changes, while its browser is connected.

        `on_problem` gets a sentence when a refresh fails, and "" when one succeeds.
        """
        tasks: list[asyncio.Task[None]] = []
        client: Any = self.client

        def start() -> None:
            if not tasks:
                following = self._following(refresh, on_problem)
                tasks.append(asyncio.get_running_loop().create_task(following, name="halter-page"))

        def end() -> None:
            for task in tasks:
                task.cancel()

        client.on_connect(start)
        client.on_delete(end)

    async def _following(self, refresh: RefreshPage, on_problem: Callable[[str], None]) -> None:
        # The page lacks changes from before the browser connected and from while it was disconnected.
        has_missed_changes = True
        async with aclosing(self.live.changes()) as feed:
            async for changes in feed:
                if self.client.has_socket_connection:
                    await self._refresh(
                        refresh, on_problem, FeedChanges(everything=True) if has_missed_changes else changes
                    )
                has_missed_changes = not self.client.has_socket_connection

    async def _refresh(self, refresh: RefreshPage, on_problem: Callable[[str], None], changes: FeedChanges) -> None:
        try:
            with self.client:
                await refresh(changes)
        except HalterError as error:
            on_problem(str(error))
        else:
            on_problem("")


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
"""Head elements for a phone that installs the dashboard."""


FormValues = Mapping[str, str]
"""The values of a form's fields."""
SubmitForm = Callable[[FormValues], Awaitable[str]]
"""Performs the action and returns a sentence about its result."""


@dataclass(frozen=True, slots=True)
class FormField:
    """A field of a form: a line, a text, a list of choices, or radio buttons."""

    name: str
    label: str
    value: str = ""
    kind: Literal["line", "text", "choice", "radio"] = "line"
    choices: tuple[str, ...] = ()


REASON = FormField("reason", "Reason")


def open_dialog(
    page: OpenPage,
    title: str,
    message: str,
    fields: Sequence[FormField],
    submit_label: str,
    perform: SubmitForm,
    kind: str = "yes",
) -> None:
    """Open a dialog. It closes when the action succeeds or the person cancels."""
    with page.client.content, ui.dialog() as dialog, add_box("div"), add_box("form", "h-dialog", title) as form:
        add_text(title, "", "h2")
        add_text(message).style("white-space: pre-wrap")
        inputs = {field.name: _input(field, first=field is fields[0]) for field in fields}
        problem_label = add_text("", "h-bad h-text")
        problem_label.props["role"] = "alert"

        async def submit() -> None:
            try:
                sentence = await perform({name: str(each.value or "") for name, each in inputs.items()})
            except HalterError as error:
                problem_label.show_text(str(error))
                return
            dialog.close()
            page.show_message(sentence)

        with add_box("div", "h-end"):
            add_button("Cancel", dialog.close)
            add_submit(submit_label, kind)
    form.on("submit.prevent", submit)
    dialog.on("hide", dialog.delete)
    dialog.open()


def _input(field: FormField, *, first: bool) -> Any:
    value, label = make_legible(field.value), make_legible(field.label)
    match field.kind:
        case "line":
            element: Any = ui.input(label, value=value)
        case "text":
            element = ui.textarea(label, value=value)
        case "choice":
            element = ui.select(list(field.choices), label=label, value=field.value)
        case "radio":
            with add_box("div", "", label, role="group"):
                add_text(label, "h-dim h-small")
                return ui.radio(list(field.choices), value=field.value)
    element.props("outlined dense autofocus" if first else "outlined dense")
    return element


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
"""Number of pages that a phone shows as tabs; the others are behind "More"."""

PageBuilder = Callable[[OpenPage], Awaitable[RefreshPage]]
"""Builds a page inside the frame, and returns its refresh function."""


async def build_frame(page: OpenPage, title: str, current_path: str, build: PageBuilder) -> None:
    counts = _navigation(page, current_path)
    banner = add_box("div", role="status")
    halts = KeyedList(banner, lambda row: _build_halt_row(page, row))
    problem_label = _top(page, title)
    # Shown before the page is built, so that a page that fails shows them, too.
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

    page.follow_changes(refresh_frame, problem_label.show_text)


async def _show_counts(page: OpenPage, title: str, counts: Mapping[str, TextLabel]) -> None:
    """Show the number of needs in the navigation and the title, and of urgent findings in the navigation."""
    need_count = len(await queries.read_needs(page.actor))
    urgent_count = await queries.count_urgent_findings(page.actor)
    for path, count in (("/", need_count), ("/findings", urgent_count)):
        counts[path].show_text(f"{min(count, 99)}" if count else "")
    full_title = f"({need_count}) {title} · Halter" if need_count else f"{title} · Halter"
    if page.client.title != full_title:
        ui.page_title(make_legible(full_title))


def _navigation(page: OpenPage, current_path: str) -> Mapping[str, TextLabel]:
    counts: dict[str, TextLabel] = {}
    with page.client.layout:
        skip = add_link("Skip to content", "#body", "h-skip")
        with add_box("nav", "h-nav", "Pages") as nav:
            with add_box("div", "h-brand"):
                add_box("span", "h-logo", aria_hidden="true")
                add_text("Halter", "", "span")
            for index, (path, name, icon) in enumerate(NAVIGATION):
                counts[path] = _page_link(path, name, icon, current_path, "h-rare" if index >= TABS else "")
            _account(page)
            with add_box("details", "h-more"):
                with add_box("summary"):
                    add_icon("more")
                    add_text("More", "", "span")
                with add_box("div", "h-more-items"):
                    for path, name, icon in NAVIGATION[TABS:]:
                        _page_link(path, name, icon, current_path, "")
                    _account(page)
    nav.move(target_index=0)
    skip.move(target_index=0)
    return counts


def _page_link(path: str, name: str, icon: str, current_path: str, style: str) -> TextLabel:
    with add_box("a", style, href=path) as element:
        add_icon(icon)
        add_text(name, "", "span")
        count = add_text("", "h-count", "span")
    if path == current_path:
        element.props["aria-current"] = "page"
    return count


def _account(page: OpenPage) -> None:
    with add_box("form", "h-who", method="post", action="/logout"):
        add_icon("person")
        add_text(f"{page.principal.name} ({page.principal.role})", "h-text", "span")
        logout_button = add_submit("", "bare")
        logout_button.props["aria-label"] = "Log out"
        logout_button.props["title"] = "Log out"
        with logout_button:
            add_icon("leave")


def _top(page: OpenPage, title: str) -> TextLabel:
    with add_box("header", "h-top"):
        add_text(title, "", "h1")
        add_box("div", "h-space")
        problem_label = add_text("", "h-lost h-text")
        problem_label.props["role"] = "status"
        theme: Element = add_button("", lambda: None, "bare", "Switch between light and dark", "theme")
        theme.on("click", js_handler=THEME_TOGGLE)
        if page.has_role("approver"):
            add_button("HALT ALL", lambda: _halt_all(page), "stop")
    return problem_label


async def _show_halts(page: OpenPage, halts: KeyedList[HaltRow]) -> None:
    rows = await control.halts_now(page.actor)
    halts.show({(row.scope, row.at): row for row in rows if row.scope in _list_all_scopes(page)})


def _list_all_scopes(page: OpenPage) -> tuple[str, ...]:
    return tuple(f"agent:{name}" for name in page.principal.agents) or ("fleet",)


def _build_halt_row(page: OpenPage, row: HaltRow) -> Callable[[HaltRow], None]:
    subject = "Everything is" if row.scope == "fleet" else f"{row.scope.removeprefix('agent:')} is"
    reason = f": {row.reason}" if row.reason else "."
    with add_box("div", "h-banner"):
        add_text(f"{subject} halted since {format_relative_moment(row.at, page.now)}, by {row.by}{reason}")
        if page.has_role("operator"):
            add_button("Resume…", lambda: ask_to_resume(page, row.scope))
    return lambda _: None


async def _halt_all(page: OpenPage) -> None:
    active_sessions = await queries.sessions_under_way(page.actor)
    running_count = sum(row.shown_state == "RUNNING" for row in active_sessions)

    async def do(values: FormValues) -> str:
        for scope in _list_all_scopes(page):
            await control.halt(page.actor, scope, values["reason"])
        return "Everything is halted. Running calls stop within a second; nothing new starts."

    message = (
        f"Stops {format_count(len(active_sessions), 'active session')}, {running_count} of them running now. "
        "Running calls stop within a second. Nothing starts until you resume."
    )
    open_dialog(page, "Halt everything?", message, (REASON,), "Halt everything", do, "stop")


def ask_to_resume(page: OpenPage, scope: str) -> None:
    async def do(values: FormValues) -> str:
        spread_seconds = parse_duration(values["over"]) // SECOND if values["over"].strip() else None
        return (await control.resume(page.actor, scope, spread_seconds, values["reason"])).sentence

    message = "Sessions resume where they stopped. A fleet takes a second per session unless you set a duration."
    duration_field = FormField("over", "Spread the starts over", "")
    open_dialog(page, f"Resume {scope}?", message, (duration_field, REASON), "Resume", do)


def ask_to_switch_on(page: OpenPage, agent: str) -> None:
    async def do(values: FormValues) -> str:
        return (await control.switch(page.actor, agent, on=True, reason=values["reason"])).sentence

    message = "On: it runs unattended, and its triggers start sessions, in each process that has its folder."
    open_dialog(page, f"Switch {agent} on?", message, (REASON,), "Switch on", do)


def ask_cap(
    page: OpenPage, scope: str, direction: Direction = "raise", window: str = "", current_cap: str = ""
) -> None:
    """Ask for a new cap of a scope, for its current window or a named one."""

    async def do(values: FormValues) -> str:
        await money.set_cap(page.actor, direction, scope, values["cap"].strip(), window, values["reason"])
        return f"The cap of {scope} was changed."

    cap = FormField("cap", "New cap in dollars, or none")
    title, yes = f"{direction.capitalize()} the cap of {scope}?", direction.capitalize()
    open_dialog(page, title, f"{current_cap}The change is recorded with your name.", (cap, REASON), yes, do)
