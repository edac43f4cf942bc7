"""The values of a call with their roles, and the names of acts and approvals."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, cast

from halter.core.provenance import ArgumentUse, Declaration, guess_use, split_name
from halter.provenance.records import FIGURES, PLAIN, Leaf, list_leaves, normalise_path
from halter.provenance.trusted_text import normalise_link, normalise_number, normalise_value

PLACES: Final = ("destination", "target")
_MAX_NAME_LENGTH: Final = 80
_MAX_NAME_WORDS: Final = 5

Uses = list[tuple[Leaf, ArgumentUse]]
"""The values of a call with their roles."""


def name_acts(tool: str, declaration: Declaration, uses: Uses) -> set[tuple[str, ...]]:
    """Name an act by its tool and places, in any order. A payment has a second name: its places and amount."""
    place_names = {name_value(leaf, use) for leaf, use in uses if use.role in PLACES and str(leaf.value or "").strip()}
    acts = {(tool, *sorted(place_names))}
    amounts = [str(normalise_number(leaf.value)) for leaf, use in uses if use.role == "amount" and leaf.value]
    destinations = list_destinations(uses)
    if declaration.reach == "final" and amounts and destinations:
        acts.add(("", *sorted(map(normalise_value, destinations)), *sorted(amounts)))
    return acts


def name_value(leaf: Leaf, use: ArgumentUse) -> str:
    """Name a place in an act. The name depends neither on the argument nor on the number of occurrences."""
    text = str(leaf.value)
    value = normalise_link(text) if use.kind == "url" else normalise_value(text)
    return f"{leaf.field if use.role == 'target' else use.kind}={value}"


def list_destinations(uses: Iterable[tuple[Leaf, ArgumentUse]]) -> list[str]:
    return [str(leaf.value) for leaf, use in uses if use.role == "destination" and str(leaf.value or "").strip()]


def name_amount(destinations: Iterable[str]) -> str:
    """Name the approval of an amount, which counts only for these destinations."""
    return " ".join(("amount", *sorted(map(normalise_value, destinations))))


def name_content(destinations: Iterable[str]) -> str:
    """Name the approval of a content, which counts only for these destinations."""
    return " ".join(("content", *sorted(map(normalise_value, destinations))))


def name_place(tool: str, use: ArgumentUse, code: str, places: Iterable[str]) -> str:
    """Name the approval of a place: for one tool and kind. A target has its destinations, code its full text."""
    if use.kind == "code":
        return f"{tool} {use.role}:{use.kind} {code}"
    destinations = sorted(map(normalise_value, places)) if use.role == "target" else ()
    return " ".join((tool, f"{use.role}:{use.kind}", *destinations))


def join_code(uses: Iterable[tuple[Leaf, ArgumentUse]]) -> str:
    """Join the code of a call, one word per line, including empty words of a list."""
    return "\n".join(
        str(leaf.value) for leaf, use in uses if use.kind == "code" and (has_value(leaf) or "[" in leaf.path)
    )


def has_value(leaf: Leaf) -> bool:
    return leaf.value is not None and not is_blank(leaf)


def is_blank(leaf: Leaf) -> bool:
    return isinstance(leaf.value, str) and not leaf.value.strip()


def top_argument(path: str) -> str:
    return path.split(".", 1)[0].split("[", 1)[0]


def is_sent(uses: Uses) -> bool:
    return any(use.role == "destination" and bool(str(leaf.value or "").strip()) for leaf, use in uses)


def find_use(declaration: Declaration, leaf: Leaf) -> ArgumentUse:
    """Return the declared role of an argument or of a field inside it. An undeclared role is guessed strictly."""
    uses = declaration.arguments
    use = uses.get(leaf.field)
    if use is None or "." in leaf.path:
        top = top_argument(leaf.path)
        use = uses.get(normalise_path(leaf.path)) or uses.get(top) or use
        if "." in leaf.path and f"arguments.{top}" in declaration.guessed:
            # The name of a field is more specific than that of its object.
            inner = guess_use(leaf.field)
            use = use if inner == ArgumentUse("destination") else inner
    if use is None:
        shape = {"type": "number"} if isinstance(leaf.value, int | float) else None
        return guess_use(leaf.field, shape)
    return use


def has_figures_alone(declaration: Declaration, arguments: Mapping[str, Any]) -> bool:
    """Return whether a call has only declared figures, none of them a destination."""
    if not FIGURES.issuperset(map(type, arguments.values())):
        return False
    for name in arguments:
        use = declaration.arguments.get(name)
        if use is None or use.role == "destination" or "." in name:
            return False
    return True


def is_usual_field(key: str) -> bool:
    """Return whether a key is a single usual word, which cannot carry information."""
    return key == "name" or (
        len(split_name(key)) == 1 and key.isalpha() and guess_use(key) != ArgumentUse("destination")
    )


def looks_like_name(value: str) -> bool:
    """Return whether an entry of a directory can be a name: it must be short and no sentence."""
    return 0 < len(value) <= _MAX_NAME_LENGTH and value.count(" ") < _MAX_NAME_WORDS


def iterate_keys(declaration: Declaration, arguments: Mapping[str, Any]) -> Iterator[Leaf]:
    """Yield the keys of a call that are neither declared nor usual. Such keys can carry words, as values do."""
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
