"""OpenAI's Responses protocol: its models reason and take tools, and are given back what only they can read."""

import json
from pathlib import Path
from typing import Any

import pydantic_ai.models.openai  # noqa: F401  Its import takes seconds, in which the fast clock would end a turn.
import pytest
from library_bench import Bench, finished, shown
from msgspec.structs import replace

from halter import File, StreamChunk
from halter.core.errors import ContextOverflow, ModelUnavailable
from halter.core.ids import SortableIds, session_stream
from halter.core.messages import (
    VOLATILE,
    Message,
    Reasoning,
    ReasoningItem,
    Text,
    ToolCall,
    ToolResult,
    bound_message_tokens,
    make_user_message,
)
from halter.core.money import micros_to_usd
from halter.core.ports import read_body
from halter.core.usage import ModelName
from halter.journal.open import open_store
from halter.journal.retention import erase_session_bodies
from halter.models.exchange import ExchangeTerms
from halter.models.input_files import make_files_message
from halter.models.providers import find_endpoint, make_model
from halter.models.wire import ModelHabits
from halter.present.bodies import describe_event
from halter.spec.models import Provider, choose_wire

PRICE = {"price": {"input": 2, "cache_read": 0.5, "cache_write": 2.5, "output": 10}}
MODEL = "openai:gpt-5.6"
OTHER = "openai:gpt-6-sol"
SEALED = "gAAAAA-sealed-by-the-provider"


