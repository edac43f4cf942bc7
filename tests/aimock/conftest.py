"""A model server that nobody here wrote: installed once from its pinned version, started for the tests, and gone."""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".aimock"
PROGRAM = CACHE / "node_modules" / "@copilotkit" / "aimock" / "dist" / "cli.js"
OLDEST_NODE = 20
LISTENS = re.compile(rb"listening on (http://\S+)")

# The shell stops the server when nobody holds the other end of its input any more, so it never outlives the tests.
KEEPER = 'exec 3<&0; "$@" & server=$!; (read -r _ <&3; kill $server) & wait $server'


class AimockMissing(Exception):
    """The server cannot be had on this machine."""


@pytest.fixture(scope="session")
def aimock() -> Iterator[str]:
    """Start the server and tell its address; where it cannot be had, skip loudly, or fail if everything is required."""
    try:
        program = installed()
    except AimockMissing as missing:
        if os.environ.get("HALTER_REQUIRE_ALL") == "1":
            pytest.fail(str(missing))
        pytest.skip(str(missing))
    yield from serving(program)


def installed() -> list[str]:
    """Install what the lock file names, unless it is there already; processes that start together take turns."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise AimockMissing("The tests against aimock need node and npm: please install them.")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.removeprefix("v").split(".")[0]) < OLDEST_NODE:
        raise AimockMissing(f"The tests against aimock need node {OLDEST_NODE} or newer, but this is {version}.")
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        lock = HERE / "package-lock.json"
        mark = CACHE / f"{hashlib.sha256(lock.read_bytes()).hexdigest()}.installed"
        if not mark.exists():
            install(npm)
            mark.touch()
    return [node, str(PROGRAM)]


def install(npm: str) -> None:
    for name in ("package.json", "package-lock.json"):
        shutil.copy(HERE / name, CACHE / name)
    command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"]
    try:
        done = subprocess.run(command, cwd=CACHE, capture_output=True, text=True, check=False, timeout=100)
    except subprocess.TimeoutExpired:
        raise AimockMissing("The tests against aimock need npm to install it, but that takes too long.") from None
    if done.returncode:
        raise AimockMissing(
            f"The tests against aimock need npm to install it, but it says: {done.stderr.strip()[-300:]}"
        )


def serving(program: list[str]) -> Iterator[str]:
    options = ["--port", "0", "--fixtures", str(HERE / "fixtures.json"), "--validate-on-load", "--strict"]
    server = subprocess.Popen(
        ["/bin/sh", "-c", KEEPER, "keeper", *program, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    with server.stdin, server.stdout:
        said = b""
        while (found := LISTENS.search(said)) is None:
            line = server.stdout.readline()
            assert line, f"aimock did not start: {said.decode()}"
            said += line
        yield found[1].decode()
    server.wait(20)
