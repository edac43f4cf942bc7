"""Programs, as lists of arguments: no shell reads them unless the list names one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict, Unpack

from halter.core.options import demand_known
from halter.core.tools import Failed
from halter.tools.files import parts_of
from halter.tools.group import Ended
from halter.tools.sandbox import Limits, Sandbox
from halter.tools.tool import FunctionTool, tool


class ShellOptions(TypedDict, total=False):
    """How commands run. `readable` are further folders that they can see; `environment` is all that they inherit."""

    sandbox: bool
    network: bool
    limits: Limits
    readable: Sequence[Path]
    environment: Mapping[str, str]
    max_output: int
    timeout: float | str


def shell(root: str | Path, **options: Unpack[ShellOptions]) -> FunctionTool:
    """Return a tool that runs commands below a folder: in a sandbox, unless the configuration says otherwise."""
    demand_known(options, ShellOptions.__optional_keys__, "the shell tool")
    enclosed = options.get("sandbox", True)
    network = options.get("network", False)
    sandbox = Sandbox(
        Path(root),
        options.get("limits", Limits()),
        enclosed=enclosed,
        network=network,
        readable=options.get("readable", ()),
        environment=options.get("environment", {}),
        max_output=options.get("max_output", 1_000_000),
    )

    async def run_command(argv: list[str], folder: str = ".", stdin: str = "") -> str:
        """Run a program below the root. `argv` is the program and its arguments; no shell expands them.

        The answer is what it put out; an exit code other than 0 stands in the last line.
        """
        place = sandbox.root.joinpath(*parts_of(folder))
        return _told(await sandbox.run(_checked(argv), place, stdin.encode("utf-8", "surrogatepass")))

    return tool(
        run_command,
        level="RESTRICTED" if enclosed else "PRIVILEGED",
        effect="write",
        egress=network or not enclosed,
        timeout=options.get("timeout", 60),
    ).at(sandbox)


def _checked(argv: list[str]) -> list[str]:
    if not argv or not argv[0]:
        raise Failed("BadCommand", "argv is empty: its first element names the program.")
    if any("\0" in argument for argument in argv):
        raise Failed("BadCommand", "an argument cannot hold a NUL character.")
    return argv


def _told(ended: Ended) -> str:
    if ended.code == 0:
        return ended.text
    line_end = "" if ended.text.endswith("\n") or not ended.text else "\n"
    return f"{ended.text}{line_end}[exit code {ended.code}]"
