"""The index of trusted text: whole values with boundaries, words and numbers.

A value is compared after NFKC and case folding. An entity is a name, a number, an address or a quotation; a word that
merely occurs is not. Look-ups use sets, so no call searches the history.
"""

import re
import unicodedata
from collections.abc import Container, Iterable, Iterator, Sequence
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

from halter.core.text import make_word_set
from halter.provenance.sentences import find_amounts, strip_forbidden, strip_sources

_GRAM: Final = 4
"""Longest phrase that is indexed whole, in words. A longer one must consist of indexed phrases."""

_MAX_CACHED_TEXTS: Final = 32
"""Number of texts whose index is cached: all sessions of an agent begin with the same instructions."""
_MAX_CACHED_LENGTH: Final = 20_000

_MIN_STEM_LENGTH: Final = 3
_GROUP: Final = 3
_MAX_NUMBER_DIGITS: Final = 30
_MAX_QUOTE_LENGTH: Final = 200
_SHORT_NUMBER: Final = 6
_DIGITS_OF_PROSE: Final = 4
_MAX_WORD_LENGTH: Final = 24
_MAX_PROSE_NUMBER_LENGTH: Final = 4
_SPELT: Final = re.compile(r"(?:(?<![^\W_])[^\W_][\W_]+){4}")
"""Four single letters or digits in a row: a spelt-out value."""

_ENDS: Final = ".,;:!?'\"`()[]{}<>«»“”„\u2018\u2019…|*"
_QUOTED: Final = re.compile(r"(?<!\w)['\"“„«\u2018`]([^'\"“”„«»\u2018\u2019`\n]{1,200})['\"”“»\u2019`](?!\w)")
_LINK: Final = re.compile(
    r"[a-z][a-z0-9+.-]{1,12}://[^\s<>\"'`()\[\]{}|\\^]+|(?<![\w.+%-])[\w.+%-]+@[\w-]+(?:\.[\w-]+)+"
    r"|(?<![\w@.-])(?:(?:[\w-]+\.)+(?:xn--[a-z0-9-]{2,59}|[^\W\d_]{2,18})(?![\w@-])(?::\d+)?|(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?(?=[/?#]))(?:[/?#][^\s<>\"'`()\[\]{}|\\^]*)?",
    re.IGNORECASE,
)
_LINKED_MARK: Final = re.compile(r"[\w-]\.[^\W\d_]|\.\d{1,3}(?::\d+)?[/?#]|://|@")
"""Marks of which every link has at least one."""

_PERCENT: Final = re.compile(r"%(2e|2f|3a|40)", re.IGNORECASE)
"""A percent-encoded dot, slash, colon or at sign."""

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
"""Words after which a sentence requests nothing: it forbids, reminds, or tells what the person will do."""

_DATE: Final = re.compile(r"^[\d\s:./-]*\d{1,4}[:./-]\d{1,2}(?:[:./-][\d\s:./-]*)?$")
_SENTENCE: Final = re.compile(r"\.(?=[A-Z][a-z])")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_UNSEEN: Final = re.compile("[\u034f\u115f\u1160\u180b-\u180f\u2800\u3164\ufe00-\ufe0e\uffa0\U000e0100-\U000e01ef]")
"""Invisible marks without a category of their own: variation selectors and fillers."""

_WORD: Final = re.compile(r"[^\W_]+")
_GAP: Final = re.compile(r"[\W_]+")
_USUAL_GAPS: Final = frozenset((" ", ", ", ". ", "."))
_INNER_CAPITAL: Final = re.compile(r"(?<=[A-Za-z0-9])[A-Z]")
_SPACES: Final = re.compile(r"\s+")
_PLAIN_SPACES: Final = re.compile(r"^(?: {1,2}|(?:\r?\n){1,3} {0,8})$")
_PLAIN_MARKS: Final = frozenset(".,;:!?'\"`()[]{}<>«»“”„\u2018\u2019…|*/\\-\u2013—_#@&+=%$€£•~")
_MAX_GAP_MARKS: Final = 6
_MAX_SPACES: Final = 3
"""Maximum number of spaces between two words. More spaces could spell something, such as Morse code."""

