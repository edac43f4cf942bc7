"""A secret in a call, a result, an error, a prompt or a reply appears nowhere afterwards.

Made-up secrets in every encoding, and made-up keys of all families, are leaked in every way. Then every byte of the
store is searched for them, and everything beside it: checkpoints, output, prompts, answers, and what commands print.
"""

import asyncio
import logging
import os
import random
import sys
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing
from itertools import chain, count, cycle, islice, zip_longest
from pathlib import Path
from typing import Final

import msgspec

from halter.core.agent_spec import Playbook, Step
from halter.core.errors import ConfigError, ModelRejected
from halter.core.ids import WorkerId
from halter.core.messages import Message, Prompt, Reply, Text, TextListener, ToolCall, ToolResult
from halter.core.ports import BLOB_THRESHOLD
from halter.core.tools import Failed, Permit, Tool
from halter.core.usage import ModelName
from halter.dispatch.heartbeat import keep_leases
from halter.guard.model_door import ModelRequest
from halter.guard.prepare import Call
from halter.redaction.redact import Redactor, StreamRedactor
from halter.redaction.secrets import SECRET_PREFIX, GivenSecrets
from halter.runtime.agent_context import make_guard
from halter.runtime.assemble import AssembledAgent
from halter.runtime.runtime import Runtime, open_runtime
from halter.runtime.sessions import begin_playbook
from halter.settings import Settings
from halter.tools.function_tool import tool
from halter_drills.canaries import KEYS, SPELLINGS, WIDTH, Canary, key, spell, values
from halter_drills.children import Children, Pipe, children
from halter_drills.drill import (
    Drill,
    DrillBroken,
    DrillResult,
    Setting,
    Workspace,
    connection,
    own_store,
    result,
    sqlite_file,
    use_memory_file,
)
from halter_drills.workload import PERSON, begin_session, make_guard_runtime, policy_of, standing_of

SESSION: Final = "leaks"
WORKER: Final = WorkerId("drill")
CUT: Final = 300
SHORT: Final = 2000
CHUNKS: Final = (1, 3, 17, 64)

Redact = Callable[[str], str]


class Leak(msgspec.Struct, frozen=True):
    """One canary, and the way in which it leaks."""

    canary: Canary
    way: str


class LeakyPlace(msgspec.Struct, frozen=True):
    """The settings and secrets of the agent, and the folder for everything that leaks."""

    settings: Settings
    secrets: Mapping[str, str]
    folder: Path

    def environ(self) -> dict[str, str]:
        return {f"{SECRET_PREFIX}{name}": value for name, value in self.secrets.items()}

    def naive(self) -> Redact:
        """The teeth: redact plain text only."""

        def redact(text: str) -> str:
            for value in self.secrets.values():
                text = text.replace(value, "[redacted]")
            return text

        return redact


class LeakChannel:
    """A model that says what the drill wants, and records what it is sent."""

    name = ModelName("scripted", "mouth")
    base_url: None = None

    def __init__(self, sent: Path) -> None:
        self._sent = sent
        self.says = ""
        self.fails = False

    def count(self, prompt: Prompt) -> int:
        return 100

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        permit.use()
        with self._sent.open("ab") as file:
            file.write(msgspec.json.encode(prompt) + b"\n")
        if self.fails:
            raise ModelRejected(f"BadRequest: the provider repeats {self.says}", billed=False)
        call = ToolCall("c", "echo", msgspec.json.encode({"text": self.says}).decode())
        return Reply((Text(self.says, "model", trusted=False), call))


