"""The names of programs, and the tables beside this file that say what each of them is."""

import re
from importlib.resources import files
from typing import Final

from halter.core.text import make_word_set


def read_entries(name: str) -> list[str]:
    """Read the entries of a table: each begins a line, and an indent of eight continues a line."""
    text = files("halter.risk").joinpath(f"{name}.txt").read_text("utf-8").replace("\n        ", " ")
    return re.findall(r"^[^#\s].*(?:\n    .*)*", text, re.MULTILINE)


_NAMES_BY_KIND: Final = dict(entry.split(": ", 1) for entry in read_entries("programs"))
SHELLS: Final = make_word_set(_NAMES_BY_KIND["shells"])
FETCHERS: Final = make_word_set(_NAMES_BY_KIND["fetchers"])
PRIVILEGE_RAISERS: Final = make_word_set(_NAMES_BY_KIND["privilege-raisers"])
READERS: Final = make_word_set(_NAMES_BY_KIND["readers"])
DESTROYERS: Final = make_word_set(_NAMES_BY_KIND["destroyers"])

_PYTHON: Final = re.compile(r"(?:python|pypy|pythonw|ipython|micropython|jython|bpython)[\d.]*[a-z]*(?:-\w+)?")
_NUMBERED: Final = re.compile(r"(perl|ruby|node|nodejs|php|lua|luajit|tclsh|guile|deno|bun|julia|Rscript)[\d.-]*")


def program_of(word: str) -> str:
    return word if "$(" in word or "`" in word else word.replace("\\", "/").rpartition("/")[2]


def family_of(program: str) -> str:
    """Return the name of an interpreter without its version: `python` for `python3.11`."""
    if _PYTHON.fullmatch(program):
        return "python"
    match = _NUMBERED.fullmatch(program)
    return match[1] if match else program
