"""The checks of `halter doctor` of this machine: program, files, prices, sandbox, port, tokens."""

import asyncio
import errno
import platform
import socket
import sqlite3
import tempfile
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from halter.config.merge import read_fleet
from halter.core.clock import DAY, SECOND
from halter.core.errors import ConfigError, render_install_command
from halter.core.text import format_count
from halter.core.tools import Failed
from halter.settings import Settings
from halter.tools.shell import Sandbox

if TYPE_CHECKING:
    from halter.models.price_tables import FetchedPrices
from halter.operations.doctor.check import Check, fail_check, pass_check, warn_check

HOST: Final = "127.0.0.1"
PORT: Final = 8765
MAX_PRICES_AGE_DAYS: Final = 180
"""An older table deserves an update."""
LOCAL_TIMEOUT_SECONDS: Final = 2.0
OTHERS_MODE_MASK: Final = 0o077


def check_program() -> Check:
    return pass_check("program", f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}.")


def check_fleet_file(settings: Settings) -> Check:
    if settings.fleet is None:
        return pass_check(
            "fleet", "There is no halter.yaml here. The store's policy applies, or the defaults if it has none."
        )
    try:
        read_fleet(settings.fleet)
    except ConfigError as error:
        return fail_check("fleet", str(error))
    return pass_check("fleet", f"{settings.fleet} can be read.")


def check_prices(now: int, fetched: "FetchedPrices | None" = None) -> Check:
    """Check the age of the newest price table. The bundled one does not state its own, but when it was installed."""
    if fetched is not None:
        return _check_fetched_prices(now, fetched)
    table = distribution("genai-prices")
    installed_at = Path(str(table.locate_file("genai_prices/data.py"))).stat().st_mtime
    days = max(0, now // SECOND - int(installed_at)) // 86_400
    sentence = f"The bundled price table of genai-prices {table.version} was installed {days} days ago"
    if days > MAX_PRICES_AGE_DAYS:
        return warn_check(
            "prices",
            f"{sentence}. Update it with pip install -U genai-prices, or fetch the newest prices with `halter prices "
            "update`. Configured prices take precedence.",
        )
    return pass_check("prices", f"{sentence}; configured prices take precedence.")


def _check_fetched_prices(now: int, fetched: "FetchedPrices") -> Check:
    sentence = f"The price table was fetched from {fetched.source} {max(0, now - fetched.at) // DAY} days ago"
    if fetched.waiting:
        count = format_count(len(fetched.waiting), "lower price")
        verb = "waits" if len(fetched.waiting) == 1 else "wait"
        return warn_check("prices", f"{sentence}. {count} in it {verb} for your yes: see `halter prices`.")
    if now - fetched.at > MAX_PRICES_AGE_DAYS * DAY:
        return warn_check("prices", f"{sentence}. Update it with `halter prices update`.")
    return pass_check("prices", f"{sentence}; configured prices take precedence.")


def check_postgresql() -> Check:
    if find_spec("psycopg") is None:
        command = render_install_command("postgres")
        return pass_check("postgresql", f"No driver is installed. For more than one machine: {command}.")
    return pass_check("postgresql", "The driver is installed.")


async def check_sandbox() -> Check:
    """Run a command in the sandbox, which verifies its isolation from inside."""
    with tempfile.TemporaryDirectory(prefix="halter-doctor-") as root:
        try:
            await Sandbox(Path(root)).verify()
        except Failed as failed:
            return warn_check("sandbox", f"Agents with a shell tool cannot run commands here: {failed}")
    return pass_check("sandbox", "bubblewrap works: commands of agents are isolated.")


async def check_port(host: str = HOST, number: int = PORT) -> Check:
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, number))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return warn_check(
                "port", f"Cannot listen on {host}:{number} ({error.strerror}). Choose another address with --listen."
            )
    else:
        return pass_check("port", f"{host}:{number} is free for the dashboard and webhooks; no display is needed.")
    if await _is_halter(host, number):
        return pass_check("port", f"Halter already serves {host}:{number}.")
    return warn_check(
        "port", f"{host}:{number} is used by another program. Start Halter with --listen {host}:{number + 1}."
    )


async def _is_halter(host: str, number: int) -> bool:
    try:
        async with asyncio.timeout(LOCAL_TIMEOUT_SECONDS):
            reader, writer = await asyncio.open_connection(host, number)
            try:
                writer.write(f"GET /healthz HTTP/1.1\r\nHost: {host}:{number}\r\nConnection: close\r\n\r\n".encode())
                return b"halter" in (await reader.read(4096)).lower()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


def check_tokens(settings: Settings) -> Check | None:
    path = settings.tokens
    if path is None or not path.exists():
        return None
    if path.stat().st_mode & OTHERS_MODE_MASK:
        return fail_check("tokens", f"Other users can read {path}. Run chmod 600 {path}.")
    return pass_check("tokens", f"Only you can read {path}.")
