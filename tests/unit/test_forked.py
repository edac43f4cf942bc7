"""Plain tools run in a copy of the process: it sees what the process has, changes nothing of it, and can be killed."""

import asyncio
import json
import logging
import os
import re
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest

from halter.core.events import HaltLifted
from halter.core.tools import AGENT_VARIABLE, EffectStatus, Failed, JournalEffect, Output, Permit, Unstoppable, Valid
from halter.journal.sqlite_connection import open_connection
from halter.system.forks import ForkLock, fork
from halter.testing.world import SeedLoop, run_in_virtual_time
from halter.tools.function_tool import Deps, FunctionTool, tool
from tests.processes import gone, runs

CATASTROPHE = re.compile(r"(a+)+$")
ENDLESS = "a" * 60 + "b"


def permit() -> Permit:
    return Permit("call-1", deadline=0, secrets={})


async def run_tool(subject: FunctionTool, **arguments: Any) -> str:
    result = subject.validate(json.dumps(arguments).encode())
    assert isinstance(result, Valid), result
    return (await subject.run(result, permit())).text


@tool
def match(fifo: str) -> str:
    """Match badly: the engine holds the interpreter lock until the end of the world."""
    Path(fifo).write_text(str(os.getpid()))
    return str(CATASTROPHE.match(ENDLESS))


@tool
def count(fifo: str) -> str:
    """Count in C, which holds the lock as well."""
    Path(fifo).write_text(str(os.getpid()))
    return str(sum(range(10**15)))


@tool
def family(fifo: str) -> str:
    """Start a child, tell both numbers, and hang."""
    child = subprocess.Popen(["/bin/sleep", "600"])
    Path(fifo).write_text(f"{os.getpid()} {child.pid}")
    signal.pause()
    return ""


@pytest.mark.parametrize("subject", [match, count, family], ids=lambda each: each.spec.name)
async def test_a_plain_tool_is_killed_whatever_it_is_stuck_in_and_the_loop_continues(
    subject: FunctionTool, tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    task = asyncio.create_task(run_tool(subject, fifo=str(fifo)))
    pids = [int(pid) for pid in (await asyncio.to_thread(fifo.read_text)).split()]
    assert os.getpid() not in pids
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await gone(*pids)


async def test_a_plain_tool_sees_what_the_process_has_now_and_changes_nothing_of_it() -> None:
    texts: list[str] = ["first"]

    class Bank:
        balance = 5

    def spend(amount: int, bank: Deps[Bank]) -> str:
        """Spend."""
        bank.balance -= amount
        texts.append("spent")
        return f"{bank.balance} {texts}"

    bank = Bank()
    subject = tool(spend).with_deps(bank)
    texts.append("second")
    assert await run_tool(subject, amount=2) == "3 ['first', 'second', 'spent']"
    assert await run_tool(tool(lambda: "a lambda", name="nameless")) == "a lambda"
    assert (bank.balance, texts) == (5, ["first", "second"])


async def test_a_tool_may_be_let_run_in_the_process() -> None:
    numbers: list[int] = []

    def note() -> None:
        numbers.append(os.getpid())

    await run_tool(tool(note, isolate=False))
    assert numbers == [os.getpid()]


async def test_what_a_plain_tool_prints_is_seen_by_nobody_and_kept_where_it_fails(
    capfd: pytest.CaptureFixture[str],
) -> None:
    logger = logging.getLogger("halter.test_forked")
    logger.addHandler(logging.StreamHandler())

    def chatter(fails: bool) -> str:  # noqa: FBT001  an argument that a model fills in
        """Chatter."""
        sys.stdout.write("out, ")
        logger.warning("logged")
        os.write(2, b"written")
        if fails:
            raise Failed("Own", "words", partial=", and own")
        return "done"

    assert await run_tool(tool(chatter), fails=False) == "done"
    with pytest.raises(Failed, match="Own: words") as failed:
        await run_tool(tool(chatter), fails=True)
    assert all(each in failed.value.partial for each in ("out, ", "logged", "written", ", and own"))
    assert capfd.readouterr() == ("", "")


async def test_a_plain_tool_cannot_disturb_the_connections_of_the_process(tmp_path: Path) -> None:
    here, there = socket.socketpair()
    reading, writing = os.pipe()
    file = tmp_path / "file"

    def meddle() -> str:
        """Use what the process has open, after opening a file of its own."""
        with file.open("wb") as buffered_writer:
            buffered_writer.write(b"own")
            with pytest.raises(BrokenPipeError):
                here.send(b"meddled")
            assert here.recv(1) == b""
            with pytest.raises(OSError, match="pipe"):
                os.write(writing, b"meddled")
        return "done"

    assert await run_tool(tool(meddle)) == "done"
    assert file.read_bytes() == b"own"
    here.send(b"honest")
    assert there.recv(100) == b"honest"
    os.write(writing, b"honest")
    assert os.read(reading, 100) == b"honest"
    for each in (here, there):
        each.close()
    for fd in (reading, writing):
        os.close(fd)


async def test_a_copy_handles_no_signal_as_the_process_does_and_says_that_an_agent_started_it() -> None:
    def tell() -> list[Any]:
        """Tell."""
        usual = signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
        return [os.getpid() == os.getsid(0), os.environ[AGENT_VARIABLE], usual]

    def handle(_number: int, _frame: object) -> None: ...

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        assert json.loads(await run_tool(tool(tell))) == [True, "tool", True]
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert AGENT_VARIABLE not in os.environ


async def test_a_signal_that_comes_while_a_copy_is_made_is_handled_once_and_by_the_process() -> None:
    """The copy shares the pipe that wakes the loop: a handler that ran there would have the process act twice."""
    numbers: list[int] = []
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, numbers.append, 1)

    def after_fork() -> None:
        if copying:
            signal.raise_signal(signal.SIGUSR1)

    copying = False
    os.register_at_fork(after_in_child=after_fork)
    try:
        copying = True
        with pytest.raises(Failed, match=r"Crashed: .* signal SIGUSR1"):
            await run_tool(tool(lambda: "done", name="quick"))
        copying = False
        await asyncio.sleep(0)
        assert numbers == []
        assert await run_tool(tool(lambda: "done", name="quick")) == "done"
        os.kill(os.getpid(), signal.SIGUSR1)
        while not numbers:  # noqa: ASYNC110  nobody else tells
            await asyncio.sleep(0.001)
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)
    assert numbers == [1]


