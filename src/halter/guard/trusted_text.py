"""What trusted places have said, indexed when it is heard: whole values with boundaries, words and numbers.

A value is compared after NFKC and case folding. An entity is a name, a number, an address or quoted: a word that merely
occurs is none. Look-ups are in sets; no call searches the history.
"""

import re
import unicodedata
from collections.abc import Container, Iterable, Iterator, Sequence
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

from halter.core.text import word_set
from halter.guard.sentences import find_amounts, strip_forbidden, strip_sources

_GRAM: Final = 4
"""The longest phrase that is indexed whole; a longer one must consist of indexed ones."""

_MOST_SHARED: Final = 32
"""Texts whose index is kept: every session of an agent begins with the same instructions."""
_LONGEST_SHARED: Final = 20_000

_SHORTEST_STEM: Final = 3
_GROUP: Final = 3
_LONGEST_NUMBER: Final = 30
_LONGEST_QUOTE: Final = 200
_SHORT_NUMBER: Final = 6
_DIGITS_OF_PROSE: Final = 4
_LONGEST_WORD: Final = 24
_LONGEST_NUMBER_OF_PROSE: Final = 4
_SPELT: Final = re.compile(r"(?:(?<![^\W_])[^\W_][\W_]+){4}")
"""Four single letters or digits in a row: a value that is spelt out."""

_ENDS: Final = ".,;:!?'\"`()[]{}<>«»“”„\u2018\u2019…|*"
_QUOTED: Final = re.compile(r"(?<!\w)['\"“„«\u2018`]([^'\"“”„«»\u2018\u2019`\n]{1,200})['\"”“»\u2019`](?!\w)")
_LINK: Final = re.compile(
    r"[a-z][a-z0-9+.-]{1,12}://[^\s<>\"'`()\[\]{}|\\^]+|(?<![\w.+%-])[\w.+%-]+@[\w-]+(?:\.[\w-]+)+"
    r"|(?<![\w@.-])(?:(?:[\w-]+\.)+(?:xn--[a-z0-9-]{2,59}|[^\W\d_]{2,18})(?![\w@-])(?::\d+)?|(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?(?=[/?#]))(?:[/?#][^\s<>\"'`()\[\]{}|\\^]*)?",
    re.IGNORECASE,
)
_LINKED_MARK: Final = re.compile(r"[\w-]\.[^\W\d_]|\.\d{1,3}(?::\d+)?[/?#]|://|@")
"""Without one of these a text has no link."""

_PERCENT: Final = re.compile(r"%(2e|2f|3a|40)", re.IGNORECASE)
"""A dot, a slash, a colon or an at sign that hides in a link."""

_PAGE_SCHEMES: Final = ("", "http", "https")
_HOST_AND_PATH: Final = re.compile(r"(?=[/?#])")
_FILE: Final = re.compile(
    r"^[\w-]+(?:\.[\w-]+)*\.(?:txt|docx?|xlsx?|pptx?|pdf|md|csv|json|ya?ml|py|log|html?|png|jpe?g|gif|zip|tar|gz|toml|ini)$",
    re.IGNORECASE,
)
_STOP: Final = re.compile(r"[.!?;](?=\s|$)|\n")
_ASIDE: Final = re.compile(
    r"(?:(?<!\w)(?:not|never)|n['\u2019]t)(?!\w| (?:forget|hesitate|fail|miss|only)\b)"
    r"|(?<!\w)(?:without|avoid|remind(?:ers?|s|ed|ing)?)(?!\w)"
    r"|(?<!\w)i(?:['\u2019]ll| will| am going to| plan to)"
    r"(?!\w| (?:arrive|be|have|leave|like|meet|need|stay|travel|visit|want)\b)",
    re.IGNORECASE,
)
"""After these words a sentence asks for nothing: what must not be done, what to remind of, what the person does."""

_DATE: Final = re.compile(r"^[\d\s:./-]*\d{1,4}[:./-]\d{1,2}(?:[:./-][\d\s:./-]*)?$")
_SENTENCE: Final = re.compile(r"\.(?=[A-Z][a-z])")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_UNSEEN: Final = re.compile("[\u034f\u115f\u1160\u180b-\u180f\u2800\u3164\ufe00-\ufe0e\uffa0\U000e0100-\U000e01ef]")
"""Marks that are not shown, and that no category tells: variation selectors and fillers."""

