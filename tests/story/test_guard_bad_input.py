"""Whatever a model, a tool or a network does comes through the door as a structured result, and the session lives.

Each case goes the whole way: arguments as a model wrote them, through the guard, to a real tool. After it the next call
works, nothing is left in flight or held, and nothing outside the tools' own root was touched.
"""

import asyncio
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, get_args

import pytest

from halter.config.agent_files import parse_agent
from halter.config.merge import parse_fleet
from halter.config.resolve import resolve_policy
from halter.config.yaml_reader import load_bytes
from halter.core.clock import SystemClock
from halter.core.events import SessionStarted
from halter.core.ids import SortableIds, WorkerId
from halter.core.ports import Query
from halter.core.rows import HoldRow
from halter.core.tools import Failed, Tool
from halter.core.vocabulary import Outcome
from halter.guard.call_answer import Answer
from halter.guard.guard import GuardRuntime
from halter.guard.prepare import Call, SessionContext
from halter.journal.memory import MemoryEngine
from halter.journal.store import JournalStore
from halter.loop.session_runtime import SessionRuntime
from halter.models.prices import Prices
from halter.net.addresses import resolve_host as look_up
from halter.redaction.redact import Redactor
from halter.redaction.secrets import GivenSecrets
from halter.spec.agent import Phase
from halter.spec.playbook import Playbook, Step
from halter.state import lifecycle
from halter.state.session import replay
from halter.tasks.playbooks import Task, walk_playbook
from halter.tools.files import make_file_tools
from halter.tools.function_tool import tool
from halter.tools.http import make_http_tools
from halter.tools.shell import Sandbox, make_shell_tool

CLOCK = SystemClock()
KEPT = "must stay as it is"


class Unspeakable(Exception):
    """An error that cannot even say what it is."""

    def __str__(self) -> str:
        raise ValueError("no words")


class Panic(BaseException):
    """An error that is no Exception, as libraries written in Rust raise it."""


@tool(level="SAFE", effect="read")
def echo(word: str) -> str:
    """Say it again."""
    return word


@tool(cost=0.001)
async def order(number: int) -> str:
    """Order something."""
    return str(number)


RAISED: Mapping[str, Any] = {
    "error": lambda: ValueError("no such order"),
    "exit": lambda: SystemExit("enough"),
    "memory": MemoryError,
    "stop": lambda: StopIteration(7),
    "cancelled": asyncio.CancelledError,
    "group": lambda: ExceptionGroup("many", [ValueError("a"), OSError("b")]),
    "long": lambda: ValueError("x" * 1_000_000),
    "surrogate": lambda: ValueError("\ud800\0"),
    "unspeakable": Unspeakable,
    "panic": Panic,
}


@tool(cost=0.001)
async def raises(how: str) -> str:
    """Raise something."""
    error = RAISED[how]()
    raise error


@tool(cost=0.001, isolate=False)
def raises_in_thread(how: str) -> str:
    """Raise something in a thread."""
    error = RAISED[how]()
    raise error


@tool(cost=0.001)
def raises_in_copy(how: str) -> str:
    """Raise something in a copy of the process."""
    error = RAISED[how]()
    raise error


@tool(cost=0.001)
def recurses() -> str:
    """Call itself."""
    return recurses_again()


def recurses_again() -> str:
    return recurses_again()


def circle() -> Any:
    results: list[Any] = []
    results.append(results)
    return results


GIVEN: Mapping[str, Any] = {
    "object": object,
    "circle": circle,
    "deep": lambda: json.loads("[" * 900 + "]" * 900),
    "surrogate": lambda: "\ud800\0",
    "binary": lambda: bytes(range(256)),
    "nothing": lambda: None,
    "number": lambda: float("nan"),
    "flood": lambda: "word " * 10_000_000,
}


@tool(cost=0.001)
def gives(what: str) -> Any:
    """Give something odd."""
    return GIVEN[what]()


@tool(timeout=0.05)
async def hangs() -> str:
    """Never end."""
    await asyncio.Event().wait()
    return ""


