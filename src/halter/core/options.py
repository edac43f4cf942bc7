"""Options that a program gives by keyword. An unknown one is refused: whoever wrote it relies on it."""

from collections.abc import Iterable

from halter.core.errors import ConfigError
from halter.core.text import nearest


def demand_known(options: Iterable[str], known: Iterable[str], what: str) -> None:
    """Refuse an option that does not exist, with the nearest one that does."""
    names = sorted(known)
    for name in options:
        if name not in names:
            raise ConfigError(f"`{name}` is no option of {what}; {nearest(name, names, 'its options')}")
