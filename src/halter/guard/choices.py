"""Switches and choices of a call that may grant more than the task says, or remove a protection."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

from halter.core.provenance import split_name
from halter.core.text import make_word_set
from halter.guard.trusted_text import is_function_word

RAISING: Final = make_word_set(
    "accept accepted admin administrator all anyone approve approved auto broadcast bypass cascade editor elevated "
    "everyone external force forced full hard ignore live manage manager merge override overwrite owner permanent "
    "permanently privileged prod production public publish recursive recursively root rw skip sudo superuser unlimited "
    "unrestricted write writer"
)
"""Choices that grant rights, reach more than one place, or bypass a protection."""

GUARDING: Final = make_word_set(
    "private secret confidential restricted internal protected readonly encrypted encrypt secure dry confirm draft"
)
"""Switches that protect something from others when they are on."""

_OPENING: Final = make_word_set("everyone live open plain public publicly publish published real unencrypted visible")
"""Words of a task that allow such a switch to be off."""

_RIGHTS: Final = make_word_set("role roles permission permissions scope scopes access visibility privilege privileges")
_LOW_RIGHTS: Final = make_word_set("guest no none only own private r read reader readonly ro view viewer")

HasWord = Callable[[str], bool]


def raises_choice(field: str, value: Any, has_word: HasWord, *, final: bool) -> bool:
    """Return whether a choice grants more than the task says, such as a right to write or a publication.

    For a final act, the task must name every switch that is on.
    """
    words = split_name(field if isinstance(value, bool) else str(value))
    if value is False:
        return not GUARDING.isdisjoint(words) and not any(map(has_word, _OPENING))
    if value is True:
        if not GUARDING.isdisjoint(words):
            return False
        raising = frozenset(words) if final else RAISING.intersection(words)
        return bool(raising) and not any(has_word(word) for word in raising if not is_function_word(word))
    if not isinstance(value, str):
        return False
    raising = RAISING.intersection(words)
    if not _RIGHTS.isdisjoint(split_name(field)):
        raising = frozenset(words) - _LOW_RIGHTS
    return bool(raising) and not any(map(has_word, raising))


@lru_cache(maxsize=1_000)
def find_guarding_words(field: str) -> frozenset[str]:
    """Find the protecting words in a switch's name. If the task has one of them, no call may omit the switch."""
    return GUARDING.intersection(split_name(field))
