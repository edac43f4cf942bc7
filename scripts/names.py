"""Check the names of the package against the rules that are absolute.

Each check takes the parsed modules by their paths below the import root, and lists what breaks its rule.
"""

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

Modules = Mapping[Path, ast.Module]
Function = ast.FunctionDef | ast.AsyncFunctionDef

NOUNS_IN_ING = frozenset({"billing", "string", "thing", "ring", "ping", "king", "spring", "embedding", "testing"})
"""Words that end like a gerund and are none, and `halter.testing`, which is a public name."""

WORDS_IN_ED = frozenset(
    {"bed", "embed", "exceed", "feed", "need", "proceed", "red", "seed", "shed", "speed", "succeed"}
)
"""Words that end like a participle and are none."""

IRREGULAR_PARTICIPLES = re.compile(
    r"""(?x)
    been | begun | bent | bitten | blown | born | bought | broken | brought | built | burnt | caught | chosen | come
    | done | drawn | driven | eaten | fallen | fed | felt | fought | forbidden | forgotten | found | frozen | given
    | gone | got | grown | heard | held | hidden | hung | kept | known | laid | lain | led | left | lent | lost |
    made | meant | met | paid | ridden | risen | said | seen | sent | shaken | shot | shown | sold | sought | spent
    | spoken | stolen | stood | stricken | struck | stuck | sunk | swept | sworn | taken | taught | thought | thrown
    | told | torn | understood | undone | woken | won | worn | wound | written
    """
)
"""Those that are no imperative as well, as `read`, `split`, `bound`, `set` and `run` are."""

PROPERTIES = frozenset({"property", "cached_property", "setter"})
"""A property is named by what it is, and so is a copy that `with_` or `without_` begins."""

VERBS = {
    "see": "read",
    "look": "read",
    "hear": "apply or on_EVENT",
    "tell": "report or send",
    "say": "report or send",
    "take": "get or apply",
    "keep": "save or record",
    "demand": "require",
    "furnish": "build",
    "word": "render",
    "owe": "defer",
    "until": "wait_until",
    "may": "can",
    "what": "find",
    "all": "list",
    "those": "list",
}
"""The first words that a function does not have, and the verbs of the glossary in their place."""

IDIOMS = re.compile(r"look_up(_.+)?|take_over(_.+)?|take_snapshot|keep_alive|may_not_.+")
"""Phrases of the field that begin with one of those words."""

PUBLIC_VERBS = frozenset({"say"})
"""What programs call by a name of an earlier version: `halter.testing.say` makes a scripted answer."""

BOOLEAN_PREFIXES = frozenset({"is", "has", "can"})
BOOLEANS = re.compile(r"bool|TypeGuard\[.*\]|TypeIs\[.*\]|Awaitable\[bool\]")
SENTENCE_PREFIXES = frozenset({"describe"})
SENTENCES = re.compile(r"str( \| None)?|Text( \| None)?|(list|Sequence|Iterator)\[str\]|tuple\[str, (str|\.\.\.)\]")

PARTICIPLES: Mapping[str, str] = {}
"""The functions that a participle names nevertheless, and the reason of each."""

ALIASES: Mapping[str, str] = {
    "Set as AbstractSet": "the abstract class of collections.abc would hide the builtin `set` from the reader",
}
"""The imports that give a name another one nevertheless, and the reason of each."""


def find_participles(modules: Modules) -> Iterator[str]:
    """Find the functions that a bare participle names."""
    for path, function in _list_functions(modules):
        words = function.name.strip("_").split("_")
        if (
            len(words) == 1
            and _is_participle(words[0])
            and not _is_property(function)
            and function.name not in PARTICIPLES
        ):
            yield f"{path}:{function.lineno}: {function.name}"


def find_gerund_modules(modules: Modules) -> Iterator[str]:
    """Find the modules that a gerund names."""
    for path in modules:
        if any(word.endswith("ing") and word not in NOUNS_IN_ING for word in path.stem.split("_")):
            yield str(path)


def find_repeated_classes(modules: Modules) -> Iterator[str]:
    """Find the public class names that more than one module defines."""
    names = Counter(
        node.name
        for module in modules.values()
        for node in module.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return (f"{name}: {count} modules" for name, count in sorted(names.items()) if count > 1)


def find_import_aliases(modules: Modules) -> Iterator[str]:
    """Find the imports that give what they import another name."""
    for path, module in modules.items():
        for node in ast.walk(module):
            for alias in node.names if isinstance(node, ast.ImportFrom | ast.Import) else ():
                renaming = f"{alias.name} as {alias.asname}"
                if alias.asname not in {None, alias.name} and renaming not in ALIASES:
                    yield f"{path}:{alias.lineno}: {renaming}"


def find_foreign_verbs(modules: Modules) -> Iterator[str]:
    """Find the functions whose first word is another word for a verb of the glossary."""
    for path, function in _list_functions(modules):
        name = function.name.strip("_")
        verb = VERBS.get(name.split("_")[0])
        if verb and not (IDIOMS.fullmatch(name) or function.name in PUBLIC_VERBS or _is_property(function)):
            yield f"{path}:{function.lineno}: {function.name}: {verb}"


def find_broken_prefixes(modules: Modules) -> Iterator[str]:
    """Find the functions whose first word promises a type that they do not return."""
    for path, function in _list_functions(modules):
        prefix = function.name.strip("_").split("_")[0]
        returned = "" if function.returns is None else ast.unparse(function.returns).strip("'\"")
        if (prefix in BOOLEAN_PREFIXES and not BOOLEANS.fullmatch(returned)) or (
            prefix in SENTENCE_PREFIXES and not SENTENCES.fullmatch(returned)
        ):
            yield f"{path}:{function.lineno}: {function.name} returns {returned}"


CHECKS: Mapping[str, Callable[[Modules], Iterator[str]]] = {
    "functions named by a participle": find_participles,
    "modules named by a gerund": find_gerund_modules,
    "public class names used twice or more": find_repeated_classes,
    "imports that rename": find_import_aliases,
    "functions with another word for a verb of the glossary": find_foreign_verbs,
    "functions that return what their first word does not promise": find_broken_prefixes,
}


def _list_functions(modules: Modules) -> Iterator[tuple[Path, Function]]:
    for path, module in modules.items():
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("__"):
                yield path, node


def _is_participle(word: str) -> bool:
    if IRREGULAR_PARTICIPLES.fullmatch(word):
        return True
    return len(word) > len("red") and word.endswith("ed") and word not in WORDS_IN_ED


def _is_property(function: Function) -> bool:
    return any(
        (isinstance(decorator, ast.Name) and decorator.id in PROPERTIES)
        or (isinstance(decorator, ast.Attribute) and decorator.attr in PROPERTIES)
        for decorator in function.decorator_list
    )