@pytest.fixture(params=["responses"])
def wire(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def provider(provider: Any) -> Any:
    """As strict as the real one."""
    provider.strict = True
    return provider


class Desk:
    """An agent whose OpenAI is on this machine, and answers 400 where the real one does."""

    def __init__(self, folder: Path, provider: Any) -> None:
        self.bench = Bench(folder)
        self.provider = provider
        self.read: list[str] = []

    def agent(self, wire: str = "responses", **more: Any) -> Any:
        at = {"wire": wire, "base_url": f"http://127.0.0.1:{self.provider.port}/v1", "api_key": "${secret:MADE_UP}"}
        values = {
            "model": MODEL,
            "providers": {"openai": at, "azure": at},
            "secrets": {"MADE_UP": self.provider.key},
            "fleet": {"models": {MODEL: PRICE, OTHER: PRICE, "azure:gpt-5.6": PRICE}},
        }
        agent = self.bench.agent(**{**values, **more})

        @agent.tool(level="SAFE", effect="read")
        async def read_file(path: str) -> str:
            """Read a file."""
            self.read.append(path)
            return f"{path} is empty"

        return agent

    def calls(self, *paths: str, text: str = "", sealed: tuple[str, ...] = (), **more: Any) -> None:
        made = tuple((f"call_{path}", "read_file", (f'{{"path":"{path}"}}',)) for path in paths)
        self.provider.says(*([text] if text else []), calls=made, sealed=sealed, **more)
        self.provider.then()

    @property
    def inputs(self) -> list[list[dict[str, Any]]]:
        return [asked.body["input"] for asked in self.provider.asked]

    def facts(self, kind: str) -> list[dict[str, Any]]:
        return self.bench.facts(kind)


@pytest.fixture
def desk_of(tmp_path: Path, provider: Any) -> Desk:
    return Desk(tmp_path, provider)


def kinds(items: list[dict[str, Any]]) -> list[str]:
    return [item.get("type") or item["role"] for item in items]


async def test_a_current_model_takes_tools_while_it_reasons(desk_of: Desk) -> None:
    desk_of.calls("a.log", sealed=(SEALED,))
    desk_of.provider.says("It is empty.")
    result = await desk_of.agent().run("What is in a.log?")
    desk_of.bench.balanced(result)
    assert (result.state, result.text, desk_of.read) == ("COMPLETED", "It is empty.", ["a.log"])
    assert {asked.path for asked in desk_of.provider.asked} == {"/v1/responses"}


async def test_over_chat_the_same_model_answers_400_to_tools_unless_reasoning_is_off(desk_of: Desk) -> None:
    desk_of.provider.says("Here.")
    refused = await desk_of.agent("openai").run("What is in a.log?")
    assert "Function tools with reasoning_effort are not supported for gpt-5.6" in refused.sentence
    assert refused.cost_usd == 0
    assert (await desk_of.agent("openai", thinking="off").run("What is in a.log?")).text == "Here."


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
async def test_reasoning_goes_back_whole_before_the_call_that_it_led_to_and_nothing_else_has_an_id(
    desk_of: Desk,
    streaming: bool,  # noqa: FBT001
) -> None:
    desk_of.calls("a.log", "b.log", text="I look.", sealed=("s0", "s1", "s2"), phase="commentary", thoughts="Hm.")
    desk_of.calls("c.log", sealed=("s3",))
    desk_of.provider.says("Empty.", sealed=("s4",))
    agent = desk_of.agent()
    if streaming:
        chunks = [item async for item in agent.stream("Look.", kind="task") if isinstance(item, StreamChunk)]
        finished(chunks)
        assert shown(chunks) == "I look.Empty."
    else:
        await agent.run("Look.")
    third = [item for item in desk_of.inputs[2] if item.get("role") not in ("system", "user")]
    assert [
        (item.get("type"), item.get("encrypted_content") or item.get("arguments") or item.get("content"))
        for item in third
        if item.get("type") != "function_call_output"
    ] == [
        ("reasoning", "s0"),
        (None, "I look."),
        ("reasoning", "s1"),
        ("function_call", '{"path":"a.log"}'),
        ("reasoning", "s2"),
        ("function_call", '{"path":"b.log"}'),
        ("reasoning", "s3"),
        ("function_call", '{"path":"c.log"}'),
    ]
    assert {item["type"] for item in third if "id" in item} == {"reasoning"}
    assert [item["phase"] for item in third if "phase" in item] == ["commentary"]
    assert [item["summary"] for item in third if "summary" in item] == [[]] * 4
    assert "Hm." not in json.dumps(desk_of.inputs)


async def test_nothing_is_stored_at_the_provider_or_compared_with_what_it_stored(desk_of: Desk) -> None:
    desk_of.calls("a.log", sealed=(SEALED,))
    desk_of.provider.says("Empty.")
    await desk_of.agent().run("Look.")
    for asked in desk_of.provider.asked:
        assert asked.body["store"] is False
        assert asked.body["include"] == ["reasoning.encrypted_content"]
        assert not {"previous_response_id", "conversation", "metadata", "user"} & asked.body.keys()
        assert "comparison_response_id" not in json.dumps(asked.body)


async def test_another_process_continues_with_the_reasoning_in_the_journal(desk_of: Desk) -> None:
    desk_of.calls("a.log", sealed=(SEALED,))
    desk_of.provider.says("Empty.", sealed=("s1",))
    first = await desk_of.agent().run("Look.", kind="chat")
    again = Desk(desk_of.bench.folder, desk_of.provider)
    await again.agent().run("Sure?", session=first.session, kind="chat")
    assert [item["encrypted_content"] for item in desk_of.inputs[-1] if item.get("type") == "reasoning"] == [
        SEALED,
        "s1",
    ]


@pytest.mark.parametrize("model", ["azure:gpt-5.6", "House:openai/gpt-5.6", "House:gpt-9-nova"])
async def test_other_providers_of_the_protocol_get_back_their_own(desk_of: Desk, model: str) -> None:
    desk_of.provider.strict = not model.startswith("House:openai/")
    desk_of.calls("a.log", sealed=(SEALED,))
    desk_of.provider.says("Empty.")
    at = {"wire": "responses", "base_url": f"http://127.0.0.1:{desk_of.provider.port}/v1"}
    providers = {model.partition(":")[0]: at}
    result = await desk_of.agent(model=model, providers=providers, fleet={"models": {model: PRICE}}).run("Look.")
    assert result.state == "COMPLETED"
    assert [item["encrypted_content"] for item in desk_of.inputs[1] if "encrypted_content" in item] == [SEALED]


async def test_reasoning_that_another_account_encrypted_is_left_out_and_the_session_continues(desk_of: Desk) -> None:
    desk_of.calls("a.log", sealed=(SEALED,))
    desk_of.provider.says("Empty.")
    first = await desk_of.agent().run("Look.", kind="chat")
    desk_of.provider.sealed.clear()
    second = await desk_of.agent().run("Sure?", session=first.session, kind="chat")
    assert (second.text, second.receipt.requests[-1].outcome) == ("Empty.", "ok")
    assert (SEALED in json.dumps(desk_of.inputs[-2]), SEALED in json.dumps(desk_of.inputs[-1])) == (True, False)
    errors = [fact["error"] for fact in desk_of.facts("request_settled") if "error" in fact]
    assert [error.partition(":")[0] for error in errors] == ["ForeignReasoning"]


async def test_another_gateway_behind_the_same_host_is_sent_none_of_it(desk_of: Desk) -> None:
    def gateway(path: str) -> dict[str, Any]:
        address = f"http://127.0.0.1:{desk_of.provider.port}{path}"
        return {"openai": {"wire": "responses", "base_url": address, "api_key": "${secret:MADE_UP}"}}

    session = None
    for path in ("/north/v1", "/south/v1", "/north/v1/"):
        desk_of.provider.says("Empty.", sealed=(path,))
        agent = desk_of.agent(providers=gateway(path))
        session = (await agent.run("Look.", kind="chat", session=session)).session
    sent = [[item["encrypted_content"] for item in items if "encrypted_content" in item] for items in desk_of.inputs]
    assert sent == [[], [], ["/north/v1"]]


async def test_the_refusal_of_it_is_charged_where_the_provider_bills_errors(desk_of: Desk) -> None:
    at = {"wire": "responses", "base_url": f"http://127.0.0.1:{desk_of.provider.port}/v1", "bills_errors": True}
    desk_of.calls("a.log", sealed=(SEALED,))
    desk_of.provider.says("Empty.")
    first = await desk_of.agent(providers={"openai": at}).run("Look.", kind="chat")
    desk_of.provider.sealed.clear()
    second = await desk_of.agent(providers={"openai": at}).run("Sure?", session=first.session, kind="chat")
    assert second.text == "Empty."
    refused = [each for each in second.receipt.requests if each.outcome == "error"]
    assert [each.cost_usd > 0 for each in refused] == [True]


async def test_a_fork_continues_with_it_too(desk_of: Desk) -> None:
    desk_of.calls("a.log", sealed=(SEALED,))
    desk_of.provider.says("Empty.")
    first = await desk_of.agent().run("Look.")
    forked = await desk_of.agent().fork(first.session, "Sure?")
    assert forked.state == "COMPLETED"
    assert SEALED in json.dumps(desk_of.inputs[-1])


@pytest.mark.parametrize("other", [OTHER, "azure:gpt-5.6"])
async def test_another_model_or_maker_is_sent_none_of_it(desk_of: Desk, other: str) -> None:
    desk_of.calls("a.log", sealed=(SEALED,))
    for _ in range(2):
        desk_of.provider.refuses(500)
        desk_of.provider.then()
    desk_of.calls("b.log", sealed=("s1",))
    desk_of.provider.says("Empty.")
    result = await desk_of.agent(fallback_models=[other], limits={"max_retries": 1}).run("Look.")
    assert result.state == "COMPLETED"
    # The fallback is sent none, and after it the first model only its own.
    sent = [[item["encrypted_content"] for item in items if "encrypted_content" in item] for items in desk_of.inputs]
    assert sent[3:] == [[], [SEALED]]


async def test_reasoning_is_never_masked_or_shown(desk_of: Desk) -> None:
    like_a_secret = "ghp_" + "a1B2c3D4e5F6g7H8i9J0" * 2
    desk_of.calls("a.log", text="I look.", sealed=(like_a_secret,))
    desk_of.provider.says("Empty.")
    result = await desk_of.agent().run("Look.")
    assert like_a_secret in json.dumps(desk_of.inputs[1])
    store = open_store(str(desk_of.bench.file), clock=desk_of.bench.clock, ids=SortableIds(desk_of.bench.clock.now))
    events = await store.read(session_stream(result.session))
    shown_texts = [describe_event(each.event, await read_body(store, each)) for each in events]
    await store.close()
    assert "I look." in "".join(shown_texts)
    assert like_a_secret not in f"{shown_texts} {result.text} {result.receipt}"


async def test_reasoning_is_erased_with_its_answer(desk_of: Desk) -> None:
    desk_of.calls("a.log", sealed=(SEALED * 500,))
    desk_of.provider.says("Empty.")
    result = await desk_of.agent().run("Look.")
    clock = desk_of.bench.clock
    store = open_store(str(desk_of.bench.file), clock=clock, ids=SortableIds(clock.now))
    await erase_session_bodies(store, [result.session], by="ada")
    await store.close()
    assert SEALED.encode() not in desk_of.bench.file.read_bytes()


async def test_a_truncated_thought_is_continued_without_its_loose_end(desk_of: Desk) -> None:
    desk_of.provider.says(sealed=(SEALED,), finish="length")
    desk_of.provider.then()
    desk_of.provider.says("Here.")
    result = await desk_of.agent().run("Look.")
    assert (result.text, result.state) == ("Here.", "COMPLETED")
    assert "reasoning" not in kinds(desk_of.inputs[1])


async def test_cached_input_and_cache_writes_have_their_own_prices(desk_of: Desk) -> None:
    desk_of.provider.says("Here.", usage=(1000, 20, 400), written=500)
    result = await desk_of.agent().run("Look.")
    assert result.cost_usd == micros_to_usd(100 * 2 + 400 // 2 + 500 * 5 // 2 + 20 * 10)


async def test_reasoning_is_held_as_input_at_the_output_that_was_reported_for_it(desk_of: Desk) -> None:
    desk_of.calls("a.log", sealed=(SEALED,), usage=(100, 3000, 0))
    desk_of.provider.says("Here.")
    await desk_of.agent(max_cost_usd=1).run("Look.")
    first, second = (max(leg[-1] for leg in fact["legs"]) for fact in desk_of.facts("request_started"))
    assert first < 100 * 2.5 + 3000 * 2.5 + 4096 * 10 <= second


def test_a_message_is_bounded_with_its_reasoning() -> None:
    plain = Message("assistant", (Text("Yes.", "model"),))
    reasoning = Reasoning("m", (ReasoningItem("text", 0, "rs", "sealed"),), 500)
    assert bound_message_tokens(replace(plain, reasoning=reasoning)) == bound_message_tokens(plain) + 500


async def test_an_answer_in_a_form_is_enforced_and_asked_for_again(desk_of: Desk) -> None:
    desk_of.provider.says('{"value": 3}', sealed=(SEALED,))
    desk_of.provider.then()
    desk_of.provider.says('{"value": 4}', sealed=("s1",))
    agent = desk_of.agent(native_output=True)

    @agent.output_validator
    def reject_three(value: int) -> int:
        if value == 3:
            raise ValueError("three is taken")
        return value

    result = await agent.run("How many?", output_type=int)
    assert (result.state, result.output) == ("COMPLETED", 4)
    assert desk_of.provider.last["text"]["format"]["type"] == "json_schema"


# One request at a time


async def test_pictures_and_files_arrive(desk: Any) -> None:
    desk.provider.says("A cat.")
    pdf = b"%PDF-1.4 /Type /Page "
    files = make_files_message(
        [File(b"\x89PNG", "image/png", "cat.png"), File(pdf, "application/pdf", "cat.pdf", pages=1)]
    )
    await desk.ask(desk.prompt(files, tools=()))
    content = [part for item in desk.provider.last["input"] if item["role"] == "user" for part in item["content"]]
    assert [part["type"] for part in content] == ["input_text", "input_image", "input_text", "input_file"]
    assert content[1]["image_url"].startswith("data:image/png;base64,")
    assert content[3]["file_data"].startswith("data:application/pdf;base64,")


async def test_a_refusal_is_heard_and_is_the_answer(desk: Any) -> None:
    desk.provider.says(refusal=("I can", "not."), sealed=("s",))
    reply = await desk.ask()
    assert (reply.text, reply.stop) == ("I cannot.", "refused")
    assert "".join(desk.heard) == ("I cannot." if desk.streaming else "")


async def test_a_refusal_that_is_cut_off_is_no_answer(streamed: Any) -> None:
    streamed.provider.says(refusal=("I can", "not."), until="text")
    with pytest.raises(ModelUnavailable, match="CutStream"):
        await streamed.ask()


async def test_a_summary_of_reasoning_is_not_what_was_said(desk: Any) -> None:
    desk.provider.says("Seven.", thoughts="The user wants a number.", sealed=("s",))
    reply = await desk.ask()
    assert (reply.text, "".join(desk.heard)) == ("Seven.", "Seven." if desk.streaming else "")
    assert reply.reasoning == Reasoning(
        f"openai:gpt-5.6 at 127.0.0.1:{desk.provider.port}/v1", (ReasoningItem("text", 0, "rs_0", "s"),), 20
    )


def incomplete(desk: Any, reason: str | None, status: str = "incomplete", **more: Any) -> None:
    """Answer with a response that ended in another way than those of the other tests."""
    desk.provider.says("Wel", finish="length")
    body = desk.provider.written("responses") if desk.streaming else b""
    details = {"incomplete_details": {"reason": reason} if reason else None, "status": status, **more}
    if desk.streaming:
        *head, last, _ = body.decode().split("\r\n\r\n")
        event = json.loads(last.partition("data: ")[2])
        event = {**event, "type": f"response.{status}", "response": {**event["response"], **details}}
        tail = f"data: {json.dumps(event)}"
        desk.provider.sends(200, "\r\n\r\n".join([*head, tail, ""]).encode(), "text/event-stream")
    else:
        whole = {"id": "r", "object": "response", "created_at": 1, "model": "m", "output": [], "error": None}
        fixed = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
        usage = {"input_tokens": 100, "output_tokens": 20, "total_tokens": 120}
        desk.provider.sends(200, {**whole, **fixed, "usage": usage, **details})


@pytest.mark.parametrize("reason", ["max_output_tokens", "max_messages", "something new", None])
async def test_an_incomplete_response_is_a_truncated_one_whatever_the_reason(desk: Any, reason: str | None) -> None:
    incomplete(desk, reason)
    reply = await desk.ask()
    assert reply.stop == "max_tokens"
    assert reply.usage is not None


async def test_a_filtered_response_is_a_refused_one(desk: Any) -> None:
    incomplete(desk, "content_filter")
    assert (await desk.ask()).stop == "refused"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("server_error", ModelUnavailable),
        ("rate_limit_exceeded", ModelUnavailable),
        ("context_length_exceeded", ContextOverflow),
    ],
)
async def test_a_failed_response_is_charged_at_what_it_reports(desk: Any, code: str, kind: type[Exception]) -> None:
    incomplete(desk, None, "failed", error={"code": code, "message": "No luck."})
    with pytest.raises(kind, match=r"No luck\.") as caught:
        await desk.ask()
    assert (caught.value.billed, caught.value.usage is not None, caught.value.final) == (True, True, True)  # pyright: ignore[reportAttributeAccessIssue]