_UNCLEAR_NUMBER: Final = re.compile(r"^[+-]?(?:\d*,(?!\d{3}(?:\D|$)).*|\d{1,3}\.0{3})$")
"""Ambiguous numbers, such as `1,0000` and `1.000`: one tool reads one, another a thousand."""

_COUNTED: Final = re.compile(r"^[\d.,:/-]{1,5}(?:st|nd|rd|th|am|pm|h|%|k|m|kg|km|min|day|days|hour|hours|-hour|x)?$")
"""Numbers that count something, rather than name a thing."""

_ORDINAL: Final = re.compile(r"(?<!\w)(\d{1,2})(?:st|nd|rd|th)?(?!\w)")
_MONTHS: Final = {
    name: (f"{number:02}",)
    for number, name in enumerate(
        ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"], 1
    )
}
_CALENDAR: Final = make_word_set(
    "january february march april may june july august september october november december monday tuesday wednesday "
    "thursday friday saturday sunday"
)
_DETAIL: Final = re.compile(
    r"^(?:[+-]?\d{1,12}(?:[.,]\d{1,4})?%?"
    r"|\d{4}-\d{2}(?:-\d{2})?(?:[T ]\d{2}:\d{2}(?::\d{2})?(?:\.\d+)?(?:Z|[+-]\d{2}:?\d{2})?)?"
    r"|\d{1,2}:\d{2}(?::\d{2})?|\d{1,2}[./]\d{1,2}[./]\d{2,4}|[A-Za-z]{1,4})$"
)
_FUNCTION_WORDS: Final = make_word_set(
    "a about above after again all also am an and any are as at be because been before being below best between "
    "both but by can cannot could d dear did do does doing done down during each else even every few first "
    "following for from further get had has have having he hello her here hers hi him his how i if in into is it "
    "its just last least less let like ll m many may me might more most much must my nd near next no nor not now of "
    "off ok on once one only or other our out over own per please rd re regarding regards s same see seen shall she "
    "should since so some st still such t th than thank thanks that the their them then there these they this those "
    "through to today tomorrow too two until up us ve very via was we were what when where which while who whom why "
    "will with within would yes yet you your yours"
)
_EVERYDAY_WORDS: Final = make_word_set(
    "afternoon appointment arrival arrive arrives booking break breakfast brunch call coffee daily day days departure "
    "depart departs dinner drive enjoy evening event flight fly holiday home hotel hour hours journey leave lunch meal "
    "meet meeting minutes monthly morning night nights noon office plan plans reminder reservation restaurant return "
    "room stay talk ticket time travel trip vacation visit walk week weekend weekly"
)
"""Words of plans and calendars."""

