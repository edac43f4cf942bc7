"""Plain functions as tools: what they take, what they give, how they fail, and how they are stopped."""

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from halter.core.clock import SECOND
from halter.core.errors import ConfigError
from halter.core.tools import (
    Effect,
    EffectStatus,
    Failed,
    Invalid,
    Output,
    Permit,
    Unstoppable,
    Valid,
    find_secret_names,
    substitute_secrets,
)
from halter.tools.function_tool import CallKey, FunctionTool, canonical_json, spec_from_hints, tool
from tests.processes import gone


def permit(**secrets: str) -> Permit:
    return Permit("call-1", deadline=0, secrets=secrets)


def valid(subject: FunctionTool, **arguments: Any) -> Valid:
    outcome = subject.validate(json.dumps(arguments).encode())
    assert isinstance(outcome, Valid), outcome
    return outcome


async def run_tool(subject: FunctionTool, **arguments: Any) -> str:
    return (await subject.run(valid(subject, **arguments), permit())).text


class Place(BaseModel):
    city: str
    zip: int | None = None


@tool(level="SAFE", effect="read", cost="0.002", timeout="5s")
async def weather(place: Place, days: Annotated[int, Field(ge=1, description="how many")] = 3, copy: str = "") -> str:
    """Tell what the weather will be like."""
    return f"{place.city} {days}{copy}"


@tool
def add(a: int, b: list[int] = [0]) -> int:  # noqa: B006 A default that could be shared is the point here.
    """Add numbers."""
    b.append(a)
    return sum(b)


@tool(isolate=True)
def isolated_sum(path: Path, numbers: list[int], key: CallKey) -> dict[str, Any]:
    """Add numbers elsewhere."""
    print("working")  # noqa: T201 What an isolated function prints must not disturb its answer.
    return {"sum": sum(numbers), "name": path.name, "key": key, "other": os.getpid() != os.getppid()}


@tool(isolate=True)
def isolated_failure(how: str) -> str:
    """Fail in some way."""
    sys.stdout.write("so far so good\n")
    sys.stdout.flush()
    match how:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "leave":
            os._exit(3)
        case "exit":
            sys.exit("enough")
        case _:
            raise OSError(how)
    return ""


@tool(isolate=True)
async def isolated_flood(size: int) -> str:
    """Print and return too much."""
    os.write(1, b"x" * size)
    return "y " * size


@tool(isolate=True)
def isolated_family(fifo: str) -> str:
    """Start a child, tell both numbers, and hang."""
    child = subprocess.Popen(["/bin/sleep", "600"])
    Path(fifo).write_text(f"{os.getpid()} {child.pid}")
    signal.pause()
    return ""


def test_signature_and_docstring_describe_a_tool() -> None:
    spec = weather.spec
    assert (spec.name, spec.description) == ("weather", "Tell what the weather will be like.")
    assert (spec.level, spec.effect, spec.cost, spec.timeout) == ("SAFE", "read", 2000, 5 * SECOND)
    schema = json.loads(spec.schema)
    assert schema["required"] == ["place"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["days"]["minimum"] == 1
    assert add.spec.level == "CONTROLLED"
    assert add.spec.effect == "write"


def test_a_digest_covers_everything_said_of_a_tool() -> None:
    def same(x: int) -> None:
        """Do it."""

    digests = {
        tool(same).spec.digest,
        tool(same, level="SAFE").spec.digest,
        tool(same, name="other").spec.digest,
        tool(same, egress=True).spec.digest,
        tool(same, timeout=1).spec.digest,
    }
    assert len(digests) == 5
    assert tool(same).spec == tool(same).spec


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b'{"place": {"city": 5}}', "place.city: Input should be a valid string"),
        (b"{}", "place: Field required"),
        (b'{"place": {"city": "a"}, "days": 0}', "days: Input should be greater"),
        (b'{"place": {"city": "a"}, "days": "many"}', "days: Input should be a valid integer"),
        (b'{"place": {"city": "a"}, "surprise": 1}', "surprise: Extra inputs are not permitted"),
        (b'{"place": {"city": "\\ud800"}}', "Invalid JSON"),
        (b"", "place: Field required"),
        (b"null", "Input should be an object"),
        (b"[1]", "Input should be an object"),
        (b"{", "Invalid JSON"),
        (b"\xff\x00", "Invalid JSON"),
        (b"[" * 100_000, "recursion limit"),
    ],
)
def test_arguments_that_do_not_fit_are_a_sentence_for_the_model(sent: bytes, message: str) -> None:
    refused = weather.validate(sent)
    assert isinstance(refused, Invalid)
    assert refused.sentence.startswith("Invalid arguments for weather.")
    assert message in refused.sentence


