"""Answers hooks on a Unix socket, until cancelled. What cannot be answered is blocked."""

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from halter.core.errors import ConfigError, HalterError
from halter.core.ids import make_worker_id
from halter.core.text import clean
from halter.dispatch.heartbeat import keep_leases
from halter.hooks.client import LARGEST_EVENT, PROTOCOL, SIGNATURE_BYTES, Unusable, pack, unpack
from halter.hooks.gate import SWEEP_INTERVAL, HookGate
from halter.hooks.protocol import HookReply, block
from halter.hooks.registry import HookFolder, find_hook_folder
from halter.loop.session_runtime import run_together
from halter.runtime.runtime import Runtime

READ_SECONDS: Final = 10
"""How long an event may take to arrive."""
LONGEST_HEAD: Final = 1000
BACKLOG: Final = 128

Tell = Callable[[str], None]


async def serve_hooks(app: Runtime, report: Tell, ready: Callable[[Path], None]) -> None:
    """Answer hooks until cancelled; `ready` is called once that is so.

    Raises ConfigError where another process does so already.
    """
    folder = find_hook_folder(app.settings)
    key, worker = folder.key(), make_worker_id("hooks", app.ids)
    with bind_socket(folder.socket) as listening:
        async with keep_leases(app.patient(), app.clock, worker, liveness=app.liveness):
            gate = HookGate(app, worker, folder)
            server = await asyncio.start_unix_server(
                HookServer(gate, key, report).answer, sock=listening, limit=LONGEST_HEAD
            )
            ready(folder.socket)
            try:
                await run_together([server.serve_forever, lambda: sweep_forever(app, gate, report)])
            finally:
                server.close()
                _remove(folder)


async def sweep_forever(app: Runtime, gate: HookGate, report: Tell) -> None:
    while True:
        await app.clock.sleep(SWEEP_INTERVAL)
        try:
            await gate.sweep()
        except HalterError as error:
            report(f"Hooked sessions cannot be looked through: {error}")


def bind_socket(path: Path) -> socket.socket:
    """Bind a private socket, in place of one whose server has gone."""
    if answers(path):
        raise ConfigError(f"Another process answers hooks at {path}: stop it first.")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        path.unlink(missing_ok=True)
        listening.bind(str(path))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(f"{path} cannot be bound: {error.strerror or error}.") from error
    finally:
        os.umask(before)
    return listening


def answers(path: Path) -> bool:
    """Whether a server listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.settimeout(1)
        try:
            trial.connect(str(path))
        except OSError:
            return False
        return True


def _remove(folder: HookFolder) -> None:
    with suppress(OSError):
        folder.socket.unlink()


class HookServer:
    """Reads requests, checks their signatures, and writes signed answers."""

    def __init__(self, gate: HookGate, key: bytes, report: Tell) -> None:
        self._gate = gate
        self._key = key
        self._report = report

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one hook. A request that is not signed gets no answer, which its program blocks by itself."""
        try:
            if _peer_user(writer) != os.getuid():
                return
            async with asyncio.timeout(READ_SECONDS):
                message = await _read_message(reader)
            nonce = bytes.fromhex(message.split(b" ", 2)[1].decode("ascii"))
            (_, program, agent, attended), (event,) = unpack(self._key, nonce, message, 1)
            reply = await self._reply(program.decode(), agent.decode(), event, attended=attended != b"0")
            writer.write(pack(self._key, nonce, (b"%d" % reply.code,), reply.out, reply.err))
            await writer.drain()
        except (Unusable, ValueError, IndexError, TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            self._report(f"A hook sent something that cannot be answered: {clean(str(error) or type(error).__name__)}")
        finally:
            writer.close()

    async def _reply(self, program: str, agent: str, event: bytes, *, attended: bool) -> HookReply:
        try:
            return await self._gate.reply(program, agent, event, attended=attended)
        except Exception as error:  # noqa: BLE001 A hook that breaks must block its call, and no other.
            self._report(f"A hook of {clean(agent)} broke: {type(error).__name__}: {clean(str(error))}")
            return block("Halter broke on this event; its server says why. This call is blocked.")


async def _read_message(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\n")
    size = head.rpartition(b" ")[2].strip()
    if not head.startswith(PROTOCOL) or not size.isdigit() or int(size) > LARGEST_EVENT:
        raise Unusable("it is no request of this version, or too long")
    return head + await reader.readexactly(int(size) + SIGNATURE_BYTES)


def _peer_user(writer: asyncio.StreamWriter) -> int:
    peer: socket.socket = writer.get_extra_info("socket")
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return user
