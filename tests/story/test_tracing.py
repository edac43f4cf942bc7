"""Traces of unattended agents, sent to a real receiver on this machine, or to none."""

import asyncio
import json
import logging
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest
from library_bench import PRICED, Bench
from opentelemetry import context as otel_context
from opentelemetry import trace as otel
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from halter import Agent, Store, tool
from halter.core.errors import ConfigError, StoreUnusable
from halter.core.events import SessionEnded, TurnEnded, TurnStarted
from halter.core.events.effects import CallRefused, CallSettled, CallStarted, RequestSettled, RequestStarted
from halter.core.ids import StreamId, WorkerId, inbox_stream, session_stream
from halter.core.ports import Draft, Lease, Write
from halter.core.rows import AuditRow
from halter.core.usage import Usage
from halter.models.scripted import Scripted, call, say
from halter.runtime.feed import CommitObserver
from halter.runtime.telemetry.metrics import MetricTable
from halter.runtime.telemetry.spans import SpanSender, open_span_sender
from halter.runtime.telemetry.tracer import SessionTracer, count_metrics
from halter.state.trace import Span
from halter.state.trace_context import SpanReference
from halter.testing.world import World
from tests.story.test_cli_talk import Person, until
from tests.story.test_cli_up import RUNS, Up

CANARY = "canary-51c2"
LOOKS = f"""\
- calls: [{{tool: look, arguments: {{at: "{CANARY}"}}}}]
- text: All {CANARY} is well.
  calls: [{{tool: yield, arguments: {{mode: sleep, sleep: 1h, reason: {CANARY}}}}}]
"""


