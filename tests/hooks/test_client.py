"""A hook under attack: killed, hung, fed with garbage, faced with a false server. The call is blocked each time."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple, cast

import pytest

from halter.hooks import client
from halter.hooks.client import MAX_EVENT_BYTES, pack
from halter.hooks.install import MARGIN_SECONDS, install_hooks, make_command, write_policy
from halter.hooks.registry import DEFAULT_WAIT_SECONDS, HookedProgram, HookFolder
from halter.hooks.server import HookServer, bind_socket
from tests.hooks.desks import bash, bash_done, event, open_desk
from tests.processes import Halter

ALLOW = b'{"hookSpecificOutput":{"hookEventName":"PreToolUse","permissionDecision":"allow"}}'
Answers = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Ran(NamedTuple):
    code: int
    out: bytes
    err: bytes

    @property
    def blocks(self) -> bool:
        """Whether every program takes this for a block: the exit code 2, a sentence, and nothing to read."""
        return self.code == 2 and self.out == b"" and b"blocked" in self.err


@pytest.fixture
def folder() -> Iterator[HookFolder]:
    """A folder of hooks with a short name, as sockets need one."""
    with tempfile.TemporaryDirectory(prefix="h-") as text:
        hook_folder = HookFolder(Path(text) / "hooks")
        hook_folder.key(make=True)
        hook_folder.save(
            HookedProgram(
                agent="claude-code", program="claude", folder=str(write_policy(hook_folder, "claude-code", "x"))
            )
        )
        yield hook_folder


def command(folder: HookFolder, seconds: int = 60) -> list[str]:
    """The command that an installation writes, as a program runs it."""
    line, default_seconds = make_command(folder.agents()["claude-code"], folder), DEFAULT_WAIT_SECONDS + MARGIN_SECONDS
    return [
        "/bin/sh",
        "-c",
        line.replace(f"{folder.path} {default_seconds} ", f"{folder.path} {seconds} "),
    ]


async def run(folder: HookFolder, data: bytes = bash("ls"), seconds: int = 60) -> Ran:
    pipe = asyncio.subprocess.PIPE
    program = await asyncio.create_subprocess_exec(*command(folder, seconds), stdin=pipe, stdout=pipe, stderr=pipe)
    body, err = await asyncio.wait_for(program.communicate(data), 60)
    assert program.returncode is not None
    return Ran(program.returncode, body, err)


@asynccontextmanager
async def serving(folder: HookFolder, answers: Answers) -> AsyncGenerator[None]:
    """Something that listens where the server should."""
    tasks: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(task := cast("asyncio.Task[None]", asyncio.current_task()))
        try:
            await answers(reader, writer)
        finally:
            tasks.discard(task)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    server = await asyncio.start_unix_server(answer, sock=bind_socket(folder.socket), limit=2 * MAX_EVENT_BYTES)
    try:
        yield
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def answering(data: bytes) -> Answers:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\n")
        writer.write(data)
        await writer.drain()

    return answer


def answering_to_its_nonce(
    key: bytes, *, cut: int = 0, protocol: bytes = client.PROTOCOL, code: bytes = b"0", out: bytes = ALLOW
) -> Answers:
    """A server that knows what it was asked, and signs an allowance with a key."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonce = bytes.fromhex((await reader.readuntil(b"\n")).split()[1].decode())
        data = pack(key, nonce, (code,), out, b"").replace(client.PROTOCOL, protocol, 1)
        writer.write(data[: len(data) - cut])
        await writer.drain()

    return answer


def child_of(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


async def hanging(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\n")
    await asyncio.Event().wait()


async def test_an_answer_that_is_signed_gets_through(folder: HookFolder) -> None:
    async with serving(folder, answering_to_its_nonce(folder.key())):
        assert await run(folder) == (0, ALLOW, b"")


async def test_without_a_server_the_call_is_blocked(folder: HookFolder) -> None:
    ran = await run(folder)
    assert ran.blocks
    assert b"start `halter serve`" in ran.err


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"garbage",
        ALLOW,
        b"HTTP/1.1 200 OK\r\n\r\n" + ALLOW,
        b"\0" * 100_000,
        client.PROTOCOL + b" 0 2 0\n{}",
    ],
    ids=["nothing", "a line", "garbage", "an allowance", "HTTP", "zeros", "no signature"],
)
async def test_a_server_that_answers_anything_else_blocks(folder: HookFolder, data: bytes) -> None:
    async with serving(folder, answering(data)):
        assert (await run(folder)).blocks


