"""The text of HTML."""

import re
from html.parser import HTMLParser
from typing import Final

from halter.documents.charset import decode_text

_SILENT: Final = frozenset({"script", "style", "template", "noscript", "svg", "iframe", "object"})
_BLOCKS: Final = frozenset(
    {
        *("address", "article", "aside", "blockquote", "dd", "details", "dialog", "div", "dl"),
        *("dt", "fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3"),
        *("h4", "h5", "h6", "header", "hr", "main", "nav", "ol", "p"),
        *("pre", "section", "summary", "table", "title", "ul"),
    }
)
_LINES: Final = frozenset({"br", "li", "tr", "option", "caption"})
_CELLS: Final = frozenset({"td", "th"})
_CHARSET: Final = re.compile(rb"<meta[^>]{0,200}charset=[\"' ]{0,2}([A-Za-z0-9_-]{1,40})", re.IGNORECASE)
_SPACES: Final = re.compile(r"[ \t\f\r\n]+")


def extract_html_text(data: bytes) -> str | None:
    """Extract the text of a page; None if the bytes are not text."""
    charset = _CHARSET.search(data[:4096])
    page = decode_text(data, charset[1].decode() if charset else "")
    if page is None:
        return None
    reader = _Reader()
    reader.feed(page)
    reader.close()
    return reader.text()


class _Reader(HTMLParser):
    """A parser that collects text with the ends of its lines and paragraphs."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._parts: list[str] = []
        self._silent: list[str] = []
        self._as_written = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _SILENT:
            self._silent.append(tag)
        self._as_written += tag == "pre"
        self._break(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._silent:
            del self._silent[self._silent.index(tag) :]
        if tag == "pre":
            self._as_written = max(0, self._as_written - 1)
        if tag not in _CELLS:
            self._break(tag)

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self._parts.append(data if self._as_written else _SPACES.sub(" ", data))

    def text(self) -> str:
        lines = (line.strip(" \t\r") for line in "".join(self._parts).split("\n"))
        collapsed_lines: list[str] = []
        for line in lines:
            if line or (collapsed_lines and collapsed_lines[-1]):
                collapsed_lines.append(line)
        return "\n".join(collapsed_lines).strip("\n")

    def _break(self, tag: str) -> None:
        if tag in _BLOCKS:
            self._parts.append("\n\n")
        elif tag in _LINES:
            self._parts.append("\n")
        elif tag in _CELLS:
            self._parts.append("\t")