class Receiver:
    """A collector on this machine: it takes whatever is sent, or refuses it."""

    def __init__(self, status: int = 200) -> None:
        self.bodies: list[bytes] = []
        self.metric_bodies: list[bytes] = []
        self.news = threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with receiver.news:
                    (receiver.metric_bodies if self.path.endswith("/metrics") else receiver.bodies).append(body)
                    receiver.news.notify_all()
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def spans(self) -> list[Any]:
        results: list[Any] = []
        for body in self.bodies:
            request = ExportTraceServiceRequest.FromString(body)
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    results += scope.spans
        return results

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the newest request that has any, by name."""
        for body in reversed(self.metric_bodies):
            request = ExportMetricsServiceRequest.FromString(body)
            return {
                metric.name: metric
                for resource in request.resource_metrics
                for scope in resource.scope_metrics
                for metric in scope.metrics
            }
        return {}

    def until(self, *names: str) -> list[Any]:
        with self.news:
            assert self.news.wait_for(lambda: set(names) <= {span.name for span in self.spans()}, timeout=60)
        return self.spans()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    new_receiver = Receiver()
    yield new_receiver
    new_receiver.server.shutdown()
    new_receiver.server.server_close()


@pytest.fixture
def ada(tmp_path: Path) -> Iterator[Person]:
    person = Person(tmp_path)
    person.writes(LOOKS * 5, RUNS)
    yield person
    while Up.begun:
        with Up.begun.pop().program as program:
            program.kill()


def test_a_collector_gets_the_spans_of_a_turn_and_not_a_word_of_what_was_said(ada: Person, receiver: Receiver) -> None:
    ada.environ |= {"HALTER_TRACES": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url}
    up = Up(ada, str(ada.agent))
    up.until("sleeps")
    spans = {span.name: span for span in receiver.until("turn 1", "execute_tool look", "chat script")}
    assert up.ends()[0] == 130
    turn = spans["turn 1"]
    assert {spans["execute_tool look"].parent_span_id, spans["chat script"].parent_span_id} == {turn.span_id}
    assert len({span.trace_id for span in receiver.spans()}) == 1
    fields = {each.key: each.value for each in spans["execute_tool look"].attributes}
    assert fields["gen_ai.tool.name"].string_value == "look"
    assert fields["halter.level"].string_value == "SAFE"
    assert all(CANARY.encode() not in body for body in receiver.bodies)


def test_what_was_said_is_sent_where_somebody_asked_for_it(ada: Person, receiver: Receiver) -> None:
    ada.environ |= {"HALTER_TRACES": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "HALTER_TRACES_CONTENT": "1"}
    up = Up(ada, str(ada.agent))
    (tool,) = [span for span in receiver.until("execute_tool look") if span.name == "execute_tool look"]
    up.ends()
    fields = {each.key: each.value.string_value for each in tool.attributes}
    assert json.loads(fields["gen_ai.tool.call.arguments"]) == {"at": CANARY}
    assert fields["gen_ai.tool.call.result"] == f"nothing at {CANARY}"


def test_a_restart_continues_the_same_trace_and_repeats_no_span(ada: Person, receiver: Receiver) -> None:
    ada.environ |= {"HALTER_TRACES": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url}
    first = Up(ada, str(ada.agent))
    first.until("sleeps")
    receiver.until("turn 1")
    first.ends(signal.SIGTERM)
    second = Up(ada, str(ada.agent))
    second.until("-1 resumes (")
    assert ada.types("cancel", "desk-1")[0] == 0
    spans = receiver.until("invoke_agent desk")
    second.ends()
    assert len({span.span_id for span in spans}) == len(spans)
    assert len({span.trace_id for span in spans}) == 1
    (session,) = [span for span in spans if span.name == "invoke_agent desk"]
    (turn,) = [span for span in spans if span.name == "turn 1"]
    assert turn.parent_span_id == session.span_id


def test_a_collector_that_refuses_everything_is_reported_once_and_agents_continue(ada: Person) -> None:
    refusing = Receiver(400)
    ada.environ |= {"HALTER_TRACES": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": refusing.url}
    up = Up(ada, str(ada.agent))
    up.until("sleeps", "Traces are being lost")
    code, text = up.ends()
    assert (code, text) == (130, "")
    assert len([line for line in up.seen if "Traces are being lost" in line]) == 1
    refusing.server.shutdown()
    refusing.server.server_close()


def test_traces_go_to_a_file_that_only_its_owner_may_read(ada: Person) -> None:
    ada.environ["HALTER_TRACES"] = "file:traces.jsonl"
    up = Up(ada, str(ada.agent))
    up.until("sleeps")
    file = ada.home / "traces.jsonl"
    # The tracer reads the journal at its own pace.
    until(lambda: file.exists() and '"turn 1"' in file.read_text())
    assert up.ends() == (130, "")
    assert file.stat().st_mode & 0o777 == 0o600
    names = [json.loads(line)["name"] for line in file.read_text().splitlines()]
    assert "execute_tool look" in names
    assert "turn 1" in names
    assert CANARY not in file.read_text()


@pytest.mark.parametrize(
    ("way", "sentence"),
    [
        ("jaeger", "HALTER_TRACES is 'jaeger', which is not a valid target: write otlp, console, file:PATH or off."),
        ("file:", "HALTER_TRACES is 'file:', which is not a valid target"),
        ("file:/nowhere/at/all", "Traces cannot be written to '/nowhere/at/all' (No such file or directory)"),
    ],
)
def test_a_slip_in_the_variable_is_answered_with_a_sentence(ada: Person, way: str, sentence: str) -> None:
    ada.environ["HALTER_TRACES"] = way
    code, _, text = ada.types("up", str(ada.agent))
    assert code == 3
    assert sentence in text


def test_a_missing_extra_is_a_sentence(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['opentelemetry.sdk.trace.export'] = None\n"
        "from halter.runtime.telemetry.spans import open_span_sender\n"
        "try:\n  open_span_sender('otlp', {}).__enter__()\nexcept Exception as e: print(type(e).__name__, e)"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    install = "pip install 'halter-agents[telemetry]'"
    sentence = f"HALTER_TRACES is set, but OpenTelemetry is not installed: {install}, or unset it."
    assert process.stdout == f"ConfigError {sentence}\n"


def test_without_the_variable_nothing_is_imported_and_no_thread_is_started(tmp_path: Path) -> None:
    program = """
import asyncio, sys, threading
from halter.runtime.runtime import open_runtime
from halter.runtime.telemetry.tracer import trace_agents
from halter.settings import read_settings
from pathlib import Path