def test_what_cannot_be_json_again_is_refused() -> None:
    @tool
    def anything(x: Any) -> None: ...

    assert isinstance(anything.validate(b'{"x": null}'), Valid)
    assert isinstance(anything.validate(b'{"x": NaN}'), Invalid)
    assert isinstance(anything.validate(b'{"x": [1e999]}'), Invalid)


def test_a_default_that_could_not_be_read_again_is_refused() -> None:
    def nothing(x: str = cast("str", None)) -> str:
        return x

    assert isinstance(tool(nothing).validate(b"{}"), Invalid)
    assert isinstance(tool(nothing).validate(b'{"x": ""}'), Valid)


def test_equal_arguments_have_one_canonical_form() -> None:
    outcome = weather.validate(b' { "days":3, "place": {"zip":null,"city":"K\xc3\xb6ln"} }')
    result = weather.validate(b'{"place":{"city":"K\\u00f6ln"}}')
    assert isinstance(outcome, Valid)
    assert isinstance(result, Valid)
    assert outcome.canonical == result.canonical
    assert outcome.canonical == '{"copy":"","days":3,"place":{"city":"Köln","zip":null}}'.encode()


@given(words=st.text(), count=st.integers(), sure=st.booleans())
def test_plain_values_are_written_as_all_others_are(*, words: str, count: int, sure: bool) -> None:
    """What a person agreed to is bound to these bytes, so they must not change with the way they are written."""

    @tool(level="SAFE", effect="read")
    async def count_words(*, words: str, count: int, sure: bool) -> None: ...

    given_values = {"words": words, "count": count, "sure": sure}
    valid = count_words.validate(json.dumps(given_values).encode())
    assert isinstance(valid, Valid)
    assert valid.canonical == canonical_json(given_values)


async def test_async_and_blocking_functions_run_and_defaults_are_not_shared() -> None:
    assert await run_tool(weather, place={"city": "Bonn"}, copy="!") == "Bonn 3!"
    assert await run_tool(add, a=2) == "2"
    assert await run_tool(add, a=2) == "2"


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("as is", "as is"),
        (None, "null"),
        ({"b": [1, 2]}, '{"b":[1,2]}'),
        (Place(city="Bonn"), '{"city":"Bonn","zip":null}'),
        (b"plain", "plain"),
        (b"\x00\x01", "[2 bytes that are not text, in base64]\nAAE="),
        (b"\xff\xfe", "[2 bytes that are not text, in base64]\n//4="),
        (Output("text", cost_micros=7), "text"),
    ],
)
async def test_any_result_becomes_text(result: Any, text: str) -> None:
    @tool
    async def give() -> Any:
        return result

    assert await run_tool(give) == text


async def test_a_function_may_report_its_cost() -> None:
    @tool
    async def give() -> Output:
        return Output("text", cost_micros=7)

    assert await give.run(valid(give), permit()) == Output("text", 7)


