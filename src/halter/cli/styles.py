"""Lines of a screen, and how much they stand out."""

from typing import Final

import msgspec

PLAIN: Final = ""
LOOK: Final = "yellow"
NEEDED: Final = "bold yellow"


class Line(msgspec.Struct, frozen=True):
    """What is shown, and how much it stands out."""

    text: str
    style: str = PLAIN