@tool(timeout=0.05, effect="read")
async def clings() -> str:
    """Not want to end."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return "too late"
    return ""


@tool(timeout=0.05, isolate=False)
def hangs_in_thread(fifo: str) -> str:
    """Hang where nobody can stop it."""
    return Path(fifo).read_text()


@tool(isolate=True, timeout=30, max_output=100_000)
def isolated(how: str) -> str:
    """Misbehave in a process of its own."""
    match how:
        case "flood":
            chunk = b"x" * (1 << 20)
            for _ in range(1000):
                os.write(1, chunk)
        case "binary":
            os.write(1, bytes(range(256)) * 100)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "leave":
            os._exit(0)
        case "fork":
            return str(subprocess.Popen(["/bin/sleep", "600"]).pid)
        case _:
            os.close(1)
    return "done"


@tool(isolate=True, timeout=2)
def isolated_hang(place: str) -> str:
    """Start a child and hang."""
    child = subprocess.Popen(["/bin/sleep", "600"])
    Path(place).write_text(f"{os.getpid()} {child.pid}")
    signal.pause()
    return ""


OWN: tuple[Tool, ...] = (
    *(echo, order, raises, raises_in_thread, raises_in_copy, recurses, gives),
    *(hangs, clings, hangs_in_thread, isolated, isolated_hang),
)
AGENT = b"name: desk\nmode: FULL\nlimits: {max_cost_usd: 1}\n"


class Desk:
    """A session with real tools behind its door, a root for their files, and something outside of it."""

    def __init__(self, store: JournalStore, running: SessionRuntime, root: Path, outside: Path) -> None:
        self.store = store
        self.running = running
        self.root = root
        self.outside = outside
        self._calls = 0

    async def calls(self, name: str, arguments: bytes | Mapping[str, Any]) -> Answer:
        self._calls += 1
        body = arguments if isinstance(arguments, bytes) else json.dumps(arguments).encode()
        return await self.running.call(Call(f"s.{self._calls}", name, body))

    async def meets(self, name: str, arguments: bytes | Mapping[str, Any], outcome: str, output: str = "") -> Answer:
        """Make a call that comes out like that, and see that the session lives and nothing outside was touched."""
        answer = await self.calls(name, arguments)
        assert answer.outcome in get_args(Outcome)
        assert (answer.outcome, output in answer.text) == (outcome, True), answer
        await self.lives()
        return answer

    async def lives(self) -> None:
        answer = await self.calls("echo", {"word": "still here"})
        assert (answer.outcome, answer.text) == ("ok", "still here")
        assert replay(await self.running.events()).in_flight == {}
        assert await self.store.ask(Query("holds", HoldRow)) == []
        assert {path.name: path.read_text() for path in self.outside.iterdir()} == {"kept": KEPT}


@asynccontextmanager
async def opened(folder: Path, *more: Tool) -> AsyncGenerator[Desk]:
    root, outside = folder / "root", folder / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "kept").write_text(KEPT)
    store = JournalStore(MemoryEngine(now=CLOCK.now, new_id=SortableIds(CLOCK.now).make), inline=True)
    await store.commit(
        lifecycle.start_session(SessionStarted(session="s", agent="desk", kind="task", started_by="ada"))
    )
    (lease,) = await store.claim(WorkerId("w"), 1)
    policy = resolve_policy(
        parse_fleet(load_bytes(b"mode: FULL\n", "halter.yaml")), parse_agent(load_bytes(AGENT, "agent.yaml"))
    )
    session_context = SessionContext("s", "desk", Phase("work", None), policy, str(policy.digest()))
    guard = GuardRuntime(
        store, CLOCK, redact=Redactor({}).redact, secrets=GivenSecrets({}), prices=Prices(policy.prices)
    )
    tools = {each.spec.name: each for each in (*OWN, *make_file_tools(root), *more)}
    yield Desk(store, SessionRuntime(store, CLOCK, guard, lease, session_context, tools), root, outside)
    await store.close()


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with opened(tmp_path) as desk:
        yield desk


@pytest.mark.parametrize(
    "arguments",
    [
        *(b'{"number": "seven"}', b'{"number": 7.5}', b'{"number": null}', b'{"number": 1e400}', b'{"number": NaN}'),
        *(b"{}", b"", b"[]", b"null", b"not json", b'{"number": 7', b'{"number": 7, "more": 1}', b"\xff\xfe\0"),
        *(b"[" * 100_000, b'{"number": ' * 10_000, b'{"number": "\\ud800"}', b"1" * 1_000_000),
    ],
    ids=lambda arguments: arguments[:20],
)
async def test_arguments_that_do_not_fit_never_reach_a_tool(desk: Desk, arguments: bytes) -> None:
    await desk.meets("order", arguments, "invalid_arguments", "Invalid arguments for order. ")


@pytest.mark.parametrize("name", ["", "orders", "order\0", "__class__", "../order", "\ud800", "x" * 100_000])
async def test_a_call_of_a_missing_tool_is_reported_as_such(desk: Desk, name: str) -> None:
    answer = await desk.meets(name, {"number": 7}, "unknown_tool", "There is no tool")
    assert len(answer.text) < 200


@pytest.mark.parametrize("how", RAISED)
@pytest.mark.parametrize("name", ["raises", "raises_in_thread", "raises_in_copy"])
async def test_whatever_a_tool_raises_is_a_structured_failure(desk: Desk, name: str, how: str) -> None:
    answer = await desk.meets(name, {"how": how}, "error", ": ")
    assert len(answer.text) <= 300


async def test_a_tool_that_calls_itself_for_ever_is_a_failure(desk: Desk) -> None:
    await desk.meets("recurses", {}, "error", "RecursionError: ")


@pytest.mark.parametrize(
    ("what", "outcome", "expected_text"),
    [
        ("object", "error", "cannot be encoded as JSON"),
        ("circle", "error", "cannot be encoded as JSON"),
        ("deep", "error", "cannot be encoded as JSON"),
        ("surrogate", "ok", "\0"),
        ("binary", "ok", "256 bytes that are not text"),
        ("nothing", "ok", "null"),
        ("number", "ok", "N"),
        ("flood", "ok", " characters omitted]"),
    ],
)
async def test_whatever_a_tool_gives_becomes_text_that_can_be_kept(
    desk: Desk, what: str, outcome: str, expected_text: str
) -> None:
    answer = await desk.meets("gives", {"what": what}, outcome, expected_text)
    assert len(answer.text) < 11_000_000


@pytest.mark.parametrize(("name", "outcome"), [("hangs", "timeout"), ("clings", "timeout")])
async def test_a_tool_that_hangs_is_stopped_in_time(desk: Desk, name: str, outcome: str) -> None:
    await desk.meets(name, {}, outcome)


async def test_a_write_that_hangs_in_a_thread_is_unknown(desk: Desk, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    await desk.meets("hangs_in_thread", {"fifo": str(fifo)}, "unknown")
    fifo.write_text("let it go")


@pytest.mark.parametrize(
    ("how", "outcome", "expected_text"),
    [
        ("flood", "ok", "done"),
        ("binary", "ok", "done"),
        ("mute", "ok", "done"),
        ("kill", "error", "Crashed: the tool's process exited without an answer: signal SIGKILL."),
        ("leave", "error", "Crashed: the tool's process exited without an answer: exit code 0."),
    ],
)
async def test_a_tool_in_a_process_of_its_own_can_do_no_harm(
    desk: Desk, how: str, outcome: str, expected_text: str
) -> None:
    await desk.meets("isolated", {"how": how}, outcome, expected_text)


async def test_a_child_that_a_tool_left_behind_is_gone_with_it(desk: Desk) -> None:
    answer = await desk.meets("isolated", {"how": "fork"}, "ok")
    assert has_ended(int(answer.text))


async def test_a_tool_whose_time_is_up_is_killed_with_its_children(desk: Desk, tmp_path: Path) -> None:
    path = tmp_path / "family"
    await desk.meets("isolated_hang", {"place": str(path)}, "timeout")
    family = path.read_text() if path.exists() else ""
    assert all(has_ended(int(pid)) for pid in family.split())


def has_ended(pid: int) -> bool:
    """Wait until a process has ended; a killed one takes a moment."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watch], [], [], 10)[0])
    finally:
        os.close(watch)


