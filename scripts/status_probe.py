"""Run `halter status --store STORE`, and report its SQL statements and the files whose functions it called, as JSON."""

import inspect
import json
import sqlite3
import sys
import threading
from collections import Counter
from types import FrameType
from typing import Any

STATEMENTS = frozenset(("execute", "executemany", "executescript"))
called = Counter[str]()
statements = Counter[str]()


def follow(frame: FrameType, event: str, argument: Any) -> None:
    """Handle one event of the interpreter. What runs because a module is imported counts only if it is a function."""
    if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        called[frame.f_code.co_filename] += 1
    elif event == "c_call" and isinstance(getattr(argument, "__self__", None), sqlite3.Connection | sqlite3.Cursor):
        statements[argument.__name__] += 1


def main() -> None:
    """Run the command under the profile functions of all threads."""
    store = sys.argv[1]
    sys.argv = ["halter", "status", "--store", store]
    threading.setprofile(follow)
    sys.setprofile(follow)
    try:
        from halter_agents import main as run_halter

        run_halter()
    finally:
        sys.setprofile(None)
        files = [file for file in called if "/halter/" in file]
        count = sum(count for name, count in statements.items() if name in STATEMENTS)
        print(json.dumps({"statements": count, "files": len(files)}), file=sys.stderr)


if __name__ == "__main__":
    main()
