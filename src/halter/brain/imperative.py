"""Whether a sentence tells somebody to do something, by lists of words: what is not listed is no imperative.

A schedule is made of an imperative and a time. Where the time may belong to a clause inside of the sentence ("write a
script that checks the site every minute"), it is not taken for the schedule's.
"""

import re
from collections.abc import Sequence
from typing import Final


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_VERBS: Final = _words(
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
_FINITE: Final = _words(
    """
    am is are was were be been being has had does did will would shall should must may might can could cannot can't
    won't isn't aren't starts started ends ended begins began happens happened goes went comes came takes took runs
    ran arrives arrived opens opened closes closed works worked fails failed occurs occurred fires fired needs
    needed means meets met sits finishes finished wakes woke sleeps due gets got
    """
)
_NEGATIONS: Final = _words(
    """
    not never don't dont doesn't didn't won't cannot can't couldn't shouldn't wouldn't mustn't no-longer neither nor
    nobody nothing
    """
)
"""Words that turn an imperative into something that nobody is told to do."""
_PAST: Final = _words(
    "yesterday ago earlier previously formerly was were had did happened occurred failed crashed last past previous"
)
_DESCRIBING: Final = _words(
    """
    analyse analyze assess audit compare describe evaluate examine explain extract find inspect investigate list
    outline paraphrase plot query rank read recap research retrieve review rewrite search show summarise summarize
    tabulate transcribe translate
    """
)
"""Verbs that look back as often as not: `summarise the outage at 14:00` names the outage, not the hour of the work."""
_SPEAKING: Final = _words(
    "say repeat spell pronounce translate define type echo quote print read write explain describe"
)
_MENTIONED: Final = _words(
    """
    word words phrase term title name called named spelled letters text string sentence caption label heading
    expression keyword line me adverb adjective
    """
)
"""Words after which a time is only mentioned: `write the word hourly`."""
_SUBJECTS: Final = _words("you i we they he she")
"""Who stands behind a verb in a question: `do you check the mail every day`."""
_CLAUSES: Final = _words(
    """
    that which who whom whose why how what where when while because since if whether although unless until saying
    says said stating explaining describing titled called named i we they he she i'm i'll we'll we're they'll
    it's he'll
    """
)
_LOOKING: Final = _words("check verify ensure confirm monitor see watch tell let show remind report look make")
"""What begins a sentence whose clause is looked into at the time that is said: `check if the site is up every hour`."""
_LEADING: Final = _words(
    "for from until till by before after since of about to than between around with in on at not the a an"
)
"""Words after which a time belongs to them: `by tomorrow at 9` is a deadline."""
_PENDING: Final = _words(
    "pending upcoming outstanding trending missing existing remaining incoming outgoing failing meeting"
)
_ABOUT_DOING: Final = re.compile(r"\babout (\w+ing)\b")
_ARRANGING: Final = _words(
    """
    arrange book schedule reserve plan organise organize put add move find search invite set explain describe
    """
)
"""Verbs that arrange or word something for a moment, rather than at it."""
_EVENTS: Final = _words(
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
"""Things that have a moment of their own: `write to Bob about the meeting tomorrow at 9`."""
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
_UNSEEN: Final = "".join(
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
_FAR: Final = 200
"""How many characters of politeness are taken away at most."""


def trimmed(text: str) -> str:
    """Take away what stands around a message without being one: line ends, spaces, signs that nobody sees."""
    return text.strip(_UNSEEN)


def negates(words: Sequence[str]) -> bool:
    """Tell whether somebody is told not to do something."""
    return any(word in _NEGATIONS or word.endswith("n't") for word in words)


def without_politeness(text: str) -> str:
    """Take away greetings and requests before the imperative."""
    place = 0
    while place < _FAR and (found := _POLITE.match(text, place)):
        place = found.end()
    return text[place:]


def without_thanks(text: str) -> str:
    """Take away punctuation and thanks at the end."""
    tail = text[-_FAR:]
    return text[: len(text) - len(tail)] + _THANKS.sub("", tail)


def asks(text: str) -> bool:
    """Tell whether it is a question, and no request in the form of one; `would you … if I asked?` is none."""
    if _QUESTION.search(text[-_FAR:]) is None:
        return False
    return _REQUEST.search(text[:_FAR]) is None or _SUPPOSED.search(text[: 2 * _FAR]) is not None


def commands(words: Sequence[str]) -> bool:
    """Tell whether words begin as an imperative does: a verb that is no subject of another."""
    if words and words[0].startswith("@"):
        words = words[1:]
    if not words or words[0] not in _VERBS:
        return False
    return len(words) == 1 or words[1] not in _FINITE | _SUBJECTS | _NEGATIONS


def owns_its_end(words: list[str], *, once: bool) -> bool:
    """Tell whether a time at the end belongs to the verb at the beginning, and to nothing in between."""
    if not words:
        return False
    if words[-1] in _LEADING | _FINITE or any(word.endswith(":") for word in words) or negates(words):
        return False
    if (words[-1] in _MENTIONED and words[0] in _SPEAKING) or (len(words) == 1 and words[0] in _SPEAKING):
        return False
    if once and (words[0] in _DESCRIBING or not _PAST.isdisjoint(words)):
        return False
    if once and (words[0] in _ARRANGING or (words[-1] in _EVENTS and words[0] != "remind")):
        return False
    if (doing := _ABOUT_DOING.search(" ".join(words))) and doing[1] not in _PENDING:
        return False
    if not any(word.rstrip(",") in _CLAUSES for word in words[1:]):
        return True
    looking = words[:2] == ["make", "sure"] if words[0] == "make" else words[0] in _LOOKING
    return looking and words[-1] not in _VERBS and (not once or words[0] == "remind")
