"""A store that lies in its agent's folder stays locked while the agent runs."""

import os
import subprocess
import sys
from pathlib import Path

from halter import Agent

LOOK = """
import fcntl, os, struct, sys
lock = struct.Struct("hhqqi4x")
file = os.open(sys.argv[1], os.O_RDWR)
print(lock.unpack(fcntl.fcntl(file, fcntl.F_GETLK, lock.pack(fcntl.F_WRLCK, os.SEEK_SET, int(sys.argv[2]), 1, 0)))[-1])
"""
PRESENT = 128
"""The byte of SQLite's shared memory that every open connection locks, by the WAL index format."""


def find_holder(file: Path, byte: int) -> int:
    """Ask from another process who holds a lock: a process does not see its own."""
    texts = [sys.executable, "-c", LOOK, str(file), str(byte)]
    return int(subprocess.run(texts, capture_output=True, check=True).stdout)


async def test_a_store_in_the_folder_of_its_agent_keeps_its_locks(tmp_path: Path) -> None:
    (tmp_path / "agent.yaml").write_text("name: desk\nmodel: reflex\nreflex: [{say: Good evening.}]\n")
    store = tmp_path / "halter.db"
    async with Agent.load(tmp_path, store=store) as agent:
        first = await agent.run("hello")
        assert find_holder(tmp_path / "halter.db-shm", PRESENT) == os.getpid()
        second = await agent.run("hello")
    assert first.receipt.folder == second.receipt.folder, "what it wrote changed no version of its agent"
