"""Charts: rows become what ECharts draws. Pure, and the same in both themes, because colours are names of the page's.

Text in a chart is drawn and never taken for HTML: tooltips are rich text. No foreign text is a key in here, since
NiceGUI runs what stands under some keys.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from halter.server.dashboard.legible import one_line

Options = dict[str, Any]

INK: Final = "var(--ink)"
DIM: Final = "var(--dim)"
LINE: Final = "var(--line)"
CARD: Final = "var(--card)"
GOOD: Final = "var(--good)"
LOOK: Final = "var(--look)"
BAD: Final = "var(--bad)"
MARK: Final = "var(--mark)"

MOST: Final = 500
"""So many points are drawn of one thing: a browser has to stay quick."""
FEW: Final = 40
"""So many points are marked, each by itself."""
SHADES: Final = (MARK, LOOK, GOOD, BAD, DIM)
SHAPES: Final = ("circle", "rect", "triangle", "diamond", "roundRect")

Point = tuple[int, float]
"""A moment in microseconds, and a value."""


class Span(msgspec.Struct, frozen=True):
    """Something that lasted, or happened at one moment where it has no end."""

    lane: str
    name: str
    start: int
    end: int | None = None
    mood: str = MARK


def spend_over_time(points: Sequence[Point], cap: float | None, until: int) -> Options:
    """Draw what was spent so far, as steps in dollars, against the cap."""
    total = 0.0
    steps: list[list[float]] = []
    for at, usd in points:
        total += usd
        steps.append([_millis(at), round(total, 6)])
    if steps:
        steps.append([_millis(until), steps[-1][1]])
    line: Options = {**_line("spent", thin(steps), MARK), "step": "end", "areaStyle": {"opacity": 0.12}}
    if cap is not None:
        label = {"formatter": "cap", "color": BAD, "position": "insideEndTop"}
        line["markLine"] = {
            "symbol": "none",
            "silent": True,
            "data": [
                {"yAxis": round(cap, 6), "lineStyle": {"color": BAD, "type": "dashed", "width": 2}, "label": label}
            ],
        }
    top = max(total, cap or 0.0) * 1.08 or 1.0
    return {**_ground(), "yAxis": {**_values("$"), "min": 0, "max": round(top, 6)}, "series": [line]}


def timeline(spans: Sequence[Span], lanes: Sequence[str]) -> Options:
    """Draw what lasted as bars and what happened as points, each in its lane."""
    series = [each for mood in dict.fromkeys(span.mood for span in spans) for each in _of_mood(spans, mood)]
    return {
        **_ground(left=84),
        "yAxis": {
            "type": "category",
            "data": [one_line(lane, 40) for lane in reversed(lanes)],
            "axisLabel": {"color": INK, "width": 76, "overflow": "truncate"},
            "axisLine": {"lineStyle": {"color": LINE}},
            "axisTick": {"show": False},
        },
        "series": series,
    }


def _of_mood(spans: Sequence[Span], mood: str) -> list[Options]:
    """Lasting things of one colour are one line with holes in it; moments are points, of another shape by colour."""
    found = [span for span in spans if span.mood == mood][-MOST:]
    bars: list[Any] = []
    for span in found:
        if span.end is not None:
            lane, name = one_line(span.lane, 40), one_line(span.name, 120)
            ends = (span.start, max(span.end, span.start))
            bars += [*({"value": [_millis(at), lane], "name": name} for at in ends), [_millis(ends[1]), None]]
    dots = [
        {"value": [_millis(span.start), one_line(span.lane, 40)], "name": one_line(span.name, 120)}
        for span in found
        if span.end is None
    ]
    shape = SHAPES[SHADES.index(mood) % len(SHAPES)]
    drawn: list[Options] = []
    if bars:
        drawn.append(_line("", bars, mood) | {"lineStyle": {"color": mood, "width": 8}, **_marks(shape)})
    if dots:
        drawn.append({"type": "scatter", "data": dots, "symbol": shape, "symbolSize": 10, "itemStyle": {"color": mood}})
    return drawn


def _marks(shape: str) -> Options:
    """Mark both ends: what took no time is seen as well, and a pointer finds it."""
    return {"connectNulls": False, "showSymbol": True, "symbol": shape, "symbolSize": 9}


def history(values: Mapping[str, Sequence[Point]]) -> Options:
    """Draw how numbers went, each as a line of its own with its name."""
    series = [
        _line(one_line(name, 60), thin([[_millis(at), value] for at, value in points]), SHADES[place % len(SHADES)])
        | {"showSymbol": len(points) <= FEW, "symbol": SHAPES[place % len(SHAPES)], "symbolSize": 7}
        for place, (name, points) in enumerate(values.items())
    ]
    legend = {"textStyle": {"color": INK}, "inactiveColor": DIM, "type": "scroll", "top": 0}
    return {**_ground(top=34), "legend": legend, "yAxis": {**_values(""), "scale": True}, "series": series}


def thin(points: Sequence[Any], most: int = MOST) -> list[Any]:
    """Leave out points where there are too many, but never the last."""
    if len(points) <= most:
        return list(points)
    stride = -(-len(points) // most)
    return [*points[:-1:stride], points[-1]]


def _ground(top: int = 16, left: int = 56) -> Options:
    return {
        "animation": False,
        "textStyle": {"color": INK},
        "grid": {"left": left, "right": 20, "top": top, "bottom": 28},
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


def _values(unit: str) -> Options:
    return {
        "type": "value",
        "axisLabel": {"color": DIM, "formatter": f"{unit}{{value}}"},
        "splitLine": {"lineStyle": {"color": LINE}},
    }


def _line(name: str, data: Sequence[Any], colour: str) -> Options:
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
