"""Somebody at a terminal who types what a page says, in a home of their own, with no network and no keys."""

import os
import queue
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from typer.testing import CliRunner

from halter.cli.commands import build_command_tree
from tests.processes import warm_command

PATIENCE = 30
COLUMNS = "110"
KEPT = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "TMPDIR", "VIRTUAL_ENV")
SHELL = re.compile(r"[|<>&;$`*]")

LIVE = {"up", "serve", "demo"}
"""Commands that write to the screen themselves, and so need one of their own."""


class Running:
    """A program that was left running; what it prints is read line by line."""

    def __init__(self, command: str, environ: dict[str, str]) -> None:
        self.command = command
        self._program = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {command}"],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._program.stdout is not None
        for line in self._program.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    @property
    def lines(self) -> Iterator[str]:
        """What it prints from now on, as long as somebody waits for it."""
        while (line := self._lines.get(timeout=PATIENCE)) is not None:
            yield line

    def ends(self) -> None:
        """End it, as Ctrl-C would."""
        self._program.terminate()
        self._program.wait(PATIENCE)
        self._reader.join(PATIENCE)
        assert self._program.stdout is not None
        self._program.stdout.close()


class Terminal:
    """A shell. What is plainly a command of Halter runs in this process, which is quicker; all else in a shell."""

    def __init__(self, home: Path) -> None:
        shims = home / ".shims"
        shims.mkdir()
        python = shlex.quote(sys.executable)
        forked = shlex.join(warm_command("python", imports=["mcp", "mcp.server.mcpserver"]))
        for name, words in (
            ("halter", f"exec {shlex.join(warm_command('halter'))}"),
            ("python", f'case "$1" in *.py) exec {forked} "$@";; esac; exec {python}'),
            ("pytest", f"exec {python} -m pytest -p no:cacheprovider --disable-plugin-autoload -p halter"),
        ):
            (shims / name).write_text(f'#!/bin/sh\n{words} "$@"\n')
            (shims / name).chmod(0o755)
        self.environ = {name: value for name, value in os.environ.items() if name in KEPT}
        self.environ |= {"HOME": str(home), "HALTER_PERSON": "ada", "COLUMNS": COLUMNS, "TERM": "dumb"}
        self.environ["PATH"] = f"{shims}:{os.environ['PATH']}"
        self.running: list[Running] = []

    def types(self, command: str) -> tuple[str, int]:
        """Type a command; return what is printed, and the code that it leaves with."""
        if command.startswith("cd "):
            os.chdir(command.removeprefix("cd "))
            return "", 0
        if command.startswith("export "):
            name, _, value = shlex.split(command)[1].partition("=")
            self.environ[name] = value
            return "", 0
        if command.startswith("halter ") and not SHELL.search(command) and command.split()[1] not in LIVE:
            return self._invoked(shlex.split(command)[1:])
        process = subprocess.run(
            ["/bin/sh", "-c", command],
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=2 * PATIENCE,
            check=False,
        )
        return process.stdout, process.returncode

    def _invoked(self, words: list[str]) -> tuple[str, int]:
        values: dict[str, str | None] = dict.fromkeys(os.environ)
        result = CliRunner().invoke(build_command_tree(), words, prog_name="halter", env={**values, **self.environ})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.output, result.exit_code

    def leaves_running(self, command: str) -> Running:
        """Type a command in another terminal."""
        self.running.append(Running(command, self.environ))
        return self.running[-1]

    def find_running(self, word: str) -> Running:
        """Find the newest command with a word in it that was left running."""
        return next(running for running in reversed(self.running) if word in running.command)

    def close(self) -> None:
        """End whatever still runs."""
        for program in self.running:
            program.ends()
