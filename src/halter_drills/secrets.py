"""A secret that gets into a call, a result, an error, a prompt or a reply is seen nowhere afterwards.

Made-up secrets, in every spelling, and made-up keys of all families are let out by every way there is. Then every byte
of the store is searched for them, and all that was written beside it: checkpoints, what the process put out, what the
model was sent, what was answered, and what the commands show.
"""

import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, count, cycle, islice, zip_longest
from typing import Any, Final

from halter.settings import Settings
from halter_drills.agents import PERSON
from halter_drills.broken import DrillBroken
from halter_drills.canaries import KEYS, SPELLINGS, WIDTH, Canary, key, spelled, values
from halter_drills.children import children
from halter_drills.drill import Drill, Ground, Result, Setting, connection, own_store, result, sqlite_file
from halter_drills.examine import in_memory
from halter_drills.leaky import FEW_WAYS, SESSION, WAYS, Leak, Place, leak

PATIENCE: Final = 120.0
CHUNK: Final = 1 << 18
AROUND: Final = 60
"""How much of what stands before a fragment is told: it was made up, so it can be."""

AGENT: Final = "name: leaky\nsecrets: [PLAIN, ODD, LINES]\n"
TOOLS: Final = '''
import base64

from halter.tools.tool import tool


@tool
async def echo(text: str) -> str:
    """Say it again."""
    return text


@tool
async def encode(text: str) -> str:
    """Say it in base64."""
    return base64.b64encode(text.encode()).decode()


@tool
async def fail(text: str) -> str:
    """Fail."""
    raise ValueError(text)
'''
PLAYBOOK: Final = """
- {call: echo, with: {text: "${secret:PLAIN}"}}
- {call: echo, with: {text: "${secret:ODD}"}}
- {call: echo, with: {text: "before ${secret:LINES} after"}, as: lines}
- {call: echo, with: {text: "${steps.lines.text}"}}
- {call: encode, with: {text: "${secret:PLAIN}"}}
- {call: encode, with: {text: "${secret:ODD}"}}
- {call: fail, with: {text: "${secret:ODD}"}}
"""
LOOKS: Final = (
    ("show", SESSION),
    ("show", SESSION, "--json"),
    ("receipt", SESSION, "--json"),
    ("audit", "--json"),
    ("inbox", "--json"),
)


@dataclass(frozen=True, slots=True)
class Channel:
    """One place where secrets could be seen, and every byte of it."""

    name: str
    data: bytes


def leaks(secrets: Mapping[str, str], chance: random.Random) -> list[Leak]:
    """Let secrets out in turn, by every way in every spelling; in between, a key of each family by the usual ways."""
    turns = cycle(secrets.items())
    known = (Leak(spelled(*next(turns), spelling), way) for spelling in SPELLINGS for way in WAYS)
    keys = [key(chance, family, form) for family, form in KEYS]
    made = (Leak(each, way) for way in FEW_WAYS for each in keys)
    return [leak for pair in zip_longest(known, made) for leak in pair if leak is not None]


def run(setting: Setting) -> Result:
    """Let secrets out in a process of its own, or as many of them as are wanted, and look for them everywhere."""
    chance = random.Random(0)
    secrets = values(chance)
    wanted = leaks(secrets, chance) if setting.seeds is None else list(_endless(secrets, chance, setting.seeds))
    setting.progress(0, len(wanted), "secrets are let out")
    with own_store(in_memory(setting)) as ground:
        place = Place(_settings(ground), secrets, ground.folder)
        _leaked(place, wanted, teeth=setting.teeth)
        channels = [*_played(place), *_looked(place), *_stored(ground), *_beside(place)]
    violations = seen(channels, [each.canary for each in wanted])
    setting.progress(len(wanted), len(wanted), "searched")
    counts = {
        "ways": len({each.way for each in wanted}),
        "spellings": len(SPELLINGS),
        "key_forms": len(KEYS),
        "key_families": len({family for family, _ in KEYS}),
        "bytes_searched": sum(len(channel.data) for channel in channels),
    }
    return result(DRILL.name, ground.kind, len(wanted), violations, counts)


def _endless(secrets: Mapping[str, str], chance: random.Random, wanted: int) -> Iterator[Leak]:
    """Begin anew with other keys once all leaks were made."""
    return islice(chain.from_iterable(leaks(secrets, chance) for _ in count()), wanted)


def _settings(ground: Ground) -> Settings:
    folder = ground.folder
    return Settings(ground.url, folder / "checkpoints", folder / "signing.key", PERSON, folder / "trust.json", None)


