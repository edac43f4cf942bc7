"""What tests ask of processes that they started or killed."""

import asyncio
from pathlib import Path


async def gone(*family: int) -> None:
    """Wait for what was killed to be gone, which the system does in its own time."""
    async with asyncio.timeout(60):
        while any(runs(pid) for pid in family):  # noqa: ASYNC110  nobody else tells
            await asyncio.sleep(0.01)


def runs(pid: int) -> bool:
    """Tell whether a process runs; one that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
