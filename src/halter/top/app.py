"""The live terminal: four tables, the selected session's last events, and keys to decide, halt and resume."""

import json
from collections.abc import Coroutine, Sequence
from typing import Any, ClassVar, Final, cast

import msgspec
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.coordinate import Coordinate
from textual.screen import ModalScreen
from textual.timer import Timer
from textual.widgets import DataTable, Footer, Input, Static, TabbedContent, TabPane, TextArea

from halter.cli.output import escape_text
from halter.core.errors import HalterError, NotDone
from halter.core.text import escape_hidden, to_one_line
from halter.operations.decisions import arguments
from halter.operations.top import FleetView, QueuedNeed
from halter.present.events import StyledLine
from halter.top.rows import COLUMNS, TITLES, Row, describe_need, editable_arguments, head_line, key_of, list_rows
from halter.top.source import OperationSource

REFRESH_SECONDS: Final = 2.0
FOLLOW_SECONDS: Final = 0.2
"""Delay before the events of a newly selected session are read, so that a held key reads none."""
Cells = DataTable[Text]


def _clean(text: str) -> Text:
    """Make a line without markup and without control sequences for the terminal."""
    return escape_text(to_one_line(text))


class ConfirmScreen(ModalScreen[bool]):
    """A screen with a whole decision; a second y approves it, once its end was on the screen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "agree", "Approve exactly this"),
        Binding("escape,n,q", "leave", "Cancel"),
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text
        self._is_drawn = False

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="question"):
            yield Static(escape_text(self._text))
        yield Footer()

    def on_mount(self) -> None:
        self.call_after_refresh(self._note_drawn)

    def _note_drawn(self) -> None:
        self._is_drawn = True

    def action_agree(self) -> None:
        question = self.query_one("#question", VerticalScroll)
        if not self._is_drawn:
            return
        if question.scroll_y < question.max_scroll_y:
            self.notify("Scroll to the end first: you approve all of it.", markup=False)
        else:
            self.dismiss(True)  # noqa: FBT003 - the result of the screen

    def action_leave(self) -> None:
        self.dismiss(False)  # noqa: FBT003 - the result of the screen


class LineScreen(ModalScreen[str | None]):
    """A screen that asks for a line of text; Escape cancels."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "Cancel")]

    def __init__(self, question: str, hint: str) -> None:
        super().__init__()
        self._question = question
        self._hint = hint

    def compose(self) -> ComposeResult:
        with Vertical(id="line"):
            yield Static(escape_text(self._question))
            yield Input(placeholder=self._hint)
        yield Footer()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value)

    def action_leave(self) -> None:
        self.dismiss(None)


