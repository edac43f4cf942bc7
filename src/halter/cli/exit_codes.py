"""Exit codes, and the signals that end a command.

| code | meaning |
|---|---|
| 0 | success |
| 1 | a negative result: something was found, failed, was refused, or came too late |
| 2 | wrong usage: an invalid argument, or an unknown name |
| 3 | a store, a setting or the output cannot be used |
| 70 | a bug in Halter |
| 130 | interrupted |
| 141 | the reader of the output has closed it, as `head` does |
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
    0: "success",
    EXIT_FAILED: "something was found, failed, was refused or came too late",
    EXIT_USAGE: "wrong usage: an invalid argument, or an unknown name",
    EXIT_UNUSABLE: "a store, a setting or the output cannot be used",
    EXIT_INTERNAL: "a bug in Halter",
    EXIT_INTERRUPTED: "interrupted",
    EXIT_BROKEN_PIPE: "the reader of the output has closed it",
}
TERMINATION_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT_CODES: Final[Mapping[NotDoneWhy, int]] = {
    "wrong": EXIT_USAGE,
    "missing": EXIT_USAGE,
    "refused": EXIT_FAILED,
    "forbidden": EXIT_FAILED,
}
