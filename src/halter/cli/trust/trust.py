"""`halter trust`: trust the code of an agent's folder."""

from pathlib import Path
from typing import Annotated

import typer

from halter.cli.command import (
    JsonOption,
    read_cli_settings,
    report_errors,
)
from halter.cli.output import answer_json, print_sentence
from halter.config.trust import digest_contents
from halter.core.clock import SystemClock
from halter.core.errors import ConfigError
from halter.core.ids import can_decide
from halter.runtime.assembly.folder_code import find_agent_code, open_trust, require_sound_code


def trust(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Agent folder.")], *, as_json: JsonOption = False
) -> None:
    """Trust the current code of an agent folder. Changed code must be trusted again.

    The code is tools.py and the servers in .mcp.json: review both first. It runs with your rights. tools.py is loaded
    once; if that fails, or a tool has no docstring or types, the folder is not trusted.
    """
    settings = read_cli_settings(None)

    def job() -> tuple[str, str]:
        if not can_decide(settings.person):
            raise ConfigError("Only a person can trust code; this command runs inside an agent.")
        contents, trust_store = find_agent_code(settings, folder).contents(), open_trust(settings)
        digest, changes = digest_contents(contents), trust_store.describe_change(folder, contents)
        require_sound_code(folder, contents)
        trust_store.trust(folder, digest, settings.person, SystemClock().now(), contents)
        return digest, changes

    digest, changes = report_errors(job)
    if as_json:
        answer_json({"folder": str(folder), "digest": digest, "by": settings.person, "since": changes})
        return
    print_sentence(f"Trusted the current code of {folder} ({digest[:16]}…).")
    if changes:
        print_sentence(f"Changes since it was last trusted: {changes}.")