async def test_a_huge_result_is_cut_in_the_middle_between_words() -> None:
    @tool(max_output=1000)
    async def give() -> str:
        return "begin " + "word " * 100_000 + "end"

    text = await run_tool(give)
    assert len(text) < 1100
    assert text.startswith("begin word")
    assert text.endswith("word end")
    assert "characters omitted]" in text


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("bad"), "ValueError: bad"),
        (KeyError("k"), "KeyError: 'k'"),
        (TimeoutError("slow"), "TimeoutError: slow"),
        (SystemExit("bye"), "SystemExit: bye"),
        (asyncio.CancelledError(), "CancelledError: "),
        (Failed("Own", "words"), "Own: words"),
        (ValueError("x" * 1000), "ValueError: " + "x" * 1000),
    ],
)
async def test_whatever_a_function_raises_is_a_failure(error: BaseException, message: str, *, blocking: bool) -> None:
    def block() -> None:
        raise error

    async def wait() -> None:
        raise error

    subject = tool(block if blocking else wait)
    with pytest.raises(Failed) as failed:
        await run_tool(subject)
    assert str(failed.value) == message


async def test_a_permit_is_used_up_by_a_run_even_a_failed_one() -> None:
    used = permit()
    await weather.run(valid(weather, place={"city": "x"}), used)
    with pytest.raises(RuntimeError, match="used before"):
        await weather.run(valid(weather, place={"city": "x"}), used)


def test_a_tool_cannot_be_called_past_the_guard() -> None:
    with pytest.raises(TypeError, match=r"is a tool and cannot be called directly\. Call it through the guard"):
        weather(place={"city": "x"})


async def test_secrets_are_put_in_only_for_the_call() -> None:
    got: list[Any] = []

    @tool
    async def send(place: Place, headers: dict[str, list[str]], key: CallKey) -> None:
        got.append((place.city, headers, key))

    arguments = valid(send, place={"city": "in ${secret:TOWN}"}, headers={"a": ["Bearer ${secret:KEY}"]})
    assert find_secret_names(arguments.canonical) == {"TOWN", "KEY"}
    await send.run(arguments, permit(TOWN="${secret:KEY}", KEY='quote" and \\'))
    assert got == [("in ${secret:KEY}", {"a": ['Bearer quote" and \\']}, "call-1")]
    assert b"quote" not in arguments.canonical
    assert "quote" not in repr(arguments.values)


async def test_a_secret_that_was_not_granted_stops_the_call() -> None:
    with pytest.raises(Failed, match="UnknownSecret: This call may not use the secret OTHER"):
        await weather.run(valid(weather, place={"city": "${secret:OTHER}"}), permit(KEY="x"))


def test_secrets_reach_texts_and_nothing_else() -> None:
    value = {"${secret:A}": ["${secret:A}", 1, None, {"x": "<${secret:A}>"}, "${secret:}", "$secret:A"]}
    expected = {"${secret:A}": ["1", 1, None, {"x": "<1>"}, "${secret:}", "$secret:A"]}
    assert substitute_secrets(value, {"A": "1"}.__getitem__) == expected


async def test_a_check_tells_what_became_of_a_call() -> None:
    async def paid(amount: int, key: CallKey) -> EffectStatus:
        return "done" if (amount, key) == (5, "call-1") else "not_done"

    def pay(amount: int, to: str, key: CallKey) -> None: ...

    subject = tool(pay, check=paid)
    assert subject.spec.checked
    assert "key" not in json.loads(subject.spec.schema)["properties"]
    assert await subject.check(valid(subject, amount=5, to="ann"), permit()) == "done"
    assert await subject.check(valid(subject, amount=6, to="ann"), permit()) == "not_done"
    assert await weather.check(valid(weather, place={"city": "x"}), permit()) == "unknown"
    assert await tool(pay, check=lambda: "perhaps").check(valid(subject, amount=5, to="a"), permit()) == "unknown"


def _starred(*numbers: int) -> None: ...


def _plain(x: int) -> None: ...


def _odd(x: asyncio.Task[None]) -> None: ...


