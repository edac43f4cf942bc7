"""Time of a hook's decision on a tool call: the hook's process from its start to its answer.

The bare row is the same interpreter without a program, started by the same shell: the lower bound of a Python hook.
"""

import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

from bench.measure import Contender, Measured, Sample, compare
from halter.hooks.install import install_hooks, write_policy
from halter.hooks.registry import HookedProgram, HookFolder

CALLS = 40


def run(rounds: int, report: Callable[[str], None]) -> Measured:
    with tempfile.TemporaryDirectory(prefix="halter-") as home, _serving(Path(home)) as command:
        fresh, admitted_numbers = count(), deque[int]()

        def admit() -> int:
            admitted_numbers.append(number := next(fresh))
            return number

        rows = {
            "python": (f"{sys.executable} -I -S -c pass", "PreToolUse", "ls -la", lambda: 0),
            "before ls -la": (command, "PreToolUse", "ls -la", admit),
            "after ls -la": (command, "PostToolUse", "ls -la", admitted_numbers.popleft),
            "before git push --force": (command, "PreToolUse", "git push --force", lambda: next(fresh)),
        }
        contenders = [
            Contender(name, "hook", "decision", partial(_decide, line, partial(_event, event, command_text), numbers))
            for name, (line, event, command_text, numbers) in rows.items()
        ]
        return compare(contenders, rounds, report), {"calls": CALLS}


@contextmanager
def _serving(home: Path) -> Generator[str]:
    """Run `halter hook serve` on a store of its own; yield the command of its hooks."""
    folder = HookFolder(home / "hooks")
    policy = str(write_policy(folder, "claude-code", "Claude Code"))
    entry = HookedProgram(agent="claude-code", program="claude", folder=policy, wait_seconds=0)
    install_hooks(entry, folder, home / "settings.json")
    hooks = json.loads((home / "settings.json").read_text())["hooks"]
    environ = {
        **os.environ,
        "HOME": str(home),
        "HALTER_HOOKS": str(folder.path),
        "HALTER_STORE": str(home / "halter.db"),
    }
    words = [sys.executable, "-m", "halter", "hook", "serve"]
    with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE) as server:
        try:
            if server.stdout is None or not server.stdout.readline():
                raise RuntimeError("The hook server did not start.")
            yield hooks["PreToolUse"][0]["hooks"][0]["command"]
        finally:
            server.send_signal(signal.SIGINT)


def _event(name: str, command: str, number: int) -> bytes:
    context = {"session_id": "bench", "transcript_path": "/t", "cwd": "/home/ada/project", "hook_event_name": name}
    call = {"tool_name": "Bash", "tool_input": {"command": command}, "tool_use_id": f"t{number}"}
    return json.dumps({**context, **call, "tool_response": {"stdout": "made.txt", "stderr": ""}}).encode()


def _decide(command: str, event: Callable[[int], bytes], number: Callable[[], int]) -> Sample:
    before, walls = resource.getrusage(resource.RUSAGE_CHILDREN), list[float]()
    for _ in range(CALLS):
        event_body, began = event(number()), time.perf_counter()
        subprocess.run(["/bin/sh", "-c", command], input=event_body, capture_output=True, check=True)
        walls.append(time.perf_counter() - began)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    walls.sort()
    late = {"p50_ms": statistics.median(walls) * 1000, "p95_ms": walls[int(len(walls) * 0.95)] * 1000}
    return Sample(CALLS, sum(walls), cpu, late)
