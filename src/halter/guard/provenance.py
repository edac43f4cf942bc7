"""The injection brake: a call that decides where data goes or what is changed is made of values that were said.

A session starts clean, and as long as only trusted places have spoken nothing is asked. After that, destinations,
targets and amounts must be said by the person or stand in a record of a trusted place that the person named; contents
must be made of said words. Nothing looks for attacks in untrusted text: an attacker hides what is looked for.

`Provenance` is a fold: the same calls in the same order give the same state, and `judge` changes nothing. It knows
neither Halter's loop nor its store nor a clock.
"""

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from halter.core.provenance import ArgumentUse, BrakeVerdict, Declaration, Flaw, FlawReason, Reach, Source, split_name
from halter.guard.call_values import (
    PLACES,
    Uses,
    find_use,
    has_figures_alone,
    is_blank,
    is_given,
    is_sent,
    iterate_keys,
    join_code,
    list_destinations,
    looks_like_name,
    name_acts,
    name_amount,
    name_content,
    name_place,
    top_argument,
)
from halter.guard.choices import find_guarding_words, raises_choice
from halter.guard.records import FIGURES, PLAIN, Leaf, identifies, list_leaves, read_records
from halter.guard.trusted_text import (
    TrustedText,
    cut_atoms,
    cut_words,
    find_links,
    fold_value,
    is_disguised,
    is_everyday_word,
    is_function_word,
    is_plain_detail,
    is_prose,
    normalise_link,
    normalise_number,
    normalise_value,
)

MAX_RESULT: Final = 2_000_000
"""A longer result mints nothing: it only taints."""

MAX_ARGUMENTS: Final = 2_000
"""A call with more values is put before a person unread."""

MAX_CONTENT: Final = 200_000
"""Characters of arguments; a longer call is put before a person unread."""

_KEPT: Final = 100_000
"""Characters of each untrusted text kept to quote from."""

_KEPT_IN_ALL: Final = 300_000

_FREE_DIGITS: Final = 4
"""Digits that were not said and may stand in the contents of a session."""

_FREE_WORDS: Final = 12
"""Function words that were not said and may stand in one content."""

_FREE_ENDINGS: Final = 4
"""Words of one content that were said with another ending."""

_FREE_SILENT: Final = 10
"""Switches, and values that are empty, in one call: many of them are bits."""

_FREE_DIGITS_OF_READ: Final = 5
"""Digits in the numbers that go along with a read outside: a page or a limit."""

_COUNTING: Final = re.compile(r"(?:^|_)(?:limit|max|offset|page|per|count|top|size|skip|start)(?:$|_)", re.IGNORECASE)
_MOST_FOUND: Final = 200
"""Records that a look-up by a name finds; of more, only those that have the name are what was looked for."""

_LEFT_OUT: Final = "(left out)"
_FREE_JOINTS: Final = 40
"""Pairs of neighbours that were not said beside each other: the order of many said words spells anything."""

_REPEATS: Final = 5
"""How often one word may stand in a content: a rhythm of two words spells anything."""

_SPELT_KINDS: Final = ("", "file", "id", "name")
"""Kinds in which a mark at the end of a word changes what is meant: `build *` is more than `build`."""

_DIGIT: Final = re.compile(r"\d")

_FREE_DIGITS_OF_CALL: Final = 2

_STRONG: Final = 3
_NAMED: Final = 2
"""A record of the person's own that they named: it may be shown to those whom they named, and go nowhere by itself."""

_WEAK: Final = 1
_MINTS: Final = ("nothing", "trusted", "own", "known")
_KEY: Final = ArgumentUse("content", "key")
_NO_FLAWS: Final = BrakeVerdict()
_OUTSIDE: Final = frozenset(("url", "address", "phone"))
_ADDRESSED: Final = re.compile(
    r"//|(?<!\w)(?:https?|ftp|file|data|javascript|mailto|wss?|gopher|ssh|git|smb|ldap|dict|tel):|%[0-9a-f]{2}",
    re.IGNORECASE,
)
"""What makes an address of a text without a usual host."""

