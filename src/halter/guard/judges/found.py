"""What a judge of a program finds, and how it reads words: options, operands, values."""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from halter.guard.commands import Command
from halter.guard.places import Finding


class Runs(msgspec.Struct, frozen=True):
    """Something that a command runs besides: a line for a shell, or one command as words."""

    given: str | tuple[str, ...]


class Mentions(msgspec.Struct, frozen=True):
    """Words among which may be a command: those that name a dangerous program count as if they were run."""

    words: tuple[str, ...]


Found = Finding | Runs | Mentions
Judge = Callable[[Command], Iterator[Found]]


def operands(words: Sequence[str]) -> list[str]:
    """List the words that are no options."""
    after = words.index("--") if "--" in words else len(words)
    return [word for word in words[:after] if not word.startswith("-")] + list(words[after + 1 :])


def has(words: Sequence[str], letters: str, *names: str) -> bool:
    """Tell whether a flag is there, also among joined ones as in `-rf`, and also cut short as in `--recurs`."""
    for word in words:
        if word == "--":
            return False
        name = word.split("=")[0]
        if name.startswith("--"):
            if any(each.startswith(name) for each in names):
                return True
        elif word[:1] == "-" and (set(letters) & set(word[1:]) or word in names):
            return True
    return False


def values_of(words: Sequence[str], *names: str) -> Iterator[str]:
    """List the values of options: in the next word, after an equals sign, or behind a single letter."""
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if word == "--":
            return
        following = words[at + 1] if at + 1 < len(words) else ""
        for option in names:
            if option.startswith("--"):
                if len(name) > len("--") and option.startswith(name):
                    yield value if equals else following
                    break
            elif word == option:
                yield following
                break
            elif len(option) == len("-x") and word.startswith(option) and not word.startswith("--"):
                yield word[len(option) :].removeprefix("=")
                break


def is_path(word: str) -> bool:
    """Tell a word that names a file from a pattern or a sentence."""
    return " " not in word and ("/" in word or word.startswith((".", "~", "$HOME", "${HOME}")))


def verbs(high: str = "", critical: str = "", low: str = "", *, otherwise: bool = True) -> Judge:
    """Judge a program by those of its words that are known to be dangerous, or known to be harmless."""
    grave, worse, mild = high.split(), critical.split(), frozenset(low.split())

    def judge(command: Command) -> Iterator[Found]:
        words = command.argv[1:]
        for word in worse:
            if word in words:
                yield "CRITICAL", f"{command.program} {word} cannot be taken back"
        for word in grave:
            if word in words:
                yield "HIGH", f"{command.program} {word} changes or deletes a lot"
        verb = next(iter(operands(words)), "")
        if otherwise and verb not in mild:
            yield "MEDIUM", f"{command.program} changes something outside"

    return judge
