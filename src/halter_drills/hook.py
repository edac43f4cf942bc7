"""In a program with Halter's hooks, no tool runs that Halter did not admit, even if the hook or its server fails.

The drill runs the installed commands as programs do, and reads their answers as the most careless program does: only
exit code 2 with a sentence blocks. Hooks are killed. Servers are missing, hang, are killed while they decide, answer
garbage, nothing or an older version, or are false servers that answer yes. Then the drill compares the calls that would
have run with the intents in the store, by plain SQL.
"""

import asyncio
import json
import os
import signal
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal, cast

import msgspec

from halter.hooks import client
from halter.hooks.install import make_command, write_policy
from halter.hooks.registry import HookedProgram, HookFolder
from halter.settings import Settings
from halter_drills.checker import StoreContents, check, read_store
from halter_drills.children import Child, Children, Pipe, children
from halter_drills.drill import Drill, DrillResult, Setting, Workspace, own_store, result, use_memory_file

HookAttack = Literal[
    "nothing",
    "a risky call",
    "a risky call without a person",
    "a risky call of a sub-agent without a person",
    "the hook is killed",
    "no event",
    "garbage as event",
    "no server",
    "the server hangs",
    "the server is killed while it decides",
    "the answer is empty",
    "the answer is garbage",
    "the answer is of an older version",
    "the answer is cut off",
    "another server says yes",
    "the server's yes to another call",
]
Answering = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

AGENT: Final = "claude-code"
HARMLESS: Final = "ls -la"
RISKY: Final = "git push --force"
WAIT_SECONDS: Final = 60
HANG_SECONDS: Final = 1
_ALLOW: Final = b'{"hookSpecificOutput":{"hookEventName":"PreToolUse","permissionDecision":"allow"}}'
_FAILS_CLOSED: Final = " || {"
_UNATTENDED: Final = frozenset({"a risky call without a person", "a risky call of a sub-agent without a person"})
_HOOK_TIMEOUT_SECONDS: Final = 60


class HookCase(msgspec.Struct, frozen=True):
    """One tool call, and the attack while the guard judges it."""

    call: str
    attack: HookAttack

    def event(self) -> bytes:
        if self.attack == "no event":
            return b""
        if self.attack == "garbage as event":
            return b"\x00 this is no JSON"
        is_risky, is_unattended = self.attack.startswith("a risky call"), self.attack in _UNATTENDED
        command, session = RISKY if is_risky else HARMLESS, f"drill-{self.call}" if is_unattended else "drill"
        context = {"session_id": session, "transcript_path": "/t", "cwd": "/home", "hook_event_name": "PreToolUse"}
        if self.attack == "a risky call of a sub-agent without a person":
            context["agent_id"] = "a1"
        call = {"tool_name": "Bash", "tool_input": {"command": command}, "tool_use_id": self.call}
        return json.dumps({**context, **call}).encode()


class HookRun(msgspec.Struct, frozen=True):
    """Exit code and output of a hook."""

    code: int
    out: bytes
    err: bytes

    def is_deferred(self) -> bool:
        """Return True if the program ends now, and repeats the call when it is resumed."""
        return b'"permissionDecision":"defer"' in self.out

    def lets_run(self) -> bool:
        """Return True if the most careless program runs the tool: any failure but code 2 with a sentence is a yes."""
        if self.code:
            return self.code != client.BLOCKED or not self.err.strip()
        try:
            answer: Any = json.loads(self.out or b"{}")
            decision: Any = answer.get("hookSpecificOutput", {}).get("permissionDecision", "allow")
        except (ValueError, AttributeError):
            return True
        return decision == "allow"


def run(setting: Setting) -> DrillResult:
    with (
        own_store(use_memory_file(setting)) as workspace,
        children(__name__) as processes,
        tempfile.TemporaryDirectory(prefix="h-") as folder,
    ):
        return asyncio.run(_run_cases(setting, workspace, processes, Path(folder)))


