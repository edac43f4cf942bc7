"""A chart on a page, drawn anew only where it has changed."""

from typing import Any

from nicegui import ui

from halter.server.dashboard.charts import Options
from halter.server.dashboard.parts import words


class Plot:
    """A chart, or a sentence where there is nothing to draw."""

    def __init__(self, label: str, empty: str) -> None:
        self._label = label
        self._nothing = words(empty, "h-none")
        self._chart: Any = None
        self._slot = ui.element("div")
        self._seen: Options | None = None

    def show(self, options: Options, *, empty: bool, lanes: int = 0) -> None:
        """Draw it: as high as others, or as its lanes need."""
        self._nothing.set_visibility(empty)
        self._slot.set_visibility(not empty)
        if empty or options == self._seen:
            return
        self._seen = options
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