@pytest.mark.parametrize(
    ("name", "path", "more"),
    [
        *(("read_file", path, {}) for path in ("../outside/kept", "{outside}/kept", "a\0b", "link/kept", "")),
        ("write_file", "x/../../outside/kept", {"text": "changed"}),
        ("list_folder", "..", {}),
        ("find_files", "link/kept", {"pattern": "*"}),
    ],
)
async def test_no_path_leads_out_of_the_root(desk: Desk, name: str, path: str, more: Mapping[str, str]) -> None:
    (desk.root / "link").symlink_to(desk.outside)
    answer = await desk.meets(name, {"path": path.format(outside=desk.outside), **more}, "error", ": ")
    assert KEPT not in answer.text


@pytest.mark.parametrize("times", [20, pytest.param(200, marks=pytest.mark.soak)])
async def test_a_link_that_is_swapped_in_between_leads_nowhere(desk: Desk, times: int) -> None:
    spot, aside, event = desk.root / "spot", desk.root / "aside", threading.Event()
    aside.mkdir()

    def swap() -> None:
        for number in itertools.takewhile(lambda _: not event.is_set(), itertools.count()):
            with suppress(OSError):
                spot.rename(aside / str(number))
            with suppress(OSError):
                spot.symlink_to(desk.outside)
            with suppress(OSError):
                spot.unlink()
            event.wait(0.0005)

    swapping = asyncio.create_task(asyncio.to_thread(swap))
    outcomes = [(await desk.calls("write_file", {"path": "spot/kept", "text": "new"})).outcome for _ in range(times)]
    event.set()
    await swapping
    assert set(outcomes) <= {"ok", "error"}
    await desk.lives()


class Names:
    """A resolver that knows one name, and asks the system about all others."""

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1"] if host == "near.example" else await look_up(host, port)


