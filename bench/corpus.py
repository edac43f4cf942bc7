"""Rates of secrets that the redactor misses, and of harmless text that it changes: `python -m bench.corpus`.

The texts are templates in `tests/corpus`. Their secrets are generated from a seed, so no file contains a key.
"""

import random
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from halter.redaction.redact import Redactor

FOLDER = Path(__file__).parent.parent / "tests" / "corpus"
PARTS = ("a", "b", "c")
"""The three parts of the corpus."""

WIDTH = 6
"""Number of consecutive characters of a secret that count as a leak."""

_FIELD = re.compile(r"§([a-z0-9]+)(?:\.(\d+))?§")
_SECRET = re.compile(r"«(.*?)»", re.DOTALL)
_MARK = re.compile(r"\[redacted:[^\]]*\]")
_ALNUM = string.ascii_letters + string.digits
_ALPHABETS = {
    "hex": "0123456789abcdef",
    "upx": "0123456789ABCDEF",
    "dig": string.digits,
    "low": string.ascii_lowercase + string.digits,
    "up": string.ascii_uppercase + string.digits,
    "b62": _ALNUM,
    "b64x": _ALNUM + "+/",
    "b64u": _ALNUM + "_-",
    "b32": string.ascii_uppercase + "234567",
    "wif": "".join(sorted(set(_ALNUM) - set("0OIl"))),
    "crypt": _ALNUM + "./",
    "pwu": _ALNUM + "!-_.*",
    "pwj": _ALNUM + "!#%?+~-",
    "pwa": _ALNUM + "!#%^*+?.~",
}
_WORDS = (
    *("amber", "bottle", "canyon", "drift", "echo", "fabric", "garden", "harbor", "island", "jungle", "kettle"),
    *("ladder", "meadow", "nectar", "ocean", "pepper", "quarry", "ribbon", "saddle", "timber", "velvet", "window"),
)


@dataclass(frozen=True)
class Sample:
    """A text and its secrets."""

    family: str
    text: str
    secrets: tuple[str, ...]


@dataclass(frozen=True)
class Rate:
    """Result for one part of the corpus."""

    samples: int
    families: int
    missed: Sequence[Sample]

    @property
    def share(self) -> float:
        """Share of failed samples."""
        return len(self.missed) / self.samples


def samples(kind: str, part: str, seed: int = 1) -> list[Sample]:
    """Read one part of the corpus: `found` has secrets, `harmless` has none."""
    return [_filled(family, text, random.Random(f"{seed} {text}")) for family, text in _read(kind, part)]


def found(part: str, redact: Callable[[str], str], seed: int = 1) -> Rate:
    """Find the samples in which part of a secret remains."""
    all_samples = samples("found", part, seed)
    return _rate(all_samples, [each for each in all_samples if left(each, redact(each.text))])


def touched(part: str, redact: Callable[[str], str], seed: int = 1) -> Rate:
    """Find the harmless samples that were changed."""
    all_samples = samples("harmless", part, seed)
    return _rate(all_samples, [each for each in all_samples if redact(each.text) != each.text])


def left(sample: Sample, redacted: str) -> tuple[str, ...]:
    """List the parts of a sample's secrets that remain."""
    harmless_text = sample.text
    for secret in sample.secrets:
        harmless_text = harmless_text.replace(secret, " ")
    visible = _MARK.sub(" ", redacted)
    windows = (line[at : at + WIDTH] for secret in sample.secrets for line in secret.split("\n") for at in _steps(line))
    return tuple(window for window in windows if window in visible and window not in harmless_text)


def mixed(size: int) -> str:
    """Make a text of `size` characters from all harmless samples, with a secret in one of 1,000 lines."""
    chance = random.Random(7)
    lines: list[str] = []
    for seed in count(1):
        lines_of_seed = [sample.text for part in PARTS for sample in samples("harmless", part, seed)]
        lines_of_seed.append(chance.choice(samples("found", PARTS[0], seed)).text)
        chance.shuffle(lines_of_seed)
        lines += lines_of_seed
        size -= sum(len(line) + 1 for line in lines_of_seed)
        if size <= 0:
            break
    return "\n".join(lines)


def _steps(line: str) -> range:
    return range(max(1, len(line) - WIDTH + 1)) if line.strip() else range(0)


def _rate(all_samples: Sequence[Sample], failed: Sequence[Sample]) -> Rate:
    return Rate(len(all_samples), len({sample.family for sample in all_samples}), failed)


def _read(kind: str, part: str) -> Iterator[tuple[str, str]]:
    """Give each template with its family."""
    text = (FOLDER / f"{kind}_{part}.txt").read_text()
    for head, family, body in re.findall(r"^(==?) (\S+)\n(.*?)\n?(?=^==? |\Z)", text, re.DOTALL | re.MULTILINE):
        yield from ((family, sample) for sample in ([body] if head == "==" else body.split("\n")) if sample)


def _filled(family: str, template: str, chance: random.Random) -> Sample:
    text = _FIELD.sub(lambda field: _made(field[1], int(field[2] or 0), chance), template)
    return Sample(family, _SECRET.sub(r"\1", text), tuple(_SECRET.findall(text)))


def _made(kind: str, size: int, chance: random.Random) -> str:
    if kind in _ALPHABETS:
        text = "".join(chance.choices(_ALPHABETS[kind], k=size))
        # A password of letters alone is a word, and a word at its end may be a full stop of the sentence.
        return f"{text[:2]}7{text[3:-1]}x" if kind.startswith("pw") else text
    return _SPECIAL[kind](size, chance)


def _uuid(_: int, chance: random.Random) -> str:
    return "-".join(_made("hex", size, chance) for size in (8, 4, 4, 4, 12))


def _jwt(_: int, chance: random.Random) -> str:
    return ".".join((f"eyJ{_made('b62', 33, chance)}", f"eyJ{_made('b62', 80, chance)}", _made("b64u", 43, chance)))


def _lines(indent: str) -> Callable[[int, random.Random], str]:
    return lambda size, chance: indent.join(_made("b64x", 64, chance) for _ in range(size))


_SPECIAL: Mapping[str, Callable[[int, random.Random], str]] = {
    "uuid": _uuid,
    "jwt": _jwt,
    "pem": _lines("\n"),
    "pem4": _lines("\n    "),
    "pemq": _lines("\n> "),
    "pemplus": _lines("\n+"),
    "pemjson": _lines("\\n"),
    "words": lambda size, chance: " ".join(chance.choices(_WORDS, k=size)),
}


def main() -> None:
    redact = Redactor({}).redact
    for part in PARTS:
        for kind, rate in (("secrets missed", found(part, redact)), ("harmless touched", touched(part, redact))):
            print(f"part {part}: {len(rate.missed)} of {rate.samples} ({rate.share:.2%}, {rate.families} kinds) {kind}")
            for family, times in Counter(sample.family for sample in rate.missed).items() if "-v" in sys.argv else ():
                print(f"    {family}: {times}")
            for sample in rate.missed if "-v" in sys.argv else ():
                print(f"      {sample.text!r}\n   -> {redact(sample.text)!r}")


if __name__ == "__main__":
    main()