class EditScreen(ModalScreen[str | None]):
    """A screen to edit the arguments of a call; Ctrl-S approves the edited arguments."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s", "agree", "Approve these arguments", priority=True),
        Binding("escape", "leave", "Cancel", priority=True),
    ]

    def __init__(self, sentence: str, arguments: dict[str, object]) -> None:
        super().__init__()
        self._sentence = sentence
        self._arguments = arguments

    def compose(self) -> ComposeResult:
        with Vertical(id="edit"):
            yield Static(escape_text(self._sentence))
            yield TextArea(escape_hidden(json.dumps(self._arguments, indent=2, ensure_ascii=False)))
        yield Footer()

    def action_agree(self) -> None:
        self.dismiss(self.query_one(TextArea).text)

    def action_leave(self) -> None:
        self.dismiss(None)


class TopApp(App[None]):
    """The fleet, refreshed every two seconds. A failure is shown in the first line, above the last view."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: 1; text-style: bold; text-wrap: nowrap; text-overflow: ellipsis; }
    TabbedContent { height: 1fr; }
    TabPane { padding: 0; }
    DataTable { height: 1fr; scrollbar-size-horizontal: 0; }
    App:nocolor .datatable--cursor { text-style: reverse; }
    #below { height: 7; border-top: solid; }
    ModalScreen { align: center middle; background: $background; }
    #question, #edit { width: 90%; height: 80%; border: solid; padding: 0 1; }
    #line { width: 90%; height: auto; border: solid; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "tab('sessions')", "Sessions", show=False),
        Binding("2", "tab('inbox')", "Needs you", show=False),
        Binding("3", "tab('budgets')", "Budgets", show=False),
        Binding("4", "tab('workers')", "Workers", show=False),
        Binding("y", "approve", "Approve"),
        Binding("n", "deny", "Deny"),
        Binding("e", "edit", "Edit"),
        Binding("h", "halt", "Halt"),
        Binding("u", "resume", "Resume"),
        Binding("r", "refresh_view", "Refresh"),
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]

    def __init__(
        self,
        source: OperationSource,
        *,
        refresh_seconds: float | None = REFRESH_SECONDS,
        follow: float = FOLLOW_SECONDS,
        limit: int = 200,
    ) -> None:
        super().__init__()
        self.animation_level = "none"
        self._source = source
        self._refresh_seconds = refresh_seconds
        self._follow_changes = follow
        self._resting: Timer | None = None
        self._limit = limit
        self._view: FleetView | None = None
        self._rows: dict[str, list[Row]] = {}
        self._asking = False

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        with TabbedContent(initial="sessions"):
            for number, (name, title) in enumerate(TITLES.items(), 1):
                with TabPane(f"{number} {title}", id=name):
                    yield DataTable[Text](id=f"{name}-table", cursor_type="row", zebra_stripes=True)
        with VerticalScroll(id="below", can_focus=False):
            yield Static(id="tail")
        yield Footer()

    def on_mount(self) -> None:
        for name, columns in COLUMNS.items():
            self._table(name).add_columns(*columns)
        self._table("sessions").focus()
        self.action_refresh_view()
        if self._refresh_seconds is not None:
            self.set_interval(self._refresh_seconds, self.action_refresh_view)

    def action_refresh_view(self) -> None:
        self.run_worker(self._refresh, group="look", exclusive=True)

    async def _refresh(self) -> None:
        try:
            view = await self._source.call("top", session=self._read_selected_key("sessions"), limit=self._limit)
        except HalterError as error:
            if self._view is not None:
                self._head(head_line(self._view, f"NOT UP TO DATE: {error}"))
            else:
                self._head(str(error))
            return
        self._view = view
        self._head(head_line(view))
        for name, rows in list_rows(view).items():
            self._fill(name, rows)
        count_text = f" ({len(view.inbox)})" if view.inbox else ""
        self.query_one(TabbedContent).get_tab("inbox").label = f"2 {TITLES['inbox']}{count_text}"
        self._below()

    def _head(self, line: str) -> None:
        self.query_one("#head", Static).update(_clean(line))

    def _fill(self, name: str, rows: list[Row]) -> None:
        """Update the cells that differ; if rows were added or removed, refill the table and keep the cursor's row."""
        table, old_rows = self._table(name), self._rows.get(name, [])
        self._rows[name] = rows
        if [key for key, _ in old_rows] == [key for key, _ in rows]:
            self._change_cells(table, old_rows, rows)
            return
        selected_key = self._key_at(old_rows, table)
        table.clear()
        for key, cells in rows:
            table.add_row(*map(_clean, cells), key=key)
        if selected_key and (indexes := [index for index, (key, _) in enumerate(rows) if key == selected_key]):
            table.move_cursor(row=indexes[0])

    @staticmethod
    def _change_cells(table: Cells, old_rows: Sequence[Row], new_rows: Sequence[Row]) -> None:
        """Update the cells that differ. Columns only grow, since to shrink one every cell would have to be measured."""
        widths = [column.content_width for column in table.ordered_columns]
        for index, ((_, old_cells), (_, new_cells)) in enumerate(zip(old_rows, new_rows, strict=True)):
            for column, cell in enumerate(new_cells):
                if cell != old_cells[column]:
                    styled_cell = _clean(cell)
                    is_wider = styled_cell.cell_len > widths[column]
                    table.update_cell_at(Coordinate(index, column), styled_cell, update_width=is_wider)
                    widths[column] = max(widths[column], styled_cell.cell_len)

    def _table(self, name: str) -> Cells:
        return cast("Cells", self.query_one(f"#{name}-table", DataTable))

    def _read_selected_key(self, name: str) -> str:
        return self._key_at(self._rows.get(name, []), self._table(name))

    @staticmethod
    def _key_at(rows: Sequence[Row], table: Cells) -> str:
        return rows[table.cursor_row][0] if 0 <= table.cursor_row < len(rows) else ""

    def _below(self) -> None:
        """Show the details of the selected row: a session's last events, or a whole decision."""
        tail = self.query_one("#tail", Static)
        if self.query_one(TabbedContent).active == "inbox":
            need = self._need()
            tail.update(escape_text(describe_need(need) if need else "Nothing needs you."))
            self.query_one("#below").scroll_home(animate=False)
        elif self._view is not None:
            tail.update(_paint(self._view.tail))
            self.query_one("#below").scroll_end(animate=False)

    def _need(self) -> QueuedNeed | None:
        key = self._read_selected_key("inbox")
        waiting = self._view.inbox if self._view else ()
        return next((need for need in waiting if key_of(need) == key), None)

    def on_data_table_row_highlighted(self) -> None:
        if self.query_one(TabbedContent).active != "sessions":
            self._below()
            return
        if self._resting is not None:
            self._resting.stop()
        self._resting = self.set_timer(self._follow_changes, self.action_refresh_view)

    def on_tabbed_content_tab_activated(self) -> None:
        name = self.query_one(TabbedContent).active
        self._table(name).focus()
        self._below()

    def action_tab(self, name: str) -> None:
        self.query_one(TabbedContent).active = name

    def _open_need(self) -> QueuedNeed | None:
        """Return the decision under the cursor; without one, open the inbox or show a message."""
        if self.query_one(TabbedContent).active != "inbox":
            self.action_tab("inbox")
            return None
        need = self._need()
        if need is None or not need.digest:
            self._show_message("No decision selected." if need is None else f"Type: {need.need.commands[0]}")
            return None
        return need

    def _ask(self, question: Coroutine[Any, Any, None]) -> None:
        """Open one dialog at a time: a key pressed twice opens one."""
        if self._asking:
            question.close()
            return
        self._asking = True
        self.run_worker(self._ask_once(question))

    async def _ask_once(self, question: Coroutine[Any, Any, None]) -> None:
        try:
            await question
        finally:
            self._asking = False

    def action_approve(self) -> None:
        if (need := self._open_need()) is not None:
            self._ask(self._approve(need))

    async def _approve(self, need: QueuedNeed) -> None:
        terms: dict[str, Any] = {}
        if need.need.kind == "cap_raise":
            cap = await self.push_screen_wait(LineScreen(f"{describe_need(need)}\n\nNew cap in dollars:", "2.50"))
            if not cap:
                return
            terms["cap"] = cap
        elif not await self.push_screen_wait(ConfirmScreen(describe_need(need))):
            return
        await self._do("approve", decision=need.need.decision, digest=need.digest, **terms)

    def action_edit(self) -> None:
        if (need := self._open_need()) is None:
            return
        if original := editable_arguments(need):
            self._ask(self._edit(need, original))
        else:
            self._show_message("No arguments to edit: y approves, n denies.")

    async def _edit(self, need: QueuedNeed, original: dict[str, object]) -> None:
        text = await self.push_screen_wait(EditScreen(need.need.sentence, original))
        if text is None:
            return
        try:
            edited_arguments = msgspec.json.decode(arguments(text.encode("utf-8", "surrogatepass"), ""))
        except NotDone as error:
            self._show_message(f"Nothing was approved. {error}")
            return
        await self._do("approve", decision=need.need.decision, digest=need.digest, edit=edited_arguments)

    def action_deny(self) -> None:
        if (need := self._open_need()) is not None:
            self._ask(self._deny(need))

    async def _deny(self, need: QueuedNeed) -> None:
        reason = await self.push_screen_wait(LineScreen(f"Deny: {need.need.sentence}", "Reason (optional), then Enter"))
        if reason is not None:
            await self._do("deny", decision=need.need.decision, reason=reason)

    def action_halt(self) -> None:
        self._ask(self._steer("halt", "Type the scope to halt, then Enter. It stays halted until you resume it."))

    def action_resume(self) -> None:
        self._ask(self._steer("resume", "Type the scope to resume, then Enter."))

    async def _steer(self, name: str, question: str) -> None:
        hint = "fleet, agent:NAME or session:ID"
        session = self._read_selected_key("sessions")
        prompt = f"{question}\nThe selected session is session:{session}." if session else question
        scope = await self.push_screen_wait(LineScreen(prompt, hint))
        if scope:
            await self._do(name, scope=scope.strip(), reason="in halter status --live")

    async def _do(self, name: str, **parameters: Any) -> None:
        try:
            result = await self._source.call(name, **parameters)
        except NotDone as refusal:
            self._show_message(str(refusal))
        except HalterError as error:
            self._show_message(f"Not done: {error}")
        else:
            self._show_message(result.sentence)
        self.action_refresh_view()

    def _show_message(self, sentence: str) -> None:
        self.notify(escape_text(sentence).plain, markup=False)


def _paint(lines: Sequence[StyledLine]) -> Text:
    return Text("\n").join(Text(_clean(line.text).plain, line.style) for line in lines)