_WORD: Final = re.compile(r"[^\W_]+")
_GAP: Final = re.compile(r"[\W_]+")
_USUAL_GAPS: Final = frozenset((" ", ", ", ". ", "."))
_INNER_CAPITAL: Final = re.compile(r"(?<=[A-Za-z0-9])[A-Z]")
_SPACES: Final = re.compile(r"\s+")
_PLAIN_SPACES: Final = re.compile(r"^(?: {1,2}|(?:\r?\n){1,3} {0,8})$")
_PLAIN_MARKS: Final = frozenset(".,;:!?'\"`()[]{}<>«»“”„\u2018\u2019…|*/\\-\u2013—_#@&+=%$€£•~")
_LONGEST_GAP: Final = 6
_MOST_SPACES: Final = 3
"""More marks or spaces between two words, or others, spell something: a Morse code has no words."""

_UNCLEAR_NUMBER: Final = re.compile(r"^[+-]?(?:\d*,(?!\d{3}(?:\D|$)).*|\d{1,3}\.0{3})$")
"""One tool reads one, another a thousand: `1,0000` and `1.000`."""

_COUNTED: Final = re.compile(r"^[\d.,:/-]{1,5}(?:st|nd|rd|th|am|pm|h|%|k|m|kg|km|min|day|days|hour|hours|-hour|x)?$")
"""A number in a sentence, rather than the name of a thing."""

_ORDINAL: Final = re.compile(r"(?<!\w)(\d{1,2})(?:st|nd|rd|th)?(?!\w)")
_MONTHS: Final = {
    name: (f"{number:02}",)
    for number, name in enumerate(
        ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"], 1
    )
}
_CALENDAR: Final = word_set(
    "january february march april may june july august september october november december monday tuesday wednesday "
    "thursday friday saturday sunday"
)
_DETAIL: Final = re.compile(
    r"^(?:[+-]?\d{1,12}(?:[.,]\d{1,4})?%?"
    r"|\d{4}-\d{2}(?:-\d{2})?(?:[T ]\d{2}:\d{2}(?::\d{2})?(?:\.\d+)?(?:Z|[+-]\d{2}:?\d{2})?)?"
    r"|\d{1,2}:\d{2}(?::\d{2})?|\d{1,2}[./]\d{1,2}[./]\d{2,4}|[A-Za-z]{1,4})$"
)
_FUNCTION_WORDS: Final = word_set(
    "a about above after again all also am an and any are as at be because been before being below best between "
    "both but by can cannot could d dear did do does doing done down during each else even every few first "
    "following for from further get had has have having he hello her here hers hi him his how i if in into is it "
    "its just last least less let like ll m many may me might more most much must my nd near next no nor not now of "
    "off ok on once one only or other our out over own per please rd re regarding regards s same see seen shall she "
    "should since so some st still such t th than thank thanks that the their them then there these they this those "
    "through to today tomorrow too two until up us ve very via was we were what when where which while who whom why "
    "will with within would yes yet you your yours"
)
_EVERYDAY_WORDS: Final = word_set(
    "afternoon appointment arrival arrive arrives booking break breakfast brunch call coffee daily day days departure "
    "depart departs dinner drive enjoy evening event flight fly holiday home hotel hour hours journey leave lunch meal "
    "meet meeting minutes monthly morning night nights noon office plan plans reminder reservation restaurant return "
    "room stay talk ticket time travel trip vacation visit walk week weekend weekly"
)
"""Words of plans and calendars."""

_COMMON: Final = word_set(
    "add all also always an and answer any append are arrange as ask at book buy call cancel change check clean clear "
    "close collect compare copy could create delete deploy describe do does download draft edit email erase execute "
    "explain fetch file fill find fix follow for forward from generate get give go "
    "have he hello help her hey his how i if in include inform insert invite is it join keep launch let list look mail "
    "make mark message modify move my never new no not notify of on one open or order our pay perform please post "
    "prepare print publish purchase push put read recommend record refund register release remove rename rent replace "
    "reply report reschedule reserve respond review run save schedule search send set share she show so some sort "
    "start stop submit summarise summarize take tell thanks that the their them then there "
    "they this to transfer translate trigger turn update upload use visit "
    "was we what when where which who will with write yes you your"
)


_BY_ID: Final = ("id", "event", "email", "mail", "message", "payment", "order", "ticket", "record")
_EXACT: Final = {"secret": 1, "code": 1, "account": 6, "phone": 6, **dict.fromkeys(_BY_ID, 1)}
"""Kinds whose values have so many digits, or are quoted: words that merely occur are none."""

