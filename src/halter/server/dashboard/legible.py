"""Foreign words on a page: what a model, a tool or a file says is text, and cannot pass for something else."""

import re
from typing import Final

_STEERING: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
"""What is not seen, or turns the order of letters around: people decide about what they read."""

_HALF: Final = re.compile("[\ud800-\udfff]")

MOST: Final = 20_000
"""So many characters of one thing are shown at most: a browser has to stay quick."""


def legible(text: str, most: int = MOST) -> str:
    """Make text fit to be shown: what cannot be seen becomes visible, and what is too long is cut with a word of it."""
    cut = text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} characters more)"
    return _STEERING.sub(_named, _HALF.sub("\ufffd", cut))


def one_line(text: str, most: int = 200) -> str:
    """Make text fit for a single line, such as a name in a chart."""
    return legible(" ".join(text.split()), most)


def file_name(text: str) -> str:
    """Make a name for a file that is downloaded: letters, digits and a few signs, and nothing else."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:80] or "halter"


def _named(found: re.Match[str]) -> str:
    return f"⟨U+{ord(found[0]):04X}⟩"
