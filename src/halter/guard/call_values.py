"""The values of a call with their roles, and how an act and a yes name them."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, cast

from halter.core.provenance import ArgumentUse, Declaration, guess_use, split_name
from halter.guard.records import FIGURES, PLAIN, Leaf, list_leaves, normalise_path
from halter.guard.trusted_text import normalise_link, normalise_number, normalise_value

PLACES: Final = ("destination", "target")
_LONGEST_NAME: Final = 80
_WORDS_OF_NAME: Final = 5

Uses = list[tuple[Leaf, ArgumentUse]]
"""The values of a call with their roles."""


def name_acts(tool: str, declaration: Declaration, uses: Uses) -> set[tuple[str, ...]]:
    """An act by its tool and its places, in any order; a payment also by place and amount, with any tool."""
    named = {name_value(leaf, use) for leaf, use in uses if use.role in PLACES and str(leaf.value or "").strip()}
    acts = {(tool, *sorted(named))}
    amounts = [str(normalise_number(leaf.value)) for leaf, use in uses if use.role == "amount" and leaf.value]
    places = list_destinations(uses)
    if declaration.reach == "final" and amounts and places:
        acts.add(("", *sorted(map(normalise_value, places)), *sorted(amounts)))
    return acts


def name_value(leaf: Leaf, use: ArgumentUse) -> str:
    """A place as an act names it: under which argument, and how often, makes no other act of it."""
    text = str(leaf.value)
    value = normalise_link(text) if use.kind == "url" else normalise_value(text)
    return f"{leaf.field if use.role == 'target' else use.kind}={value}"


def list_destinations(uses: Iterable[tuple[Leaf, ArgumentUse]]) -> list[str]:
    return [str(leaf.value) for leaf, use in uses if use.role == "destination" and str(leaf.value or "").strip()]


def name_amount(places: Iterable[str]) -> str:
    """An amount is agreed to for where it goes."""
    return " ".join(("amount", *sorted(map(normalise_value, places))))


def name_content(places: Iterable[str]) -> str:
    """A content is agreed to for where it goes."""
    return " ".join(("content", *sorted(map(normalise_value, places))))


def name_place(tool: str, use: ArgumentUse, code: str, places: Iterable[str]) -> str:
    """A place is agreed to for one tool and as the kind that was shown: a target for where it goes, code as a whole."""
    if use.kind == "code":
        return f"{tool} {use.role}:{use.kind} {code}"
    along = sorted(map(normalise_value, places)) if use.role == "target" else ()
    return " ".join((tool, f"{use.role}:{use.kind}", *along))


def join_code(uses: Iterable[tuple[Leaf, ArgumentUse]]) -> str:
    """The code of a call, one word to a line: an empty word of a list counts."""
    return "\n".join(
        str(leaf.value) for leaf, use in uses if use.kind == "code" and (is_given(leaf) or "[" in leaf.path)
    )


def is_given(leaf: Leaf) -> bool:
    return leaf.value is not None and not is_blank(leaf)


def is_blank(leaf: Leaf) -> bool:
    return isinstance(leaf.value, str) and not leaf.value.strip()


def top_argument(path: str) -> str:
    return path.split(".", 1)[0].split("[", 1)[0]


def is_sent(uses: Uses) -> bool:
    return any(use.role == "destination" and bool(str(leaf.value or "").strip()) for leaf, use in uses)


def find_use(declaration: Declaration, leaf: Leaf) -> ArgumentUse:
    """The declared role of an argument or of a field within; what is not declared is guessed, strictly."""
    uses = declaration.arguments
    use = uses.get(leaf.field)
    if use is None or "." in leaf.path:
        top = top_argument(leaf.path)
        use = uses.get(normalise_path(leaf.path)) or uses.get(top) or use
        if "." in leaf.path and f"arguments.{top}" in declaration.guessed:
            # The name of an object says less than the name of its field.
            inner = guess_use(leaf.field)
            use = use if inner == ArgumentUse("destination") else inner
    if use is None:
        shape = {"type": "number"} if isinstance(leaf.value, int | float) else None
        return guess_use(leaf.field, shape)
    return use


def has_figures_alone(declaration: Declaration, whole: Mapping[str, Any]) -> bool:
    """Whether a call has declared figures and nothing else, and no place among them."""
    if not FIGURES.issuperset(map(type, whole.values())):
        return False
    for name in whole:
        use = declaration.arguments.get(name)
        if use is None or use.role == "destination" or "." in name:
            return False
    return True


def is_usual_field(key: str) -> bool:
    """Whether a key is one word that is usual for a field: it carries nothing."""
    return key == "name" or (
        len(split_name(key)) == 1 and key.isalpha() and guess_use(key) != ArgumentUse("destination")
    )


def looks_like_name(value: str) -> bool:
    """Whether an entry of a directory can be a name: short, and no sentence."""
    return 0 < len(value) <= _LONGEST_NAME and value.count(" ") < _WORDS_OF_NAME


def iterate_keys(declaration: Declaration, arguments: Mapping[str, Any]) -> Iterator[Leaf]:
    """The keys of a call carry words as its values do; those that are declared or usual carry none."""
    for key in arguments.keys() - declaration.arguments.keys():
        if key and not is_usual_field(key):
            yield Leaf(key, key, key)
    for name, value in arguments.items():
        if type(value) in PLAIN or not isinstance(value, Mapping | list):
            continue
        paths = (leaf.path for leaf in list_leaves(cast("Any", value), name, name))
        keys = {(path, key) for path in paths for key in re.split(r"[.\[\]]+", path)[1:] if not key.isdecimal()}
        for path, key in sorted(keys):
            if key and normalise_path(path) not in declaration.arguments and not is_usual_field(key):
                yield Leaf(name, path, key)
