"""Exit codes, for scripts, and the signals that end a command.

| code | meaning |
|---|---|
| 0 | all is well |
| 1 | it was understood, and the answer is not the good one: something was found, refused, or came too late |
| 2 | the command line is wrong: a word that cannot be read, or a name that nothing here has |
| 3 | a store, a setting, or the place where the answer goes cannot be used |
| 70 | a mistake of Halter's own |
| 130 | interrupted |
| 141 | the reader of the output is gone, as with `head` |
"""

import signal
from collections.abc import Mapping
from typing import Final

from halter.core.errors import NotDoneWhy

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_UNUSABLE: Final = 3
EXIT_INTERNAL: Final = 70
EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141
EXIT_MEANINGS: Final[Mapping[int, str]] = {
    0: "all is well",
    EXIT_FAILED: "understood, but something was found, refused or too late",
    EXIT_USAGE: "the command line is wrong, or names what is not there",
    EXIT_UNUSABLE: "a store, a setting or the output cannot be used",
    EXIT_INTERNAL: "a mistake of Halter's own",
    EXIT_INTERRUPTED: "interrupted",
    EXIT_BROKEN_PIPE: "whoever read the answer has gone",
}
TERMINATION_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What tells a program to end."""
EXIT_CODES: Final[Mapping[NotDoneWhy, int]] = {
    "wrong": EXIT_USAGE,
    "missing": EXIT_USAGE,
    "refused": EXIT_FAILED,
    "forbidden": EXIT_FAILED,
}