class LeakyAgent:
    """One session that leaks secrets in every way."""

    def __init__(self, app: Runtime, place: LeakyPlace, *, naive: bool) -> None:
        self._app = app
        self._answers = place.folder / "answers"
        self._mouth = LeakChannel(place.folder / "sent")
        self._policy = policy_of("leaky", secrets=tuple(place.secrets))
        self._standing = standing_of(SESSION, self._policy)
        self._secrets = GivenSecrets(place.secrets)
        self._redactor = Redactor(place.secrets, app.environ)
        self._naive = place.naive() if naive else None
        self._doors = (
            make_guard(app, self._policy, self._secrets, self._mouth)
            if self._naive is None
            else make_guard_runtime(
                app.store, app.clock, redact=self._naive, secrets=self._secrets, simulates=self._mouth
            )
        )
        self._tools = self._toolbox()
        self._planted = ""
        self._number = 0

    def _toolbox(self) -> Mapping[str, Tool]:
        """Make tools that leak what is planted."""

        async def echo(text: str) -> str:
            return f"I heard {text}"

        async def give() -> str:
            return f"The setting is {self._planted} as you can see."

        async def flood() -> str:
            return f"{'so much ' * (BLOB_THRESHOLD // 8)} {self._planted} {'so much ' * 100}"

        async def cut() -> str:
            return f"{'x ' * (SHORT // 4 - 10)} {self._planted} {'y ' * SHORT}"

        async def fail() -> str:
            raise ValueError(f"cannot log in with {self._planted}")

        async def fail_at_length() -> str:
            raise ValueError("x" * (CUT - len("ValueError: ") - len(self._planted) * 2 // 3 - 1) + " " + self._planted)

        async def fail_late() -> str:
            raise Failed("Late", "it took too long", f"so far: {self._planted}")

        async def fetch(url: str, headers: dict[str, str]) -> str:
            return f"asked {url} with {sorted(headers)}"

        async def write_file(path: str) -> str:
            return f"wrote {path}"

        async def chatter() -> str:
            leak_text(self._planted)
            await asyncio.to_thread(leak_text, self._planted)
            return "It is said."

        def mutter() -> str:
            leak_text(self._planted)
            return "It is said."

        plain = (echo, give, flood, fail, fail_at_length, fail_late, fetch, chatter, mutter)
        made = [*map(tool, plain), tool(cut, max_output=SHORT), tool(write_file, level="RESTRICTED")]
        return {each.spec.name: each for each in made}

    async def leak(self, leak: Leak) -> None:
        self._planted = self._mouth.says = leak.canary.text
        self._mouth.fails = False
        said = await WAYS[leak.way](self, leak.canary.text)
        with self._answers.open("ab") as file:
            file.write(said.encode("utf-8", "surrogatepass") + b"\n")

    async def start(self) -> None:
        self._lease = await begin_session(self._app.store, WORKER, SESSION, self._policy)

    async def call(self, name: str, **arguments: object) -> str:
        self._number += 1
        call = Call(f"{SESSION}.{self._number}", name, msgspec.json.encode(arguments))
        answer = await self._doors.call(self._lease, self._standing, call, self._tools)
        return msgspec.json.encode(answer).decode()

    async def request(self, *parts: Text | ToolCall | ToolResult, system: str = "") -> str:
        self._number += 1
        prompt = Prompt(system=system, messages=(Message("user", parts),))
        request = ModelRequest(id=f"{SESSION}.{self._number}", prompt=prompt)
        came = await self._doors.request(self._lease, self._standing, request, self._mouth)
        return msgspec.json.encode(came).decode()

    async def ask_with(self, text: str) -> str:
        """Send a secret to the model in every part of a prompt; the reply is harmless."""
        self._mouth.says = "I see."
        parts = (Text(text), ToolCall("c", "echo", text), ToolResult("c", "echo", "ok", text))
        return await self.request(*parts, system=f"You may use {text}.")

    async def ask_for(self, _: str) -> str:
        return await self.request(Text("What is it?"))

    async def ask_in_vain(self, _: str) -> str:
        self._mouth.fails = True
        return await self.request(Text("Are you there?"))

    async def stream(self, text: str) -> str:
        whole = f"and then it said: {text} and that was all. "
        return "".join(self._stream(whole, size) for size in CHUNKS)

    def _stream(self, text: str, size: int) -> str:
        chunks = [text[at : at + size] for at in range(0, len(text), size)]
        if self._naive is not None:
            return "".join(map(self._naive, chunks))
        redactor = StreamRedactor(self._redactor)
        return "".join([*map(redactor.feed, chunks), redactor.finish()])

    async def print(self, _: str) -> str:
        """Let tools print a secret: on the loop, in a thread and in a fork."""
        return await self.call("chatter") + await self.call("mutter")

    async def play_with(self, text: str) -> str:
        """Start a playbook with a secret as input; it must be refused."""
        step = Step("echo", b'{"text":"${inputs.text}"}')
        agent = AssembledAgent(policy=self._policy, tools=self._tools, secrets=self._secrets)
        try:
            return await begin_playbook(self._app, agent, Playbook((step,), "playbook.yaml", ("text",)), {"text": text})
        except ConfigError as refused:
            return str(refused)


def leak_text(text: str) -> None:
    """Print, log and warn with a text, also in pieces."""
    sys.stdout.write(f"It is {text}.\n")
    for at in range(0, len(text), CHUNKS[1]):
        sys.stderr.write(text[at : at + CHUNKS[1]])
    sys.stderr.write("\n")
    logging.getLogger("halter.drill").warning("It is %s.", text)
    warnings.warn(f"It is {text}.", stacklevel=1)


Way = Callable[[LeakyAgent, str], Awaitable[str]]

WAYS: Final[Mapping[str, Way]] = {
    "an argument": lambda leaky, text: leaky.call("echo", text=text),
    "an output": lambda leaky, _: leaky.call("give"),
    "an error": lambda leaky, _: leaky.call("fail"),
    "what a model is sent": LeakyAgent.ask_with,
    "what a model says": LeakyAgent.ask_for,
    "a large output": lambda leaky, _: leaky.call("flood"),
    "an output that is cut": lambda leaky, _: leaky.call("cut"),
    "an error that is cut": lambda leaky, _: leaky.call("fail_at_length"),
    "a partial output": lambda leaky, _: leaky.call("fail_late"),
    "a URL": lambda leaky, text: leaky.call("fetch", url=f"https://example.com/?q={text}", headers={}),
    "a header": lambda leaky, text: leaky.call("fetch", url="https://example.com/", headers={"X-Token": text}),
    "the name of a tool": lambda leaky, text: leaky.call(text),
    "the name of an argument": lambda leaky, text: leaky.call("echo", **{text: 1}),
    "what a person is shown": lambda leaky, text: leaky.call("write_file", path=f"/etc/{text}"),
    "a model that fails": LeakyAgent.ask_in_vain,
    "a stream": LeakyAgent.stream,
    "the input of a playbook": LeakyAgent.play_with,
    "what a tool prints": LeakyAgent.print,
}
"""Every way in which a secret can leak."""

FEW_WAYS: Final = tuple(WAYS)[:5]
"""The ways that are tried with keys of every family."""


async def leak(pipe: Pipe, place: LeakyPlace, leaks: Sequence[Leak], naive: bool) -> None:  # noqa: FBT001  passed to a process
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(place.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    async with open_runtime(place.settings, environ=place.environ()) as app, keep_leases(app.store, app.clock, WORKER):
        leaky = LeakyAgent(app, place, naive=naive)
        await leaky.start()
        for each in leaks:
            await leaky.leak(each)
        app.checkpointer.flush()
    pipe.send("done")


PATIENCE: Final = 120.0
CHUNK: Final = 1 << 18
AROUND: Final = 60
"""Characters before a fragment that a violation shows; they are made up, too."""

AGENT: Final = "name: leaky\nsecrets: [PLAIN, ODD, LINES]\n"
TOOLS: Final = '''
import base64

from halter.tools.function_tool import tool


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


class SearchedPlace(msgspec.Struct, frozen=True):
    """One place where secrets could appear, and every byte of it."""

    name: str
    data: bytes


def plan_leaks(secrets: Mapping[str, str], rng: random.Random) -> list[Leak]:
    """Leak secrets in turn, in every way and encoding; in between, a key of each family in the usual ways."""
    turns = cycle(secrets.items())
    known = (Leak(spell(*next(turns), spelling), way) for spelling in SPELLINGS for way in WAYS)
    keys = [key(rng, family, form) for family, form in KEYS]
    made = (Leak(each, way) for way in FEW_WAYS for each in keys)
    return [leak for pair in zip_longest(known, made) for leak in pair if leak is not None]


def run(setting: Setting) -> DrillResult:
    rng = random.Random(0)
    secrets = values(rng)
    endless = chain.from_iterable(plan_leaks(secrets, rng) for _ in count())
    wanted = plan_leaks(secrets, rng) if setting.seeds is None else list(islice(endless, setting.seeds))
    setting.progress(0, len(wanted), "secrets are leaked")
    with own_store(use_memory_file(setting)) as workspace:
        folder = workspace.folder
        settings = Settings(
            workspace.url, folder / "checkpoints", folder / "signing.key", PERSON, folder / "trust.json"
        )
        place = LeakyPlace(settings, secrets, folder)
        with children(__name__) as started:
            _run_leaks(place, started, wanted, teeth=setting.teeth)
            looks = (_command(place, started, *words, "--store", workspace.url) for words in LOOKS)
            channels = [*_play(place, started), *looks, *_read_store(workspace), *_read_beside_store(place)]
    violations = find_leaks(channels, [each.canary for each in wanted])
    setting.progress(len(wanted), len(wanted), "searched")
    counts = {
        "ways": len({each.way for each in wanted}),
        "spellings": len(SPELLINGS),
        "key_forms": len(KEYS),
        "key_families": len({family for family, _ in KEYS}),
        "bytes_searched": sum(len(channel.data) for channel in channels),
    }
    return result(DRILL.name, workspace.kind, len(wanted), violations, counts)


def _run_leaks(place: LeakyPlace, children: Children, planned: Sequence[Leak], *, teeth: bool) -> None:
    for name in NAMES:
        (place.folder / name).touch()
    child = children.start(leak, place, planned, teeth)
    child.receive(PATIENCE)
    child.wait()


def _play(place: LeakyPlace, children: Children) -> Iterator[SearchedPlace]:
    """Play a playbook that uses secrets from the command line, and keep its output."""
    agent = place.folder / "agent"
    agent.mkdir()
    for name, text in (("agent.yaml", AGENT), ("tools.py", TOOLS), ("play.yaml", PLAYBOOK)):
        (agent / name).write_text(text)
    yield _command(place, children, "trust", str(agent))
    played = _command(place, children, "play", str(agent / "play.yaml"), "--store", place.settings.store)
    if b"step_failed" not in played.data or b"[redacted:" not in played.data:
        output = played.data.decode("utf-8", "replace")[-500:]
        raise DrillBroken(f"The playbook of the drill failed: {output}")
    yield played


def _command(place: LeakyPlace, children: Children, *words: str) -> SearchedPlace:
    settings, printed = place.settings, place.folder / "printed"
    environ = {
        **place.environ(),
        "HALTER_CHECKPOINTS": str(settings.checkpoints),
        "HALTER_SIGNING_KEY": str(settings.signing_key),
        "HALTER_TRUST": str(settings.trust),
        "HALTER_PERSON": PERSON,
    }
    children.start(run_command, words, environ, printed).wait(PATIENCE)
    return SearchedPlace(f"halter {' '.join(words[:1])}", printed.read_bytes())


def run_command(_: Pipe, words: Sequence[str], environ: Mapping[str, str], printed: Path) -> None:
    """Be the program `halter`; all that it prints goes to a file."""
    from halter.cli import main

    output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for number in (1, 2):
        os.dup2(output, number)
    os.environ.update(environ)
    os.chdir(printed.parent)
    sys.argv = ["halter", *words]
    main()


def _read_store(workspace: Workspace) -> Iterator[SearchedPlace]:
    """Read every column of every table, and on SQLite every byte of its files."""
    if workspace.kind == "sqlite":
        file = sqlite_file(workspace.url)
        yield from (
            SearchedPlace(f"the file {each.name}", each.read_bytes()) for each in file.parent.glob(f"{file.name}*")
        )
    with closing(connection(workspace.url)) as database:
        names = (
            "SELECT name FROM sqlite_master WHERE type = 'table'"
            if workspace.kind == "sqlite"
            else "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()"
        )
        for (table,) in database.execute(names).fetchall():
            for row in database.execute(f'SELECT * FROM "{table}"').fetchall():  # noqa: S608  a name of our own
                values = [
                    each if isinstance(each, bytes) else str(each).encode("utf-8", "surrogatepass") for each in row
                ]
                yield SearchedPlace(f"the table {table}", b"\0".join(values))


def _read_beside_store(place: LeakyPlace) -> Iterator[SearchedPlace]:
    """Read what was written beside the store: checkpoints, output, prompts and answers."""
    for name, title in NAMES.items():
        yield SearchedPlace(title, (place.folder / name).read_bytes())
    for file in place.settings.checkpoints.rglob("*"):
        if file.is_file():
            yield SearchedPlace("the checkpoints", file.read_bytes())


NAMES: Final = {
    "stdout": "the output of the process",
    "stderr": "the error output of the process",
    "sent": "what the model was sent",
    "answers": "what was answered",
}


def find_leaks(channels: Sequence[SearchedPlace], canaries: Sequence[Canary]) -> list[str]:
    """Search all channels for any fragment of a canary; each canary counts once per channel."""
    whose = {fragment: canary.name for canary in canaries for fragment in canary.fragments()}
    found: dict[tuple[str, str], str] = {}
    for channel in channels:
        for each in _find_fragments(channel.data, whose.keys()):
            where = (channel.name, whose[each])
            if where not in found:
                at = channel.data.index(each)
                found[where] = ascii(channel.data[max(0, at - AROUND) : at + WIDTH].decode("utf-8", "replace"))
    return [f"{name} is seen in {channel}: {near}" for (channel, name), near in found.items()]


def _find_fragments(data: bytes, fragments: AbstractSet[bytes]) -> Iterator[bytes]:
    """Find fragments in time linear in the data, for any number of fragments."""
    last = len(data) - WIDTH + 1
    for start in range(0, last, CHUNK):
        yield from fragments & {data[at : at + WIDTH] for at in range(start, min(start + CHUNK, last))}


DRILL: Final = Drill(
    "secrets", "A secret in a call, a result, an error, a prompt or a reply is in no record and in no answer.", run
)