async def test_a_plain_tool_may_have_a_loop_of_its_own() -> None:
    def loop() -> str:
        """Run something async."""

        async def inner() -> str:
            await asyncio.sleep(0)
            return "inner"

        return asyncio.run(inner())

    assert await run_tool(tool(loop)) == "inner"


def _dies(how: str) -> str:
    match how:
        case "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        case "leaves":
            os._exit(3)
        case "doubts":
            raise Unstoppable("nobody knows")
        case _:
            raise KeyboardInterrupt
    return ""


@pytest.mark.parametrize(
    ("how", "raised", "told"),
    [
        ("signal", Failed, "Crashed: the tool's process exited without an answer: signal SIGTERM."),
        ("leaves", Failed, "Crashed: the tool's process exited without an answer: exit code 3."),
        ("doubts", Unstoppable, "nobody knows"),
        ("interrupted", Failed, "KeyboardInterrupt: "),
    ],
)
async def test_a_copy_that_dies_takes_nobody_along(how: str, raised: type[Exception], told: str) -> None:
    with pytest.raises(raised) as error:
        await run_tool(tool(_dies, name="dies"), how=how)
    assert str(error.value) == told


@pytest.mark.parametrize("gone", ["closed", "replaced"])
async def test_the_result_of_a_tool_that_takes_the_standard_streams_away_is_received(gone: str) -> None:
    def take() -> str:
        """Take them away."""
        if gone == "closed":
            sys.stdout.close()
        else:
            sys.stdout = sys.stderr = cast("Any", None)
        return "done"

    assert await run_tool(tool(take)) == "done"


async def test_a_program_that_forgets_its_children_at_once_gets_their_answers() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert [await run_tool(tool(lambda: "done", name="quick")) for _ in range(5)] == ["done"] * 5
    finally:
        signal.signal(signal.SIGCHLD, before)


async def test_a_call_for_which_there_are_no_files_left_fails_and_leaves_no_process_behind() -> None:
    subject, before = tool(lambda: "done", name="quick"), children()
    with no_files_left() as numbers:
        texts = [await outcome(subject)]
        while texts[-1] != "done":
            os.close(numbers.pop())
            texts.append(await outcome(subject))
    assert len(texts) > 5
    # The last ones fail in the copy, which wants some files for itself.
    assert all(
        each.startswith(("OSError: cannot create a process for the call: ", "Crashed: ")) for each in texts[:-1]
    ), texts
    assert children() <= before