@asynccontextmanager
async def serving(redirect_to: str) -> AsyncGenerator[tuple[int, list[bytes]]]:
    """Serve a page on this machine that leads elsewhere, and note who asked for it."""
    bodies: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        bodies.append(await reader.readuntil(b"\r\n\r\n"))
        head = f"HTTP/1.1 302 Found\r\nlocation: {redirect_to}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        writer.write(head.encode())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], bodies


INNER = (
    *("127.0.0.1", "localhost", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "10.0.0.1", "169.254.169.254"),
    *("[::1]", "[::ffff:127.0.0.1]", "[::ffff:a00:1]", "[fe80::1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]"),
)


@pytest.mark.parametrize("host", INNER)
async def test_no_url_leads_inside(tmp_path: Path, host: str) -> None:
    async with serving("/") as (port, bodies), opened(tmp_path, *make_http_tools(["*"])) as desk:
        await desk.meets("http_get", {"url": f"http://{host}:{port}/"}, "error", ": ")
        await desk.meets("http_post", {"url": f"http://{host}:{port}/", "body": "x"}, "error", ": ")
        assert bodies == []


@pytest.mark.parametrize("host", INNER[6:])
async def test_no_redirect_leads_inside(tmp_path: Path, host: str) -> None:
    async with serving(f"http://{host}/") as (port, bodies):
        web = make_http_tools(["*"], resolve=Names(), allow_addresses=["127.0.0.1/32"])
        async with opened(tmp_path, *web) as desk:
            await desk.meets("http_get", {"url": f"http://near.example:{port}/"}, "error", ": ")
        assert len(bodies) == 1


@pytest.mark.parametrize("url", ["", "nothing", "file:///etc/passwd", "http://", "http://a\0b/", "http://[::1"])
async def test_what_is_no_url_is_a_failure(tmp_path: Path, url: str) -> None:
    async with opened(tmp_path, *make_http_tools(["*"])) as desk:
        await desk.meets("http_get", {"url": url}, "error", "BadUrl: ")


@pytest.fixture(scope="module")
def bubblewrap(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip loudly where no sandbox can be made; where everything is required, one that is installed must work."""
    try:
        asyncio.run(Sandbox(tmp_path_factory.mktemp("probe")).verify())
    except Failed as failed:
        if shutil.which("bwrap") is not None and os.environ.get("HALTER_REQUIRE_ALL") == "1":
            pytest.fail(str(failed))
        pytest.skip(str(failed))


def _program_of(value: list[str] | str) -> str:
    return value[0] if isinstance(value, list) else ""


@pytest.mark.parametrize(
    ("argv", "expected_text"),
    [
        (["seq", "120000000"], " bytes omitted]"),
        (["head", "-c", "1000000000", "/dev/zero"], "bytes that are not text"),
        (["head", "-c", "20000", "/dev/urandom"], "bytes that are not text"),
        (["setsid", "--fork", "sleep", "601.25"], ""),
        (["cat", "{outside}/kept"], "[exit code 1]"),
        (["cp", "{root}/../outside/kept", "."], "[exit code 1]"),
        (["nosuchprogram"], "[exit code 127]"),
    ],
    ids=_program_of,
)
async def test_a_command_is_bounded_and_shut_in(
    bubblewrap: None, tmp_path: Path, argv: Sequence[str], expected_text: str
) -> None:
    (tmp_path / "commands").mkdir()
    async with opened(tmp_path, make_shell_tool(tmp_path / "commands", max_output=100_000)) as desk:
        words = [word.format(root=desk.root, outside=desk.outside) for word in argv]
        answer = await desk.meets("run_command", {"argv": words}, "ok", expected_text)
        assert len(answer.text) < 150_000
        assert KEPT not in answer.text
    assert all(has_ended(pid) for pid in running("601.25"))


def running(word: str) -> list[int]:
    """Find the processes on this machine that were started with such an argument."""
    numbers: list[int] = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(ProcessLookupError, FileNotFoundError):
            if word.encode() in line.read_bytes().split(b"\0"):
                numbers.append(int(line.parent.name))
    return numbers


@pytest.mark.parametrize(
    "reference", ["steps.nosuch.text", "steps.first.json", "steps.first.json.a.b", "inputs.nosuch"]
)
async def test_a_playbook_with_a_missing_reference_stops_before_that_call(desk: Desk, reference: str) -> None:
    steps = (
        Step("echo", b'{"word": "not json"}', "first", 2),
        Step("write_file", json.dumps({"path": "made", "text": f"${{{reference}}}"}).encode(), "second", 3),
    )
    playbook_outcome = await walk_playbook(desk.running, desk.store, Task(Playbook(steps, "book.yaml")))
    assert (playbook_outcome.state, playbook_outcome.terminal_reason) == ("ERROR", "step_failed")
    assert f"(line 3): `${{{reference}}}`" in playbook_outcome.sentence
    assert list(desk.root.iterdir()) == []