async def _run_cases(setting: Setting, workspace: Workspace, children: Children, root: Path) -> DrillResult:
    folder = HookFolder(root / "hooks")
    folder.key(make=True)
    policy = str(write_policy(folder, AGENT, "Claude Code"))
    entry = HookedProgram(agent=AGENT, program="claude", folder=policy, wait_seconds=0)
    folder.save(entry)
    line = make_command(entry, folder)
    if setting.teeth:
        # A hook whose failure counts as a yes, the default of such programs.
        line = f"{line[: line.index(_FAILS_CLOSED)]} || true"
    cases = [
        HookCase(f"t{number}-{index}", attack)
        for number in range(setting.seeds or 1)
        for index, attack in enumerate(_ATTACKS)
    ]
    ran: dict[str, HookCase] = {}
    deferred: dict[str, HookCase] = {}
    for number, case in enumerate(cases):
        setting.progress(number, len(cases), case.attack)
        ended = await _ATTACKS[case.attack](_Stage(workspace, children, folder, line), case)
        if ended.lets_run():
            ran[case.call] = case
        if ended.is_deferred():
            deferred[case.call] = case
    setting.progress(len(cases), len(cases), "checked")
    contents = read_store(workspace.url)
    violations = [*check(contents), *_compare(cases, ran, contents), *_find_lost(cases, deferred, contents)]
    return result(DRILL.name, workspace.kind, len(cases), violations, {"attacks": len(_ATTACKS), "ran": len(ran)})


async def serve_gate(pipe: Pipe, url: str, hook_folder: str) -> None:
    """Answer hooks on the drill's store until the drill ends the server."""
    from halter.hooks.server import serve_hooks
    from halter.runtime.runtime import open_runtime

    hooks = Path(hook_folder)
    settings = Settings(
        store=url,
        checkpoints=hooks.parent / "checkpoints",
        signing_key=hooks.parent / "signing.key",
        person="drill",
        hooks=hooks,
    )
    async with open_runtime(settings, environ={}) as app:
        server_task = asyncio.ensure_future(serve_hooks(app, lambda _: None, lambda _: pipe.send("ready")))
        await asyncio.to_thread(pipe.recv)
        server_task.cancel()
        await asyncio.gather(server_task, return_exceptions=True)
    pipe.send("ended")


class _Stage:
    """The hook and the server of one attack."""

    def __init__(self, workspace: Workspace, children: Children, folder: HookFolder, line: str) -> None:
        self._ground = workspace
        self._started = children
        self.folder = folder
        self._line = line

    async def start_hook(self, seconds: int = WAIT_SECONDS, *, attended: bool = True) -> Process:
        command = self._line.replace(f"{self.folder.path} {WAIT_SECONDS}", f"{self.folder.path} {seconds}")
        environ = {**os.environ, client.ATTENDED_VARIABLE: "1" if attended else "0"}
        return await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environ
        )

    async def run_hook(self, case: HookCase, seconds: int = WAIT_SECONDS) -> HookRun:
        return await _end(await self.start_hook(seconds, attended=case.attack not in _UNATTENDED), case.event())

    @asynccontextmanager
    async def server(self) -> AsyncGenerator[Child]:
        """Run the real server in its own process."""
        child = self._started.start(serve_gate, self._ground.url, str(self.folder.path))
        await asyncio.to_thread(child.receive)
        try:
            yield child
        finally:
            with suppress(OSError, EOFError):
                child.resume()
                child.send("end")
                await asyncio.to_thread(child.receive)
            await asyncio.to_thread(child.wait)

    @asynccontextmanager
    async def false_server(self, answer: Answering) -> AsyncGenerator[None]:
        """Run a false server at the real server's socket."""

        async def answer_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(OSError, asyncio.IncompleteReadError):
                await answer(reader, writer)
                await writer.drain()
            writer.close()

        self.folder.socket.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(
            answer_and_close, str(self.folder.socket), limit=2 * client.MAX_EVENT_BYTES
        )
        try:
            yield
        finally:
            server.close()
            self.folder.socket.unlink(missing_ok=True)


async def _end(hook: Process, event: bytes) -> HookRun:
    stdout, stderr = await asyncio.wait_for(hook.communicate(event), _HOOK_TIMEOUT_SECONDS)
    return HookRun(cast("int", hook.returncode), stdout, stderr)


async def _with_server(stage: _Stage, case: HookCase) -> HookRun:
    async with stage.server():
        return await stage.run_hook(case)


async def _without_server(stage: _Stage, case: HookCase) -> HookRun:
    return await stage.run_hook(case)


async def _with_hung_server(stage: _Stage, case: HookCase) -> HookRun:
    async with stage.server() as server:
        await asyncio.to_thread(server.stop)
        hook_run = await stage.run_hook(case, HANG_SECONDS)
        await asyncio.to_thread(server.kill)
        return hook_run