_CONNECTORS: Final = word_set(
    "and at by da de del della den der des di do du el for in la las le les los of on the und van von y zu"
)
"""Small words inside of a name."""

_LINKED: Final = ("", "url", "address", "file", "name")
"""Kinds whose values may be links, addresses or names of files."""


def is_link(value: str) -> bool:
    return _FILE.match(value) is not None or bool(find_links(value))


def is_function_word(word: str) -> bool:
    return word in _FUNCTION_WORDS


def is_everyday_word(word: str) -> bool:
    return word in _EVERYDAY_WORDS


def normalise_value(text: str) -> str:
    """A value as it is compared: NFKC, case folded, single spaces, without the punctuation around it."""
    return " ".join(cut_atoms(text))


def fold_value(text: str) -> str:
    """A value with all of its marks: NFKC, case folded, single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).lower().split())


def cut_atoms(text: str) -> list[str]:
    folded = text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).lower()
    return [atom for part in folded.split() if (atom := part.strip(_ENDS))]


def cut_words(text: str) -> list[str]:
    folded = text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).lower()
    return _WORD.findall(folded)


@lru_cache(maxsize=20_000)
def stem_word(word: str) -> str:
    """A word without its ending, as far as a task and an act may differ in it."""
    for ending in ("ation", "ings", "ing", "ers", "er", "ied", "ies", "ed", "es", "s", "e", "y"):
        if word.endswith(ending) and len(word) - len(ending) >= _SHORTEST_STEM:
            return word[: -len(ending)]
    return word


def normalise_link(text: str) -> str:
    """A link without the scheme of a page and its closing slash; letters behind the host keep their case."""
    plain = unicodedata.normalize("NFKC", text).strip().strip(_ENDS)
    scheme, found, rest = plain.partition("://")
    if not found:
        scheme, rest = "", plain
    host, *path = _HOST_AND_PATH.split(rest, 1)
    kept = "" if scheme.lower() in _PAGE_SCHEMES else scheme.lower() + found
    return "".join((kept, host.lower(), *path)).rstrip("/")


def find_links(text: str) -> set[str]:
    """The links and addresses in a text; a file's name is none."""
    if "%" in text:
        text = _PERCENT.sub(lambda found: chr(int(found[1], 16)), text)
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    if _LINKED_MARK.search(text.replace("\u3002", ".")) is None:
        return set()
    found = [match[0] for match in _LINK.finditer(text.replace("\u3002", "."))]
    links = {(normalise_link(link), "://" in link) for link in found}
    return {link for link, whole in links if link and (whole or not _FILE.match(link))}


def normalise_number(value: Any) -> str | None:
    """A number in one spelling, or none."""
    if isinstance(value, bool):
        return None
    text = str(value).strip().replace("\u2019", "'").replace("'", "").replace(" ", "")
    if text.count(",") == 1 and "." not in text and len(text.rpartition(",")[2]) < _GROUP:
        text = text.replace(",", ".")
    if isinstance(value, str) and _UNCLEAR_NUMBER.match(text):
        return None
    try:
        number = Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None
    return format(number.normalize(), "f") if number.is_finite() and abs(number.adjusted()) < _LONGEST_NUMBER else None


def is_disguised(text: str) -> bool:
    """Whether a text has invisible characters, or a word that mixes alphabets."""
    if text.isascii():
        return not text.isprintable() and _CONTROL.search(text) is not None
    if any(unicodedata.category(mark) in ("Cf", "Co", "Cs", "Cn", "Cc") and mark not in "\t\n\r" for mark in text):
        return True
    if _UNSEEN.search(text):
        return True
    return any(_mixes(word) for word in _WORD.findall(unicodedata.normalize("NFKC", text)) if not word.isascii())


def _mixes(word: str) -> bool:
    scripts = {unicodedata.name(mark, "?").split(" ", 1)[0] for mark in word if mark.isalpha()}
    return len(scripts & {"LATIN", "CYRILLIC", "GREEK", "ARMENIAN", "CHEROKEE"}) > 1


def is_plain_detail(value: Any) -> bool:
    """A number, a date, a time or a few letters decide nothing."""
    return not isinstance(value, str) or _DETAIL.match(value.strip()) is not None


