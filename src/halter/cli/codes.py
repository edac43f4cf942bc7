"""The codes that a command leaves with, for scripts, and the signals that tell it to end.

| code | meaning |
|---|---|
| 0 | all is well |
| 1 | it was understood, and the answer is not the good one: something was found, refused, or came too late |
| 2 | the command line is wrong: a word that cannot be read, or a name that nothing here has |
| 3 | a store, a setting, or the place where the answer goes cannot be used |
| 70 | a mistake of Halter's own |
| 130 | interrupted |
| 141 | whoever read the answer has gone, as `head` does |
"""

import signal
from collections.abc import Mapping
from typing import Final

NOT_FINE: Final = 1
WRONG_USE: Final = 2
UNUSABLE: Final = 3
OURS: Final = 70
INTERRUPTED: Final = 130
UNREAD: Final = 141

MEANINGS: Final[Mapping[int, str]] = {
    0: "all is well",
    NOT_FINE: "understood, but something was found, refused or too late",
    WRONG_USE: "the command line is wrong, or names what is not there",
    UNUSABLE: "a store, a setting or the output cannot be used",
    OURS: "a mistake of Halter's own",
    INTERRUPTED: "interrupted",
    UNREAD: "whoever read the answer has gone",
}

ENDINGS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What tells a program to end."""
