"""The program of a process that runs one isolated tool.

It makes the permit for the one call that it was started for, and exits after that call. It cannot be imported, so no
code of another process reaches a tool through it.
"""

import importlib
import importlib.util
import os
import signal
import sys
import threading
from typing import Any

import msgspec

from halter.core.tools import Failed, Permit
from halter.tools.function_tool import FunctionTool, tool
from halter.tools.process import IsolatedJob, perform_call
from halter.tools.trusted_code import TrustedLoader, guard_imports

if __name__ != "__main__":
    raise ImportError(f"{__name__} is the program of an isolated tool's process and cannot be imported.")


def main() -> None:
    """Run one job from standard input; write the answer to the pipe whose number is the last argument."""
    answer_fd = int(sys.argv[-1])
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=IsolatedJob)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    with os.fdopen(answer_fd, "wb") as pipe:
        pipe.write(_run_job(job))
    sys.stdout.flush()
    os._exit(0)


def _die_with_parent() -> None:
    """Kill the process group when standard input ends: the parent has exited, and nothing may run after it."""
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)


def _run_job(job: IsolatedJob) -> bytes:
    sys.path[:] = job.path
    if job.files is not None:
        guard_imports(job.files)
    permit = Permit(job.key, 0, {})
    return perform_call(lambda: _find_tool(job).run_in_own_process(job.arguments.encode(), permit), job.max_output)


def _find_tool(job: IsolatedJob) -> FunctionTool:
    try:
        target: Any = _load_module(job)
    except Exception as error:
        raise Failed(type(error).__name__, f"{job.module} cannot be imported: {error}") from error
    for name in job.name.split("."):
        target = getattr(target, name)
    return target if isinstance(target, FunctionTool) else tool(target)


def _load_module(job: IsolatedJob) -> Any:
    """Import a module by its name, or by its file if no import would find it."""
    if job.module != "__main__":
        try:
            return importlib.import_module(job.module)
        except ModuleNotFoundError as error:
            if error.name is None or not job.module.startswith(error.name):
                raise
    loader = None if job.files is None else TrustedLoader("__isolated__", job.file, job.files)
    spec = importlib.util.spec_from_file_location("__isolated__", job.file, loader=loader)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"cannot load a module from {job.file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["__isolated__"] = module
    spec.loader.exec_module(module)
    return module


main()