async def test_a_failed_response_without_an_error_is_worth_another_try(desk: Any) -> None:
    incomplete(desk, None, "failed")
    with pytest.raises(ModelUnavailable):
        await desk.ask()


@pytest.mark.parametrize(
    ("model", "thinking", "effort"),
    [
        ("gpt-5.6", None, None),
        ("gpt-5.6", "off", "none"),
        ("gpt-5.6", "low", "low"),
        ("gpt-5.6", "medium", "medium"),
        ("gpt-5.6", "high", "high"),
        ("gpt-6-sol", "off", "none"),
        ("gpt-6-astra", "off", "low"),
        ("gpt-6.1-sol", "off", "low"),
        ("gpt-9-nova", "off", "low"),
        ("gpt-9-nova", "high", "high"),
        ("gpt-5-pro", "low", "high"),
        ("gpt-4.1", "high", None),
        ("gpt-4.1", "off", None),
    ],
)
async def test_thinking_is_the_effort_that_the_model_accepts(
    desk: Any, model: str, thinking: Any, effort: str | None
) -> None:
    desk.provider.strict = model != "gpt-5-pro"
    desk.provider.says("Yes.", sealed=("s",) if model != "gpt-4.1" else ())
    chosen = desk.reach(ModelName("openai", model), habits=ModelHabits(0.3, thinking))
    reply = await desk.ask(model=chosen)
    await chosen.aclose()
    assert desk.provider.last.get("reasoning", {}).get("effort") == effort
    assert (reply.reasoning is not None) == (model != "gpt-4.1")


