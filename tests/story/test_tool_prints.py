"""Prints, logs and warnings of a tool reach the terminal without secrets, wherever the tool runs."""

import asyncio
import os
from pathlib import Path

import pytest

from tests.processes import warm_command

SECRET = "correct-horse-battery-staple-41"
FOUND = "ghp_" + "Zx81Qw" * 6
TOOLS = '''
"""Tools that tell all they know."""
import asyncio, logging, sys, threading, warnings
from halter import tool

HANDLER = logging.StreamHandler()
logging.getLogger("shop").addHandler(HANDLER)

def chatter(where, token):
    print(where, "printed", token)
    sys.stdout.write(f"{where} wrote " + token[:12])
    sys.stdout.write(token[12:] + "\\n")
    print(where, "told", token, file=sys.stderr)
    logging.getLogger("shop").warning("%s logged %s", where, token)
    try:
        raise ValueError(f"{where} raised {token}")
    except ValueError:
        logging.getLogger("shop").exception("failed")
    warnings.warn(f"{where} warned of {token}")

@tool(level="SAFE")
async def on_the_loop(token: str) -> str:
    """Tell."""
    chatter("loop", token)
    await asyncio.to_thread(chatter, "helper", token)
    return "done"

@tool(level="SAFE", isolate=False)
def in_a_thread(token: str) -> str:
    """Tell."""
    chatter("thread", token)
    return "done"

@tool(level="SAFE")
def in_a_copy(token: str) -> str:
    """Tell."""
    chatter("copy", token)
    return "done"
'''
PLAYED = """
- call: on_the_loop
  arguments: {{token: "{token}"}}
- call: in_a_thread
  arguments: {{token: "{token}"}}
- call: in_a_copy
  arguments: {{token: "{token}"}}
"""


async def halter(folder: Path, *words: str) -> tuple[str, str]:
    home = str(folder / "home")
    places = {"HALTER_STORE": str(folder / "halter.db"), "HOME": home, "HALTER_PERSON": "ada", "XDG_STATE_HOME": home}
    process = await asyncio.create_subprocess_exec(
        *warm_command("halter", *words),
        env={**os.environ, **places, "HALTER_SECRET_TOKEN": SECRET},
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    body, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return body.decode(), err.decode()


@pytest.mark.parametrize(("token", "value"), [("${secret:TOKEN}", SECRET), (FOUND, FOUND)], ids=["given", "found"])
async def test_what_tools_print_log_and_warn_of_is_shown_without_secrets(
    tmp_path: Path, token: str, value: str
) -> None:
    (tmp_path / "agent.yaml").write_text("name: desk\nsecrets: [TOKEN]\n")
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "play.yaml").write_text(PLAYED.format(token=token))
    await halter(tmp_path, "trust", str(tmp_path))
    text, err = await halter(tmp_path, "play", str(tmp_path / "play.yaml"))
    output = text + err
    for where in ("loop", "helper", "thread", "copy"):
        for how in ("printed", "wrote", "told", "logged", "raised", "warned of"):
            assert f"{where} {how}" in output
    assert value not in output
    assert not any(value[at : at + 12] in output for at in range(len(value) - 12))
