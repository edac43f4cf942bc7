"""How risky a document of GraphQL is: mutations change something, and some say by their name that they delete."""

import re
from collections.abc import Iterator
from typing import Final

from halter.guard.places import Finding

_PART: Final = re.compile(r'#[^\n]*|"""[\s\S]*?(?:"""|$)|"(?:[^"\\\n]|\\.)*"?|[{}():]|\$?\w+')
_BEGINS: Final = re.compile(r"[\s,]*(?:#[^\n]*\n[\s,]*)*(?:mutation|query|subscription|fragment|\{)")
_DELETING: Final = re.compile(r"(?:delete|remove|destroy|drop|purge|erase|wipe|truncate|terminate)", re.IGNORECASE)


def graphql_risk(text: str) -> Iterator[Finding]:
    """Judge the mutations of a document; a text that is no document says nothing."""
    if "mutation" not in text or "{" not in text or not _BEGINS.match(text):
        return
    yield from (_field_risk(name) for name in _mutated(text))


def _mutated(text: str) -> Iterator[str]:
    """List the fields that the mutations of a document ask for."""
    braces = parentheses = 0
    mutates = False
    for part in _PART.findall(text):
        if part == "(":
            parentheses += 1
        elif part == ")":
            parentheses -= 1
        elif part == "{" and not parentheses:
            braces += 1
        elif part == "}" and not parentheses:
            braces -= 1
            mutates = mutates and braces > 0
        elif not braces and not parentheses and part in {"mutation", "query", "subscription", "fragment"}:
            mutates = part == "mutation"
        elif mutates and braces == 1 and not parentheses and part[0].isalpha():
            yield part


def _field_risk(name: str) -> Finding:
    if _DELETING.match(name):
        return "HIGH", f"the mutation {name} deletes something outside"
    return "MEDIUM", f"the mutation {name} changes something outside"