CALLED = Message("assistant", (ToolCall("id-1", "read_file", "{}"),))
RESULT = Message("user", (ToolResult("id-1", "read_file", "ok", "line one"),))
NOW = Text("It is 3 o'clock.", "config", reason=VOLATILE)
MARK = {"mode": "explicit"}


def marks(body: Any) -> list[tuple[str, Any]]:
    """Find the marks of a request, each with the text that it follows."""
    parts = (
        part
        for item in body["input"]
        for value in (item.get("content"), item.get("output"))
        if isinstance(value, list)
        for part in value
    )
    return [(part["text"], part["prompt_cache_breakpoint"]) for part in parts if "prompt_cache_breakpoint" in part]


async def test_the_cache_ends_before_what_is_true_only_now(desk: Any) -> None:
    """Its own mark would be at the very end, where no later request finds it."""
    desk.provider.says("Yes.")
    question = make_user_message("What is in a.log?")
    await desk.ask(desk.prompt(Message("user", (*question.parts, NOW))))
    await desk.ask(desk.prompt(question, CALLED, Message("user", (*RESULT.parts, NOW))))
    first, second = (each.body for each in desk.provider.asked)
    assert marks(first) == [("Be brief.", MARK), ("What is in a.log?", MARK)]
    assert marks(second) == [*marks(first), ("line one", MARK)]
    assert first["prompt_cache_options"] == second["prompt_cache_options"] == {"mode": "explicit"}
    assert first["prompt_cache_key"] == second["prompt_cache_key"]


