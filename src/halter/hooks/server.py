"""The server that answers hooks on a Unix socket. An event that cannot be answered is blocked."""

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
from halter.dispatch.heartbeat import renew_leases
from halter.hooks.client import MAX_EVENT_BYTES, PROTOCOL, SIGNATURE_BYTES, Unusable, pack, unpack
from halter.hooks.gate import SWEEP_INTERVAL, HookGate
from halter.hooks.protocol import HookReply, block
from halter.hooks.registry import HookFolder, find_hook_folder
from halter.loop.concurrency import run_together
from halter.runtime.runtime import Runtime

READ_SECONDS: Final = 10
"""Maximum time for an event to arrive."""
MAX_HEAD_BYTES: Final = 1000
BACKLOG: Final = 128

ReportListener = Callable[[str], None]


async def serve_hooks(app: Runtime, report: ReportListener, on_ready: Callable[[Path], None]) -> None:
    """Answer hooks until cancelled; `on_ready` is called when the socket accepts connections.

    Raises ConfigError if another process already answers hooks.
    """
    folder = find_hook_folder(app.settings)
    key, worker = folder.key(), make_worker_id("hooks", app.ids)
    with bind_socket(folder.socket) as listener:
        async with renew_leases(app.patient(), app.clock, worker, liveness=app.liveness):
            gate = HookGate(app, worker, folder)
            server = await asyncio.start_unix_server(
                HookServer(gate, key, report).answer, sock=listener, limit=MAX_HEAD_BYTES
            )
            on_ready(folder.socket)
            try:
                await run_together([server.serve_forever, lambda: sweep_forever(app, gate, report)])
            finally:
                server.close()
                _remove(folder)


async def sweep_forever(app: Runtime, gate: HookGate, report: ReportListener) -> None:
    while True:
        await app.clock.sleep(SWEEP_INTERVAL)
        try:
            await gate.sweep()
        except HalterError as error:
            report(f"Cannot check hooked sessions: {error}")


def bind_socket(path: Path) -> socket.socket:
    """Bind a private socket, and replace one whose server has ended."""
    if answers(path):
        raise ConfigError(f"Another process answers hooks at {path}. Stop it first.")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old_umask = os.umask(0o177)
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"Cannot bind {path}: {error.strerror or error}.") from error
    finally:
        os.umask(old_umask)
    return listener


def answers(path: Path) -> bool:
    """Return True if a server listens at the path."""
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
    """A server of hook requests: it checks their signatures, and signs its answers."""

    def __init__(self, gate: HookGate, key: bytes, report: ReportListener) -> None:
        self._gate = gate
        self._key = key
        self._report = report

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one hook. A request without a valid signature gets no answer, and the hook then blocks the call."""
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
            self._report(f"Cannot answer a hook: {clean(str(error) or type(error).__name__)}")
        finally:
            writer.close()

    async def _reply(self, program: str, agent: str, event: bytes, *, attended: bool) -> HookReply:
        try:
            return await self._gate.reply(program, agent, event, attended=attended)
        except Exception as error:  # noqa: BLE001 A failing hook must block its own call, and no other.
            self._report(f"A hook of {clean(agent)} failed: {type(error).__name__}: {clean(str(error))}")
            return block("Halter failed on this event; see the output of its server. This call is blocked.")


async def _read_message(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\n")
    size = head.rpartition(b" ")[2].strip()
    if not head.startswith(PROTOCOL) or not size.isdigit() or int(size) > MAX_EVENT_BYTES:
        raise Unusable("the request is of another version, or too large")
    return head + await reader.readexactly(int(size) + SIGNATURE_BYTES)


def _peer_user(writer: asyncio.StreamWriter) -> int:
    peer: socket.socket = writer.get_extra_info("socket")
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return user