def _check_of_y(y: int) -> int:
    return y


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (_starred, {}, "which a schema cannot describe"),
        (_odd, {}, "has a type that a schema cannot describe"),
        (_plain, {"name": "has space"}, "Invalid tool name 'has space'"),
        (_plain, {"level": "HARMLESS"}, "level cannot be 'HARMLESS'"),
        (_plain, {"effect": "none"}, "effect cannot be 'none'"),
        (_plain, {"timeout": 0}, "timeout cannot be 0"),
        (_plain, {"timeout": "soon"}, "is not a duration"),
        (_plain, {"check": _check_of_y}, "takes y, which the tool does not take"),
        (lambda: None, {"name": "local", "isolate": True}, "is defined inside another function"),
    ],
)
def test_a_mistake_in_a_tool_is_reported_where_it_is_made(function: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tool(function, **options)


async def test_cancelling_reaches_an_async_function() -> None:
    event = asyncio.Event()

    @tool
    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            event.set()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await run_tool(hang)
    assert event.is_set()


async def test_a_blocked_read_is_abandoned_and_a_blocked_write_is_reported_as_unstoppable() -> None:
    release, semaphore = threading.Event(), threading.Semaphore(0)

    def block() -> None:
        semaphore.release()
        release.wait()

    effects: list[tuple[Effect, type[BaseException]]] = [("read", asyncio.CancelledError), ("write", Unstoppable)]
    for effect, raised in effects:
        task = asyncio.create_task(run_tool(tool(block, effect=effect, isolate=False)))
        await asyncio.to_thread(semaphore.acquire)
        task.cancel()
        with pytest.raises(raised):
            await task
    release.set()


async def test_an_isolated_function_answers_from_another_process() -> None:
    answer = json.loads(await run_tool(isolated_sum, path="/a/b", numbers=[1, 2]))
    assert answer == {"sum": 3, "name": "b", "key": "call-1", "other": True}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("kill", "Crashed: the tool's process exited without an answer: signal SIGKILL."),
        ("leave", "Crashed: the tool's process exited without an answer: exit code 3."),
        ("exit", "SystemExit: enough"),
        ("disk gone", "OSError: disk gone"),
    ],
)
async def test_an_isolated_function_that_fails_or_dies_is_a_failure_with_what_it_printed(
    how: str, message: str
) -> None:
    with pytest.raises(Failed) as failed:
        await run_tool(isolated_failure, how=how)
    assert str(failed.value) == message
    assert failed.value.partial == "so far so good\n"


async def test_an_isolated_function_whose_module_cannot_be_imported_there_is_a_failure_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop.py").write_text(
        "import halter\n\n\n@halter.tool(isolate=True)\ndef sell() -> None:\n    'Sell.'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    subject = importlib.import_module("shop").sell
    (tmp_path / "shop.py").write_text("import no_such_module\n")
    with pytest.raises(
        Failed, match=r"^ModuleNotFoundError: shop cannot be imported: No module named 'no_such_module'$"
    ):
        await run_tool(subject)


async def test_an_isolated_function_cannot_flood() -> None:
    text = await run_tool(isolated_flood, size=6_000_000)
    assert 9_000_000 < len(text) < 10_001_000


async def test_an_isolated_function_is_killed_with_its_children(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    task = asyncio.create_task(run_tool(isolated_family, fifo=str(fifo)))
    family = [int(pid) for pid in (await asyncio.to_thread(fifo.read_text)).split()]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await gone(*family)


@pytest.mark.parametrize(
    ("hints", "level", "effect", "idempotent", "egress"),
    [
        ({}, "RESTRICTED", "write", False, True),
        ({"readOnlyHint": True}, "CONTROLLED", "read", False, True),
        ({"readOnlyHint": True, "openWorldHint": False}, "CONTROLLED", "read", False, False),
        ({"readOnlyHint": True, "destructiveHint": True}, "RESTRICTED", "write", False, True),
        ({"readOnlyHint": "true", "idempotentHint": 1}, "RESTRICTED", "write", False, True),
        ({"destructiveHint": False, "idempotentHint": True}, "RESTRICTED", "write", True, True),
    ],
)
def test_hints_of_mcp_servers_are_read_as_claims(
    hints: Mapping[str, Any], level: str, effect: str, *, idempotent: bool, egress: bool
) -> None:
    spec = spec_from_hints("server__it", "Does it.", b"{}", hints, server="server")
    assert (spec.level, spec.effect, spec.idempotent, spec.egress) == (level, effect, idempotent, egress)
    assert spec.digest
