"""Parses schedules in plain English by exact grammars: a recurrence or a moment, and an imperative.

The time phrase is at the beginning or the end of the sentence, or after `remind me`; the rest must be an imperative. A
recurrence that is not exact (`every now and then`) is answered with a sentence. A time that may belong to an inner
clause ("write a script that checks the site every minute") is not used for the schedule.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from halter.core.schedules import Timing
from halter.front_door.time_grammar import read_timing


def _imperative_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_VERBS: Final = _imperative_words(
    """
    add adjust aggregate alert analyse analyze announce answer append apply archive arrange ask assess assign audit
    back backup balance begin book brew brief bring build buy calculate call capture change charge chase check clean
    clear close collate collect compare compile compose compress compute confirm congratulate connect cook copy count
    crawl create crosscheck curate delete deliver deploy describe detect digest display do double-check download draft
    drop dump e-mail email empty encourage end enrich ensure enter entertain escalate estimate evaluate examine
    execute explain export extract feed fetch file fill find finish fire fix flag follow forecast format forward
    generate get give go grab grade greet group hand have help highlight import improve index inform inspect
    investigate invite invoice keep kill label launch let list listen load locate lock log look mail make mark measure
    merge message migrate monitor motivate move note notify nudge open order organise organize outline paraphrase pay
    pick ping plan plant play plot poll post praise predict prepare print probe proceed process produce proofread
    propose provide prune publish pull purge push put query quiz rank rate re-run read rebalance reboot rebuild
    recalculate recap recommend reconcile record redo refresh reindex reload remind remove rename renew repeat reply
    report request rerun research reset respond restart restock restore retrieve retry return review rewrite rotate
    route run sample save say scan schedule score scrape scrub search see select sell send set share shuffle shut
    simulate sing sort spawn speak start store submit subscribe suggest summarise summarize surprise sweep switch sync
    synchronise synchronize tabulate tag take talk teach tell test text thank think tidy total track train transcribe
    transfer translate trigger turn tweak tweet unlock update upgrade upload use vacuum validate verify visit wake
    warn wash watch water weigh wipe wish work write
    """
)
_FINITE: Final = _imperative_words(
    """
    am is are was were be been being has had does did will would shall should must may might can could cannot can't
    won't isn't aren't starts started ends ended begins began happens happened goes went comes came takes took runs
    ran arrives arrived opens opened closes closed works worked fails failed occurs occurred fires fired needs
    needed means meets met sits finishes finished wakes woke sleeps due gets got
    """
)
_NEGATIONS: Final = _imperative_words(
    """
    not never don't dont doesn't didn't won't cannot can't couldn't shouldn't wouldn't mustn't no-longer neither nor
    nobody nothing
    """
)
"""Words that negate an imperative."""
_PAST: Final = _imperative_words(
    "yesterday ago earlier previously formerly was were had did happened occurred failed crashed last past previous"
)
_DESCRIBING: Final = _imperative_words(
    """
    analyse analyze assess audit compare describe evaluate examine explain extract find inspect investigate list
    outline paraphrase plot query rank read recap research retrieve review rewrite search show summarise summarize
    tabulate transcribe translate
    """
)
"""Verbs whose time may belong to their object: `summarise the outage at 14:00`."""
_SPEAKING: Final = _imperative_words(
    "say repeat spell pronounce translate define type echo quote print read write explain describe"
)
_MENTIONED: Final = _imperative_words(
    """
    word words phrase term title name called named spelled letters text string sentence caption label heading
    expression keyword line me adverb adjective
    """
)
"""Words after which a time is only mentioned: `write the word hourly`."""
_SUBJECTS: Final = _imperative_words("you i we they he she")
"""Subjects after the verb of a question: `do you check the mail every day`."""
_CLAUSES: Final = _imperative_words(
    """
    that which who whom whose why how what where when while because since if whether although unless until saying
    says said stating explaining describing titled called named i we they he she i'm i'll we'll we're they'll
    it's he'll
    """
)
_LOOKING: Final = _imperative_words(
    "check verify ensure confirm monitor see watch tell let show remind report look make"
)
"""First words whose clause is evaluated at the time: `check if the site is up every hour`."""
_LEADING: Final = _imperative_words(
    "for from until till by before after since of about to than between around with in on at not the a an"
)
"""Words to which a time after them belongs: `by tomorrow at 9` is a deadline."""
_PENDING: Final = _imperative_words(
    "pending upcoming outstanding trending missing existing remaining incoming outgoing failing meeting"
)
_ABOUT_DOING: Final = re.compile(r"\babout (\w+ing)\b")
_ARRANGING: Final = _imperative_words(
    """
    arrange book schedule reserve plan organise organize put add move find search invite set explain describe
    """
)
"""Verbs that prepare something for a time, rather than act at that time."""
_EVENTS: Final = _imperative_words(
    """
    meeting appointment call flight dinner lunch breakfast party event session interview deadline conference class
    game match train concert film movie show webinar date demo outage incident incidents error errors alert alerts
    deploy deploys deployment release rollback crash crashes failure failures spike spikes peak dip surge drop log
    logs entry entries event events standup stand-up sync review talk launch launches backup backups build builds
    run runs job jobs restart reboot upgrade migration maintenance window shift slot transaction transactions payment
    order orders login logins request requests commit commits snapshot reading readings measurement temperature
    price prices value values state traffic attack exam race sunset sunrise storm earthquake broadcast episode photo
    picture video recording screenshot record records timestamp quote candle trade trades bug issue ticket tickets
    problem problems downtime breach change changes anomaly anomalies warning warnings exception exceptions
    """
)
"""Things that have their own time: `write to Bob about the meeting tomorrow at 9`."""
_POLITE: Final = re.compile(
    r"(?:(?:hey|hi|hello|ok|okay|so|now|then|and|also|but|well|please|pls|plz|kindly|just)(?: there)?[,!.:]*\s+"
    r"|(?:can|could|would|will) you[,]?\s+|would you mind\s+|i(?: want|'d like| would like| need) you to\s+"
    r"|you (?:should|must|have to|need to)\s+|(?:be sure|make sure|remember|don't forget) to\s+|from now on[,:]?\s+"
    r"|go ahead and\s+|i(?: want|'d like| would like) to be reminded\s+(?=to|of|about))",
    re.IGNORECASE,
)
_THANKS: Final = re.compile(
    r"(?:[\s,;:.!?\u2026-]+(?:please|pls|plz|thanks|thank you|thx))?[\s,;:.!?\u2026-]*$", re.IGNORECASE
)
_QUESTION: Final = re.compile(
    r"[?\uff1f][\s,;:.!?)\"'\u2026\u200b-]*(?:please|pls|plz|thanks|thank you|thx)?[\s,;:.!?)\"'\u2026\u200b-]*$",
    re.IGNORECASE,
)
_REQUEST: Final = re.compile(r"(?:can|could|would|will) you\b", re.IGNORECASE)
_SUPPOSED: Final = re.compile(r"would you\b.{0,300}\bif (?:i|we|you|he|she|it|they)\b", re.IGNORECASE)
_INVISIBLE: Final = "".join(
    chr(code)
    for code in (
        *range(0x21),
        *range(0x7F, 0xA1),
        0xAD,
        0x180E,
        *range(0x2000, 0x2010),
        *range(0x2028, 0x2030),
        *range(0x205F, 0x2070),
        0x3000,
        0xFEFF,
    )
)
_MAX_POLITENESS: Final = 200
"""Maximum characters of politeness that are removed."""


def trim_message(text: str) -> str:
    """Remove line ends, spaces and invisible characters around a message."""
    return text.strip(_INVISIBLE)


def is_negated(words: Sequence[str]) -> bool:
    return any(word in _NEGATIONS or word.endswith("n't") for word in words)


def strip_politeness(text: str) -> str:
    position = 0
    while position < _MAX_POLITENESS and (match := _POLITE.match(text, position)):
        position = match.end()
    return text[position:]


def strip_thanks(text: str) -> str:
    tail = text[-_MAX_POLITENESS:]
    return text[: len(text) - len(tail)] + _THANKS.sub("", tail)


def is_question(text: str) -> bool:
    """Return true for a question, but not for a request in the form of one, as in `could you …?`."""
    if _QUESTION.search(text[-_MAX_POLITENESS:]) is None:
        return False
    return _REQUEST.search(text[:_MAX_POLITENESS]) is None or _SUPPOSED.search(text[: 2 * _MAX_POLITENESS]) is not None


def is_imperative(words: Sequence[str]) -> bool:
    """Return true if words begin with an imperative: a verb without a subject."""
    if words and words[0].startswith("@"):
        words = words[1:]
    if not words or words[0] not in _VERBS:
        return False
    return len(words) == 1 or words[1] not in _FINITE | _SUBJECTS | _NEGATIONS


def verb_owns_time(words: list[str], *, once: bool) -> bool:
    """Return true if a time at the end belongs to the verb at the beginning."""
    if not words:
        return False
    if words[-1] in _LEADING | _FINITE or any(word.endswith(":") for word in words) or is_negated(words):
        return False
    if (words[-1] in _MENTIONED and words[0] in _SPEAKING) or (len(words) == 1 and words[0] in _SPEAKING):
        return False
    if once and (words[0] in _DESCRIBING or not _PAST.isdisjoint(words)):
        return False
    if once and (words[0] in _ARRANGING or (words[-1] in _EVENTS and words[0] != "remind")):
        return False
    if (gerund := _ABOUT_DOING.search(" ".join(words))) and gerund[1] not in _PENDING:
        return False
    if not any(word.rstrip(",") in _CLAUSES for word in words[1:]):
        return True
    is_looking = words[:2] == ["make", "sure"] if words[0] == "make" else words[0] in _LOOKING
    return is_looking and words[-1] not in _VERBS and (not once or words[0] == "remind")


MAX_CHARACTERS: Final = 500
"""Number of characters that are read from either end."""
MAX_WORDS: Final = 16
"""Maximum words of a phrase."""

_MAX_NEGATION_WORDS: Final = 4
"""Number of words of a prompt that are checked for a negation; later words may say what not to do."""
_WORD: Final = re.compile(r"\S+")
_SINGLE: Final = re.compile(r"(?:^|\s)'[^']*$")
_QUOTES: Final = (("\u201c", "\u201d"), ("\u201e", "\u201c"), ("\u00ab", "\u00bb"), ("\u2039", "\u203a"), ("(", ")"))
_QUALIFIED: Final = re.compile(
    r"(?:between|from|until|till|except|starting|beginning|unless|but not|around|before|after|roughly|approximately"
    r"|for (?:the next )?\d+)\b"
)
_OFTEN: Final = re.compile(r"(?:hourly|daily|nightly|weekly|fortnightly|monthly|quarterly|yearly|annual)")
_VAGUE_DAY: Final = re.compile(
    r"(?:every|each) (?:\S+ ){0,2}(?:day|week|month|year|moon|holiday|season|christmas|easter|shift)"
)
_TASK_HINT: Final = "Write the task itself, without the word schedule: every monday at 9, write the report."
_SEVERAL_TIMES: Final = "The message contains more than one time. Send them one by one."
_QUALIFIER: Final = (
    "The limit of that recurrence is not exact. Give only the recurrence, like every weekday at 9, "
    "or write a cron in agent.yaml."
)


class ScheduleRequest(msgspec.Struct, frozen=True):
    """A timing, the imperative without the time, and the words of the time."""

    timing: Timing
    rest: str
    words: str


class Unclear(msgspec.Struct, frozen=True, tag=True):
    """A recurrence or moment that is not exact. The sentence says what to write instead."""

    sentence: str


class _AmbiguousTime(msgspec.Struct, frozen=True):
    """The time belongs to an inner part of the sentence; no shorter phrase is tried."""


class _Word(msgspec.Struct, frozen=True):
    text: str
    start: int
    end: int


class _Cut(msgspec.Struct, frozen=True):
    """A time phrase in a sentence and the rest; `tail` is the text before a phrase that is not at the beginning."""

    phrase: str
    words: str
    rest: str
    tail: str = ""
    qualified: bool = False


def read_schedule_request(text: str, now: int, timezone: str) -> ScheduleRequest | Unclear | None:
    """Return the time and the task of a message, or None if it does not contain both."""
    if is_question(text):
        return None
    text = strip_thanks(strip_politeness(text.strip()))
    for cut in _list_cuts(text):
        result = _read_cut(cut, now, timezone)
        if result is not None:
            return None if isinstance(result, _AmbiguousTime) else result
    return None


def _read_cut(cut: _Cut, now: int, timezone: str) -> "ScheduleRequest | Unclear | _AmbiguousTime | None":
    """Read one phrase, if the rest is an imperative to which it can belong."""
    task = strip_thanks(strip_politeness(cut.rest.strip(" \t\r\n,;:-\u2013\u2014")))
    words = [word.text for word in _split_phrase_words(task[:MAX_CHARACTERS])]
    if not is_imperative(words) or is_negated(words[:_MAX_NEGATION_WORDS]):
        return None
    timing, recurring = read_timing(cut.phrase, now, timezone, allows_bare_day=words[0] == "remind")
    if timing is None:
        return None
    preceding = [word.text for word in _split_phrase_words(strip_politeness(cut.tail))]
    if cut.tail and not verb_owns_time(preceding, once=not recurring):
        return _AmbiguousTime()
    if isinstance(timing, str):
        return Unclear(timing)
    if cut.qualified:
        return Unclear(_QUALIFIER) if recurring else None
    if words[0] == "schedule":
        return Unclear(_TASK_HINT)
    doubt = _find_doubt(preceding, now, timezone, recurring=recurring) if cut.tail else ""
    return Unclear(doubt) if doubt else ScheduleRequest(timing, task, cut.words)


def _find_doubt(words: Sequence[str], now: int, timezone: str, *, recurring: bool) -> str:
    """Return a sentence if a time is ambiguous, given the words before it."""
    preceding = " ".join(words)
    if words[-1] in {"and", "or"}:
        return _SEVERAL_TIMES
    if not recurring and (any(map(_OFTEN.fullmatch, words)) or _VAGUE_DAY.search(" ".join(words[-4:]))):
        return "It is not clear whether this repeats. For a recurrence, write it like every day at 9."
    if recurring and any(
        read_timing(cut.phrase, now, timezone, allows_bare_day=False)[1]
        for cut in _tails(preceding, _split_phrase_words(preceding))
    ):
        return _SEVERAL_TIMES
    return ""


def _split_phrase_words(text: str) -> list[_Word]:
    """Split text into words of the grammar: lower case, plain apostrophes, no trailing punctuation."""
    return [
        _Word(match[0].lower().replace("\u2019", "'").rstrip(",;!?\u2026").rstrip("."), match.start(), match.end())
        for match in _WORD.finditer(text)
    ]


def _list_cuts(text: str) -> Iterator[_Cut]:
    """Yield the phrases that could be the time, the longest first, at each possible position."""
    words = _split_phrase_words(text[:MAX_CHARACTERS])
    yield from _heads(text, words, 0)
    if len(words) > 2 and words[1].text in {"me", "us"} and is_imperative([words[0].text]):  # noqa: PLR2004
        yield _make_tail(text, words, 2)
        yield from _heads(text, words, 2)
    if len(text) <= MAX_CHARACTERS and "\n" not in text:
        yield from _tails(text, words)
        yield from _middles(text, words)


def _heads(text: str, words: Sequence[_Word], first_index: int) -> Iterator[_Cut]:
    for last_index in range(min(len(words) - 1, first_index + MAX_WORDS), first_index, -1):
        phrase_words, start, end = words[first_index:last_index], words[first_index].start, words[last_index - 1].end
        remaining = f"{text[:start]}{text[end:].lstrip(' ,:')}"
        following = " ".join(word.text for word in words[last_index : last_index + 3])
        yield _Cut(_join_words(phrase_words), text[start:end].rstrip(",:;"), remaining)
        if first_index == 0 and _QUALIFIED.match(following):
            yield from _behind_a_limit(text, words, last_index)


def _behind_a_limit(text: str, words: Sequence[_Word], last_index: int) -> Iterator[_Cut]:
    """Yield the phrase before a limit: `every hour between 9 and 17 check the mail`."""
    for index in range(last_index + 1, min(len(words), last_index + 8)):
        if is_imperative([word.text for word in words[index:]]):
            start, end = words[0].start, words[last_index - 1].end
            yield _Cut(_join_words(words[:last_index]), text[start:end], text[words[index].start :], qualified=True)
            return


def _tails(text: str, words: Sequence[_Word]) -> Iterator[_Cut]:
    for first_index in range(max(1, len(words) - MAX_WORDS), len(words)):
        start = words[first_index].start
        if _is_quoted(text, start):
            continue
        yield _make_tail(text, words, first_index)
        for last_index in range(first_index + 1, len(words)):
            if _QUALIFIED.match(" ".join(word.text for word in words[last_index : last_index + 4])):
                end = words[last_index - 1].end
                yield _Cut(
                    _join_words(words[first_index:last_index]),
                    text[start:end],
                    text[:start],
                    text[:start],
                    qualified=True,
                )


def _make_tail(text: str, words: Sequence[_Word], first_index: int) -> _Cut:
    start = words[first_index].start
    return _Cut(_join_words(words[first_index:]), text[start:].rstrip(",.;:!?"), text[:start], text[:start])


def _is_quoted(text: str, position: int) -> bool:
    preceding = text[:position]
    if any(preceding.count(sign) % 2 for sign in ('"', "`", "''")) or _SINGLE.search(preceding):
        return True
    return any(preceding.count(opening) > preceding.count(closing) for opening, closing in _QUOTES)


def _middles(text: str, words: Sequence[_Word]) -> Iterator[_Cut]:
    """Yield phrases between an imperative and the words after it.

    `check it every hour and tell me`, `send it at 9 to Bob`.
    """
    texts = [word.text for word in words]
    for last_index in range(2, len(words) - 1):
        continues = texts[last_index] in {"and", "then"} and is_imperative(texts[last_index + 1 :])
        if not continues and not (
            texts[last_index] in {"to", "via", "if"} and not texts[last_index + 1][:1].isdecimal()
        ):
            continue
        for first_index in range(max(1, last_index - MAX_WORDS), last_index):
            start, end = words[first_index].start, words[last_index - 1].end
            if _is_quoted(text, start):
                continue
            yield _Cut(
                _join_words(words[first_index:last_index]),
                text[start:end].rstrip(",;:"),
                text[:start] + text[end:].lstrip(", "),
                text[:start],
            )


def _join_words(words: Sequence[_Word]) -> str:
    return " ".join(word.text.rstrip(":") for word in words)