def children() -> set[int]:
    """List the processes that this one has started and not reaped, in whichever thread."""
    lists = (path.read_text() for path in Path("/proc/self/task").glob("*/children"))
    return {int(pid) for each in lists for pid in each.split()}


@contextmanager
def no_files_left() -> Generator[list[int]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    numbers: list[int] = []
    try:
        with suppress(OSError):
            while True:
                numbers.append(os.open(os.devnull, os.O_RDONLY))
        yield numbers
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in numbers:
            os.close(fd)


async def outcome(subject: FunctionTool) -> str:
    try:
        return await run_tool(subject)
    except Failed as failed:
        return str(failed)


async def test_a_plain_tool_cannot_have_events_written_down() -> None:
    def happen() -> Output:
        return Output("done", happened=(JournalEffect(HaltLifted(scope="fleet", by="ada")),))

    with pytest.raises(Failed, match="NotCarried"):
        await run_tool(tool(happen))


async def test_a_plain_check_can_be_killed_too(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def paid() -> EffectStatus:
        fifo.write_text(str(os.getpid()))
        return "done" if CATASTROPHE.match(ENDLESS) else "not_done"

    async def pay() -> None: ...

    subject = tool(pay, check=paid)
    result = subject.validate(b"{}")
    assert isinstance(result, Valid)
    task = asyncio.create_task(subject.check(result, permit()))
    pid = int(await asyncio.to_thread(fifo.read_text))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await gone(pid)


PROGRAM = """
import asyncio, sys
sys.path.insert(0, {folder!r})
from test_forked import match, run_tool
asyncio.run(run_tool(match, fifo={fifo!r}))
"""


async def test_a_copy_dies_with_its_process(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program = PROGRAM.format(folder=str(Path(__file__).parent), fifo=str(fifo))
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    copy = int(await asyncio.to_thread(fifo.read_text))
    assert runs(copy)
    process.kill()
    await process.wait()
    await gone(copy)


def test_virtual_time_waits_for_a_copy() -> None:
    async def scene() -> tuple[str, float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SeedLoop)
        ticking = asyncio.create_task(asyncio.sleep(3600))
        text = await run_tool(tool(lambda: str(sum(range(10**6))), name="add"))
        ticking.cancel()
        return text, loop.time()

    assert [run_in_virtual_time(scene(), seed=seed) for seed in (None, 1, 2)] == [("499999500000", 0.0)] * 3


def _child_of(event: threading.Event) -> None:
    pid = fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    event.set()


def test_a_process_forks_only_while_no_thread_holds_a_fork_lock() -> None:
    lock, event = ForkLock(), threading.Event()
    with lock:
        forking = threading.Thread(target=_child_of, args=(event,))
        forking.start()
        assert not event.wait(0.05)
    forking.join()
    assert event.is_set()


def test_a_process_does_not_fork_while_a_thread_is_inside_sqlite(tmp_path: Path) -> None:
    """SQLite's own locks would stay locked in the copy, and whatever uses SQLite there would hang."""
    connection = open_connection(str(tmp_path / "halter.db"))
    inside, leave, event = threading.Event(), threading.Event(), threading.Event()

    def hold() -> int:
        inside.set()
        leave.wait()
        return 1

    connection.create_function("hold", 0, hold)
    asking = threading.Thread(target=lambda: connection.execute("SELECT hold()").fetchall())
    asking.start()
    inside.wait()
    forking = threading.Thread(target=_child_of, args=(event,))
    forking.start()
    assert not event.wait(0.05)
    leave.set()
    asking.join()
    forking.join()
    connection.close()


async def test_a_copy_uses_sqlite_while_threads_of_the_process_do(tmp_path: Path) -> None:
    """The race itself; without the locks one copy in a hundred hangs."""
    stop, busy = threading.Event(), open_connection(str(tmp_path / "halter.db"))

    def work() -> None:
        while not stop.is_set():
            busy.execute("SELECT count(*) FROM sqlite_master").fetchall()

    def use(number: int) -> str:
        """Use SQLite."""
        with closing(sqlite3.connect(tmp_path / f"{number}.db")) as connection:
            return str(connection.execute("SELECT 7").fetchone()[0])

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        async with asyncio.timeout(120):
            assert [await run_tool(tool(use), number=number) for number in range(5)] == ["7"] * 5
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        busy.close()
