"""The programs of `examples/programs` do what they say, with a model of the tests in place of the real one."""

import asyncio
import importlib.util
import io
import re
import shutil
import sqlite3
import subprocess
import sys
import tokenize
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx2
import pytest

from halter import Store
from halter.core.messages import Prompt, Reply, Text, ToolCall, ToolResult
from halter.core.usage import ModelName, Usage
from halter.testing.models import FunctionModel, make_call

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "examples" / "programs"


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Load a program as a new module, in a folder of its own and without a home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HALTER_PERSON", "ada")

    def load_program(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, PROGRAMS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load_program


def read_results(prompt: Prompt) -> list[str]:
    return [part.text for message in prompt.messages for part in message.parts if isinstance(part, ToolResult)]


def read_words(prompt: Prompt) -> str:
    return "\n".join(part.text for message in prompt.messages for part in message.parts if isinstance(part, Text))


def call_then_tell(*calls: ToolCall) -> FunctionModel:
    """A model that makes these calls, one after the other, and then tells what the last one returned."""

    def answer(prompt: Prompt) -> ToolCall | str:
        results = read_results(prompt)
        return calls[len(results)] if len(results) < len(calls) else results[-1]

    return FunctionModel(answer)


def test_the_librarian_answers_from_the_sections_that_fit_best(
    load: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = load("rag")
    (tmp_path / "care.md").write_text("# Roses\n\nWater roses in the morning.\n\n## Cacti\n\nNever water a cactus.\n")
    for words, answer in (("water a cactus", "Never water a cactus."), ("?!", "No section has these words.")):
        with program.librarian.override(model=call_then_tell(make_call("search", words=words))):
            program.main(str(tmp_path), "How often does a cactus need water?")
        assert answer in capsys.readouterr().out


def test_an_invoice_that_does_not_add_up_is_read_again(
    load: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "invoice.txt").write_text("Invoice 17. Nails 3.20, hammer 12.80. Total 16.00.")
    lines = [{"text": "nails", "amount": "3.20"}, {"text": "hammer", "amount": "12.80"}]

    def read(prompt: Prompt) -> ToolCall:
        total = "16.00" if any("add up to 16.00" in text for text in read_results(prompt)) else "18.00"
        return make_call("final_answer", value={"number": "17", "lines": lines, "total": total})

    program, model = load("extract"), FunctionModel(read)
    with program.clerk.override(model=model):
        program.main("invoice.txt")
    assert capsys.readouterr().out == "invoice.txt: 17, 2 lines, 16.00\n"
    assert len(model.requests) == 2


def test_the_desk_asks_a_colleague_and_hands_a_customer_over(
    load: Callable[[str], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def work(prompt: Prompt) -> ToolCall | str:
        tools, results = {tool.name for tool in prompt.tools}, read_results(prompt)
        if results:
            return results[-1]
        if "look_up_price" in tools:
            return make_call("look_up_price", plan="team")
        if "read_order" in tools:
            return make_call("read_order", order=7)
        wants_money = "money back" in read_words(prompt)
        return make_call("hand_off_to_refunds" if wants_money else "ask_sales", task="Help this customer.")

    program, model = load("hand_off"), FunctionModel(work)
    with program.desk.override(model=model), program.sales.override(model=model), program.refunds.override(model=model):
        program.main("What does the team plan cost?")
        assert "29 dollars" in capsys.readouterr().out
        program.main("I want my money back for order 7.")
        assert "order 7: 29 dollars on May 2" in capsys.readouterr().out


async def wait_for(look: Callable[[], Any]) -> Any:
    while not (found := await look()):  # noqa: ASYNC110 It asks over HTTP, as a page does.
        await asyncio.sleep(0)
    return found


async def test_payments_are_approved_over_http_and_wait_through_a_restart(load: Callable[[str], Any]) -> None:
    model = call_then_tell(make_call("pay", to="Hardware Inc.", amount_usd=16))
    inbox: list[dict[str, str]] = []
    for visit in range(2):
        program = load("approvals")
        app = httpx2.ASGITransport(program.app)
        with program.accountant.override(model=model):
            async with (
                program.lifespan(program.app),
                httpx2.AsyncClient(transport=app, base_url="http://app") as client,
            ):

                async def look(client: httpx2.AsyncClient = client) -> Any:
                    return (await client.get("/inbox")).json()

                if visit == 0:
                    assert (await client.post("/bills", params={"bill": "Pay invoice 17."})).status_code == 200
                inbox = await wait_for(look)
                assert "Hardware Inc." in inbox[0]["call"]
                if visit == 0:
                    continue
                user = {"x-user": "ada"}
                answer = {"decision": inbox[0]["decision"], "digest": inbox[0]["digest"], "approved": "true"}
                changed = await client.post("/decisions", params={**answer, "digest": "other"}, headers=user)
                assert changed.status_code == 409
                assert (await client.post("/decisions", params=answer, headers=user)).status_code == 200

                async def read_ended(program: Any = program) -> Any:
                    return [row for row in await program.store.sessions("accountant") if row.ended_at]

                (ended,) = await wait_for(read_ended)
                (call,) = (await program.store.receipt(ended.session)).calls
                assert (ended.state, call.name, call.outcome) == ("COMPLETED", "pay", "ok")
                late = await client.post("/decisions", params=answer, headers=user)
                assert (late.status_code, await look()) == (409, [])


async def test_a_chat_streams_over_http_and_continues_with_its_session(load: Callable[[str], Any]) -> None:
    program = load("sse")
    app = httpx2.ASGITransport(program.app)
    with program.guide.override(model=call_then_tell(make_call("opening_hours", place="museum"))):
        async with program.lifespan(program.app), httpx2.AsyncClient(transport=app, base_url="http://app") as client:
            first = await client.post("/chat", params={"message": "When is the museum open?"})
            session = re.findall(r'"session":\s*"(\w+)"', first.text)[0]
            again = await client.post("/chat", params={"message": "Thank you.", "session": session})
    assert first.headers["content-type"].startswith("text/event-stream")
    assert re.findall(r"event: (\w+)\ndata: (.*)", first.text)[:2] == [
        ("tool", '"opening_hours"'),
        ("text", '"The museum is open from 10 to 18."'),
    ]
    assert session in again.text


async def test_a_batch_that_is_started_again_asks_the_model_for_nothing(
    load: Callable[[str], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """All of them together could pass the cap: they wait for one another."""
    answer = make_call("final_answer", value={"about": "price", "is_complaint": True})
    model = FunctionModel(lambda _: Reply((answer,), "calls", usage=Usage(1000, 100)))
    vars(model)["name"] = ModelName.parse("anthropic:claude-sonnet-5-5")
    texts, printed, spent = [f"Too dear, for the {number}th time." for number in range(200)], list[str](), list[str]()
    for _ in range(2):
        program = load("batch")
        with program.sorter.override(model=model):
            await program.main(texts)
        printed.append(capsys.readouterr().out)
        async with Store("runs.db") as store:
            (day,) = [row for row in await store.budget() if row.scope == "agent:sorter"]
        spent.append(str(day.spent))
    assert printed == ["200 of 200 reviews. Complaints: {'price': 200}\n"] * 2
    assert len(model.requests) == 200
    assert spent == ["0.6", "0.6"]


def test_a_report_is_written_once_a_day(load: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    with sqlite3.connect("shop.db") as shop:
        shop.execute("CREATE TABLE sales (day, product, pieces)")
        shop.executemany("INSERT INTO sales VALUES ('2026-11-18', ?, ?)", [("tea", 3), ("cake", 5), ("tea", 1)])
    shop.close()
    model, printed = call_then_tell(make_call("read_sales", day="2026-11-18")), list[str]()
    for _ in range(2):
        program = load("report")
        with program.reporter.override(model=model):
            program.main("shop.db", date(2026, 11, 19))
        printed.append(capsys.readouterr().out)
    assert printed == ["cake: 5\ntea: 4\n"] * 2
    assert len(model.requests) == 2


def test_the_tools_of_a_server_are_the_agents_own(
    load: Callable[[str], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    program = load("mcp_tools")
    with program.reader.override(model=call_then_tell(make_call("library__list_books", author="Michael Ende"))):
        program.main("What can I borrow by Michael Ende?")
    assert "Momo" in capsys.readouterr().out


async def test_a_long_history_is_summarized_and_what_was_said_is_not_lost(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked_for_summary = list[str]()

    def answer(prompt: Prompt) -> str:
        if not prompt.tools and "summar" in prompt.system.lower():
            asked_for_summary.append(read_words(prompt))
            return "Ada planted a lemon tree."
        return "Yes, the lemon tree." if "lemon tree" in read_words(prompt) else "I do not know."

    lines = ["I planted a lemon tree.", *[f"Day {number}. " + "It rained. " * 500 for number in range(12)]]
    program = load("long_history")
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join([*lines, "What did I plant?", "", ""])))
    with program.diary.override(model=FunctionModel(answer)):
        await program.main()
    assert capsys.readouterr().out.splitlines()[-2].endswith("Yes, the lemon tree.")
    assert asked_for_summary


def test_the_tests_of_a_program_pass_without_a_model(load: Callable[[str], Any], tmp_path: Path) -> None:
    load("orders")
    for name in ("orders.py", "test_orders.py"):
        shutil.copy(PROGRAMS / name, tmp_path)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_orders.py"]
    run = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "3 passed" in run.stdout
    assert list(tmp_path.glob("*.db")) == []


def count_lines(text: str) -> int:
    """Count the lines of code: without blank lines, comments and docstrings."""
    lines = set[int]()
    previous = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_space = token.type in {tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
        is_docstring = token.type == tokenize.STRING and previous == tokenize.NEWLINE
        if not is_space and not is_docstring and token.type != tokenize.NEWLINE:
            lines.update(range(token.start[0], token.end[0] + 1))
        if not is_space:
            previous = token.type
    return len(lines)


def test_the_page_lists_every_program_with_its_lines_of_code() -> None:
    page = (ROOT / "docs" / "programs.md").read_text("utf-8")
    rows = re.findall(r"^\| [^|]+ \| ((?:`\w+\.py`(?:, )?)+) \| (\d+) \|", page, re.MULTILINE)
    counts = {
        tuple(files): sum(count_lines((PROGRAMS / file).read_text("utf-8")) for file in files)
        for files in (re.findall(r"\w+\.py", cell) for cell, _ in rows)
    }
    assert counts == {tuple(re.findall(r"\w+\.py", cell)): int(count) for cell, count in rows}
    assert sorted(file for files in counts for file in files) == sorted(file.name for file in PROGRAMS.glob("*.py"))
    assert len(rows) == 10
    code = (PROGRAMS / "approvals.py").read_text("utf-8").partition('"""\n\n')[2]
    assert f"```python\n{code}```" in page