async def test_a_cache_that_is_switched_off_is_neither_written_nor_named(desk: Any) -> None:
    desk.provider.says("Yes.")
    model = desk.reach(desk.model.name, terms=ExchangeTerms(prompt_cache=False))
    await desk.ask(model=model)
    await model.aclose()
    assert (marks(desk.provider.last), desk.provider.last["prompt_cache_options"]) == ([], {"mode": "explicit"})
    assert "prompt_cache_key" not in desk.provider.last


async def test_older_models_and_other_servers_are_sent_no_marks(desk: Any) -> None:
    desk.provider.says("Yes.")
    for name in (ModelName("openai", "gpt-4.1"), ModelName("azure", "gpt-5.6"), ModelName("mine", "gpt-5.6")):
        model = desk.reach(name)
        await desk.ask(model=model)
        await model.aclose()
        assert "breakpoint" not in json.dumps(desk.provider.last)
        assert "prompt_cache_options" not in desk.provider.last


async def test_the_key_of_the_cache_is_that_of_the_session_and_says_nothing_about_it(desk: Any) -> None:
    desk.provider.says("Yes.")
    ada = make_user_message("Write to ada@example.com.")
    for messages in ((ada,), (ada, CALLED, RESULT), (Message("user", (*ada.parts, NOW)),), (make_user_message("Hm?"),)):
        await desk.ask(desk.prompt(*messages))
    keys = [asked.body["prompt_cache_key"] for asked in desk.provider.asked]
    assert keys[0] == keys[1] == keys[2] != keys[3]
    assert all(len(key) == 32 and key.isalnum() for key in keys)


