"""A secret in a call, a result, an error, a prompt or a reply appears nowhere afterwards.

The drill leaks made-up secrets in every encoding, and made-up keys of all families, in every way. Then it searches
every byte of the store, and of the checkpoints, output, prompts, answers, and output of commands.
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
from halter.dispatch.heartbeat import renew_leases
from halter.guard.model_door import ModelRequest
from halter.guard.prepare import Call
from halter.redaction.redact import Redactor, StreamRedactor
from halter.redaction.secrets import SECRET_PREFIX, GivenSecrets
from halter.runtime.agent_context import make_guard
from halter.runtime.assemble import AssembledAgent
from halter.runtime.runtime import Runtime, open_runtime
from halter.runtime.session_start import begin_playbook
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
from halter_drills.workload import PERSON, begin_session, make_guard_runtime, make_session_context, policy_of

SESSION: Final = "leaks"
WORKER: Final = WorkerId("drill")
CUT: Final = 300
SHORT: Final = 2000
CHUNKS: Final = (1, 3, 17, 64)

Redact = Callable[[str], str]


class Leak(msgspec.Struct, frozen=True):
    """One canary, and the way in which the drill leaks it."""

    canary: Canary
    way: str


class LeakyPlace(msgspec.Struct, frozen=True):
    """The settings and secrets of the agent, and the folder for leaked output."""

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
    """A model that replies with a given text, and records its prompts."""

    name = ModelName("scripted", "mouth")
    base_url: None = None

    def __init__(self, sent_file: Path) -> None:
        self._sent = sent_file
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

    def __init__(self, app: Runtime, setup: LeakyPlace, *, naive: bool) -> None:
        self._app = app
        self._answers = setup.folder / "answers"
        self._mouth = LeakChannel(setup.folder / "sent")
        self._policy = policy_of("leaky", secrets=tuple(setup.secrets))
        self._context = make_session_context(SESSION, self._policy)
        self._secrets = GivenSecrets(setup.secrets)
        self._redactor = Redactor(setup.secrets, app.environ)
        self._naive = setup.naive() if naive else None
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
        """Make tools that leak the planted canary."""

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
        tools = [*map(tool, plain), tool(cut, max_output=SHORT), tool(write_file, level="RESTRICTED")]
        return {each.spec.name: each for each in tools}

    async def leak(self, leak: Leak) -> None:
        self._planted = self._mouth.says = leak.canary.text
        self._mouth.fails = False
        answer = await WAYS[leak.way](self, leak.canary.text)
        with self._answers.open("ab") as file:
            file.write(answer.encode("utf-8", "surrogatepass") + b"\n")

    async def start(self) -> None:
        self._lease = await begin_session(self._app.store, WORKER, SESSION, self._policy)

    async def call(self, name: str, **arguments: object) -> str:
        self._number += 1
        call = Call(f"{SESSION}.{self._number}", name, msgspec.json.encode(arguments))
        answer = await self._doors.call(self._lease, self._context, call, self._tools)
        return msgspec.json.encode(answer).decode()

    async def request(self, *parts: Text | ToolCall | ToolResult, system: str = "") -> str:
        self._number += 1
        prompt = Prompt(system=system, messages=(Message("user", parts),))
        request = ModelRequest(id=f"{SESSION}.{self._number}", prompt=prompt)
        reply = await self._doors.request(self._lease, self._context, request, self._mouth)
        return msgspec.json.encode(reply).decode()

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
        """Start a playbook with a secret as input, which must be rejected."""
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
"""The ways in which keys of every family are leaked."""


async def leak(pipe: Pipe, setup: LeakyPlace, leaks: Sequence[Leak], naive: bool) -> None:  # noqa: FBT001  passed to a process
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(setup.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    async with open_runtime(setup.settings, environ=setup.environ()) as app, renew_leases(app.store, app.clock, WORKER):
        leaky = LeakyAgent(app, setup, naive=naive)
        await leaky.start()
        for planned_leak in leaks:
            await leaky.leak(planned_leak)
        app.checkpointer.flush()
    pipe.send("done")


TIMEOUT_SECONDS: Final = 120.0
CHUNK: Final = 1 << 18
EXCERPT_CHARACTERS: Final = 60
"""Number of characters before a fragment in a violation; they are made up, too."""

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
- {call: echo, arguments: {text: "${secret:PLAIN}"}}
- {call: echo, arguments: {text: "${secret:ODD}"}}
- {call: echo, arguments: {text: "before ${secret:LINES} after"}, as: lines}
- {call: echo, arguments: {text: "${steps.lines.text}"}}
- {call: encode, arguments: {text: "${secret:PLAIN}"}}
- {call: encode, arguments: {text: "${secret:ODD}"}}
- {call: fail, arguments: {text: "${secret:ODD}"}}
"""
COMMANDS: Final = (
    ("show", SESSION),
    ("show", SESSION, "--json"),
    ("receipt", SESSION, "--json"),
    ("audit", "--json"),
    ("inbox", "--json"),
)


class SearchedPlace(msgspec.Struct, frozen=True):
    """One channel in which secrets could appear, and all its bytes."""

    name: str
    data: bytes


def plan_leaks(secrets: Mapping[str, str], rng: random.Random) -> list[Leak]:
    """List leaks of each secret in every way and encoding, interleaved with keys of each family in the usual ways."""
    turns = cycle(secrets.items())
    secret_leaks = (Leak(spell(*next(turns), spelling), way) for spelling in SPELLINGS for way in WAYS)
    keys = [key(rng, family, form) for family, form in KEYS]
    key_leaks = (Leak(each, way) for way in FEW_WAYS for each in keys)
    return [leak for pair in zip_longest(secret_leaks, key_leaks) for leak in pair if leak is not None]


