"""A model server that nobody here wrote: installed once from its pinned version, started for the tests, and gone."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.npm import NpmMissing, install_locked

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".aimock"
PROGRAM = Path("@copilotkit", "aimock", "dist", "cli.js")
WHAT = "The tests against aimock"
OLDEST_NODE = 20
LISTENS = re.compile(rb"listening on (http://\S+)")

# The shell stops the server when nobody holds the other end of its input any more, so it never outlives the tests.
KEEPER = 'exec 3<&0; "$@" & server=$!; (read -r _ <&3; kill $server) & wait $server'


@pytest.fixture(scope="session")
def aimock() -> Iterator[str]:
    """Start the server and tell its address; where it cannot be had, skip loudly, or fail if everything is required."""
    try:
        program = installed()
    except NpmMissing as missing:
        if os.environ.get("HALTER_REQUIRE_ALL") == "1":
            pytest.fail(str(missing))
        pytest.skip(str(missing))
    yield from serving(program)


def installed() -> list[str]:
    node = shutil.which("node")
    if node is None:
        raise NpmMissing(f"{WHAT} need node and npm: please install them.")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.removeprefix("v").split(".")[0]) < OLDEST_NODE:
        raise NpmMissing(f"{WHAT} need node {OLDEST_NODE} or newer, but this is {version}.")
    return [node, str(install_locked(HERE, CACHE, WHAT) / PROGRAM)]


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
        text = b""
        while (match := LISTENS.search(text)) is None:
            line = server.stdout.readline()
            assert line, f"aimock did not start: {text.decode()}"
            text += line
        yield match[1].decode()
    server.wait(20)
