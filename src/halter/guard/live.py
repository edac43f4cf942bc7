"""Finding the values of known secrets in a text, in all their spellings.

One automaton looks for how any spelling of any value begins. Only where one does, the whole of it is looked for, with a
pattern that is compiled then: so a hundred secrets, or long ones, cost little before one of them turns up.
"""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from halter.guard.linear import Regex, RegexSet, any_of
from halter.guard.spellings import LONGEST_CHARACTER, Spelling, pieces, spellings

_AHEAD: Final = 8 * LONGEST_CHARACTER
"""How much of a text the beginning of a spelling takes at most."""


class Live(NamedTuple):
    """Where a known value stands, and whose it is."""

    start: int
    end: int
    name: str


class LiveValues:
    """The values of known secrets, of which each has a name."""

    def __init__(self, values: Mapping[str, str]) -> None:
        parts = {piece: name for name, value in values.items() for piece in pieces(value)}
        # The longest comes first, so that a value hides others that are parts of it.
        longest_first = sorted(parts, key=lambda piece: (-len(piece), piece))
        self._spellings = [(parts[piece], spelling) for piece in longest_first for spelling in spellings(piece)]
        self._beginnings = [spelling.beginning() for _, spelling in self._spellings]
        self._any = Regex(any_of(self._beginnings)) if self._beginnings else None
        self._which: RegexSet | None = None
        self._whole: dict[int, Regex] = {}

    def find(self, data: bytes, start: int, end: int) -> Iterator[Live]:
        """Find all values between two places, in order, never overlapping."""
        while self._any is not None and (match := self._any.search(data, start, end)) is not None:
            found = self._at(data, match[0], end)
            start = match[0] + 1 if found is None else found.end
            if found is not None:
                yield found

    def _at(self, data: bytes, place: int, end: int) -> Live | None:
        self._which = self._which or RegexSet(self._beginnings)
        for index in sorted(self._which.match(data[place : min(end, place + _AHEAD)])):
            name, spelling = self._spellings[index]
            stop = self._compiled(index, spelling).match(data, place, end)
            if stop >= 0:
                return Live(place, stop, name)
        return None

    def _compiled(self, index: int, spelling: Spelling) -> Regex:
        if index not in self._whole:
            self._whole[index] = Regex(spelling.whole())
        return self._whole[index]