def list_units(body: dict[str, Any]) -> list[tuple[str, bool]]:
    """List what a request consists of, in its order, and which of it ends with a mark."""
    units = [(json.dumps(body.get("tools", [])), False)]
    for item in body["input"]:
        key = "output" if "output" in item else "content"
        parts = item.get(key) if isinstance(item.get(key), list) else [{"text": item.get(key)}]
        rest = {name: value for name, value in item.items() if name != key}
        units += [(json.dumps([rest, part.get("text")]), "prompt_cache_breakpoint" in part) for part in parts]
    return units


def compute_cached_share(bodies: list[dict[str, Any]]) -> float:
    """Compute the share of the input that is read from a cache which is found only at marks, as OpenAI's is."""
    cached: set[str] = set()
    read = total = 0
    for body in bodies:
        prefix, marked = "", [""]
        for text, is_marked in list_units(body):
            prefix += text
            marked += [prefix] if is_marked else []
        read += max(len(each) for each in marked if each in cached or not each)
        total += len(prefix)
        cached |= {*marked}
    return read / total


async def test_of_a_session_of_twenty_steps_nearly_all_input_is_read_from_the_cache(desk_of: Desk) -> None:
    for step in range(19):
        desk_of.calls(f"{step}.log", text=f"I look for the {step}th time.", sealed=(f"{SEALED}{step}",))
    desk_of.provider.says("Empty.")
    result = await desk_of.agent(instructions="Be brief. " * 100, max_cost_usd=5).run("Look at all logs.")
    assert result.state == "COMPLETED"
    bodies = [asked.body for asked in desk_of.provider.asked]
    assert len(bodies) == 20
    assert len({json.dumps(body["input"][-1]) for body in bodies}) == 20, "each ends with what is true only now"
    assert compute_cached_share(bodies) > 0.9