async def main():
    async with open_runtime(read_settings({"HALTER_STORE": "memory:", "LOGNAME": "ada"}, Path(sys.argv[1]))) as app:
        with trace_agents(app, app.store, print, lambda _: True, {}) as jobs:
            print(len(jobs), [name for name in sys.modules if "opentelemetry" in name])
            print([each.name for each in threading.enumerate() if "trace" in each.name])
asyncio.run(main())
"""
    process = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert process.stdout == "0 []\n[]\n"


class Kept:
    """Takes spans, as long as there is room."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.said = ""

    def enqueue(self, span: Span) -> None:
        self.spans.append(span)

    def trouble(self) -> str:
        text, self.said = self.said, ""
        return text


async def write(world: World, lease: Lease, *events: Any) -> None:
    for event in events:
        stream = session_stream(lease.session)
        reads = [(AuditRow, event.call)] if isinstance(event, CallRefused | CallStarted | CallSettled) else ()
        await world.journal.commit(Write(stream, world.ids.make(), lambda _, e=event: [Draft(e)], reads, lease=lease))


ASKS = RequestStarted(request="r1", model="openai:gpt-5-mini", purpose="turn")
ANSWERS = RequestSettled(request="r1", outcome="ok")
ASKS_AGAIN = RequestStarted(request="r2", model="openai:gpt-5-mini", purpose="turn")
ANSWERS_AGAIN = RequestSettled(request="r2", outcome="ok")


def test_a_follower_that_begins_in_the_middle_makes_the_spans_that_the_one_before_it_would_have_made() -> None:
    with World(3) as world:

        async def story() -> tuple[list[Span], list[Span]]:
            await world.start("desk-1", kind="autonomous")
            (lease,) = await world.journal.claim(WorkerId("w"), 1)
            whole, late = Kept(), Kept()
            world.spawn(SessionTracer(world.journal, world.clock, [whole], print).run({}))
            await write(world, lease, TurnStarted(turn=1), ASKS)
            await world.advance(10**6)
            values = {session_stream("desk-1"): 3}
            world.spawn(SessionTracer(world.journal, world.clock, [late], print).run(values))
            ends = SessionEnded(state="COMPLETED", terminal_reason="completed")
            await write(world, lease, ANSWERS, TurnEnded(turn=1, why="ended"), ends)
            await world.advance(10**7)
            return whole.spans, late.spans

        whole, late = world.run(story())
    assert [span.name for span in whole] == ["chat gpt-5-mini", "turn 1", "invoke_agent agent"]
    assert late == whole


def test_a_session_that_moves_between_workers_stays_one_trace_and_each_makes_the_spans_of_what_it_did() -> None:
    with World(3) as world:

        async def story() -> tuple[list[Span], list[Span], list[Span]]:
            await world.start("desk-1", kind="autonomous")
            (lease,) = await world.journal.claim(WorkerId("w"), 1)
            whole, sinks = Kept(), (Kept(), Kept())
            world.spawn(SessionTracer(world.journal, world.clock, [whole], print).run({}))
            loop = asyncio.get_running_loop()
            north, south = CommitObserver(loop, lambda _: True), CommitObserver(loop, lambda _: True)
            for sink, commit_observer in zip(sinks, (north, south), strict=True):
                world.spawn(SessionTracer(world.journal, world.clock, [sink], print).run_here(commit_observer))
            ends = SessionEnded(state="COMPLETED", terminal_reason="completed")
            done = ((TurnStarted(turn=1), ASKS), (ANSWERS, TurnEnded(turn=1, why="ended"), TurnStarted(turn=2)))
            after = 1
            for commit_observer, events in zip(
                (north, south, north), (*done, (TurnEnded(turn=2, why="ended"), ends)), strict=True
            ):
                await write(world, lease, *events)
                commit_observer.on_commit(await world.journal.read(session_stream("desk-1"), after))
                after += len(events)
                await world.advance(10**6)
            await world.advance(10**7)
            return whole.spans, sinks[0].spans, sinks[1].spans

        whole, north, south = world.run(story())
    assert [span.name for span in south] == ["chat gpt-5-mini", "turn 1"]
    assert [span.name for span in north] == ["turn 2", "invoke_agent agent"]
    assert [*south, *north] == whole