def _leaked(place: Place, planned: Sequence[Leak], *, teeth: bool) -> None:
    for name in NAMES:
        (place.folder / name).touch()
    with children(__name__) as started:
        child = started.start(leak, place, planned, "naive" if teeth else "careful")
        child.hear(PATIENCE)
        child.wait()


def _played(place: Place) -> Iterator[Channel]:
    """Play a playbook that names secrets, as a person does, and keep what they would see."""
    agent = place.folder / "agent"
    agent.mkdir()
    for name, text in (("agent.yaml", AGENT), ("tools.py", TOOLS), ("play.yaml", PLAYBOOK)):
        (agent / name).write_text(text)
    yield _told(place, "trust", str(agent))
    store = ("--store", place.settings.store)
    played = _told(place, "play", str(agent / "play.yaml"), *store)
    if b"step_failed" not in played.data or b"[redacted:" not in played.data:
        said = played.data.decode("utf-8", "replace")[-500:]
        raise DrillBroken(f"The playbook of the drill did not run as it should: {said}")
    yield played


def _looked(place: Place) -> Iterator[Channel]:
    """Look at everything with the commands that people and programs use."""
    for words in LOOKS:
        yield _told(place, *words, "--store", place.settings.store)


def _told(place: Place, *words: str) -> Channel:
    """Run a command, and keep all that it puts out."""
    settings = place.settings
    environ = {
        **os.environ,
        **place.environ(),
        "HALTER_CHECKPOINTS": str(settings.checkpoints),
        "HALTER_SIGNING_KEY": str(settings.signing_key),
        "HALTER_TRUST": str(settings.trust),
        "HALTER_PERSON": PERSON,
    }
    ran = subprocess.run(
        [sys.executable, "-m", "halter", *words],
        env=environ,
        cwd=place.folder,
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    return Channel(f"halter {' '.join(words[:1])}", ran.stdout + ran.stderr)


def _stored(ground: Ground) -> Iterator[Channel]:
    """Read every column of every table, and on SQLite every byte of the file and of its log."""
    if ground.kind == "sqlite":
        file = sqlite_file(ground.url)
        yield from (Channel(f"the file {each.name}", each.read_bytes()) for each in file.parent.glob(f"{file.name}*"))
    with closing(connection(ground.url)) as database:
        for table in _tables(database, ground):
            for row in database.execute(f'SELECT * FROM "{table}"').fetchall():  # noqa: S608  a name of our own
                yield Channel(f"the table {table}", b"\0".join(map(_bytes, row)))


def _tables(database: Any, ground: Ground) -> list[str]:
    names = (
        "SELECT name FROM sqlite_master WHERE type = 'table'"
        if ground.kind == "sqlite"
        else "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()"
    )
    return [name for (name,) in database.execute(names).fetchall()]


def _bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


def _beside(place: Place) -> Iterator[Channel]:
    """Read what was written beside the store: checkpoints, output, what the model was sent and what was answered."""
    for name, told in NAMES.items():
        yield Channel(told, (place.folder / name).read_bytes())
    for file in place.settings.checkpoints.rglob("*"):
        if file.is_file():
            yield Channel("the checkpoints", file.read_bytes())


NAMES: Final = {
    "stdout": "the output of the process",
    "stderr": "the complaints of the process",
    "sent": "what the model was sent",
    "answers": "what was answered",
}


def seen(channels: Sequence[Channel], canaries: Sequence[Canary]) -> list[str]:
    """Search all channels for any fragment of a canary; each that is seen in one counts once."""
    whose = {fragment: canary.name for canary in canaries for fragment in canary.fragments()}
    found: dict[tuple[str, str], str] = {}
    for channel in channels:
        for each in _within(channel.data, whose.keys()):
            where = (channel.name, whose[each])
            if where not in found:
                found[where] = _around(channel.data, each)
    return [f"{name} is seen in {channel}: {near}" for (channel, name), near in found.items()]


def _around(data: bytes, fragment: bytes) -> str:
    at = data.index(fragment)
    return ascii(data[max(0, at - AROUND) : at + WIDTH].decode("utf-8", "replace"))


def _within(data: bytes, fragments: AbstractSet[bytes]) -> Iterator[bytes]:
    """Find fragments in time in proportion to what is searched, however many are looked for."""
    last = len(data) - WIDTH + 1
    for start in range(0, last, CHUNK):
        yield from fragments & {data[at : at + WIDTH] for at in range(start, min(start + CHUNK, last))}


DRILL: Final = Drill(
    "secrets", "A secret in a call, a result, an error, a prompt or a reply is in no record and in no answer.", run
)