def is_prose(text: str) -> bool:
    """Plain words: nothing that can be clicked, copied, spelt out or decoded."""
    if "@" in text or "\\" in text or find_links(text) or _SPELT.search(text):
        return False
    words = cut_words(text)
    return 3 * sum(map(str.isdecimal, words)) <= len(words) + _DIGITS_OF_PROSE and all(
        len(word) <= (_LONGEST_WORD if word.isalpha() else _LONGEST_NUMBER_OF_PROSE if word.isdecimal() else 0)
        for word in words
    )


class TrustedText:
    """The index of trusted texts."""

    def __init__(self) -> None:
        self._phrases: set[str] = set()
        self._targets: set[str] = set()
        """The phrases that are more than the source of something: what is sent may go there."""
        self._quotations: set[str] = set()
        self._commands: set[str] = set()
        """What was quoted, word by word."""
        self._spelt: set[str] = set()
        """What was quoted, and what stood between spaces, with its marks."""
        self._verbatim: set[str] = set()
        self._marks: set[str] = set()
        """The marks between the words."""
        self._mixed: set[str] = set()
        """The words with capitals inside."""
        self._grams: set[str] = set()
        self._word_set: set[str] = set()
        """The stems of the words."""
        self._exact: set[str] = set()
        self._digits: set[str] = set()
        self._neighbours: dict[str, set[str]] = {}
        """The phrases that stand in one sentence with a number."""
        self._asking: dict[str, set[int]] = {}
        """The sentences that ask with a word."""
        self._figures: list[frozenset[str]] = []
        """The numbers of each sentence."""
        self._links: set[str] = set()

    def add(self, text: str) -> None:
        """Hear a text. What it forbids lends its words to contents, and names nothing."""
        index = _index_text if len(text) <= _LONGEST_SHARED else _index_text.__wrapped__
        raw, before = vars(index(text)), len(self._figures)
        for name in _SETS:
            getattr(self, name).update(raw[name])
        self._figures += raw["_figures"]
        for number, phrases in raw["_neighbours"].items():
            self._neighbours.setdefault(number, set()).update(phrases)
        for word, sentences in raw["_asking"].items():
            self._asking.setdefault(word, set()).update([before + sentence for sentence in sentences])

    def index(self, text: str) -> None:
        """Index a text, sentence by sentence."""
        named = strip_forbidden(text)
        for part in _QUOTED.findall(named):
            value = normalise_value(part)
            self._quotations.add(value)
            self._phrases.add(value)
            self._spelt.add(fold_value(part))
            self._verbatim.add(part.strip())
            self._commands.add("\n".join(part.split()))
            self._links |= find_links(part)
        spaced = _SENTENCE.sub(". ", named)
        self._links |= find_links(named) | find_links(spaced)
        plain = unicodedata.normalize("NFKC", text)
        self._verbatim.update(named.split())
        self._spelt.update(unicodedata.normalize("NFKC", named).lower().split())
        self._marks.update("".join(_GAP.findall(plain)))
        self._mixed.update(word for word in _WORD.findall(plain) if _is_mixed(word))
        for sentence in _STOP.split(named):
            self._add_sentence(sentence)
        self._add_words(text)
        aimed = strip_sources(named)
        self._targets.update(map(normalise_value, _QUOTED.findall(aimed)))
        for variant in {named, spaced}:
            self._grams.update(_cut_phrases(cut_atoms(variant)))
            self._phrases |= _find_names(variant)
        for variant in {aimed, _SENTENCE.sub(". ", aimed)}:
            self._targets |= _find_names(variant)

    def add_found(self, value: str) -> None:
        """Take in a value of a record that was named: its words may be told, and looked up; it asks for nothing."""
        self._links |= find_links(value)
        self._add_words(value)
        atoms = cut_atoms(value)
        if len(value) <= _LONGEST_QUOTE:
            self._phrases.add(" ".join(atoms))
        self._grams.update(_cut_phrases(atoms))

    def _add_words(self, text: str) -> None:
        for word in cut_words(text):
            if word.isdecimal():
                self._digits.add(word)
            else:
                self._exact.add(word)
                self._word_set.add(stem_word(word))
                self._digits.update(_MONTHS.get(word[:3], ()))
        self._digits.update(f"{int(day):02}" for day in _ORDINAL.findall(text))

    def _add_sentence(self, sentence: str) -> None:
        """Index what a sentence asks for, and its numbers with what stands beside them."""
        aside = _ASIDE.search(sentence)
        for word in cut_words(sentence[: aside.end()] if aside else sentence):
            self._asking.setdefault(stem_word(word), set()).add(len(self._figures))
        numbers = frozenset(filter(None, map(normalise_number, find_amounts(sentence))))
        self._figures.append(numbers)
        if numbers:
            phrases = set(_cut_phrases(cut_atoms(sentence)))
            for number in numbers:
                self._neighbours.setdefault(number, set()).update(phrases)

    def contains(self, text: str) -> bool:
        """Whether a value was said whole, as an entity or not."""
        atoms = cut_atoms(text)
        if len(atoms) <= _GRAM:
            phrase = " ".join(atoms)
            return phrase in self._phrases or phrase in self._grams
        return " ".join(atoms) in self._phrases or _consists(atoms, self._grams)

    def names(self, text: str, kind: str = "") -> bool:
        """Whether a value was said whole and as an entity; a short number must be said as an id."""
        return self.names_value(normalise_value(text), kind)

    def names_value(self, value: str, kind: str = "") -> bool:
        """As `names`, for a normalised value."""
        if not value or (kind == "address" and "@" not in value):
            return False
        if len(value) <= _SHORT_NUMBER and not any(mark.isalpha() for mark in value):
            marks = ("id", "nr", "no", "number", "#", kind)
            return f"#{value}" in self._grams or any(f"{mark} {value}" in self._grams for mark in marks if mark)
        if sum(map(str.isdigit, value)) < _EXACT.get(kind, 0):
            return value in self._quotations
        if value not in self._phrases and not (value.count(" ") >= _GRAM and self.contains(value)):
            return False
        addressed = kind == "recipient" and "@" in value
        if (kind not in _LINKED and not addressed and is_link(value)) or (
            kind in ("file", "name") and find_links(value)
        ):
            return False
        return _DATE.match(value) is None

    def names_target(self, value: str) -> bool:
        """Whether a normalised value that was named is more than the source of something."""
        return value in self._targets or value not in self._phrases

    def quotes_command(self, words: str) -> bool:
        """Whether the words of a command, one to a line, were quoted together, and in this order."""
        return words in self._commands

    def spells_out(self, text: str) -> bool:
        """Whether a value has no marks around its words, or was said with them: `build *` is not `build`."""
        spelt = fold_value(text)
        return spelt == normalise_value(text) or spelt in self._spelt

    def quotes_exactly(self, text: str) -> bool:
        """Whether a command was said letter by letter: in code a capital or a line break is another command."""
        return text.strip() in self._verbatim

    def count_joints(self, text: str) -> int:
        """How many pairs of neighbours of a text were not said beside each other."""
        atoms = cut_atoms(text)
        return sum(f"{one} {other}" not in self._grams for one, other in pairwise(atoms))

    def has_marks(self, text: str) -> bool:
        """Whether nothing is spelt between the words of a text, or with capitals inside of them."""
        plain = text if text.isascii() else unicodedata.normalize("NFKC", text)
        if not all(map(self._is_plain_gap, {*_GAP.findall(plain)} - _USUAL_GAPS)):
            return False
        if plain.isascii() and _INNER_CAPITAL.search(plain) is None:
            return True
        return not any(_is_mixed(word) and word not in self._mixed for word in _WORD.findall(plain))

    def _is_plain_gap(self, gap: str) -> bool:
        marks = "".join(gap.split())
        if len(marks) > _LONGEST_GAP or any(mark not in _PLAIN_MARKS and mark not in self._marks for mark in marks):
            return False
        spaces = _SPACES.findall(gap)
        return len(spaces) <= _MOST_SPACES and all(map(_PLAIN_SPACES.match, spaces))

    def is_loose(self, text: str, kind: str, *, final: bool) -> bool:
        """Whether a value was said, but too loosely to reach others with it: a title in place of a record's id.

        For what is final, a single plain word that was said without quotes is too little as well.
        """
        value = normalise_value(text)
        if kind in _BY_ID and not any(map(str.isdigit, value)):
            return True
        if not final:
            return False
        return value not in self._quotations and _is_plain(
            [word for word in value.split() if word not in _FUNCTION_WORDS]
        )

    def has_query(self, text: str) -> bool:
        """Whether a query consists of said words, and of more than function words."""
        return self.contains(text) and any(word not in _FUNCTION_WORDS for word in cut_words(text))

    def has_word(self, word: str) -> bool:
        return stem_word(word) in self._word_set

    def find_unsaid(self, words: Iterable[str]) -> list[str]:
        """The words that were not said with this ending."""
        return [word for word in words if word not in self._exact]

    def has_exact(self, word: str) -> bool:
        """Whether a word was said with this ending."""
        return word in self._exact

    def has_digits(self, digits: str) -> bool:
        return digits in self._digits

    def has_number(self, number: str, beside: Sequence[str] = ()) -> bool:
        """Whether a number was said, in one sentence with one of the values that must stand beside it."""
        phrases = self._neighbours.get(number)
        if phrases is None or not beside:
            return phrases is not None
        return any(_consists(cut_atoms(value), phrases) for value in beside)

    def find_asking(self, words: Iterable[str]) -> set[int]:
        """The sentences that ask with all of these words."""
        found = [self._asking.get(stem_word(word), set()) for word in words]
        return set[int]().union(*found[:1]).intersection(*found[1:])

    def find_requested_figures(self, sentences: Iterable[int]) -> frozenset[str] | None:
        """The numbers of these sentences; none at all if one of them names no number, and so leaves it open."""
        figures = [self._figures[sentence] for sentence in sentences]
        return frozenset[str]().union(*figures) if figures and all(figures) else None

    def has_link(self, link: str) -> bool:
        return link in self._links


