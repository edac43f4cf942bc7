"""The provenance check: a call that decides where data goes or what is changed must be made of trusted values.

A session starts clean, and no question is asked while all its text comes from trusted sources. After that, a person
must have named destinations, targets and amounts, or they must be in a trusted source's record that the person named.
Contents must consist of trusted words. The check does not search untrusted text for attacks, which attackers hide.

`Provenance` is a fold: the same calls in the same order give the same state, and `judge` does not change it. It depends
on no loop, store or clock. In this module, a trusted word or value is one that trusted text contains.
"""

import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Final

from halter.core.provenance import ArgumentUse, BrakeVerdict, Declaration, Flaw, FlawReason, Reach, Source, split_name
from halter.core.text import make_word_set
from halter.provenance.call_values import (
    PLACES,
    Uses,
    find_use,
    has_figures_alone,
    has_value,
    is_blank,
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
from halter.provenance.records import FIGURES, PLAIN, Leaf, identifies, list_leaves, read_records
from halter.provenance.trusted_text import (
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
"""Longest result that mints values, in characters. A longer one only taints the session."""

MAX_ARGUMENTS: Final = 2_000
"""Maximum number of checked values of a call. A person is asked about a call with more."""

MAX_CONTENT: Final = 200_000
"""Maximum number of checked characters of a call. A person is asked about a longer call."""

_MAX_TEXT_LENGTH: Final = 100_000
"""Number of characters of each untrusted text that are stored for quotes."""

_MAX_TOTAL_LENGTH: Final = 300_000

_FREE_DIGITS: Final = 4
"""Number of untrusted digits that the contents of a session may have."""

_FREE_WORDS: Final = 12
"""Number of untrusted function words that a content may have."""

_FREE_ENDINGS: Final = 4
"""Number of words of a content that may differ from a trusted word in their ending."""

_FREE_SILENT: Final = 10
"""Number of switches and empty values that a call may have: more of them could encode bits."""

_FREE_DIGITS_OF_READ: Final = 5
"""Number of untrusted digits that an outside read may have in numbers such as a page or a limit."""

_COUNTING: Final = re.compile(r"(?:^|_)(?:limit|max|offset|page|per|count|top|size|skip|start)(?:$|_)", re.IGNORECASE)
_MAX_MATCHES: Final = 200
"""Number of records that a look-up by a name may find. After those, only records with the name count."""

_OMITTED: Final = "(left out)"
_FREE_JOINTS: Final = 40
"""Number of pairs of neighbouring words that trusted text does not have: the order of words can spell anything."""

_REPEATS: Final = 5
"""Number of times that a content may repeat a word: a rhythm of two words can spell anything."""

_SPELT_KINDS: Final = ("", "file", "id", "name")
"""Kinds of values in which a mark after a word changes the meaning: `build *` is more than `build`."""

_DIGIT: Final = re.compile(r"\d")

_FREE_DIGITS_OF_CALL: Final = 2

_STRONG: Final = 3
_NAMED: Final = 2
"""Tier of values from a person's own record that they named: recipients may see them, but they are no recipients."""

_WEAK: Final = 1
_MINTS: Final = ("nothing", "trusted", "own", "known")
_KEY: Final = ArgumentUse("content", "key")
_NO_FLAWS: Final = BrakeVerdict()
_OUTSIDE: Final = frozenset(("url", "address", "phone"))
_ADDRESSED: Final = re.compile(
    r"//|(?<!\w)(?:https?|ftp|file|data|javascript|mailto|wss?|gopher|ssh|git|smb|ldap|dict|tel):|%[0-9a-f]{2}",
    re.IGNORECASE,
)
"""Marks that make a text without a usual host an address."""

_EGRESS: Final = frozenset(("url", "address", "phone", "account", "channel"))

_VERB_GROUPS: Final[tuple[frozenset[str], ...]] = tuple(
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
    """A session's trusted text, the values minted from records that it names, and the session's acts."""

    def __init__(self, *, prose: bool = False) -> None:
        """Make the state of a new session. With `prose`, plain prose may be written into the person's own things."""
        self.clean = True
        self._prose = prose
        self._unread: list[str] = []
        self._minted: dict[tuple[str, str], int] = {}
        self._bound: dict[tuple[str, str], str] = {}
        self._ambiguous: set[tuple[str, str]] = set()
        """Names of several records."""
        self._listed: set[tuple[str, str]] = set()
        self._spelt: set[str] = set()
        """Minted and listed values, with their marks."""
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
        self._stored_length = 0

    @cached_property
    def _index(self) -> TrustedText:
        return TrustedText()

    @cached_property
    def _looked_up(self) -> TrustedText:
        return TrustedText()

    @property
    def _trusted(self) -> TrustedText:
        """The index of trusted text, built on first use: calls with only figures never need it."""
        for text in self._unread:
            self._index.add(text)
        self._unread.clear()
        return self._index

    def add_text(self, text: str, source: Source) -> None:
        """Add a text of the prompt: a person's message, instructions, a document, a memory, a summary."""
        if source.trusted:
            self._unread.append(text)
            self._requested_figures.clear()
        elif text.strip():
            self._taint(text, source.name or source.origin)

    def mark_erased(self, source: Source) -> None:
        """Add an erased text. Minted values stop counting."""
        self._erased = True
        self.clean = self.clean and source.trusted

    def observe(self, tool: str, declaration: Declaration, arguments: Mapping[str, Any], result_text: str) -> None:
        """Add a tool's result, which may taint the session and mint values."""
        was_clean, reads = self.clean, declaration.reads
        mints = reads in _MINTS and len(result_text) <= MAX_RESULT and not self._erased
        if reads not in ("nothing", "trusted") and result_text.strip():
            self._taint(result_text, tool)
        # Figures contain no words.
        adds_model_text = not was_clean and not FIGURES.issuperset(map(type, arguments.values()))
        leaves = list_leaves(arguments) if mints or adds_model_text else []
        if adds_model_text:
            self._add_model_text(leaves)
        if mints:
            is_grounded = self._is_grounded(declaration, leaves)
            is_named = any(self._names(leaf) or self._looked_up.names(str(leaf.value)) for leaf in leaves)
            is_grounded = is_grounded and (bool(leaves) or reads == "trusted")
            self._mint(declaration, read_records(result_text), is_grounded=is_grounded, is_named=is_named)

    def observe_erased(self, tool: str, declaration: Declaration) -> None:
        """Add an erased result. It mints nothing, and minted values stop counting."""
        self._erased = True
        if declaration.reads not in ("nothing", "trusted"):
            self.clean = False

    def act(self, tool: str, declaration: Declaration, arguments: Mapping[str, Any]) -> None:
        """Add an act that the guard admitted."""
        full_arguments = {**declaration.defaults, **arguments}
        uses = [(leaf, find_use(declaration, leaf)) for leaf in list_leaves(full_arguments)]
        if declaration.reach != "none":
            self._effects |= name_acts(tool, declaration, uses)
        if not self.clean:
            self._add_model_text(leaf for leaf, _ in uses)
            is_alone = declaration.alone is not None and not is_sent(uses)
            leaves_house = (declaration.alone if is_alone else declaration.reach) != "own"
            counted_roles = ("content", "detail") if leaves_house else ("content",)
            for leaf, use in uses:
                if use.role in counted_roles and not self._is_approved(str(leaf.value)):
                    self._digits += self._count_digits(leaf)

    def act_erased(self, tool: str) -> None:
        """Add an act with erased arguments. The tool's next act counts as a repetition."""
        self._erased = True
        self._erased_effects.add(tool)

    def approve(self, tool: str, declaration: Declaration, arguments: Mapping[str, Any], flaws: Iterable[Flaw]) -> None:
        """Add a person's approval: each value is trusted from now on, for such a call and in the same role."""
        full_arguments = {**declaration.defaults, **arguments}
        uses = {leaf.path: (leaf, find_use(declaration, leaf)) for leaf in list_leaves(full_arguments)}
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
        """Return the flaws of a call about which a person must be asked. The state does not change."""
        if self.clean or (declaration.reach == "none" and declaration.reads == "nothing"):
            # A call that neither changes nor reads anything discloses nothing.
            return _NO_FLAWS
        # An omitted argument has its default.
        full_arguments = {**declaration.defaults, **arguments}
        if (
            declaration.reach == "none"
            and len(full_arguments) <= MAX_ARGUMENTS
            and has_figures_alone(declaration, full_arguments)
        ):
            # A read with only figures and without an address discloses nothing.
            return _NO_FLAWS
        uses = [(leaf, find_use(declaration, leaf)) for leaf in list_leaves(full_arguments)]
        is_flat = PLAIN.issuperset(map(type, arguments.values()))
        if not is_flat or not arguments.keys() <= declaration.arguments.keys():
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
            *(() if is_flat else self._judge_lists(declaration, uses)),
        )
        return BrakeVerdict(
            flaws, can_wait=bool(flaws) and declaration.reads in ("nothing", "trusted", "own") and not declaration.mints
        )

    def unsaid_links(self, answer_text: str) -> tuple[Flaw, ...]:
        """Find the links and addresses in an answer that come from no trusted source."""
        if self.clean:
            return ()
        links = sorted(find_links(answer_text))
        return tuple(self._flaw("", link, "link") for link in links if not self._knows_link(link))

    def _taint(self, text: str, name: str) -> None:
        self.clean = False
        stored_text = text[:_MAX_TEXT_LENGTH]
        self._untrusted.append((name, stored_text, stored_text.casefold()))
        self._stored_length += len(stored_text)
        while self._stored_length > _MAX_TOTAL_LENGTH:
            self._stored_length -= len(self._untrusted.popleft()[1])

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
        """Return whether a look-up has only trusted words and numbers. Counts and limits do not matter."""
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
        self, declaration: Declaration, records: Iterable[tuple[Leaf, ...]], *, is_grounded: bool, is_named: bool
    ) -> None:
        for number, record in enumerate(records):
            names = [leaf for leaf in record if self._names(leaf)]
            names_record = [leaf for leaf in names if identifies(leaf.field)] or not any(
                identifies(leaf.field) for leaf in record
            )
            is_echoed = bool(self._model_values) and any(self._is_uttered(str(leaf.value)) for leaf in record)
            is_named = is_named and number < _MAX_MATCHES
            if (
                declaration.reads == "trusted"
                and is_grounded
                and (is_named or (names and names_record))
                and not is_echoed
            ):
                for leaf in record:
                    self._looked_up.add_record_value(str(leaf.value))
            if declaration.reads == "known" and any(leaf.field in declaration.lists for leaf in record):
                links = {link for leaf in record for link in find_links(str(leaf.value))}
                self._house_links |= links - self._model_values
            for leaf in record:
                kind = declaration.lists.get(leaf.field, declaration.lists.get("*", ""))
                minted_kind = declaration.mints.get(leaf.field, declaration.mints.get("*", ""))
                minted_kind = minted_kind if not is_echoed and (names or is_grounded) else ""
                if leaf.value is None or not (kind or minted_kind):
                    continue
                value, spelling = normalise_value(str(leaf.value)), fold_value(str(leaf.value))
                if kind and value not in self._model_values and looks_like_name(value):
                    self._listed.add((kind, value))
                    self._spelt.add(spelling)
                if minted_kind:
                    self._spelt.add(spelling)
                    self._mint_value(
                        minted_kind, value, names, self._find_tier(declaration, names) if names_record else _WEAK
                    )

    def _find_tier(self, declaration: Declaration, names: list[Leaf]) -> int:
        """Find the tier that a named record gives to its values."""
        if declaration.reads == "own":
            return _NAMED
        is_target = any(self._trusted.names_target(normalise_value(str(name.value))) for name in names)
        return _STRONG if declaration.reads in ("nothing", "trusted") and is_target else _WEAK

    def _is_uttered(self, text: str) -> bool:
        """Return whether earlier calls of the session contain a value, one of its links, or all of its words."""
        if normalise_value(text) in self._model_values or not self._model_values.isdisjoint(find_links(text)):
            return True
        unsaid = self._trusted.find_unsaid(cut_words(text))
        return bool(unsaid) and self._model_words.issuperset(unsaid)

    def _mint_value(self, kind: str, value: str, names: list[Leaf], tier: int) -> None:
        """Mint a value. If two different records have the same name, both are weak."""
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
        """Judge a read. A read that discloses data is egress: its address must be trusted, or an internal link.

        Other values that reach the address, such as a header or a path, must consist of trusted words.
        """
        places, code = list_destinations(uses), join_code(uses)
        kinds = {use.kind for leaf, use in uses if use.role == "destination" and has_value(leaf)}
        goes_outside, digits = not kinds.isdisjoint(_OUTSIDE), 0
        for leaf, use in uses:
            leaves_house = use.role == "destination" and use.kind in _EGRESS
            travels_along = goes_outside and not leaves_house and use.kind != "choice"
            if not isinstance(leaf.value, str):
                digits += self._count_digits(leaf) if travels_along and not isinstance(leaf.value, bool) else 0
                if digits > _FREE_DIGITS_OF_READ:
                    yield self._flaw(leaf.path, str(leaf.value), "content")
            elif self._approved and (name_place(tool, use, code, places), leaf.value) in self._approved:
                continue
            elif travels_along or (use.role == "content" and not kinds.isdisjoint(_EGRESS)):
                if leaf.value.strip() and not (use.role in PLACES and self._trusted.names(leaf.value, use.kind)):
                    yield from self._judge_content(leaf, "others", self._count_digits(leaf), places)
            elif self._leads_out(leaf.value, is_url=leaves_house and use.kind == "url"):
                yield self._flaw(leaf.path, leaf.value, "egress")

    def _leads_out(self, text: str, *, is_url: bool) -> bool:
        """Return whether a value of a read is an untrusted address."""
        links = find_links(text)
        if not links and not is_url:
            return _ADDRESSED.search(text) is not None and not self._trusted.contains(text)
        checked_links = links | {normalise_link(text)} if is_url else links
        return is_disguised(text) or not all(map(self._knows_link, checked_links))

    def _knows_link(self, link: str) -> bool:
        return (
            self._trusted.has_link(link)
            or ("link", link) in self._approved
            or (not self._erased and (self._looked_up.has_link(link) or link in self._house_links))
        )

    def _judge_act(self, tool: str, declaration: Declaration, uses: Uses) -> Iterator[Flaw]:
        is_requested, _ = self._find_asking(tool, declaration)
        if not is_requested and ("unasked", normalise_value(tool)) not in self._approved:
            yield Flaw("", tool, "unasked")
        is_repeated = self._effects and not self._effects.isdisjoint(name_acts(tool, declaration, uses))
        if is_repeated or tool in self._erased_effects:
            yield Flaw("", tool, "repeated")

    def _judge_omitted(self, tool: str, declaration: Declaration, uses: Uses) -> Iterator[Flaw]:
        """Judge omitted arguments: the default decides about a protection, or about the destination of a final act."""
        guarding_arguments = [name for name in declaration.arguments if find_guarding_words(name)]
        if not guarding_arguments and declaration.reach != "final":
            return
        present_arguments = {top_argument(leaf.path) for leaf, use in uses if use is not _KEY and has_value(leaf)}
        for name in guarding_arguments:
            if name not in present_arguments and any(map(self._trusted.has_word, find_guarding_words(name))):
                yield Flaw(name, _OMITTED, "unsaid")
        if declaration.reach != "final":
            return
        roles = {name: use.role for name, use in declaration.arguments.items() if "." not in name}
        places = [name for name, role in roles.items() if role in PLACES]
        if places and present_arguments.isdisjoint(places):
            yield Flaw(places[0], _OMITTED, "unsaid")
        amounts = [name for name, role in roles.items() if role == "amount"]
        if amounts and present_arguments.isdisjoint(amounts) and self._find_asking(tool, declaration)[1]:
            yield Flaw(amounts[0], _OMITTED, "amount")

    def _judge_lists(self, declaration: Declaration, uses: Uses) -> Iterator[Flaw]:
        """Judge what the values of a call can spell together: bits, a rhythm of trusted words, a repeated place."""
        silent_count = sum(isinstance(leaf.value, bool) or not has_value(leaf) for leaf, _ in uses)
        if silent_count > _FREE_SILENT:
            yield Flaw("", f"{len(uses)} values", "unclear")
        groups: dict[str, Uses] = {}
        for leaf, use in uses:
            if isinstance(leaf.value, str) and not is_blank(leaf):
                groups.setdefault(top_argument(leaf.path), []).append((leaf, use))
        max_repeats = 1 if declaration.reach == "final" else _REPEATS
        amounts = Counter(top_argument(leaf.path) for leaf, use in uses if use.role == "amount")
        if declaration.reach == "final" and amounts and max(amounts.values()) > 1:
            yield Flaw(amounts.most_common(1)[0][0], f"{amounts.most_common(1)[0][1]} amounts", "amount")
        for group in groups.values():
            places = Counter(normalise_value(leaf.value) for leaf, use in group if use.role in PLACES)
            if places and max(places.values()) > max_repeats:
                yield self._flaw(group[0][0].path, group[0][0].value, "repeated")
            texts = [leaf.value for leaf, use in group if use.role in ("content", "detail")]
            first_leaf, joined_text = group[0][0], "\n".join(texts)
            lacks_together = len(texts) > 1 and self._lacks_trusted(
                Leaf(first_leaf.field, first_leaf.path, joined_text)
            )
            if lacks_together and not any(self._lacks_trusted(leaf) for leaf, _ in group):
                yield self._flaw(first_leaf.path, joined_text, "content")

    def _find_asking(self, tool: str, declaration: Declaration) -> tuple[bool, frozenset[str] | None]:
        """Find out if the task asks for such an act, and the figures of its sentences, if each of them has one."""
        request = self._requested_figures.get(tool)
        if request is None:
            words = split_name(tool)
            related_verbs = {
                verb for group in _VERB_GROUPS for word in words if word in group for verb in group
            } or set(words)
            phrases = [phrase.split() for phrase in declaration.asks] or [[verb] for verb in related_verbs]
            sentences = set[int]().union(*(self._trusted.find_asking(phrase) for phrase in phrases))
            request = self._requested_figures[tool] = (bool(sentences), self._trusted.find_requested_figures(sentences))
        return request

    def _judge_values(self, tool: str, declaration: Declaration, uses: Uses) -> Iterator[Flaw]:
        has_destination = is_sent(uses)
        reach = declaration.reach if has_destination or declaration.alone is None else declaration.alone
        discloses = reach == "final" or (reach == "others" and has_destination)
        places, code = list_destinations(uses), join_code(uses)
        is_plain: bool | None = None
        digits = 0
        for leaf, use in uses:
            is_switch = isinstance(leaf.value, bool)
            if (
                reach != "own"
                and (is_switch or use.role == "detail")
                and self._raises_choice(leaf, final=reach == "final")
            ):
                yield self._flaw(leaf.path, str(leaf.value), "unsaid")
                continue
            if leaf.value is None or (is_switch and use.role != "amount"):
                continue
            is_default = declaration.defaults.get(leaf.path) == leaf.value
            if is_default and (use.role in ("content", "detail") or leaf.value == "."):
                # The tool's default text, or its folder.
                continue
            if isinstance(leaf.value, str) and not leaf.value.strip():
                continue
            if isinstance(leaf.value, str) and is_disguised(leaf.value) and use.role != "content":
                yield self._flaw(leaf.path, leaf.value, "disguised")
                continue
            match use.role:
                case "destination" | "target":
                    is_loose = reach != "own" and self._trusted.is_loose(
                        str(leaf.value), use.kind, final=reach == "final"
                    )
                    is_approved = (name_place(tool, use, code, places), str(leaf.value)) in self._approved
                    needed_tier = _STRONG if discloses else _WEAK
                    if use.role == "target" and reach == "others" and has_destination:
                        needed_tier = _NAMED
                    if not is_approved and not self._is_trusted(leaf, use, needed_tier, is_loose=is_loose, code=code):
                        if is_plain is None:
                            is_plain = not any(
                                other_use.role == "target"
                                or (other_use.role == "content" and self._lacks_trusted(other_leaf))
                                for other_leaf, other_use in uses
                                if other_leaf is not leaf
                            )
                        yield from self._judge_place(leaf, use, reach, is_plain=is_plain)
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
                    is_counted = has_destination or reach != "own"
                    digits += self._count_digits(leaf) if is_counted else 0
                    has_unsaid_words = is_counted and isinstance(leaf.value, str) and self._lacks_trusted(leaf)
                    if has_unsaid_words or (is_counted and not self._spares(digits)):
                        yield self._flaw(leaf.path, str(leaf.value), "content")
                    elif not is_plain_detail(leaf.value):
                        yield from self._judge_content(leaf, reach, digits, places)

    def _raises_choice(self, leaf: Leaf, *, final: bool) -> bool:
        return raises_choice(leaf.field, leaf.value, self._trusted.has_word, final=final)

    def _is_trusted(self, leaf: Leaf, use: ArgumentUse, min_tier: int, *, is_loose: bool, code: str) -> bool:
        """Return whether a place is trusted or minted. The words of a command count only together."""
        text = str(leaf.value)
        value = normalise_value(text)
        if use.kind in ("", "url") and "/" in text and find_links(text):
            # Case matters after the host.
            return self._trusted.has_link(normalise_link(text)) or (
                not self._erased and self._tier(use.kind, value) >= min_tier
            )
        if use.kind == "code" and "\n" in code:
            return self._trusted.quotes_command(code)
        if use.kind == "code":
            return self._trusted.quotes_exactly(text) and not is_loose and self._trusted.names_value(value, use.kind)
        if use.role == "destination" and not self._trusted.names_target(value):
            return False
        if use.kind in _SPELT_KINDS and not self._spells_trusted(str(leaf.value)):
            return False
        if not is_loose and self._trusted.names_value(value, use.kind):
            return True
        if use.kind == "url" and self._trusted.has_link(normalise_link(str(leaf.value))):
            return True
        return not self._erased and self._tier(use.kind, value) >= min_tier

    def _spells_trusted(self, text: str) -> bool:
        return self._trusted.spells_out(text) or fold_value(text) in self._spelt

    def _judge_place(self, leaf: Leaf, use: ArgumentUse, reach: Reach, *, is_plain: bool) -> Iterator[Flaw]:
        """Judge an untrusted place. A listed internal place is no flaw if the call is plain."""
        text = str(leaf.value)
        value = normalise_value(text)
        is_listed = not self._erased and reach != "final" and (use.kind, value) in self._listed
        if is_listed and is_plain:
            return
        is_weak = is_listed or (not self._erased and self._tier(use.kind, value) > 0)
        yield self._flaw(leaf.path, text, "weak" if is_weak else "unsaid")

    def _tier(self, kind: str, value: str) -> int:
        return self._minted.get((kind, value), 0)

    def _judge_amount(
        self, leaf: Leaf, places: Sequence[str], figures: frozenset[str] | None, *, final: bool
    ) -> Iterator[Flaw]:
        """Judge an amount. It must be trusted; for a final act, in one sentence with the place and the request."""
        if (name_amount(places), normalise_value(str(leaf.value))) in self._approved:
            return
        number = normalise_number(leaf.value)
        if number is None:
            is_trusted = self._trusted.names(str(leaf.value))
        else:
            is_trusted = self._trusted.has_number(number, places if final else ()) and (
                figures is None or number in figures
            )
        if not is_trusted:
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
        """Return whether a call may have this many untrusted digits."""
        return digits <= _FREE_DIGITS_OF_CALL and self._digits + digits <= _FREE_DIGITS

    def _lacks_trusted(self, leaf: Leaf, *, own: bool = False) -> bool:
        """Return whether a content has an untrusted word, or can spell something with its words or marks.

        In the person's `own` things, the usual words of plans are allowed.
        """
        text = str(leaf.value)
        if not self._trusted.has_marks(text) or ("${" in text and not self._trusted.contains(text)):
            return True
        # A pair of neighbours has at least two letters.
        if len(text) > 2 * _FREE_JOINTS and self._trusted.count_joints(text) > _FREE_JOINTS:
            return True
        return not self._has_words(cut_words(text), own=own) and not self._trusted.contains(text)

    def _has_words(self, words: list[str], *, own: bool) -> bool:
        if len(words) > _REPEATS and max(Counter(words).values()) > _REPEATS:
            return False
        function_word_count = other_ending_count = 0
        for word in self._trusted.find_unsaid(words):
            if word.isdecimal() or (not self._erased and self._looked_up.has_exact(word)):
                continue
            if is_function_word(word) or (own and is_everyday_word(word)):
                function_word_count += 1
            elif self._has_word(word):
                other_ending_count += 1
            else:
                return False
        return function_word_count <= _FREE_WORDS and other_ending_count <= _FREE_ENDINGS

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
        """Find a value in untrusted text, the newest first; return its source and line."""
        needle = value.strip().casefold()[:80]
        if not needle:
            return "", ""
        for source, text, folded_text in reversed(self._untrusted):
            position = folded_text.find(needle)
            if position >= 0:
                start = text.rfind("\n", 0, position) + 1
                end = text.find("\n", position)
                return source, text[start : end if end >= 0 else None][:300].strip()
        return "", ""


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
