"""A throwaway PostgreSQL server from the machine's own binaries, in a temporary folder, on a free local port."""

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from halter.core.errors import HalterError

DEBIAN_POSTGRES: Final = Path("/usr/lib/postgresql")
START_SECONDS: Final = 60.0
STOP_SECONDS: Final = 8.0

# The shell stops the server at the end of its input, so the server never outlives its program, even a killed one.
_KEEPER_SCRIPT: Final = 'exec 3<&0; "$@" & server=$!; (read -r _ <&3; kill -QUIT $server) & wait $server'


class PostgresMissing(HalterError):
    """No PostgreSQL server is installed, or it does not start."""


class Cluster:
    """A server that can be stopped hard, like a crash, and started again on the same data and port."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self._binaries = find_postgres_binaries()
        self._folder = folder
        self.data = folder / "data"
        self._settings = settings
        self._user = "postgres" if os.geteuid() == 0 else None
        self._server: subprocess.Popen[bytes] | None = None
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._initialise()

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        """Start the server and return when it takes connections."""
        settings = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", **self._settings}
        flags = [flag for name, value in settings.items() for flag in ("-c", f"{name}={value}")]
        server = [str(self._binaries / "postgres"), "-D", str(self.data), "-p", str(self.port), *flags]
        with self._log.open("ab") as log:
            self._server = subprocess.Popen(
                ["/bin/sh", "-c", _KEEPER_SCRIPT, "keeper", *server],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                user=self._user,
                group=self._user,
                extra_groups=None if self._user is None else [],
                start_new_session=True,
            )
        self._wait_until_ready(self._server)

    def stop_hard(self) -> None:
        """Stop the server like a crash: every connection is cut and nothing is flushed."""
        server, self._server = self._server, None
        if server is None:
            return
        if server.stdin is not None:
            server.stdin.close()
        try:
            server.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            # The server answers each new client before it ends: clients that reconnect can keep it alive forever.
            self._kill(server)

    def _kill(self, server: subprocess.Popen[bytes]) -> None:
        """Kill the server, and wait for its children, which would block the next server."""
        children: list[str] = []
        # The server may have ended in the meantime.
        with suppress(OSError):
            postmaster = (self.data / "postmaster.pid").read_text().split()[0]
            children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
            os.killpg(server.pid, signal.SIGKILL)
        server.wait(START_SECONDS)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in children):
            time.sleep(0.01)

    @property
    def _log(self) -> Path:
        return self._folder / "log"

    def _initialise(self) -> None:
        if self._user is not None:
            shutil.chown(self._folder, self._user, self._user)
        command = [self._binaries / "initdb", "-D", self.data, "-U", "postgres", "-E", "UTF8"]
        subprocess.run(
            [*command, "--auth=trust", "--locale=C.UTF-8", "--no-sync"],
            check=True,
            capture_output=True,
            cwd=self._folder,
            user=self._user,
            group=self._user,
            extra_groups=None if self._user is None else [],
        )

    def _wait_until_ready(self, server: subprocess.Popen[bytes]) -> None:
        """Wait until the server has written `ready` to its pid file."""
        status = self.data / "postmaster.pid"
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and server.poll() is None:
            if status.exists() and status.read_text().rstrip().endswith("ready"):
                return
            time.sleep(0.01)
        self.stop_hard()
        raise PostgresMissing(f"PostgreSQL did not start. Log: {self._log.read_text()[-2000:]}")


@contextmanager
def throwaway_cluster(settings: Mapping[str, str] = {}) -> Generator[Cluster]:
    """Run a fresh server; `settings` are those of postgresql.conf."""
    find_postgres_binaries()
    folder = Path(tempfile.mkdtemp(prefix="halter-postgres-"))
    try:
        cluster = Cluster(folder, settings)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop_hard()
    finally:
        shutil.rmtree(folder)


def find_postgres_binaries() -> Path:
    """Find the folder with the newest PostgreSQL server: Debian's, or the one on the PATH."""
    paths = [folder.parent for folder in DEBIAN_POSTGRES.glob("*/bin/postgres")]
    if paths:
        return max(paths, key=lambda folder: [int(part) for part in re.findall(r"\d+", folder.parent.name)])
    for search_folder in os.get_exec_path():
        if (Path(search_folder) / "initdb").exists() and (Path(search_folder) / "postgres").exists():
            return Path(search_folder)
    raise PostgresMissing("No PostgreSQL server found. Install one (on Debian: apt-get install postgresql).")