@pytest.mark.postgres
def test_a_worker_traces_what_it_does_itself(ada: Person, postgres_schema_url: str) -> None:
    ada.environ |= {"HALTER_TRACES": "file:traces.jsonl", "HALTER_STORE": postgres_schema_url}
    worker = Worker(ada, str(ada.agent))
    worker.until("sleeps")
    assert worker.ends(signal.SIGTERM)[0] == 0
    spans = [json.loads(line)["name"] for line in (ada.home / "traces.jsonl").read_text().splitlines()]
    assert "execute_tool look" in spans
    assert "turn 1" in spans


class Worker(Up):
    """One of many."""

    command = ("worker",)


def test_only_our_own_agents_are_traced_and_trouble_is_reported() -> None:
    with World(4) as world:

        async def story() -> tuple[list[Span], list[str]]:
            await world.start("desk-1")
            (lease,) = await world.journal.claim(WorkerId("w"), 1)
            kept, texts = Kept(), list[str]()
            kept.said = "The collector is gone."
            others = SessionTracer(
                world.journal, world.clock, [kept], texts.append, lambda trace: trace.agent == "somebody else"
            )
            world.spawn(others.run({}))
            await write(world, lease, ASKS, ANSWERS)
            await world.advance(10**7)
            return kept.spans, texts

        assert world.run(story()) == ([], ["The collector is gone."])


class Broken(Kept):
    """Breaks down at the first span."""

    def enqueue(self, span: Span) -> None:
        raise RuntimeError(f"no room for {span.name}")


def test_a_breakdown_of_the_traces_is_reported_and_stops_nobody() -> None:
    with World(5) as world:

        async def story() -> list[str]:
            await world.start("desk-1")
            (lease,) = await world.journal.claim(WorkerId("w"), 1)
            texts = list[str]()
            task = world.spawn(SessionTracer(world.journal, world.clock, [Broken()], texts.append).run({}))
            await write(world, lease, ASKS, ANSWERS)
            await world.advance(10**7)
            assert task.done()
            return texts

        (sentence,) = world.run(story())
    assert sentence.startswith("Tracing failed and is off until the next start; agents continue")
    assert "no room for chat gpt-5-mini" in sentence


def test_a_stalled_collector_is_never_waited_for_and_what_it_did_not_take_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stalled = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _make_stalling_handler(stalled))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    span = Span(trace=1, span=1, parent=None, name="x", kind="internal", start=0, end=1, attributes={})
    with open_span_sender("otlp", {}) as sink:
        for _ in range(5000):
            sink.enqueue(span)
        assert sink.dropped_count >= 5000 - 2048 - 512 - 1
        assert "Traces are being lost" in sink.trouble()
        assert sink.trouble() == ""
        stalled.set()
    server.shutdown()
    server.server_close()
    logging.getLogger("opentelemetry").handlers.clear()


def _make_stalling_handler(until: threading.Event) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            until.wait(30)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    return Handler


def test_a_place_that_is_none_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="not a valid target"), open_span_sender("elsewhere", {}):
        pass


def read_names(file: Path) -> list[str]:
    return [json.loads(line)["name"] for line in file.read_text().splitlines()]


def test_a_run_a_chat_and_a_playbook_are_traced_to_their_end(ada: Person) -> None:
    (ada.agent / "steps.yaml").write_text("- {call: look, arguments: {at: there}}\n")
    ada.writes("- calls: [{tool: look, arguments: {at: here}}]\n- {repeat: true, text: All is well.}\n")
    commands = {
        "run": (["run", str(ada.agent), "look around"], b"", ["execute_tool look", "turn 1", "invoke_agent desk"]),
        "chat": (["chat", str(ada.agent), "--no-route"], b"look\n/quit\n", ["chat script", "turn 1"]),
        "play": (["play", str(ada.agent / "steps.yaml")], b"", ["execute_tool look", "invoke_agent desk"]),
    }
    for name, (words, body, expected) in commands.items():
        ada.environ["HALTER_TRACES"] = f"file:{name}.jsonl"
        assert ada.types(*words, given=body)[0] == 0
        texts = read_names(ada.home / f"{name}.jsonl")
        assert [each for each in expected if each not in texts] == [], name