# Which wire


@pytest.mark.parametrize(
    ("provider_name", "url", "protocol"),
    [
        ("openai", "https://api.openai.com/v1", "responses"),
        ("openai", "https://eu.api.openai.com/v1", "responses"),
        ("work", "https://api.openai.com/v1", "responses"),
        ("azure", "https://gateway.example.com/openai/v1", "responses"),
        ("cloud", "https://house.openai.azure.com/openai/v1/", "responses"),
        ("openai", "http://127.0.0.1:4000/v1", "openai"),
        ("openai", "https://api.openai.com.example.com/v1", "openai"),
        ("openai", "https://notapi.openai.com.evil/v1", "openai"),
        ("groq", "https://api.groq.com/openai/v1", "openai"),
        ("vllm", "http://localhost:8000/v1", "openai"),
        ("anthropic", "https://api.anthropic.com", "anthropic"),
    ],
)
def test_the_wire_follows_from_the_address(provider_name: str, url: str, protocol: str) -> None:
    assert choose_wire(provider_name, url) == protocol


def test_openai_is_asked_over_responses_at_its_own_address_and_over_chat_at_another() -> None:
    name = ModelName("openai", "gpt-5.6")
    key = {"OPENAI_API_KEY": "made-up"}
    assert find_endpoint(name, {}, key.get)[0].wire == "responses"
    assert find_endpoint(name, {}, {**key, "OPENAI_BASE_URL": "http://127.0.0.1:1/v1"}.get)[0].wire == "openai"
    described = {"openai": Provider(wire="openai", base_url="https://api.openai.com/v1")}
    assert find_endpoint(name, described, key.get)[0].wire == "openai"
    assert make_model("openai:gpt-5.6", {}, key.get).wire == "responses"


@pytest.mark.parametrize("model", ["gpt-audio", "gpt-audio-mini", "gpt-4o-audio-preview", "gpt-4o-search-preview"])
def test_a_model_that_only_chat_completions_has_is_asked_there(model: str) -> None:
    assert make_model(f"openai:{model}", {}, {"OPENAI_API_KEY": "made-up"}.get).wire == "openai"
