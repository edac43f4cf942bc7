"""What a command reads from the commands before it, as far as their words say what they write."""

import base64
import binascii
import re
import sys
from collections.abc import Sequence
from itertools import islice
from typing import Final

import msgspec

from halter.risk.program_names import FETCHERS, program_of

_ESCAPE: Final = re.compile(r"\\(x[0-9a-fA-F]{1,2}|0[0-7]{0,3}|[1-7][0-7]{0,2}|[\s\S])")
_SIGNS: Final = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b", "\\": "\\"}
_DIRECTIVE: Final = re.compile(r"%%|%[-+ #0-9.]*[a-zA-Z]")


class CommandInput(msgspec.Struct, frozen=True):
    """The input of a command from other commands: their names, and true if any of them fetched it.

    `roots` are the folders whose contents it lists; `text` is the content, if the line contains it.
    """

    programs: tuple[str, ...] = ()
    fetched: bool = False
    roots: tuple[str, ...] = ()
    text: str | None = None


def trace_output(words: Sequence[str], upstream: CommandInput | None, text: str | None) -> CommandInput:
    """Trace the output of a command that reads `upstream` or `text`."""
    program = program_of(words[0]) if words else ""
    source = text if text is not None else upstream.text if upstream else None
    is_fetched = (upstream is not None and upstream.fetched) or fetches(words)
    return CommandInput(
        (program,),
        is_fetched,
        _find_roots(program, words[1:]) or (upstream.roots if upstream else ()),
        _predict_output(words, source),
    )


def join_command_inputs(inputs: Sequence[CommandInput]) -> CommandInput | None:
    if len(inputs) <= 1:
        return inputs[0] if inputs else None
    texts = [source.text for source in inputs]
    return CommandInput(
        tuple(name for source in inputs for name in source.programs),
        any(source.fetched for source in inputs),
        tuple(root for source in inputs for root in source.roots),
        None if None in texts else "\n".join(text or "" for text in texts),
    )


def fetches(words: Sequence[str]) -> bool:
    """Return true if any word of a command names a program that fetches something."""
    return any(program_of(token) in FETCHERS for word in words for token in word.split())


def unescape_text(text: str) -> str:
    return _ESCAPE.sub(unescape_sign, text)


def unescape_sign(match: re.Match[str], unknown_prefix: str = "\\") -> str:
    code = match[1]
    if code[0] in "xuU" and len(code) > 1:
        number = int(code[1:], 16)
        return chr(number) if number <= sys.maxunicode else ""
    return chr(int(code, 8) & 0xFF) if code[0] in "01234567" else _SIGNS.get(code, unknown_prefix + code)


def _find_roots(program: str, words: Sequence[str]) -> tuple[str, ...]:
    if program not in {"find", "ls", "fd", "fdfind", "tree", "du"}:
        return ()
    return tuple(islice((word for word in words if not word.startswith("-")), 8)) or (".",)


def _predict_output(words: Sequence[str], source: str | None) -> str | None:
    if not words:
        return None
    program, arguments = program_of(words[0]), list(words[1:])
    match program:
        case "echo":
            while (
                arguments
                and arguments[0].startswith("-")
                and set(arguments[0][1:]) <= set("neE")
                and arguments[0] != "-"
            ):
                arguments.pop(0)
            return unescape_text(" ".join(arguments))
        case "printf":
            return _format_printf([word for word in arguments if word != "--"])
        case "cat" | "tac" | "tee" | "sponge" | "head" | "tail" | "sort" | "uniq" | "tr" | "cut" | "nl" | "pv":
            passes_input = program == "tee" or not any(word == "-" or not word.startswith("-") for word in arguments)
            return source if passes_input or arguments == ["-"] else None
        case "base64" | "basenc":
            return (
                _decode_base64(source) if source and any(word[:2] in {"-d", "-D", "--"} for word in arguments) else None
            )
        case "yes":
            return " ".join(arguments)
        case _:
            return None


def _format_printf(words: Sequence[str]) -> str:
    """Format as printf does; every directive takes the next word."""
    if not words:
        return ""
    values = iter(words[1:])
    pattern = unescape_text(words[0])
    output = _DIRECTIVE.sub(lambda match: "%" if match[0] == "%%" else unescape_text(next(values, "")), pattern)
    return " ".join([output, *(unescape_text(value) for value in values)])


def _decode_base64(text: str) -> str | None:
    try:
        return base64.b64decode("".join(text.split()), validate=False).decode("utf-8", "replace")
    except (binascii.Error, ValueError):
        return None