async def test_an_agent_of_a_program_is_traced(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "HALTER_TRACES": f"file:{tmp_path / 'traces.jsonl'}"}
    agent = Bench(tmp_path).agent(say("All is well."), environ=environ)
    assert (await agent.run("Look.", kind="task")).ok
    assert read_names(tmp_path / "traces.jsonl") == ["chat first", "turn 1", "invoke_agent desk"]


@pytest.fixture
def app_tracer() -> otel.Tracer:
    """The tracer of a program that uses OpenTelemetry itself."""
    return TracerProvider().get_tracer("app")


def read_spans(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def hex_ids(span: otel.Span) -> tuple[str, str]:
    """Return the ids of a span as the exporter writes them."""
    context = span.get_span_context()
    return f"0x{context.trace_id:032x}", f"0x{context.span_id:016x}"


def trace_to(folder: Path, name: str = "traces.jsonl", **more: str) -> dict[str, str]:
    return {"HOME": str(folder), "HALTER_TRACES": f"file:{folder / name}", **more}


async def test_a_run_is_a_part_of_the_trace_of_the_program_that_calls_it(
    tmp_path: Path, app_tracer: otel.Tracer
) -> None:
    agent = Bench(tmp_path).agent(say("All is well."), environ=trace_to(tmp_path))
    with app_tracer.start_as_current_span("request") as request:
        assert (await agent.run("Look.", kind="task")).ok
    chat, turn, session = read_spans(tmp_path / "traces.jsonl")
    assert (session["context"]["trace_id"], session["parent_id"]) == hex_ids(request)
    assert {span["context"]["trace_id"] for span in (chat, turn)} == {hex_ids(request)[0]}
    assert (chat["parent_id"], turn["parent_id"]) == (turn["context"]["span_id"], session["context"]["span_id"])


async def test_a_program_without_a_current_span_begins_a_trace_and_writes_no_caller(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert (await bench.agent(say("All is well."), environ=trace_to(tmp_path)).run("Look.", kind="task")).ok
    *_, session = read_spans(tmp_path / "traces.jsonl")
    assert session["parent_id"] is None
    (fact,) = bench.facts("session_started")
    assert "traceparent" not in fact


async def test_a_session_that_parks_for_a_person_goes_on_in_its_callers_trace_in_another_process(
    tmp_path: Path, app_tracer: otel.Tracer
) -> None:
    bench, asks = Bench(tmp_path), [call("ask_user", question="Which one?"), say("The first.")]
    environ = trace_to(tmp_path)
    with app_tracer.start_as_current_span("first") as first:
        parked = await bench.agent(*asks, environ=environ).run("Choose.", kind="task", id="desk-9")
    assert parked.state == "WAITING_FOR_INPUT"
    with app_tracer.start_as_current_span("second") as second:
        done = await bench.agent(asks[1], environ=environ).run("The first.", session="desk-9")
    assert done.ok
    named = {span["name"]: span for span in read_spans(tmp_path / "traces.jsonl")}
    session = named["invoke_agent desk"]
    assert (session["context"]["trace_id"], session["parent_id"]) == hex_ids(first)
    assert {span["context"]["trace_id"] for span in named.values()} == {hex_ids(first)[0]}
    (link,) = named["turn 2"]["links"]
    assert (link["context"]["trace_id"], link["context"]["span_id"]) == hex_ids(second)
    assert named["turn 1"]["links"] == []


async def test_a_sampler_that_drops_the_callers_trace_drops_what_belongs_to_it(tmp_path: Path) -> None:
    agent = Bench(tmp_path).agent(say("All is well."), environ=trace_to(tmp_path))
    context = otel.SpanContext(7, 7, is_remote=True, trace_flags=otel.TraceFlags(otel.TraceFlags.DEFAULT))
    token = otel_context.attach(otel.set_span_in_context(otel.NonRecordingSpan(context)))
    try:
        assert (await agent.run("Look.", kind="task")).ok
    finally:
        otel_context.detach(token)
    assert read_spans(tmp_path / "traces.jsonl") == []


async def test_an_agent_that_another_one_calls_is_in_the_same_trace(tmp_path: Path, app_tracer: otel.Tracer) -> None:
    bench = Bench(tmp_path)
    helper = Agent("helper", store=bench.file, model=Scripted([say("Found it.")], bench.clock))
    agent = bench.agent(call("ask_helper", task="Look."), say("Done."), environ=trace_to(tmp_path), agents=[helper])
    with app_tracer.start_as_current_span("request") as request:
        assert (await agent.run("Look.", kind="task")).ok
    spans = read_spans(tmp_path / "traces.jsonl")
    named = {span["name"]: span for span in spans}
    assert {span["context"]["trace_id"] for span in spans} == {hex_ids(request)[0]}
    assert named["invoke_agent helper"]["parent_id"] == named["execute_tool ask_helper"]["context"]["span_id"]


async def test_prompts_are_traced_where_somebody_asked_for_it_without_secrets(tmp_path: Path) -> None:
    secret = "sk-proj-AbCdEf0123456789AbCdEf0123456789AbCdEf01"
    for name, more in (("off", {}), ("on", {"HALTER_TRACES_CONTENT": "1"})):
        agent = Bench(tmp_path / name).agent(
            say("All is well."),
            instructions=f"Be kind to {CANARY}. {secret}",
            environ=trace_to(tmp_path, f"{name}.jsonl", **more),
        )
        assert (await agent.run(f"Look at {CANARY} with {secret}.", kind="task")).ok
    assert CANARY not in (tmp_path / "off.jsonl").read_text()
    assert secret not in (tmp_path / "on.jsonl").read_text()
    chat = read_spans(tmp_path / "on.jsonl")[0]["attributes"]
    (instructions,) = json.loads(chat["gen_ai.system_instructions"])
    assert instructions["content"].startswith(f"Be kind to {CANARY}.")
    message, *_ = json.loads(chat["gen_ai.input.messages"])
    assert message["role"] == "user"
    assert CANARY in message["parts"][0]["content"]
    assert json.loads(chat["gen_ai.output.messages"])[0]["parts"] == [{"type": "text", "content": "All is well."}]


def test_a_sender_hands_whole_spans_to_any_exporter_of_the_sdk() -> None:
    exporter = InMemorySpanExporter()
    link = SpanReference(3, 4)
    sender = SpanSender(exporter, Resource.create({}))
    fields: dict[str, Any] = {"trace": 1, "parent": 9, "kind": "internal", "start": 0, "end": 1, "attributes": {}}
    sender.enqueue(Span(span=2, name="kept", links=(link,), has_remote_parent=True, **fields))
    sender.enqueue(Span(span=3, name="dropped", is_sampled=False, **fields))
    sender.close()
    (span,) = exporter.get_finished_spans()
    assert span.name == "kept"
    assert span.parent is not None
    assert (span.parent.span_id, span.parent.is_remote) == (9, True)
    assert [(each.context.trace_id, each.context.span_id) for each in span.links] == [(3, 4)]


TOKEN_BUCKETS = [1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864]
SECOND_BUCKETS = [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92]
LOOKS_ONCE = f"""\
- calls: [{{tool: look, arguments: {{at: "{CANARY}"}}}}, {{tool: send_all, arguments: {{}}}}]
  usage: {{input_tokens: 1000, output_tokens: 40}}
- text: All {CANARY} is well.
  usage: {{input_tokens: 2000, output_tokens: 50}}
"""


def read_attributes(point: Any) -> dict[str, str]:
    return {each.key: each.value.string_value for each in point.attributes}


def test_a_collector_gets_metrics_with_the_names_buckets_and_attributes_of_the_conventions(
    ada: Person, receiver: Receiver
) -> None:
    ada.environ |= {"HALTER_METRICS": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url}
    ada.writes(LOOKS_ONCE)
    assert ada.types("run", str(ada.agent), "look around")[0] == 0
    metrics = receiver.metrics()
    assert receiver.bodies == []
    tokens = metrics["gen_ai.client.token.usage"]
    assert tokens.unit == "{token}"
    by_type = {read_attributes(point)["gen_ai.token.type"]: point for point in tokens.histogram.data_points}
    assert {kind: (point.count, point.sum) for kind, point in by_type.items()} == {
        "input": (2, 3000),
        "output": (2, 90),
    }
    assert by_type["input"].explicit_bounds == TOKEN_BUCKETS
    assert read_attributes(by_type["input"]) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "scripted",
        "gen_ai.request.model": "script",
        "gen_ai.agent.name": "desk",
        "gen_ai.token.type": "input",
    }
    (duration,) = metrics["gen_ai.client.operation.duration"].histogram.data_points
    assert (metrics["gen_ai.client.operation.duration"].unit, duration.count) == ("s", 2)
    assert duration.explicit_bounds == SECOND_BUCKETS
    (refusal,) = metrics["halter.refusals"].sum.data_points
    assert metrics["halter.refusals"].sum.is_monotonic
    assert (refusal.as_double or refusal.as_int) == 1
    assert read_attributes(refusal)["halter.outcome"] == "unknown_tool"
    assert CANARY.encode() not in b"".join(receiver.metric_bodies)


async def test_spend_and_waiting_decisions_are_metrics(tmp_path: Path) -> None:
    bench, file = Bench(tmp_path), tmp_path / "metrics.jsonl"
    environ = {"HOME": str(tmp_path), "HALTER_METRICS": f"file:{file}"}
    answers = [say("Let me.", Usage(1000, 100)), call("pay", amount=3)]
    agent = bench.agent(*answers, fleet=PRICED, environ=environ, tools=[pay], policy={"mode": "ASSIST"})
    assert (await agent.run("Greet.", kind="task")).ok
    paying = asyncio.create_task(agent.run("Pay.", kind="task"))
    async with Store(bench.file, environ={"HOME": str(tmp_path)}, clock=bench.clock) as store:
        while not await store.inbox():
            pass
    paying.cancel()
    await asyncio.wait([paying])
    runs = [
        {metric["name"]: metric for metric in json.loads(line)["resource_metrics"][0]["scope_metrics"][0]["metrics"]}
        for line in file.read_text().splitlines()
    ]
    (spend,) = runs[0]["halter.spend"]["data"]["data_points"]
    assert (spend["value"], runs[0]["halter.spend"]["unit"]) == (0.002, "USD")
    assert "halter.decisions.waiting" not in runs[0]
    (waiting,) = runs[-1]["halter.decisions.waiting"]["data"]["data_points"]
    assert (waiting["value"], waiting["attributes"]["gen_ai.agent.name"]) == (1, "desk")


@tool(level="RESTRICTED")
def pay(amount: int) -> str:
    """Pay an amount."""
    return f"Paid {amount}."


def test_a_collector_without_room_for_metrics_is_reported_once_and_agents_continue(ada: Person) -> None:
    refusing = Receiver(400)
    ada.environ |= {
        "HALTER_METRICS": "otlp",
        "OTEL_EXPORTER_OTLP_ENDPOINT": refusing.url,
        "OTEL_METRIC_EXPORT_INTERVAL": "50",
    }
    up = Up(ada, str(ada.agent))
    up.until("sleeps", "Metrics cannot be sent")
    assert up.ends() == (130, "")
    assert len([line for line in up.seen if "Metrics cannot be sent" in line]) == 1
    refusing.server.shutdown()
    refusing.server.server_close()


def test_a_slip_in_the_variable_of_metrics_names_it(ada: Person) -> None:
    ada.environ["HALTER_METRICS"] = "prometheus"
    code, _, text = ada.types("up", str(ada.agent))
    assert code == 3
    assert "HALTER_METRICS is 'prometheus', which is not a valid target: write otlp, console, file:PATH or off." in text


def test_series_beyond_the_limit_are_counted_in_one_more() -> None:
    with World(6) as world:
        table = MetricTable(world.clock)
        for number in range(2100):
            attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": f"t{number}"}
            fields: dict[str, Any] = {"trace": 1, "span": 1, "parent": None, "kind": "internal", "start": 0, "end": 0}
            table.enqueue(Span(name="x", attributes=attributes, is_refusal=True, error="disabled", **fields))
        lines = [line for line in table.render().splitlines() if line.startswith("halter_refusals_total{")]
    assert len(lines) == 2001
    assert 'halter_refusals_total{otel_metric_overflow="true"} 100' in lines


def test_names_with_quotes_and_newlines_stay_one_sample() -> None:
    with World(6) as world:
        table = MetricTable(world.clock)
        attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": 'a"b\\c\nd'}
        fields: dict[str, Any] = {"trace": 1, "span": 1, "parent": None, "kind": "internal", "start": 0, "end": 0}
        table.enqueue(Span(name="x", attributes=attributes, is_refusal=True, error="disabled", **fields))
        (line,) = [line for line in table.render().splitlines() if line.startswith("halter_refusals_total{")]
    assert 'gen_ai_tool_name="a\\"b\\\\c\\nd"' in line


class FailingReads:
    """A store whose next reads of some streams fail."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.failing: list[StreamId] = []

    async def read(self, stream: StreamId, after: int = 0, limit: int = 1000) -> Any:
        if stream in self.failing:
            self.failing.remove(stream)
            raise StoreUnusable("The disk gave no answer.")
        return await self._store.read(stream, after, limit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.parametrize("failing", [session_stream("desk-1"), inbox_stream("desk-1")])
def test_what_happens_while_the_store_cannot_be_read_is_counted_once(failing: StreamId) -> None:
    """A read of the session fails before its events are counted, a read of its inbox between two of them."""
    with World(7) as world:

        async def story() -> tuple[str, list[str]]:
            await world.start("desk-1", kind="autonomous")
            (lease,) = await world.journal.claim(WorkerId("w"), 1)
            store, table, problems = FailingReads(world.journal), MetricTable(world.clock), list[str]()
            world.spawn(count_metrics(cast("Any", store), world.clock, table, problems.append))
            await table.has_begun.wait()
            await world.advance(10**6)
            store.failing = [failing] * 3
            await world.journal.commit(
                Write(
                    session_stream("desk-1"),
                    "turn",
                    lambda _: [
                        *map(Draft, (ASKS, ANSWERS, TurnStarted(turn=1, inbox_seen=1), ASKS_AGAIN, ANSWERS_AGAIN))
                    ],
                    lease=lease,
                )
            )
            await world.advance(10**7)
            await write(world, lease, TurnEnded(turn=1, why="ended"))
            await world.advance(10**7)
            assert not store.failing
            return table.render(), problems

        text, problems = world.run(story())
    counts = [line.rpartition(" ")[2] for line in text.splitlines() if "operation_duration_seconds_count" in line]
    assert counts == ["2"]
    assert problems == [
        "Metrics are late, because the store cannot be read. It is read again. (The disk gave no answer.)"
    ]


@pytest.mark.parametrize("outcome", ["unknown_tool", "external_halt", "rate_limited", "cancelled", "invalid_arguments"])
def test_tools_that_a_model_invents_are_one_series_and_displace_no_tool(outcome: Any) -> None:
    with World(8) as world:

        async def story() -> str:
            await world.start("desk-1", kind="autonomous")
            (lease,) = await world.journal.claim(WorkerId("w"), 1)
            table = MetricTable(world.clock)
            world.spawn(SessionTracer(world.journal, world.clock, [table], print).run({}))
            for number in range(20):
                call = f"c{number}"
                await write(
                    world, lease, CallRefused(call=call, tool=f"invented {number}", outcome=outcome, sentence="No.")
                )
            await write(
                world,
                lease,
                CallStarted(call="send", tool="send", level="SAFE"),
                CallSettled(call="send", outcome="ok"),
                CallRefused(call="send2", tool="send", outcome=outcome, sentence="No."),
                CallRefused(call="pay", tool="pay", outcome="approval_denied", sentence="No."),
            )
            await world.advance(10**7)
            return table.render()

        text = world.run(story())
    counts = dict(re.findall(r'^halter_refusals_total{.*gen_ai_tool_name="([^"]*)".*} (\d+)$', text, re.MULTILINE))
    assert counts == {"_OTHER": "20", "send": "1", "pay": "1"}
