"""The worst night on screens of every width."""

import io

import pytest
from rich.console import Console

from halter.cli.run.demo_night import print_conclusion, render_night
from halter.core.clock import HOUR
from halter.core.money import micros_to_usd
from halter.demo.incidents import NIGHT_START, Bill, Frame, Incident, Night

FRAME = Frame(NIGHT_START + 3 * HOUR, 0.4, Bill(1606, micros_to_usd(29_671_332)), Bill(25, micros_to_usd(341_436)))
INCIDENT = Incident("stuck", "A stuck item", "It is tried all night.", FRAME.without, FRAME.within, "After 3 runs.", {})


@pytest.fixture(params=[40, 59, 60, 80, 200])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    return request.param


def test_both_bills_are_on_the_screen_while_the_night_goes_by(width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render_night({"A stuck item": FRAME}, width))
    lines = console.export_text().splitlines()
    assert all(len(line) <= width for line in lines)
    text = " ".join(" ".join(lines).split())
    for words in ("A stuck item", "01:00", "$29.67", "1,606 requests", "$0.34"):
        assert words in text


def test_the_figures_fit_the_screen_and_end_in_a_sentence(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    print_conclusion(Night("anthropic:claude-sonnet-4-5", [INCIDENT], FRAME.without, FRAME.within, 0))
    output = capsys.readouterr().out
    assert "\x1b" not in output
    *table, last = output.splitlines()
    assert all(len(line) <= width for line in table)
    assert last == ("A plain loop paid $29.67 for 1,606 requests. Halter paid $0.34 for 25; no cap was exceeded.")
    assert "After 3" in " ".join(output.split())