_SETS: Final = tuple(name for name, value in vars(TrustedText()).items() if isinstance(value, set))


@lru_cache(maxsize=_MOST_SHARED)
def _index_text(text: str) -> TrustedText:
    """The index of one text alone. It is never changed: sessions that hear the same text take it from here."""
    said = TrustedText()
    said.index(text)
    return said


def _find_names(text: str) -> set[str]:
    """The names in a text: a part of a quoted name is none."""
    raw = [atom.strip(_ENDS) for atom in unicodedata.normalize("NFKC", _QUOTED.sub(_keep_word, text)).split()]
    atoms = [(atom.lower(), _is_entity(atom), atom[:1].isupper() or atom.isdecimal()) for atom in raw if atom]
    found: set[str] = set()
    for start, (word, entity, _) in enumerate(atoms):
        if entity:
            found.update((word, word.removesuffix("'s").removesuffix("\u2019s")))
        if entity or word == "the":
            found.update(_cut_names(atoms[start : start + _GRAM]))
    return found


def _cut_phrases(atoms: Sequence[str]) -> Iterator[str]:
    """The phrases of a text up to the longest that is indexed."""
    for size in range(1, _GRAM + 1):
        yield from (" ".join(atoms[start : start + size]) for start in range(len(atoms) - size + 1))


