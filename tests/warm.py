"""A process that has imported Halter and is forked for each program that a test starts.

A program is a process of its own, with its own streams, signals and environment; only the imports, which take most
of its time, happen once. What depends on how Python itself starts is tested with a real start.
"""

import array
import atexit
import contextlib
import fcntl
import gc
import importlib
import importlib.util
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import struct
import sys
import termios
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

LENGTH = struct.Struct("!I")
HEAVY = ("halter.testing", "halter.adapters", "halter.dashboard", "halter.demo.incidents-watch", "halter.top")

LIBRARIES = (
    "_strptime",
    "cel",
    "nacl.signing",
    "encodings.idna",
    "encodings.utf_8_sig",
    "genai_prices",
    "httpx",
    "psycopg",
    "re2",
    "rich.console",
    "rich.table",
    "typer._adapters",
    "typer.rich_utils",
    "yaml",
)
"""What most programs import when they need it."""


class Forked(Exception):
    """This process is the child that becomes the program."""

    def __init__(self, request: dict[str, Any], streams: list[int]) -> None:
        self.request = request
        self.streams = streams


def import_early(name: str) -> None:
    """Import what programs may need. Beside a framework some libraries are too old: what needs them says so itself."""
    with contextlib.suppress(ImportError):
        importlib.import_module(name)


def preload() -> None:
    import halter

    for module in pkgutil.walk_packages(halter.__path__, "halter."):
        if not module.name.startswith(HEAVY) and not module.name.endswith(("__main__", "_program")):
            import_early(module.name)
    for name in LIBRARIES:
        with suppress(ModuleNotFoundError):  # Not every version of a library has each of its modules.
            importlib.import_module(name)
    # What starts processes of its own asks how this one was started.
    sys.modules["__main__"].__spec__ = importlib.util.find_spec("halter.__main__")
    # No garbage collection of a fork looks at what was imported, which would copy all of it.
    gc.collect()
    gc.freeze()


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    size = array.array("i", range(3)).itemsize * 3
    head, ancillary, _, _ = connection.recvmsg(LENGTH.size, socket.CMSG_SPACE(size))
    streams = array.array("i")
    for _level, _kind, data in ancillary:
        streams.frombytes(data)
    (length,) = LENGTH.unpack(head)
    text = b""
    while len(text) < length:
        text += connection.recv(length - len(text))
    return json.loads(text), list(streams)


def serve(listener: socket.socket) -> None:
    """Fork for each request; tell its process id at once, and its status when it has ended."""
    ready = selectors.DefaultSelector()
    ready.register(listener, selectors.EVENT_READ)
    ready.register(0, selectors.EVENT_READ)
    while True:
        for key, _ in ready.select():
            if key.fd == 0:
                return
            if key.fileobj is listener:
                connection, _ = listener.accept()
                request, streams = receive(connection)
                for name in request.get("imports", ()):
                    import_early(name)
                pid = os.fork()
                if pid == 0:
                    raise Forked(request, streams)
                for stream in streams:
                    os.close(stream)
                connection.sendall(struct.pack("!i", pid))
                ready.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))
            else:
                pid, connection = key.data
                ready.unregister(key.fd)
                os.close(key.fd)
                _, status = os.waitpid(pid, 0)
                with contextlib.suppress(OSError):
                    connection.sendall(struct.pack("!i", status))
                connection.close()


def become(request: dict[str, Any], streams: list[int]) -> int:
    if request["terminal"]:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, 1024)
    if request["terminal"]:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["folder"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["halter", *request["words"]]
    sys.path[0] = str(Path.cwd())
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False, buffering=1)
    try:
        run(request.get("kind", "halter"))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


def run(kind: str) -> None:
    if kind == "halter":
        from halter.cli import main

        main()
    else:
        sys.argv = sys.argv[1:]
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    place = Path(sys.argv[1])
    preload()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place))
    listener.listen(64)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    try:
        serve(listener)
    except Forked as forked:
        code = become(forked.request, forked.streams)
        threading._shutdown()  # noqa: SLF001  as at the end of every program
        atexit._run_exitfuncs()  # noqa: SLF001
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