async def test_a_false_server_cannot_allow_a_call(folder: HookFolder) -> None:
    async with serving(folder, answering_to_its_nonce(b"x" * 32)):
        assert (await run(folder)).blocks


async def test_an_allowance_of_another_call_counts_for_none(folder: HookFolder) -> None:
    async with serving(folder, answering(pack(folder.key(), b"an earlier nonce", (b"0",), ALLOW, b""))):
        assert (await run(folder)).blocks


async def test_an_answer_that_is_cut_off_blocks(folder: HookFolder) -> None:
    async with serving(folder, answering_to_its_nonce(folder.key(), cut=1)):
        assert (await run(folder)).blocks


async def test_a_server_of_another_version_blocks(folder: HookFolder) -> None:
    async with serving(folder, answering_to_its_nonce(folder.key(), protocol=b"halter-hook/9")):
        ran = await run(folder)
        assert ran.blocks
        assert b"halter hook install" in ran.err


async def test_a_server_that_hangs_blocks_in_time(folder: HookFolder) -> None:
    async with serving(folder, hanging):
        ran = await run(folder, seconds=1)
        assert ran.blocks
        assert b"did not answer in time" in ran.err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
async def test_a_hook_that_is_killed_blocks(folder: HookFolder, number: int) -> None:
    event, pipe = asyncio.Event(), asyncio.subprocess.PIPE

    async def hang(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\n")
        event.set()
        await reader.read()

    async with serving(folder, hang):
        program = await asyncio.create_subprocess_exec(*command(folder), stdin=pipe, stdout=pipe, stderr=pipe)
        answering = asyncio.ensure_future(program.communicate(bash("ls")))
        await event.wait()
        os.kill(child_of(program.pid), number)
        body, err = await answering
        assert Ran(program.returncode or 0, body, err).blocks


@pytest.mark.parametrize("data", [b"", b" " * (MAX_EVENT_BYTES + 1)], ids=["empty", "oversized"])
async def test_an_event_that_is_empty_or_too_large_blocks(folder: HookFolder, data: bytes) -> None:
    async with serving(folder, answering_to_its_nonce(folder.key())):
        assert (await run(folder, data)).blocks


async def test_a_damaged_or_missing_key_blocks(folder: HookFolder) -> None:
    async with serving(folder, answering_to_its_nonce(folder.key())):
        (folder.path / "key").write_bytes(b"short")
        assert (await run(folder)).blocks
        (folder.path / "key").unlink()
        assert (await run(folder)).blocks


async def test_a_block_without_a_sentence_gets_one(folder: HookFolder) -> None:
    """Codex runs a tool whose hook exits with 2 and says nothing."""
    async with serving(folder, answering_to_its_nonce(folder.key(), code=b"2", out=b"")):
        ran = await run(folder)
        assert (ran.code, b"blocked" in ran.err) == (2, True)


@pytest.mark.parametrize("missing", [sys.executable, client.__file__], ids=["interpreter", "program"])
async def test_a_hook_whose_program_is_gone_blocks(folder: HookFolder, missing: str) -> None:
    shell, option, line = command(folder)
    pipe = asyncio.subprocess.PIPE
    program = await asyncio.create_subprocess_exec(
        shell, option, line.replace(missing, "/gone/x"), stdin=pipe, stdout=pipe, stderr=pipe
    )
    body, err = await program.communicate(bash("ls"))
    assert (program.returncode, body, err != b"") == (2, b"", True)


async def test_a_request_that_is_not_signed_gets_no_answer(tmp_path: Path, folder: HookFolder) -> None:
    texts: list[str] = []
    nonce = b"n" * 16
    async with (
        open_desk(None, tmp_path) as desk,
        serving(folder, HookServer(desk.gate, folder.key(), texts.append).answer),
    ):
        for key in (b"x" * 32, folder.key()):
            reader, writer = await asyncio.open_unix_connection(str(folder.socket))
            words = (nonce.hex().encode(), b"claude", b"claude-code", b"-")
            writer.write(pack(key, nonce, words, event("Other")))
            assert (await reader.read() != b"") is (key == folder.key())
            writer.close()
            await writer.wait_closed()
    assert len(texts) == 1


class Server:
    """`halter hook serve` in a process of its own, with a home of its own."""

    def __init__(self, home: Path) -> None:
        self.environ = {"HOME": str(home), "PATH": "/usr/bin:/bin", "HALTER_PERSON": "ada", "HALTER_HOOKS": f"{home}/k"}
        self.folder = HookFolder(home / "k")
        entry = HookedProgram(
            agent="claude-code",
            program="claude",
            folder=str(write_policy(self.folder, "claude-code", "Claude Code")),
            wait_seconds=0,
        )
        install_hooks(entry, self.folder, home / "settings.json")
        settings = json.loads((home / "settings.json").read_text())
        self.line = settings["hooks"]["PreToolUse"][0]["hooks"][0]["command"]
        self.home = home
        self.program = self.begin()

    def begin(self, *words: str) -> Halter:
        words = words or ("hook", "serve")
        self.program = Halter(words, env=self.environ, cwd=self.home, stdin=subprocess.DEVNULL)
        assert self.program.stdout is not None
        while b"Answering hooks at" not in (line := self.program.stdout.readline()):
            assert line
        return self.program

    def ask(self, data: bytes) -> Ran:
        process = subprocess.run(["/bin/sh", "-c", self.line], input=data, capture_output=True, check=False, timeout=60)
        return Ran(process.returncode, process.stdout, process.stderr)

    def halter(self, *words: str, **marks: str) -> tuple[int, str]:
        with Halter(words, env={**self.environ, **marks}, cwd=self.home, stdin=subprocess.DEVNULL) as program:
            body, err = program.communicate()
        return program.returncode, (body + err).decode()

    def stop(self, number: int) -> None:
        with self.program as program:
            program.send_signal(number)


@pytest.fixture
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="h-") as home:
        made = Server(Path(home))
        yield made
        made.stop(signal.SIGKILL)


