"""The read-only tools of night-watch. Only Halter's own delete_file changes anything, with your approval."""

import http.client
import os
import time
from pathlib import Path

from halter import tool

HERE = Path(__file__).parent
DAY = 86_400
BEFORE: list[tuple[int, int]] = []
"""CPU time at the last reading: total and idle."""


# Runs in a thread: short reads every few seconds are not worth a process each.
@tool(level="SAFE", effect="read", isolate=False)
def check_machine() -> dict[str, float]:
    """Report the use of CPU, memory and disk, in percent."""
    return {"cpu": _cpu(), "memory": _memory(), "disk": _disk(HERE)}


@tool(level="SAFE", effect="read", isolate=False)
def check_service() -> dict[str, bool | int]:
    """Check the local service. Without an answer its status is 0."""
    try:
        port = int((HERE / "logs" / "service.port").read_text("utf-8"))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
        try:
            connection.request("GET", "/")
            status = connection.getresponse().status
        finally:
            connection.close()
    except (OSError, ValueError, http.client.HTTPException):
        status = 0
    return {"up": status == http.client.OK, "status": status}


@tool(level="SAFE", effect="read", isolate=False)
def list_old_files(days: int) -> list[str]:
    """List the temporary files that have not been changed for this many days."""
    oldest = time.time() - days * DAY
    files = [file for file in (HERE / "temp").iterdir() if file.is_file() and not file.is_symlink()]
    return sorted(file.name for file in files if file.stat().st_mtime < oldest)


def _cpu() -> float:
    """CPU use since the last reading; where /proc/stat is missing, the load average."""
    try:
        times = [int(field) for field in Path("/proc/stat").read_text("utf-8").split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return round(min(100.0, 100 * os.getloadavg()[0] / (os.cpu_count() or 1)), 1)
    current = (sum(times), sum(times[3:5]))
    previous = BEFORE.pop() if BEFORE else (0, 0)
    BEFORE.append(current)
    total, idle = current[0] - previous[0], current[1] - previous[1]
    return round(100 * (1 - idle / total), 1) if total > 0 else 0.0


def _memory() -> float:
    try:
        lines = [line.split() for line in Path("/proc/meminfo").read_text("utf-8").splitlines()]
    except OSError:
        return 0.0
    figures = {line[0]: int(line[1]) for line in lines if len(line) > 1}
    total = figures.get("MemTotal:", 0)
    return round(100 * (1 - figures.get("MemAvailable:", total) / total), 1) if total else 0.0


def _disk(folder: Path) -> float:
    stats = os.statvfs(folder)
    used = stats.f_blocks - stats.f_bfree
    return round(100 * used / (used + stats.f_bavail), 1) if used + stats.f_bavail else 0.0