async def _with_killed_server(stage: _Stage, case: HookCase) -> HookRun:
    async with stage.server() as server:
        await asyncio.to_thread(server.stop)
        hook_task = asyncio.ensure_future(stage.run_hook(case))
        await asyncio.sleep(HANG_SECONDS)
        await asyncio.to_thread(server.kill)
        return await hook_task


async def _with_killed_hook(stage: _Stage, case: HookCase) -> HookRun:
    async with stage.server() as server:
        await asyncio.to_thread(server.stop)
        hook = await stage.start_hook()
        child = await _find_child(hook.pid)
        hook_task = asyncio.ensure_future(_end(hook, case.event()))
        os.kill(child, signal.SIGKILL)
        hook_run = await hook_task
        await asyncio.to_thread(server.kill)
        return hook_run


async def _find_child(pid: int) -> int:
    """Wait for the process inside the shell, and return its id."""
    async with asyncio.timeout(_HOOK_TIMEOUT_SECONDS):
        while True:
            children = await asyncio.to_thread(Path(f"/proc/{pid}/task/{pid}/children").read_text)
            if children.split():
                return int(children.split()[0])
            await asyncio.sleep(0.01)


def _make_attack(make: Callable[[bytes, bytes], bytes]) -> "Attack":
    """Make an attack by a server whose answer is made from the real key and the nonce of the question."""

    async def attack(stage: _Stage, case: HookCase) -> HookRun:
        key = stage.folder.key()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonce = bytes.fromhex((await reader.readuntil(b"\n")).split()[1].decode())
            writer.write(make(key, nonce))

        async with stage.false_server(answer):
            return await stage.run_hook(case)

    return attack


def _forge_yes(key: bytes, nonce: bytes) -> bytes:
    return client.pack(key, nonce, (b"0",), _ALLOW, b"")


Attack = Callable[[_Stage, HookCase], Awaitable[HookRun]]
_ATTACKS: Final[Mapping[HookAttack, Attack]] = {
    "nothing": _with_server,
    "a risky call": _with_server,
    "a risky call without a person": _with_server,
    "a risky call of a sub-agent without a person": _with_server,
    "the hook is killed": _with_killed_hook,
    "no event": _with_server,
    "garbage as event": _with_server,
    "no server": _without_server,
    "the server hangs": _with_hung_server,
    "the server is killed while it decides": _with_killed_server,
    "the answer is empty": _make_attack(lambda _, __: b""),
    "the answer is garbage": _make_attack(lambda _, __: b"yes, run it\n" * 10),
    "the answer is of an older version": _make_attack(
        lambda key, nonce: _forge_yes(key, nonce).replace(client.PROTOCOL, b"halter-hook/0", 1)
    ),
    "the answer is cut off": _make_attack(lambda key, nonce: _forge_yes(key, nonce)[:-1]),
    "another server says yes": _make_attack(lambda _, nonce: _forge_yes(bytes(client.KEY_BYTES), nonce)),
    "the server's yes to another call": _make_attack(lambda key, _: _forge_yes(key, bytes(client.NONCE_BYTES))),
}


def _compare(cases: list[HookCase], calls_run: Mapping[str, HookCase], contents: StoreContents) -> Iterator[str]:
    """Check that every call that ran was admitted in the journal, and that harmless calls ran."""
    admitted_json = json.dumps([event.facts for event in contents.events if event.kind == "call_started"])
    for case in cases:
        if case.attack == "nothing":
            if case.call not in calls_run:
                yield f"{case.call}: a harmless call did not run, so the case proves nothing."
            elif case.call not in admitted_json:
                yield f"{case.call}: a call ran that is not in the journal."
        elif case.call in calls_run:
            yield f"{case.attack}: the tool ran."


def _find_lost(cases: list[HookCase], deferred: Mapping[str, HookCase], contents: StoreContents) -> Iterator[str]:
    """Check that the program keeps a deferred call, and that each call that waits is asked about in the journal."""
    asked_json = json.dumps([event.facts for event in contents.events if event.kind == "decision_asked"])
    for case in cases:
        is_kept = case.attack == "a risky call without a person"
        if (case.call in deferred) != is_kept:
            yield f"{case.attack}: {'not deferred, so the case proves nothing' if is_kept else 'the call is lost'}."
        if case.attack in _UNATTENDED and case.call not in asked_json:
            yield f"{case.attack}: no decision was asked for."


DRILL: Final = Drill(
    "hook",
    "In a program with hooks, only admitted tools run, even if the hook or its server fails.",
    run,
    stores=("sqlite",),
)