def run(setting: Setting) -> DrillResult:
    rng = random.Random(0)
    secrets = values(rng)
    endless_leaks = chain.from_iterable(plan_leaks(secrets, rng) for _ in count())
    leaks = plan_leaks(secrets, rng) if setting.seeds is None else list(islice(endless_leaks, setting.seeds))
    setting.progress(0, len(leaks), "leaking secrets")
    with own_store(use_memory_file(setting)) as workspace:
        folder = workspace.folder
        settings = Settings(
            workspace.url, folder / "checkpoints", folder / "signing.key", PERSON, folder / "trust.json"
        )
        setup = LeakyPlace(settings, secrets, folder)
        with children(__name__) as processes:
            _run_leaks(setup, processes, leaks, teeth=setting.teeth)
            command_outputs = (_command(setup, processes, *words, "--store", workspace.url) for words in COMMANDS)
            channels = [
                *_play(setup, processes),
                *command_outputs,
                *_read_store(workspace),
                *_read_outside_store(setup),
            ]
    violations = find_leaks(channels, [each.canary for each in leaks])
    setting.progress(len(leaks), len(leaks), "searched")
    counts = {
        "ways": len({each.way for each in leaks}),
        "spellings": len(SPELLINGS),
        "key_forms": len(KEYS),
        "key_families": len({family for family, _ in KEYS}),
        "bytes_searched": sum(len(channel.data) for channel in channels),
    }
    return result(DRILL.name, workspace.kind, len(leaks), violations, counts)


def _run_leaks(setup: LeakyPlace, children: Children, leaks: Sequence[Leak], *, teeth: bool) -> None:
    for name in NAMES:
        (setup.folder / name).touch()
    child = children.start(leak, setup, leaks, teeth)
    child.receive(TIMEOUT_SECONDS)
    child.wait()


def _play(setup: LeakyPlace, children: Children) -> Iterator[SearchedPlace]:
    """Play a playbook that uses secrets from the command line, and yield its output."""
    agent = setup.folder / "agent"
    agent.mkdir()
    for name, text in (("agent.yaml", AGENT), ("tools.py", TOOLS), ("play.yaml", PLAYBOOK)):
        (agent / name).write_text(text)
    yield _command(setup, children, "trust", str(agent))
    output = _command(setup, children, "play", str(agent / "play.yaml"), "--store", setup.settings.store)
    if b"step_failed" not in output.data or b"[redacted:" not in output.data:
        text = output.data.decode("utf-8", "replace")[-500:]
        raise DrillBroken(f"The playbook of the drill failed: {text}")
    yield output


def _command(setup: LeakyPlace, children: Children, *words: str) -> SearchedPlace:
    settings, output_file = setup.settings, setup.folder / "printed"
    environ = {
        **setup.environ(),
        "HALTER_CHECKPOINTS": str(settings.checkpoints),
        "HALTER_SIGNING_KEY": str(settings.signing_key),
        "HALTER_TRUST": str(settings.trust),
        "HALTER_PERSON": PERSON,
    }
    children.start(run_command, words, environ, output_file).wait(TIMEOUT_SECONDS)
    return SearchedPlace(f"halter {' '.join(words[:1])}", output_file.read_bytes())


def run_command(_: Pipe, words: Sequence[str], environ: Mapping[str, str], output_file: Path) -> None:
    """Run the program `halter`, with its output in a file."""
    from halter.cli import main

    output = os.open(output_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for number in (1, 2):
        os.dup2(output, number)
    os.environ.update(environ)
    os.chdir(output_file.parent)
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


def _read_outside_store(setup: LeakyPlace) -> Iterator[SearchedPlace]:
    """Read everything outside the store: checkpoints, output, prompts and answers."""
    for name, title in NAMES.items():
        yield SearchedPlace(title, (setup.folder / name).read_bytes())
    for file in setup.settings.checkpoints.rglob("*"):
        if file.is_file():
            yield SearchedPlace("the checkpoints", file.read_bytes())


NAMES: Final = {
    "stdout": "the output of the process",
    "stderr": "the error output of the process",
    "sent": "the prompts",
    "answers": "the answers",
}


def find_leaks(channels: Sequence[SearchedPlace], canaries: Sequence[Canary]) -> list[str]:
    """Search all channels for any fragment of a canary; each canary counts once per channel."""
    names_by_fragment = {fragment: canary.name for canary in canaries for fragment in canary.fragments()}
    excerpts: dict[tuple[str, str], str] = {}
    for channel in channels:
        for fragment in _find_fragments(channel.data, names_by_fragment.keys()):
            where = (channel.name, names_by_fragment[fragment])
            if where not in excerpts:
                at = channel.data.index(fragment)
                excerpts[where] = ascii(
                    channel.data[max(0, at - EXCERPT_CHARACTERS) : at + WIDTH].decode("utf-8", "replace")
                )
    return [f"{name} appears in {channel}: {excerpt}" for (channel, name), excerpt in excerpts.items()]


def _find_fragments(data: bytes, fragments: AbstractSet[bytes]) -> Iterator[bytes]:
    """Find fragments in time linear in the data, for any number of fragments."""
    last = len(data) - WIDTH + 1
    for start in range(0, last, CHUNK):
        yield from fragments & {data[at : at + WIDTH] for at in range(start, min(start + CHUNK, last))}


DRILL: Final = Drill(
    "secrets", "A secret in a call, a result, an error, a prompt or a reply appears in no record and no answer.", run
)
