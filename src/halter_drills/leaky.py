"""An agent through which secrets leak wherever they can: in calls and results, in errors, to its model and from it.

It acts through the real doors. Whatever it is told in answer, and whatever its model is sent, is written down outside:
there the drill looks for what should not be there.
"""

import asyncio
import logging
import os
import sys
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from halter.app.agent import Assembled
from halter.app.doors import gatehouse_for
from halter.app.opened import App, open_app
from halter.app.playing import begin
from halter.core.errors import ConfigError, ModelRejected
from halter.core.ids import WorkerId
from halter.core.messages import Hear, Message, Prompt, Reply, Text, ToolCall, ToolResult
from halter.core.playbook import Playbook, Step
from halter.core.ports import BLOB_FROM
from halter.core.tools import Failed, Permit, Tool
from halter.core.usage import ModelName
from halter.dispatch.tending import tended
from halter.guard.ask import Call
from halter.guard.gatehouse import Gatehouse
from halter.guard.redact import Redactor
from halter.guard.request import Request
from halter.guard.secrets import PREFIX, GivenSecrets
from halter.guard.stream import StreamRedactor
from halter.settings import Settings
from halter.tools.tool import tool
from halter_drills.agents import begun, doors, policy_of, standing_of
from halter_drills.canaries import Canary
from halter_drills.children import Pipe

SESSION: Final = "leaks"
WORKER: Final = WorkerId("drill")
CUT: Final = 300
SHORT: Final = 2000
CHUNKS: Final = (1, 3, 17, 64)

