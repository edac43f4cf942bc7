"""What the model says in each incident. It is the same model for everybody: it only sees what it is sent."""

import re
from typing import Final

from halter.core.messages import Part, Prompt, Reply, ToolCall, ToolResult
from halter.demo.provider import calls, says

_INVOICE: Final = re.compile(r"invoice-\d+")
_REPORT: Final = re.compile(r"report-(\d+)")
MOST: Final = 8
"""A report has fewer findings than this, and some have none."""


def bookkeeper(prompt: Prompt) -> Reply:
    """Book an invoice as soon as its scan can be read; until then, try again."""
    invoice = next(found[0] for part in _parts(prompt) if (found := _INVOICE.search(_words(part))))
    results = [part.outcome for part in _parts(prompt) if isinstance(part, ToolResult)]
    if results and results[-1] == "ok":
        return says(f"The scan agrees with {invoice}, so I booked it.")
    words = (
        f"The scan of {invoice} is not there yet, so I try again." if results else f"I compare {invoice} and its scan."
    )
    return calls("read_file", {"path": f"scans/{invoice}.txt"}, words)


def watchman(prompt: Prompt) -> Reply:
    """Look around, and find that nothing has to be done."""
    if any(tool.name == "yield" for tool in prompt.tools):
        return calls("yield", {"mode": "sleep", "sleep": "1m", "reason": "nothing needs me"}, "All is well.")
    return says("All is well.")


def analyst(prompt: Prompt) -> Reply:
    """Put down one finding after the other, then write the report."""
    report = next(int(found[1]) for part in _parts(prompt) if (found := _REPORT.search(_words(part))))
    emitted = sum(isinstance(part, ToolResult) for part in _parts(prompt))
    if emitted < report % MOST:
        finding = {"title": f"Region {emitted + 1}", "severity": "info", "text": _prose(40)}
        return calls("emit_finding", finding, "I put down what I found.")
    return says(_prose(60))


def _prose(sentences: int) -> str:
    line = "The figures of branch {} are in line with those of the quarter before, and need no correction. "
    return "".join(line.format(number) for number in range(1, sentences + 1))


def _parts(prompt: Prompt) -> list[Part]:
    return [part for message in prompt.messages for part in message.parts]


def _words(part: Part) -> str:
    return part.arguments if isinstance(part, ToolCall) else part.text