_COMMON: Final = make_word_set(
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
"""Minimum number of digits of a value by kind; a value with fewer must be quoted."""

_CONNECTORS: Final = make_word_set(
    "and at by da de del della den der des di do du el for in la las le les los of on the und van von y zu"
)
"""Small words inside a name."""

_LINKED: Final = ("", "url", "address", "file", "name")
"""Kinds whose values may be links, addresses or file names."""


def is_link(value: str) -> bool:
    return _FILE.match(value) is not None or bool(find_links(value))


def is_function_word(word: str) -> bool:
    return word in _FUNCTION_WORDS


def is_everyday_word(word: str) -> bool:
    return word in _EVERYDAY_WORDS


def normalise_value(text: str) -> str:
    """Normalise a value for comparison: NFKC, case folded, single spaces, no punctuation around words."""
    return " ".join(cut_atoms(text))


def fold_value(text: str) -> str:
    """Normalise a value but keep its marks: NFKC, case folded, single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).lower().split())


def cut_atoms(text: str) -> list[str]:
    folded_text = text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).lower()
    return [atom for part in folded_text.split() if (atom := part.strip(_ENDS))]


def cut_words(text: str) -> list[str]:
    folded_text = text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).lower()
    return _WORD.findall(folded_text)


@lru_cache(maxsize=20_000)
def stem_word(word: str) -> str:
    """Remove the ending of a word, which may differ between a task and an act."""
    for ending in ("ation", "ings", "ing", "ers", "er", "ied", "ies", "ed", "es", "s", "e", "y"):
        if word.endswith(ending) and len(word) - len(ending) >= _MIN_STEM_LENGTH:
            return word[: -len(ending)]
    return word


def normalise_link(text: str) -> str:
    """Normalise a link: no http scheme, no closing slash, a lower-case host; the path keeps its case."""
    link = unicodedata.normalize("NFKC", text).strip().strip(_ENDS)
    scheme, separator, remainder = link.partition("://")
    if not separator:
        scheme, remainder = "", link
    host, *path = _HOST_AND_PATH.split(remainder, 1)
    link_scheme = "" if scheme.lower() in _PAGE_SCHEMES else scheme.lower() + separator
    return "".join((link_scheme, host.lower(), *path)).rstrip("/")


def find_links(text: str) -> set[str]:
    """Find the links and addresses in a text; a file name is not a link."""
    if "%" in text:
        text = _PERCENT.sub(lambda match: chr(int(match[1], 16)), text)
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    if _LINKED_MARK.search(text.replace("\u3002", ".")) is None:
        return set()
    candidates = [match[0] for match in _LINK.finditer(text.replace("\u3002", "."))]
    links = {(normalise_link(link), "://" in link) for link in candidates}
    return {link for link, has_scheme in links if link and (has_scheme or not _FILE.match(link))}


def normalise_number(value: Any) -> str | None:
    """Normalise a number to one spelling; None if it is ambiguous or not a number."""
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
    return (
        format(number.normalize(), "f") if number.is_finite() and abs(number.adjusted()) < _MAX_NUMBER_DIGITS else None
    )


def is_disguised(text: str) -> bool:
    """Return whether a text has invisible characters, or a word that mixes alphabets."""
    if text.isascii():
        return not text.isprintable() and _CONTROL.search(text) is not None
    if any(
        unicodedata.category(character) in ("Cf", "Co", "Cs", "Cn", "Cc") and character not in "\t\n\r"
        for character in text
    ):
        return True
    if _UNSEEN.search(text):
        return True
    return any(_mixes(word) for word in _WORD.findall(unicodedata.normalize("NFKC", text)) if not word.isascii())


def _mixes(word: str) -> bool:
    scripts = {unicodedata.name(character, "?").split(" ", 1)[0] for character in word if character.isalpha()}
    return len(scripts & {"LATIN", "CYRILLIC", "GREEK", "ARMENIAN", "CHEROKEE"}) > 1


def is_plain_detail(value: Any) -> bool:
    """Return whether a detail is a number, a date, a time or a few letters, and so decides nothing."""
    return not isinstance(value, str) or _DETAIL.match(value.strip()) is not None


def is_prose(text: str) -> bool:
    """Return whether a text is plain words, with nothing that can be clicked, spelt out or decoded."""
    if "@" in text or "\\" in text or find_links(text) or _SPELT.search(text):
        return False
    words = cut_words(text)
    return 3 * sum(map(str.isdecimal, words)) <= len(words) + _DIGITS_OF_PROSE and all(
        len(word) <= (_MAX_WORD_LENGTH if word.isalpha() else _MAX_PROSE_NUMBER_LENGTH if word.isdecimal() else 0)
        for word in words
    )


class TrustedText:
    """The index of all trusted texts of a session."""

    def __init__(self) -> None:
        self._phrases: set[str] = set()
        self._targets: set[str] = set()
        """Phrases that trusted text names as more than a source: they may be recipients."""
        self._quotations: set[str] = set()
        self._commands: set[str] = set()
        """Quotations, one word per line."""
        self._spelt: set[str] = set()
        """Quotations, and texts between spaces, with their marks."""
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
        """The phrases in one sentence with a number, by number."""
        self._asking: dict[str, set[int]] = {}
        """The numbers of the requesting sentences, by word."""
        self._figures: list[frozenset[str]] = []
        """The numbers of each sentence."""
        self._links: set[str] = set()

    def add(self, text: str) -> None:
        """Add a text. Its forbidden parts add words, but no names."""
        index = _index_text if len(text) <= _MAX_CACHED_LENGTH else _index_text.__wrapped__
        raw, sentence_count = vars(index(text)), len(self._figures)
        for name in _SETS:
            getattr(self, name).update(raw[name])
        self._figures += raw["_figures"]
        for number, phrases in raw["_neighbours"].items():
            self._neighbours.setdefault(number, set()).update(phrases)
        for word, sentences in raw["_asking"].items():
            self._asking.setdefault(word, set()).update([sentence_count + sentence for sentence in sentences])

    def index(self, text: str) -> None:
        """Index a text, sentence by sentence."""
        allowed_text = strip_forbidden(text)
        for quotation in _QUOTED.findall(allowed_text):
            value = normalise_value(quotation)
            self._quotations.add(value)
            self._phrases.add(value)
            self._spelt.add(fold_value(quotation))
            self._verbatim.add(quotation.strip())
            self._commands.add("\n".join(quotation.split()))
            self._links |= find_links(quotation)
        split_text = _SENTENCE.sub(". ", allowed_text)
        self._links |= find_links(allowed_text) | find_links(split_text)
        normalised_text = unicodedata.normalize("NFKC", text)
        self._verbatim.update(allowed_text.split())
        self._spelt.update(unicodedata.normalize("NFKC", allowed_text).lower().split())
        self._marks.update("".join(_GAP.findall(normalised_text)))
        self._mixed.update(word for word in _WORD.findall(normalised_text) if _is_mixed(word))
        for sentence in _STOP.split(allowed_text):
            self._add_sentence(sentence)
        self._add_words(text)
        aimed_text = strip_sources(allowed_text)
        self._targets.update(map(normalise_value, _QUOTED.findall(aimed_text)))
        for variant in {allowed_text, split_text}:
            self._grams.update(_cut_phrases(cut_atoms(variant)))
            self._phrases |= _find_names(variant)
        for variant in {aimed_text, _SENTENCE.sub(". ", aimed_text)}:
            self._targets |= _find_names(variant)

    def add_record_value(self, value: str) -> None:
        """Add a value of a named record. Its words become trusted, but it requests nothing."""
        self._links |= find_links(value)
        self._add_words(value)
        atoms = cut_atoms(value)
        if len(value) <= _MAX_QUOTE_LENGTH:
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
        """Index the words with which a sentence requests something, and its numbers with the phrases around them."""
        aside_match = _ASIDE.search(sentence)
        for word in cut_words(sentence[: aside_match.end()] if aside_match else sentence):
            self._asking.setdefault(stem_word(word), set()).add(len(self._figures))
        numbers = frozenset(filter(None, map(normalise_number, find_amounts(sentence))))
        self._figures.append(numbers)
        if numbers:
            phrases = set(_cut_phrases(cut_atoms(sentence)))
            for number in numbers:
                self._neighbours.setdefault(number, set()).update(phrases)

    def contains(self, text: str) -> bool:
        """Return whether trusted text contains the whole value, as an entity or not."""
        atoms = cut_atoms(text)
        if len(atoms) <= _GRAM:
            phrase = " ".join(atoms)
            return phrase in self._phrases or phrase in self._grams
        return " ".join(atoms) in self._phrases or _consists(atoms, self._grams)

    def names(self, text: str, kind: str = "") -> bool:
        """Return whether trusted text contains the whole value as an entity; a short number must be an id there."""
        return self.names_value(normalise_value(text), kind)

    def names_value(self, value: str, kind: str = "") -> bool:
        """Do the same as `names`, for a normalised value."""
        if not value or (kind == "address" and "@" not in value):
            return False
        if len(value) <= _SHORT_NUMBER and not any(mark.isalpha() for mark in value):
            marks = ("id", "nr", "no", "number", "#", kind)
            return f"#{value}" in self._grams or any(f"{mark} {value}" in self._grams for mark in marks if mark)
        if sum(map(str.isdigit, value)) < _EXACT.get(kind, 0):
            return value in self._quotations
        if value not in self._phrases and not (value.count(" ") >= _GRAM and self.contains(value)):
            return False
        is_recipient_address = kind == "recipient" and "@" in value
        if (kind not in _LINKED and not is_recipient_address and is_link(value)) or (
            kind in ("file", "name") and find_links(value)
        ):
            return False
        return _DATE.match(value) is None

    def names_target(self, value: str) -> bool:
        """Return whether trusted text names a normalised value as more than a source."""
        return value in self._targets or value not in self._phrases

    def quotes_command(self, words: str) -> bool:
        """Return whether trusted text quotes the words of a command, one per line, together and in this order."""
        return words in self._commands

    def spells_out(self, text: str) -> bool:
        """Return whether a value has no marks around its words, or trusted text has them: `build *` is not `build`."""
        spelling = fold_value(text)
        return spelling == normalise_value(text) or spelling in self._spelt

    def quotes_exactly(self, text: str) -> bool:
        """Return whether trusted text has a command letter by letter: a capital or line break makes another command."""
        return text.strip() in self._verbatim

    def count_joints(self, text: str) -> int:
        """Count the pairs of neighbouring words that are not neighbours in trusted text."""
        atoms = cut_atoms(text)
        return sum(f"{first} {second}" not in self._grams for first, second in pairwise(atoms))

    def has_marks(self, text: str) -> bool:
        """Return whether the marks between words, and the capitals inside them, can spell nothing."""
        normalised_text = text if text.isascii() else unicodedata.normalize("NFKC", text)
        if not all(map(self._is_plain_gap, {*_GAP.findall(normalised_text)} - _USUAL_GAPS)):
            return False
        if normalised_text.isascii() and _INNER_CAPITAL.search(normalised_text) is None:
            return True
        return not any(_is_mixed(word) and word not in self._mixed for word in _WORD.findall(normalised_text))

    def _is_plain_gap(self, gap: str) -> bool:
        marks = "".join(gap.split())
        if len(marks) > _MAX_GAP_MARKS or any(mark not in _PLAIN_MARKS and mark not in self._marks for mark in marks):
            return False
        spaces = _SPACES.findall(gap)
        return len(spaces) <= _MAX_SPACES and all(map(_PLAIN_SPACES.match, spaces))

    def is_loose(self, text: str, kind: str, *, final: bool) -> bool:
        """Return whether trusted text names a value too loosely for an effect on others: a title instead of an id.

        For a final effect, a single plain word without quotes is too loose as well.
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
        """Return whether a query consists of trusted words, and of more than function words."""
        return self.contains(text) and any(word not in _FUNCTION_WORDS for word in cut_words(text))

    def has_word(self, word: str) -> bool:
        return stem_word(word) in self._word_set

    def find_unsaid(self, words: Iterable[str]) -> list[str]:
        """List the words that trusted text does not have with this ending."""
        return [word for word in words if word not in self._exact]

    def has_exact(self, word: str) -> bool:
        """Return whether trusted text has a word with this ending."""
        return word in self._exact

    def has_digits(self, digits: str) -> bool:
        return digits in self._digits

    def has_number(self, number: str, near_values: Sequence[str] = ()) -> bool:
        """Return whether trusted text has a number; with `near_values`, in one sentence with one of them."""
        phrases = self._neighbours.get(number)
        if phrases is None or not near_values:
            return phrases is not None
        return any(_consists(cut_atoms(value), phrases) for value in near_values)

    def find_asking(self, words: Iterable[str]) -> set[int]:
        """Find the sentences that request something with all of these words."""
        sentences_by_word = [self._asking.get(stem_word(word), set()) for word in words]
        return set[int]().union(*sentences_by_word[:1]).intersection(*sentences_by_word[1:])

    def find_requested_figures(self, sentences: Iterable[int]) -> frozenset[str] | None:
        """Find the numbers of these sentences; None if one of them has no number."""
        figures = [self._figures[sentence] for sentence in sentences]
        return frozenset[str]().union(*figures) if figures and all(figures) else None

    def has_link(self, link: str) -> bool:
        return link in self._links


_SETS: Final = tuple(name for name, value in vars(TrustedText()).items() if isinstance(value, set))


@lru_cache(maxsize=_MAX_CACHED_TEXTS)
def _index_text(text: str) -> TrustedText:
    """Index one text. Sessions with the same text share the result, so it must not be changed."""
    trusted_text = TrustedText()
    trusted_text.index(text)
    return trusted_text


def _find_names(text: str) -> set[str]:
    """Find the names in a text; a part of a quoted name is not a name."""
    raw = [atom.strip(_ENDS) for atom in unicodedata.normalize("NFKC", _QUOTED.sub(_replace_phrase, text)).split()]
    atoms = [(atom.lower(), _is_entity(atom), atom[:1].isupper() or atom.isdecimal()) for atom in raw if atom]
    names: set[str] = set()
    for start, (word, entity, _) in enumerate(atoms):
        if entity:
            names.update((word, word.removesuffix("'s").removesuffix("\u2019s")))
        if entity or word == "the":
            names.update(_cut_names(atoms[start : start + _GRAM]))
    return names


def _cut_phrases(atoms: Sequence[str]) -> Iterator[str]:
    """Yield the phrases of a text, up to the longest indexed length."""
    for size in range(1, _GRAM + 1):
        yield from (" ".join(atoms[start : start + size]) for start in range(len(atoms) - size + 1))


def _consists(atoms: Sequence[str], phrases: Container[str]) -> bool:
    """Return whether a value consists of indexed phrases."""
    size = min(len(atoms), _GRAM)
    return size > 0 and all(" ".join(atoms[start : start + size]) in phrases for start in range(len(atoms) - size + 1))


def _cut_names(atoms: Sequence[tuple[str, bool, bool]]) -> Iterator[str]:
    """Yield the names of several words at the start: capitals, numbers, and small words between them."""
    for end, (word, entity, capital) in enumerate(atoms[1:], 2):
        if is_link(word) or not (capital or entity or word in _CONNECTORS):
            return
        if entity or (capital and word not in _FUNCTION_WORDS):
            yield " ".join(part for part, _, _ in atoms[:end])


def _is_mixed(word: str) -> bool:
    return not word[1:].islower() and not word[1:].isupper() and word[1:].upper() != word[1:].lower()


def _is_plain(words: Sequence[str]) -> bool:
    return not words or (len(words) == 1 and words[0].isalpha())


def _replace_phrase(match: re.Match[str]) -> str:
    return match[0] if len(match[1].split()) == 1 else " … "


def _is_entity(atom: str) -> bool:
    """Return whether a word is a name, a number or an address, rather than a word that merely occurs."""
    folded_atom = atom.lower()
    if (
        _COUNTED.match(folded_atom)
        or folded_atom.endswith(("n't", "n\u2019t"))
        or re.split("['\u2019]", folded_atom)[0] in _FUNCTION_WORDS
    ):
        return False
    if folded_atom in _COMMON or folded_atom in _FUNCTION_WORDS or folded_atom in _CALENDAR:
        return False
    return (not atom.isalpha() and atom.strip("-'\u2019").isalpha() is False) or atom[:1].isupper()
