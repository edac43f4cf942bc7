"""Whether this machine has what agents need: prices, a sandbox, a port, and files that only their owner reads."""

import asyncio
import errno
import platform
import socket
import sqlite3
import tempfile
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from halter.app.health.check import Check, fine, look, problem
from halter.core.clock import SECOND
from halter.core.tools import Failed
from halter.settings import Settings

HOST: Final = "127.0.0.1"
PORT: Final = 8765
OLD_PRICES: Final = 180
"""After so many days somebody should look for a newer table."""
ANSWERS: Final = 2.0
PRIVATE: Final = 0o077


def program() -> Check:
    """Tell what runs here."""
    return fine("program", f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}.")


def fleet_file(settings: Settings) -> Check:
    """Read the fleet's file."""
    from halter.config.fleet import read_fleet
    from halter.core.errors import ConfigError

    if settings.fleet is None:
        return fine("fleet", "There is no halter.yaml here: the store's policy counts, or the defaults if it has none.")
    try:
        read_fleet(settings.fleet)
    except ConfigError as error:
        return problem("fleet", str(error))
    return fine("fleet", f"{settings.fleet} can be read.")


def prices(now: int) -> Check:
    """Tell for how long the bundled table of prices has been here: it says nothing of its own age."""
    table = distribution("genai-prices")
    since = Path(str(table.locate_file("genai_prices/data.py"))).stat().st_mtime
    days = max(0, now // SECOND - int(since)) // 86_400
    told = f"The bundled table of genai-prices {table.version} has been here for {days} days"
    if days > OLD_PRICES:
        return look("prices", f"{told}: look for a newer one (pip install -U genai-prices). Your configuration wins.")
    return fine("prices", f"{told}; your configuration wins.")


def postgresql() -> Check:
    """Tell whether there is a driver for PostgreSQL."""
    if find_spec("psycopg") is None:
        return fine("postgresql", "No driver here; install halter[postgres] for more than one machine.")
    return fine("postgresql", "The driver is here.")


async def sandbox() -> Check:
    """Run a command in the sandbox once, which looks from inside whether its walls hold."""
    from halter.tools.sandbox import Sandbox

    with tempfile.TemporaryDirectory(prefix="halter-doctor-") as root:
        try:
            await Sandbox(Path(root)).verify()
        except Failed as failed:
            return look("sandbox", f"Agents with a shell tool run nothing here, others do: {failed}")
    return fine("sandbox", "bubblewrap works: commands of agents are shut in.")


async def port(host: str = HOST, number: int = PORT) -> Check:
    """Tell whether the usual port is free, or who has it."""
    try:
        with socket.socket() as asked:
            asked.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            asked.bind((host, number))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return look(
                "port", f"{host}:{number} cannot be listened on ({error.strerror}): name another with --listen."
            )
    else:
        return fine("port", f"{host}:{number} is free for the dashboard and webhooks; no display is needed here.")
    if await _is_halter(host, number):
        return fine("port", f"A Halter answers at {host}:{number}.")
    return look("port", f"{host}:{number} is taken by another program: start Halter with --listen {host}:{number + 1}.")


async def _is_halter(host: str, number: int) -> bool:
    try:
        async with asyncio.timeout(ANSWERS):
            reader, writer = await asyncio.open_connection(host, number)
            try:
                writer.write(f"GET /healthz HTTP/1.1\r\nHost: {host}:{number}\r\nConnection: close\r\n\r\n".encode())
                return b"halter" in (await reader.read(4096)).lower()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


def tokens(settings: Settings) -> Check | None:
    """Tell whether others may read who may come in."""
    path = settings.tokens
    if path is None or not path.exists():
        return None
    if path.stat().st_mode & PRIVATE:
        return problem("tokens", f"Others than you may read {path}: run chmod 600 {path}.")
    return fine("tokens", f"Only you may read {path}.")
