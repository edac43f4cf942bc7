"""Reads a page as a person would who tries everything out: files are written, commands typed, examples run."""

import json
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

from jsonschema import Draft202012Validator

from halter.config.agent_files import parse_agent
from halter.config.decode import agent_schema, fleet_schema
from halter.config.mcp_file import load_json, parse_servers
from halter.config.merge import FleetConfig, parse_fleet
from halter.config.playbook_files import parse_playbook
from halter.config.resolve import resolve_agent, resolve_policy
from halter.config.yaml_reader import Document, load_bytes
from tests.docs.pages import Block, Page
from tests.docs.shown import Ids, difference
from tests.docs.terminal import Running, Terminal

TYPED = re.compile(r"^\$ ((?:.*\\\n)*.*)\n?", re.MULTILINE)
WITH_A_MODEL = re.compile(r"model=\"(?:anthropic|openai|google):")
"""What asks a provider is run where a provider is: by the tests of the wires."""


class Reader:
    """Somebody who reads a page at a terminal."""

    def __init__(self, terminal: Terminal, home: Path) -> None:
        self.terminal = terminal
        self.home = home
        self.ids = Ids()
        self.ports: dict[str, str] = {}

    def opens(self, page: Page) -> None:
        """Begin with a page: write the files that it does not show, and find ports that are free."""
        self.ports = {port: free_port() for port in page.ports}
        for name, text in page.hidden:
            self._saves(name, text)

    def tries(self, shown: Block) -> None:
        """Do what a block says."""
        block = replace(shown, text=self._with_ports(shown.text))
        if block.file:
            self._saves(block.file, block.text)
        match block.language:
            case "yaml":
                self._loads(block)
            case "json":
                self._parses(block)
            case "python" if not block.file and not WITH_A_MODEL.search(block.text):
                with redirect_stdout(StringIO()), self._imports_from_home():
                    exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})  # noqa: S102
            case "console" | "sh":
                self._types(block)
            case _:
                pass

    @contextmanager
    def _imports_from_home(self) -> Iterator[None]:
        """As a program in that folder would."""
        sys.path.insert(0, str(self.home))
        try:
            yield
        finally:
            sys.path.remove(str(self.home))

    def _with_ports(self, text: str) -> str:
        for port, free in self.ports.items():
            text = text.replace(port, free)
        return text

    def _saves(self, name: str, text: str) -> None:
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")

    def _loads(self, block: Block) -> None:
        """Read a file as Halter does. What has no name and is no list is a part of an agent's file."""
        name = Path(block.file or "agent.yaml").name
        text = block.text if re.search(r"^(name:|- )", block.text, re.MULTILINE) else f"name: x\n{block.text}"
        if name == "halter.yaml":
            document = load_bytes(block.text.encode(), str(block))
            fits(document, fleet_schema())
            parse_fleet(document)
        elif name == "agent.yaml" and not block.text.startswith("- "):
            self._is_an_agent(load_bytes(text.encode(), str(block)), (self.home / (block.file or name)).parent)
        else:
            self._is_a_list(load_bytes(block.text.encode(), str(block)))

    def _is_an_agent(self, document: Document, folder: Path) -> None:
        fits(document, agent_schema())
        agent = parse_agent(document)
        path = self.home / "halter.yaml"
        fleet = parse_fleet(load_bytes(path.read_bytes(), "halter.yaml")) if path.exists() else FleetConfig()
        resolve_policy(fleet, agent)
        resolve_agent(fleet, agent, folder)

    @staticmethod
    def _is_a_list(document: Document) -> None:
        value = document.value
        if isinstance(value, list) and any("call" in each for each in value if isinstance(each, dict)):
            parse_playbook(document)

    def _parses(self, block: Block) -> None:
        if "mcpServers" in json.loads(block.text):
            parse_servers(load_json(block.text.encode(), str(block)), self.home, {})

    def _types(self, block: Block) -> None:
        """Type the commands of a block, and compare what they print with what it shows, where it shows something."""
        commands = list(commands_of(block))
        last = commands[-1][0] if commands else ""
        if block.language == "console" and not block.text.startswith("$ "):
            output = block.text[: TYPED.search(block.text).start()] if TYPED.search(block.text) else block.text  # type: ignore[union-attr]
            self._compares(block, output, self.terminal.find_running(block.note("printed by") or ""))
        for command, output in commands:
            if command is last and block.note("goes on") is not None:
                self._compares(block, output, self.terminal.leaves_running(self.ids.put_into(command)))
            else:
                code = int(block.note("leaves with") or 0) if command is last else 0
                self._types_one(block, command, output, code)

    def _types_one(self, block: Block, command: str, text: str, code: int) -> None:
        output, left = self.terminal.types(self.ids.put_into(command))
        assert left == code, f"{block}: {command} left with {left} and not with {code}:\n{output}"
        if text.strip():
            lines = iter(output.splitlines())
            found = difference(text.splitlines(), lines, self.ids, to_the_end=True)
            assert not found, f"{block}: {command}\n{found}"

    def _compares(self, block: Block, text: str, running: Running) -> None:
        texts = [line for line in text.splitlines() if line.strip()]
        output = difference(texts, running.lines, self.ids, to_the_end=False)
        assert not output, f"{block}: what runs there\n{output}"


def commands_of(block: Block) -> Iterator[tuple[str, str]]:
    """List what is typed in a block, each with what is shown below it. A line of `sh` is typed as it stands."""
    if block.language == "sh":
        joined = block.text.replace("\\\n", "")
        for line in joined.splitlines():
            command = re.sub(r"\s+#\s.*$", "", line).strip()
            if command and not command.startswith("#"):
                yield command, ""
        return
    matches = list(TYPED.finditer(block.text))
    for number, each in enumerate(matches):
        end = matches[number + 1].start() if number + 1 < len(matches) else len(block.text)
        command = re.sub(r"\s{2,}#\s.*$", "", each[1].replace("\\\n", ""))
        yield command, block.text[each.end() : end]


def fits(document: Document, schema: dict[str, object]) -> None:
    """See that an editor would mark nothing."""
    assert list(Draft202012Validator(schema).iter_errors(document.value)) == []


def free_port() -> str:
    """Find a port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])