_EGRESS: Final = frozenset(("url", "address", "phone", "account", "channel"))

_VERBS: Final[tuple[frozenset[str], ...]] = tuple(
    frozenset(group.split())
    for group in (
        "send email mail write message reply respond forward tell notify inform answer post share publish",
        "pay send transfer wire refund buy purchase reimburse",
        "create add make new set put write schedule insert append save open register generate",
        "delete remove cancel drop clear erase clean purge",
        "update change edit modify adjust correct set rename move fix replace reschedule",
        "invite add include join",
        "reserve book order buy rent purchase",
        "run execute start launch call trigger",
        "upload push publish deploy release put",
    )
)


class Provenance:
    """What a session's trusted places have said, what was minted from it, and what the session did."""

    def __init__(self, *, prose: bool = False) -> None:
        """With `prose`, plain prose may be written into the person's own things."""
        self.clean = True
        self._prose = prose
        self._unread: list[str] = []
        self._minted: dict[tuple[str, str], int] = {}
        self._bound: dict[tuple[str, str], str] = {}
        self._ambiguous: set[tuple[str, str]] = set()
        """Names of several records."""
        self._listed: set[tuple[str, str]] = set()
        self._spelt: set[str] = set()
        """What was minted or listed, with its marks."""
        self._house_links: set[str] = set()
        self._model_values: set[str] = set()
        self._model_words: set[str] = set()
        self._approved: set[tuple[str, str]] = set()
        self._approved_values: set[str] = set()
        self._effects: set[tuple[str, ...]] = set()
        self._digits = 0
        self._erased = False
        self._erased_effects: set[str] = set()
        self._requested_figures: dict[str, tuple[bool, frozenset[str] | None]] = {}
        self._untrusted: deque[tuple[str, str, str]] = deque()
        self._kept_bytes = 0

    @cached_property
    def _index(self) -> TrustedText:
        return TrustedText()

    @cached_property
    def _looked_up(self) -> TrustedText:
        return TrustedText()

    @property
    def _trusted(self) -> TrustedText:
        """What trusted places said, read when it matters: calls of figures alone never ask for it."""
        for text in self._unread:
            self._index.add(text)
        self._unread.clear()
        return self._index

    def add_text(self, text: str, source: Source) -> None:
        """Text reached the prompt: the person's words, instructions, a document, a memory, a summary."""
        if source.trusted:
            self._unread.append(text)
            self._requested_figures.clear()
        elif text.strip():
            self._taint(text, source.name or source.origin)

    def mark_erased(self, source: Source) -> None:
        """A text that is erased said nothing; what was minted by it or after it counts no more."""
        self._erased = True
        self.clean = self.clean and source.trusted

    def observe(self, tool: str, declaration: Declaration, arguments: Mapping[str, Any], result_text: str) -> None:
        """A tool's result came back."""
        was_clean, reads = self.clean, declaration.reads
        mints = reads in _MINTS and len(result_text) <= MAX_RESULT and not self._erased
        if reads not in ("nothing", "trusted") and result_text.strip():
            self._taint(result_text, tool)
        # Figures utter no words.
        utters = not was_clean and not FIGURES.issuperset(map(type, arguments.values()))
        leaves = list_leaves(arguments) if mints or utters else []
        if utters:
            self._add_model_text(leaves)
        if mints:
            grounded = self._is_grounded(declaration, leaves)
            named = any(self._names(leaf) or self._looked_up.names(str(leaf.value)) for leaf in leaves)
            grounded = grounded and (bool(leaves) or reads == "trusted")
            self._mint(declaration, read_records(result_text), grounded=grounded, named=named)

    def observe_erased(self, tool: str, declaration: Declaration) -> None:
        """A result that is erased mints nothing, and nothing that was minted counts any more."""
        self._erased = True
        if declaration.reads not in ("nothing", "trusted"):
            self.clean = False

    def act(self, tool: str, declaration: Declaration, arguments: Mapping[str, Any]) -> None:
        """An act was let through."""
        whole = {**declaration.defaults, **arguments}
        uses = [(leaf, find_use(declaration, leaf)) for leaf in list_leaves(whole)]
        if declaration.reach != "none":
            self._effects |= name_acts(tool, declaration, uses)
        if not self.clean:
            self._add_model_text(leaf for leaf, _ in uses)
            alone = declaration.alone is not None and not is_sent(uses)
            leaving = (declaration.alone if alone else declaration.reach) != "own"
            counted = ("content", "detail") if leaving else ("content",)
            for leaf, use in uses:
                if use.role in counted and not self._is_approved(str(leaf.value)):
                    self._digits += self._count_digits(leaf)

    def act_erased(self, tool: str) -> None:
        """An act whose arguments are erased: the next one of this tool may be the same."""
        self._erased = True
        self._erased_effects.add(tool)

    def approve(self, tool: str, declaration: Declaration, arguments: Mapping[str, Any], flaws: Iterable[Flaw]) -> None:
        """A person agreed to these values of a call; from now on each is said in such a call, as what it was shown."""
        whole = {**declaration.defaults, **arguments}
        uses = {leaf.path: (leaf, find_use(declaration, leaf)) for leaf in list_leaves(whole)}
        places, code = list_destinations(uses.values()), join_code(uses.values())
        for flaw in flaws:
            leaf, use = uses.get(flaw.argument, (None, None))
            if leaf is None or use is None:
                self._approved.add((flaw.reason, normalise_value(flaw.value)))
                continue
            value, text = normalise_value(str(leaf.value)), str(leaf.value)
            match flaw.reason:
                case "amount":
                    self._approved.add((name_amount(places), value))
                case "content":
                    self._approved.add((name_content(places), text))
                    self._approved_values.add(value)
                case _ if use.role == "content":
                    self._approved.add((name_content(places), text))
                case _:
                    self._approved.add((name_place(tool, use, code, places), text))
                    self._approved_values.add(value)
                    if use.kind == "url":
                        links = find_links(str(leaf.value)) or {normalise_link(str(leaf.value))}
                        self._approved.update(("link", link) for link in links)

    def judge(self, tool: str, declaration: Declaration, arguments: Mapping[str, Any]) -> BrakeVerdict:
        """Say what a person must be asked before this call; changes nothing."""
        if self.clean or (declaration.reach == "none" and declaration.reads == "nothing"):
            # What neither changes nor reads anything carries nothing out.
            return _NO_FLAWS
        # What a call leaves out has its default.
        whole = {**declaration.defaults, **arguments}
        if declaration.reach == "none" and len(whole) <= MAX_ARGUMENTS and has_figures_alone(declaration, whole):
            # A read of figures alone, and from no address, carries nothing out.
            return _NO_FLAWS
        uses = [(leaf, find_use(declaration, leaf)) for leaf in list_leaves(whole)]
        plain = PLAIN.issuperset(map(type, arguments.values()))
        if not plain or not arguments.keys() <= declaration.arguments.keys():
            uses += [(leaf, _KEY) for leaf in iterate_keys(declaration, arguments)]
        size = sum(len(leaf.value) for leaf, _ in uses if isinstance(leaf.value, str))
        if len(uses) > MAX_ARGUMENTS or size > MAX_CONTENT:
            return BrakeVerdict((Flaw("", f"{len(uses)} values", "unclear"),), can_wait=False)
        if declaration.reach == "none":
            return BrakeVerdict(tuple(self._judge_read(tool, uses)))
        flaws = (
            *self._judge_act(tool, declaration, uses),
            *self._judge_omitted(tool, declaration, uses),
            *self._judge_values(tool, declaration, uses),
            *(() if plain else self._judge_lists(declaration, uses)),
        )
        return BrakeVerdict(
            flaws, can_wait=bool(flaws) and declaration.reads in ("nothing", "trusted", "own") and not declaration.mints
        )

    def unsaid_links(self, answer_text: str) -> tuple[Flaw, ...]:
        """The links and addresses in an answer that no trusted place said."""
        if self.clean:
            return ()
        found = sorted(find_links(answer_text))
        return tuple(self._flaw("", link, "link") for link in found if not self._knows_link(link))

    def _taint(self, text: str, name: str) -> None:
        self.clean = False
        part = text[:_KEPT]
        self._untrusted.append((name, part, part.casefold()))
        self._kept_bytes += len(part)
        while self._kept_bytes > _KEPT_IN_ALL:
            self._kept_bytes -= len(self._untrusted.popleft()[1])

    def _add_model_text(self, leaves: Iterable[Leaf]) -> None:
        for leaf in leaves:
            if (
                isinstance(leaf.value, str)
                and not self._trusted.contains(leaf.value)
                and not self._is_approved(leaf.value)
            ):
                self._model_values.add(normalise_value(leaf.value))
                self._model_values.update(cut_atoms(leaf.value))
                self._model_words.update(cut_words(leaf.value))
                self._model_values.update(find_links(leaf.value))

    def _is_approved(self, text: str) -> bool:
        return normalise_value(text) in self._approved_values

    def _is_grounded(self, declaration: Declaration, leaves: Iterable[Leaf]) -> bool:
        """Whether a look-up was made with the person's words and numbers alone; how many are shown says nothing."""
        for leaf in leaves:
            if isinstance(leaf.value, str):
                if not self._trusted.has_query(leaf.value) and not self._looked_up.has_query(leaf.value):
                    return False
            elif isinstance(leaf.value, int | float) and not isinstance(leaf.value, bool):
                counts = find_use(declaration, leaf).role in ("detail", "amount") and _COUNTING.search(leaf.field)
                if not counts and not self._has_digits(str(leaf.value)):
                    return False
        return True

    def _mint(
        self, declaration: Declaration, records: Iterable[tuple[Leaf, ...]], *, grounded: bool, named: bool
    ) -> None:
        for number, record in enumerate(records):
            names = [leaf for leaf in record if self._names(leaf)]
            own = [leaf for leaf in names if identifies(leaf.field)] or not any(
                identifies(leaf.field) for leaf in record
            )
            echoed = bool(self._model_values) and any(self._is_uttered(str(leaf.value)) for leaf in record)
            named = named and number < _MOST_FOUND
            if declaration.reads == "trusted" and grounded and (named or (names and own)) and not echoed:
                for leaf in record:
                    self._looked_up.add_found(str(leaf.value))
            if declaration.reads == "known" and any(leaf.field in declaration.lists for leaf in record):
                links = {link for leaf in record for link in find_links(str(leaf.value))}
                self._house_links |= links - self._model_values
            for leaf in record:
                kind = declaration.lists.get(leaf.field, declaration.lists.get("*", ""))
                minted = declaration.mints.get(leaf.field, declaration.mints.get("*", ""))
                minted = minted if not echoed and (names or grounded) else ""
                if leaf.value is None or not (kind or minted):
                    continue
                value, spelt = normalise_value(str(leaf.value)), fold_value(str(leaf.value))
                if kind and value not in self._model_values and looks_like_name(value):
                    self._listed.add((kind, value))
                    self._spelt.add(spelt)
                if minted:
                    self._spelt.add(spelt)
                    self._mint_value(minted, value, names, self._find_tier(declaration, names) if own else _WEAK)

    def _find_tier(self, declaration: Declaration, names: list[Leaf]) -> int:
        """How far a record that the person named vouches for its values."""
        if declaration.reads == "own":
            return _NAMED
        aimed = any(self._trusted.names_target(normalise_value(str(name.value))) for name in names)
        return _STRONG if declaration.reads in ("nothing", "trusted") and aimed else _WEAK

    def _is_uttered(self, text: str) -> bool:
        """Whether a value, a link in it or all of its words were uttered by calls of this session."""
        if normalise_value(text) in self._model_values or not self._model_values.isdisjoint(find_links(text)):
            return True
        unsaid = self._trusted.find_unsaid(cut_words(text))
        return bool(unsaid) and self._model_words.issuperset(unsaid)

    def _mint_value(self, kind: str, value: str, names: list[Leaf], tier: int) -> None:
        """Two records of the same name that differ make both weak, however often they are found."""
        tier = tier if names else _WEAK
        for key in ((kind, normalise_value(str(name.value))) for name in names if name.field):
            if self._bound.setdefault(key, value) != value:
                self._ambiguous.add(key)
                self._minted[kind, self._bound[key]] = _WEAK
            tier = _WEAK if key in self._ambiguous else tier
        self._minted[kind, value] = min(tier, self._minted.get((kind, value), tier)) if tier == _WEAK else tier

    def _names(self, leaf: Leaf) -> bool:
        return isinstance(leaf.value, str) and self._trusted.names(leaf.value)

    def _judge_read(self, tool: str, uses: Uses) -> Iterator[Flaw]:
        """A read that carries something out is egress: its address must be said, or a link of the house.

        What goes along to that address, as a header or a path does, must be made of said words.
        """
        places, code = list_destinations(uses), join_code(uses)
        kinds = {use.kind for leaf, use in uses if use.role == "destination" and is_given(leaf)}
        outside, digits = not kinds.isdisjoint(_OUTSIDE), 0
        for leaf, use in uses:
            leaves_house = use.role == "destination" and use.kind in _EGRESS
            along = outside and not leaves_house and use.kind != "choice"
            if not isinstance(leaf.value, str):
                digits += self._count_digits(leaf) if along and not isinstance(leaf.value, bool) else 0
                if digits > _FREE_DIGITS_OF_READ:
                    yield self._flaw(leaf.path, str(leaf.value), "content")
            elif self._approved and (name_place(tool, use, code, places), leaf.value) in self._approved:
                continue
            elif along or (use.role == "content" and not kinds.isdisjoint(_EGRESS)):
                if leaf.value.strip() and not (use.role in PLACES and self._trusted.names(leaf.value, use.kind)):
                    yield from self._judge_content(leaf, "others", self._count_digits(leaf), places)
            elif self._leads_out(leaf.value, url=leaves_house and use.kind == "url"):
                yield self._flaw(leaf.path, leaf.value, "egress")

    def _leads_out(self, text: str, *, url: bool) -> bool:
        """Whether a value of a read is an address that no trusted place said."""
        links = find_links(text)
        if not links and not url:
            return _ADDRESSED.search(text) is not None and not self._trusted.contains(text)
        asked = links | {normalise_link(text)} if url else links
        return is_disguised(text) or not all(map(self._knows_link, asked))

    def _knows_link(self, link: str) -> bool:
        return (
            self._trusted.has_link(link)
            or ("link", link) in self._approved
            or (not self._erased and (self._looked_up.has_link(link) or link in self._house_links))
        )

    def _judge_act(self, tool: str, declaration: Declaration, uses: Uses) -> Iterator[Flaw]:
        asked, _ = self._find_asking(tool, declaration)
        if not asked and ("unasked", normalise_value(tool)) not in self._approved:
            yield Flaw("", tool, "unasked")
        done = self._effects and not self._effects.isdisjoint(name_acts(tool, declaration, uses))
        if done or tool in self._erased_effects:
            yield Flaw("", tool, "repeated")

    def _judge_omitted(self, tool: str, declaration: Declaration, uses: Uses) -> Iterator[Flaw]:
        """A call that leaves out what protects, or where a final act goes, leaves it to a default."""
        guarding = [name for name in declaration.arguments if find_guarding_words(name)]
        if not guarding and declaration.reach != "final":
            return
        given = {top_argument(leaf.path) for leaf, use in uses if use is not _KEY and is_given(leaf)}
        for name in guarding:
            if name not in given and any(map(self._trusted.has_word, find_guarding_words(name))):
                yield Flaw(name, _LEFT_OUT, "unsaid")
        if declaration.reach != "final":
            return
        roles = {name: use.role for name, use in declaration.arguments.items() if "." not in name}
        places = [name for name, role in roles.items() if role in PLACES]
        if places and given.isdisjoint(places):
            yield Flaw(places[0], _LEFT_OUT, "unsaid")
        amounts = [name for name, role in roles.items() if role == "amount"]
        if amounts and given.isdisjoint(amounts) and self._find_asking(tool, declaration)[1]:
            yield Flaw(amounts[0], _LEFT_OUT, "amount")

    def _judge_lists(self, declaration: Declaration, uses: Uses) -> Iterator[Flaw]:
        """What many values of a call spell together: bits, a rhythm of said words, one place many times."""
        silent = sum(isinstance(leaf.value, bool) or not is_given(leaf) for leaf, _ in uses)
        if silent > _FREE_SILENT:
            yield Flaw("", f"{len(uses)} values", "unclear")
        groups: dict[str, Uses] = {}
        for leaf, use in uses:
            if isinstance(leaf.value, str) and not is_blank(leaf):
                groups.setdefault(top_argument(leaf.path), []).append((leaf, use))
        most = 1 if declaration.reach == "final" else _REPEATS
        amounts = Counter(top_argument(leaf.path) for leaf, use in uses if use.role == "amount")
        if declaration.reach == "final" and amounts and max(amounts.values()) > 1:
            yield Flaw(amounts.most_common(1)[0][0], f"{amounts.most_common(1)[0][1]} amounts", "amount")
        for group in groups.values():
            places = Counter(normalise_value(leaf.value) for leaf, use in group if use.role in PLACES)
            if places and max(places.values()) > most:
                yield self._flaw(group[0][0].path, group[0][0].value, "repeated")
            texts = [leaf.value for leaf, use in group if use.role in ("content", "detail")]
            first, whole = group[0][0], "\n".join(texts)
            together = len(texts) > 1 and self._lacks_trusted(Leaf(first.field, first.path, whole))
            if together and not any(self._lacks_trusted(leaf) for leaf, _ in group):
                yield self._flaw(first.path, whole, "content")

    def _find_asking(self, tool: str, declaration: Declaration) -> tuple[bool, frozenset[str] | None]:
        """Whether the task's words ask for such an act, and the figures beside them if each time there is one."""
        found = self._requested_figures.get(tool)
        if found is None:
            words = split_name(tool)
            related = {verb for group in _VERBS for word in words if word in group for verb in group} or set(words)
            phrases = [phrase.split() for phrase in declaration.asks] or [[verb] for verb in related]
            sentences = set[int]().union(*(self._trusted.find_asking(phrase) for phrase in phrases))
            found = self._requested_figures[tool] = (bool(sentences), self._trusted.find_requested_figures(sentences))
        return found

    def _judge_values(self, tool: str, declaration: Declaration, uses: Uses) -> Iterator[Flaw]:
        sent = is_sent(uses)
        reach = declaration.reach if sent or declaration.alone is None else declaration.alone
        discloses = reach == "final" or (reach == "others" and sent)
        places, code = list_destinations(uses), join_code(uses)
        plain: bool | None = None
        digits = 0
        for leaf, use in uses:
            switch = isinstance(leaf.value, bool)
            if (
                reach != "own"
                and (switch or use.role == "detail")
                and self._raises_choice(leaf, final=reach == "final")
            ):
                yield self._flaw(leaf.path, str(leaf.value), "unsaid")
                continue
            if leaf.value is None or (switch and use.role != "amount"):
                continue
            own = declaration.defaults.get(leaf.path) == leaf.value
            if own and (use.role in ("content", "detail") or leaf.value == "."):
                # The tool's own words, and its own folder.
                continue
            if isinstance(leaf.value, str) and not leaf.value.strip():
                continue
            if isinstance(leaf.value, str) and is_disguised(leaf.value) and use.role != "content":
                yield self._flaw(leaf.path, leaf.value, "disguised")
                continue
            match use.role:
                case "destination" | "target":
                    loose = reach != "own" and self._trusted.is_loose(str(leaf.value), use.kind, final=reach == "final")
                    agreed = (name_place(tool, use, code, places), str(leaf.value)) in self._approved
                    needed = _STRONG if discloses else _WEAK
                    if use.role == "target" and reach == "others" and sent:
                        needed = _NAMED
                    if not agreed and not self._is_trusted(leaf, use, needed, loose=loose, code=code):
                        if plain is None:
                            plain = not any(
                                part.role == "target" or (part.role == "content" and self._lacks_trusted(other))
                                for other, part in uses
                                if other is not leaf
                            )
                        yield from self._judge_place(leaf, use, reach, plain=plain)
                case "amount":
                    figures = self._find_asking(tool, declaration)[1] if reach == "final" else None
                    yield from self._judge_amount(leaf, places, figures, final=reach == "final")
                case "content":
                    digits += self._count_digits(leaf)
                    yield from self._judge_content(leaf, reach, digits, places)
                case "detail" if use.kind == "choice":
                    if reach == "final" and self._lacks_trusted(leaf):
                        yield self._flaw(leaf.path, str(leaf.value), "unsaid")
                case "detail":
                    counted = sent or reach != "own"
                    digits += self._count_digits(leaf) if counted else 0
                    lettered = counted and isinstance(leaf.value, str) and self._lacks_trusted(leaf)
                    if lettered or (counted and not self._spares(digits)):
                        yield self._flaw(leaf.path, str(leaf.value), "content")
                    elif not is_plain_detail(leaf.value):
                        yield from self._judge_content(leaf, reach, digits, places)

    def _raises_choice(self, leaf: Leaf, *, final: bool) -> bool:
        return raises_choice(leaf.field, leaf.value, self._trusted.has_word, final=final)

    def _is_trusted(self, leaf: Leaf, use: ArgumentUse, needed: int, *, loose: bool, code: str) -> bool:
        """Whether a place was said or minted; the words of a command together."""
        text = str(leaf.value)
        value = normalise_value(text)
        if use.kind in ("", "url") and "/" in text and find_links(text):
            # Behind a host the case of a letter counts.
            return self._trusted.has_link(normalise_link(text)) or (
                not self._erased and self._tier(use.kind, value) >= needed
            )
        if use.kind == "code" and "\n" in code:
            return self._trusted.quotes_command(code)
        if use.kind == "code":
            return self._trusted.quotes_exactly(text) and not loose and self._trusted.names_value(value, use.kind)
        if use.role == "destination" and not self._trusted.names_target(value):
            return False
        if use.kind in _SPELT_KINDS and not self._spells_trusted(str(leaf.value)):
            return False
        if not loose and self._trusted.names_value(value, use.kind):
            return True
        if use.kind == "url" and self._trusted.has_link(normalise_link(str(leaf.value))):
            return True
        return not self._erased and self._tier(use.kind, value) >= needed

    def _spells_trusted(self, text: str) -> bool:
        return self._trusted.spells_out(text) or fold_value(text) in self._spelt

    def _judge_place(self, leaf: Leaf, use: ArgumentUse, reach: Reach, *, plain: bool) -> Iterator[Flaw]:
        """Said words may go to any place of the house; another place is asked."""
        text = str(leaf.value)
        value = normalise_value(text)
        house = not self._erased and reach != "final" and (use.kind, value) in self._listed
        if house and plain:
            return
        found = house or (not self._erased and self._tier(use.kind, value) > 0)
        yield self._flaw(leaf.path, text, "weak" if found else "unsaid")

    def _tier(self, kind: str, value: str) -> int:
        return self._minted.get((kind, value), 0)

    def _judge_amount(
        self, leaf: Leaf, places: Sequence[str], figures: frozenset[str] | None, *, final: bool
    ) -> Iterator[Flaw]:
        """An amount must be said; a final one in a sentence with where it goes, and where the act is asked for."""
        if (name_amount(places), normalise_value(str(leaf.value))) in self._approved:
            return
        number = normalise_number(leaf.value)
        if number is None:
            said = self._trusted.names(str(leaf.value))
        else:
            said = self._trusted.has_number(number, places if final else ()) and (figures is None or number in figures)
        if not said:
            yield self._flaw(leaf.path, str(leaf.value), "amount")

    def _judge_content(self, leaf: Leaf, reach: Reach, digits: int, places: Sequence[str]) -> Iterator[Flaw]:
        text = str(leaf.value)
        if self._approved and (name_content(places), text) in self._approved:
            return
        links = [link for link in find_links(text) if not self._trusted.has_link(link)]
        if is_disguised(text):
            yield self._flaw(leaf.path, text, "disguised")
        elif links:
            yield self._flaw(leaf.path, text, "content")
        elif self._prose and reach == "own" and is_prose(text):
            return
        elif self._lacks_trusted(leaf, own=reach == "own") or not self._spares(digits):
            yield self._flaw(leaf.path, text, "content")

    def _spares(self, digits: int) -> bool:
        """Whether so many digits that were not said may stand in one call."""
        return digits <= _FREE_DIGITS_OF_CALL and self._digits + digits <= _FREE_DIGITS

    def _lacks_trusted(self, leaf: Leaf, *, own: bool = False) -> bool:
        """Whether a content has a word that was not said, or spells something with words or marks.

        In the person's `own` things, the usual words of a plan carry nothing.
        """
        text = str(leaf.value)
        if not self._trusted.has_marks(text) or ("${" in text and not self._trusted.contains(text)):
            return True
        # A joint takes two letters at least.
        if len(text) > 2 * _FREE_JOINTS and self._trusted.count_joints(text) > _FREE_JOINTS:
            return True
        return not self._has_words(cut_words(text), own=own) and not self._trusted.contains(text)

    def _has_words(self, words: list[str], *, own: bool) -> bool:
        if len(words) > _REPEATS and max(Counter(words).values()) > _REPEATS:
            return False
        free = endings = 0
        for word in self._trusted.find_unsaid(words):
            if word.isdecimal() or (not self._erased and self._looked_up.has_exact(word)):
                continue
            if is_function_word(word) or (own and is_everyday_word(word)):
                free += 1
            elif self._has_word(word):
                endings += 1
            else:
                return False
        return free <= _FREE_WORDS and endings <= _FREE_ENDINGS

    def _has_word(self, word: str) -> bool:
        return self._trusted.has_word(word) or (not self._erased and self._looked_up.has_word(word))

    def _count_digits(self, leaf: Leaf) -> int:
        text = str(leaf.value)
        if _DIGIT.search(text) is None:
            return 0
        return sum(len(word) for word in cut_words(text) if word.isdecimal() and not self._has_digits(word))

    def _has_digits(self, digits: str) -> bool:
        return self._trusted.has_digits(digits) or (not self._erased and self._looked_up.has_digits(digits))

    def _flaw(self, argument: str, value: str, reason: FlawReason) -> Flaw:
        source, quote = self._find_quote(value)
        return Flaw(argument, value[:2_000], reason, source, quote)

    def _find_quote(self, value: str) -> tuple[str, str]:
        """Where a value stands in untrusted text, newest first: the source and the line."""
        needle = value.strip().casefold()[:80]
        if not needle:
            return "", ""
        for source, text, folded in reversed(self._untrusted):
            place = folded.find(needle)
            if place >= 0:
                start = text.rfind("\n", 0, place) + 1
                end = text.find("\n", place)
                return source, text[start : end if end >= 0 else None][:300].strip()
        return "", ""