def _consists(atoms: Sequence[str], phrases: Container[str]) -> bool:
    """Whether a value consists of indexed phrases."""
    size = min(len(atoms), _GRAM)
    return size > 0 and all(" ".join(atoms[start : start + size]) in phrases for start in range(len(atoms) - size + 1))


def _cut_names(atoms: Sequence[tuple[str, bool, bool]]) -> Iterator[str]:
    """The names of several words at the start of these: capitals, numbers, and small words between them."""
    for end, (word, entity, capital) in enumerate(atoms[1:], 2):
        if is_link(word) or not (capital or entity or word in _CONNECTORS):
            return
        if entity or (capital and word not in _FUNCTION_WORDS):
            yield " ".join(part for part, _, _ in atoms[:end])


def _is_mixed(word: str) -> bool:
    return not word[1:].islower() and not word[1:].isupper() and word[1:].upper() != word[1:].lower()


def _is_plain(words: Sequence[str]) -> bool:
    return not words or (len(words) == 1 and words[0].isalpha())


def _keep_word(quoted: re.Match[str]) -> str:
    return quoted[0] if len(quoted[1].split()) == 1 else " … "


def _is_entity(atom: str) -> bool:
    """A name, a number or an address, rather than a word that happens to occur."""
    folded = atom.lower()
    if (
        _COUNTED.match(folded)
        or folded.endswith(("n't", "n\u2019t"))
        or re.split("['\u2019]", folded)[0] in _FUNCTION_WORDS
    ):
        return False
    if folded in _COMMON or folded in _FUNCTION_WORDS or folded in _CALENDAR:
        return False
    return (not atom.isalpha() and atom.strip("-'\u2019").isalpha() is False) or atom[:1].isupper()