Redact = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Leak:
    """One canary, and the way by which it gets out."""

    canary: Canary
    way: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where an agent leaks: its settings, its secrets, and the files in which the outside world writes."""

    settings: Settings
    secrets: Mapping[str, str]
    folder: Path

    def environ(self) -> dict[str, str]:
        """Give the secrets as a person does."""
        return {f"{PREFIX}{name}": value for name, value in self.secrets.items()}

    def naive(self) -> Redact:
        """Hide what is spelled plainly, and nothing else."""

        def redact(text: str) -> str:
            for value in self.secrets.values():
                text = text.replace(value, "[redacted]")
            return text

        return redact


class Mouth:
    """A model that says what it is told to say next, and writes down what it is sent."""

    name = ModelName("scripted", "mouth")
    base_url: None = None

    def __init__(self, sent: Path) -> None:
        self._sent = sent
        self.says = ""
        self.fails = False

    def count(self, prompt: Prompt) -> int:
        """Bound from above how many input tokens a prompt has."""
        return 100

    async def ask(self, prompt: Prompt, permit: Permit, hear: Hear | None = None) -> Reply:
        """Write down what was sent, and say what is to be said."""
        permit.use()
        with self._sent.open("ab") as file:
            file.write(msgspec.json.encode(prompt) + b"\n")
        if self.fails:
            raise ModelRejected(f"BadRequest: the provider repeats {self.says}", billed=False)
        call = ToolCall("c", "echo", msgspec.json.encode({"text": self.says}).decode())
        return Reply((Text(self.says, "model", trusted=False), call))


class Leaky:
    """One session, and every way out of it."""

    def __init__(self, app: App, place: Place, *, naive: bool) -> None:
        self._app = app
        self._answers = place.folder / "answers"
        self._mouth = Mouth(place.folder / "sent")
        self._policy = policy_of("leaky", secrets=tuple(place.secrets))
        self._standing = standing_of(SESSION, self._policy)
        self._secrets = GivenSecrets(place.secrets)
        self._redactor = Redactor(place.secrets, app.environ)
        self._naive = place.naive() if naive else None
        self._doors = self._made()
        self._tools = self._toolbox()
        self._planted = ""
        self._number = 0

    def _made(self) -> Gatehouse:
        if self._naive is None:
            return gatehouse_for(self._app, self._policy, self._secrets, self._mouth)
        return doors(self._app.store, self._app.clock, redact=self._naive, secrets=self._secrets, simulates=self._mouth)

    def _toolbox(self) -> Mapping[str, Tool]:
        """Make tools that give away what is planted."""

        async def echo(text: str) -> str:
            return f"I heard {text}"

        async def give() -> str:
            return f"The setting is {self._planted} as you can see."

        async def flood() -> str:
            return f"{'so much ' * (BLOB_FROM // 8)} {self._planted} {'so much ' * 100}"

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
            tell(self._planted)
            await asyncio.to_thread(tell, self._planted)
            return "It is said."

        def mutter() -> str:
            tell(self._planted)
            return "It is said."

        plain = (echo, give, flood, fail, fail_at_length, fail_late, fetch, chatter, mutter)
        made = [*map(tool, plain), tool(cut, max_output=SHORT), tool(write_file, level="RESTRICTED")]
        return {each.spec.name: each for each in made}

    async def leak(self, leak: Leak) -> None:
        """Let one canary out by its way, and write down what comes back."""
        self._planted = self._mouth.says = leak.canary.text
        self._mouth.fails = False
        said = await WAYS[leak.way](self, leak.canary.text)
        with self._answers.open("ab") as file:
            file.write(said.encode("utf-8", "surrogatepass") + b"\n")

    async def start(self) -> None:
        """Begin the session."""
        self._lease = await begun(self._app.store, WORKER, SESSION, self._policy)

    async def call(self, name: str, **arguments: object) -> str:
        """Make a call, and return all that is told of it."""
        self._number += 1
        call = Call(f"{SESSION}.{self._number}", name, msgspec.json.encode(arguments))
        answer = await self._doors.call(self._lease, self._standing, call, self._tools)
        return msgspec.json.encode(answer).decode()

    async def request(self, *parts: Text | ToolCall | ToolResult, system: str = "") -> str:
        """Ask the model, and return all that is told of it."""
        self._number += 1
        prompt = Prompt(system=system, messages=(Message("user", parts),))
        request = Request(id=f"{SESSION}.{self._number}", prompt=prompt)
        came = await self._doors.request(self._lease, self._standing, request, self._mouth)
        return msgspec.json.encode(came).decode()

    async def ask_with(self, text: str) -> str:
        """Send a secret to the model in every part of a prompt; the model itself says something harmless."""
        self._mouth.says = "I see."
        parts = (Text(text), ToolCall("c", "echo", text), ToolResult("c", "echo", "ok", text))
        return await self.request(*parts, system=f"You may use {text}.")

    async def ask_for(self, _: str) -> str:
        """Let the model say a secret."""
        return await self.request(Text("What is it?"))

    async def ask_in_vain(self, _: str) -> str:
        """Let the model fail with a secret in its excuse."""
        self._mouth.fails = True
        return await self.request(Text("Are you there?"))

    async def stream(self, text: str) -> str:
        """Hear a secret in chunks of all sizes."""
        whole = f"and then it said: {text} and that was all. "
        return "".join(self._streamed(whole, size) for size in CHUNKS)

    def _streamed(self, text: str, size: int) -> str:
        chunks = [text[at : at + size] for at in range(0, len(text), size)]
        if self._naive is not None:
            return "".join(map(self._naive, chunks))
        redactor = StreamRedactor(self._redactor)
        return "".join([*map(redactor.feed, chunks), redactor.finish()])

    async def print(self, _: str) -> str:
        """Let tools print a secret, on the loop, in a thread and in a copy of the process."""
        return await self.call("chatter") + await self.call("mutter")

    async def play_with(self, text: str) -> str:
        """Start a playbook with a secret among its inputs; it must be refused."""
        step = Step("echo", b'{"text":"${inputs.text}"}')
        agent = Assembled(policy=self._policy, tools=self._tools, secrets=self._secrets)
        try:
            return await begin(self._app, agent, Playbook((step,), "playbook.yaml", ("text",)), {"text": text})
        except ConfigError as refused:
            return str(refused)


def tell(text: str) -> None:
    """Print, log and warn of a text, also in pieces."""
    sys.stdout.write(f"It is {text}.\n")
    for at in range(0, len(text), CHUNKS[1]):
        sys.stderr.write(text[at : at + CHUNKS[1]])
    sys.stderr.write("\n")
    logging.getLogger("halter.drill").warning("It is %s.", text)
    warnings.warn(f"It is {text}.", stacklevel=1)


Way = Callable[[Leaky, str], Awaitable[str]]

WAYS: Final[Mapping[str, Way]] = {
    "an argument": lambda leaky, text: leaky.call("echo", text=text),
    "an output": lambda leaky, _: leaky.call("give"),
    "an error": lambda leaky, _: leaky.call("fail"),
    "what a model is sent": Leaky.ask_with,
    "what a model says": Leaky.ask_for,
    "a large output": lambda leaky, _: leaky.call("flood"),
    "an output that is cut": lambda leaky, _: leaky.call("cut"),
    "an error that is cut": lambda leaky, _: leaky.call("fail_at_length"),
    "a partial output": lambda leaky, _: leaky.call("fail_late"),
    "a URL": lambda leaky, text: leaky.call("fetch", url=f"https://example.com/?q={text}", headers={}),
    "a header": lambda leaky, text: leaky.call("fetch", url="https://example.com/", headers={"X-Token": text}),
    "the name of a tool": lambda leaky, text: leaky.call(text),
    "the name of an argument": lambda leaky, text: leaky.call("echo", **{text: 1}),
    "what a person is shown": lambda leaky, text: leaky.call("write_file", path=f"/etc/{text}"),
    "a model that fails": Leaky.ask_in_vain,
    "a stream": Leaky.stream,
    "the input of a playbook": Leaky.play_with,
    "what a tool prints": Leaky.print,
}
"""Every way by which a secret might get out."""

FEW_WAYS: Final = tuple(WAYS)[:5]
"""The ways that are tried with keys of every family."""


def leak(pipe: Pipe, place: Place, leaks: Sequence[Leak], kind: Literal["naive", "careful"]) -> None:
    """Leak in a process of its own, whose output is kept."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(place.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    asyncio.run(_leak(place, leaks, naive=kind == "naive"))
    pipe.send("done")


async def _leak(place: Place, leaks: Sequence[Leak], *, naive: bool) -> None:
    async with open_app(place.settings, environ=place.environ()) as app, tended(app.store, app.clock, WORKER):
        leaky = Leaky(app, place, naive=naive)
        await leaky.start()
        for each in leaks:
            await leaky.leak(each)
        app.checkpointer.flush()