def test_a_server_that_was_ended_blocks_every_call_and_its_successor_knows_all(server: Server) -> None:
    assert server.ask(bash("make", "t1")) == (0, b"{}", b"")
    assert b"pending decision" in server.ask(bash("git push --force", "t2")).out
    server.stop(signal.SIGTERM)
    assert server.ask(bash("ls", "t3")).blocks
    server.begin()
    assert server.ask(bash_done("make", "t1", out="built")) == (0, b"{}", b"")
    server.halter("approve", "claude-code-0b9f.t2/approval")
    assert b'"allow"' in server.ask(bash("git push --force", "t4")).out
    assert b'"deny"' in server.ask(bash("git push --force", "t4")).out
    assert server.ask(event("SessionEnd")).code == 0
    (session,) = json.loads(server.halter("sessions", "--json")[1])
    assert (session["session"], session["kind"], session["state"]) == ("claude-code-0b9f", "hooked", "COMPLETED")
    _, text = server.halter("receipt", "claude-code-0b9f")
    assert "not seen" in text
    assert "outcome unknown" in text


def test_what_a_hooked_program_starts_is_no_person(server: Server) -> None:
    server.ask(bash("git push --force", "t2"))
    code, text = server.halter("approve", "claude-code-0b9f.t2/approval", CLAUDECODE="1")
    assert (code, "agent:claude-code" in text) == (1, True)


def test_a_killed_server_blocks_every_call(server: Server) -> None:
    server.stop(signal.SIGKILL)
    assert server.ask(bash("ls", "t3")).blocks
    server.begin()
    assert server.ask(event("Other")).code == 0


def test_halter_serve_answers_hooks_too(server: Server) -> None:
    server.stop(signal.SIGTERM)
    server.begin("serve", "--listen", "127.0.0.1:0")
    assert server.ask(event("Other")).code == 0
    code, text = server.halter("hook", "serve")
    assert (code, "Another process answers hooks" in text) == (3, True)
