"""No body that a client sends holds the loop of the proxy, on which all other clients wait."""

import asyncio
import gzip
import time
from typing import Any

import httpx2
import msgspec
import pytest

from halter.core.events import RequestSettled, RequestStarted
from halter.external.relay import drain_events
from halter.guard.halts import halt
from halter.models.usage_reader import UsageReader
from halter.proxy.body_reader import ReadRequest, read_request

GPT = "gpt-4o-mini"
SIZE = 7 * 1024 * 1024
MAX_PAUSE_SECONDS = 0.1
"""Twice what is promised: the client of a test runs on the same loop."""
HOSTILE = {
    "escaped letters": b'"' + rb"\u0061" * (SIZE // 6) + b'"',
    "objects": b"[" + b"{}," * (SIZE // 3) + b"1]",
    "numbers": b"[" + b"1," * (SIZE // 2) + b"1]",
    "strings": b"[" + b'"",' * (SIZE // 3) + b"1]",
    "limits": b"[" + b'{"max_tokens":5},' * (SIZE // 17) + b"1]",
    "options": b"[" + b'{"stream_options":{}},' * (SIZE // 22) + b"1]",
    "nesting": b"[" * (SIZE // 2) + b"]" * (SIZE // 2),
}
MEMBERS = b",".join(b'"m%d":1' % number for number in range(SIZE // 12))
BODIES = {
    **{
        name: b'{"model":"gpt-4o-mini","stream":true,"max_tokens":5000,"messages":%s}' % content
        for name, content in HOSTILE.items()
    },
    "escaped options": b'{"model":"gpt-4o-mini","stream":true,"messages":[],"stream_options":{"x":%s}}'
    % HOSTILE["escaped letters"],
    "members": b'{"model":"gpt-4o-mini","messages":[],%s}' % MEMBERS,
    "a model's name": b'{"model":"%s","messages":[]}' % (b"gpt-" * (SIZE // 4)),
    "a tier's name": b'{"model":"gpt-4o-mini","messages":[],"service_tier":"%s"}' % (b"fast" * (SIZE // 4)),
    "tools": b'{"model":"gpt-4o-mini","messages":[],"tools":[%s1]}' % (b'{"type":"t"},' * (SIZE // 13)),
    "a tool's name": b'{"model":"gpt-4o-mini","messages":[],"tools":[{"type":"%s"}]}' % (b"t" * SIZE),
    "spaces": b'%s{%s"model":"gpt-4o-mini","stream":true,"messages":[]}' % (b" " * (SIZE // 2), b" " * (SIZE // 2)),
}


async def watch_pauses(pauses: list[float]) -> None:
    """Measure how long the loop computes between two turns of a task. Other processes do not count."""
    while True:
        before = time.thread_time()
        await asyncio.sleep(0)
        pauses.append(time.thread_time() - before)


@pytest.mark.parametrize(
    ("name", "masks"), [*((name, False) for name in BODIES), ("escaped letters", True), ("limits", True)]
)
async def test_no_body_of_a_client_holds_the_loop(place: Any, name: str, *, masks: bool) -> None:
    body = BODIES[name]
    key = place.key(max_cost_usd_per_day="0.01", mask_secrets=masks)
    pauses: list[float] = []
    async with httpx2.AsyncClient(timeout=120) as http:
        task = asyncio.ensure_future(watch_pauses(pauses))
        answer = await http.post(
            f"{place.base}/chat/completions", content=body, headers={"authorization": f"Bearer {key}"}
        )
        task.cancel()
    assert answer.status_code in {200, 400}, answer.text
    assert len(answer.content) < 4096
    assert max(pauses) < MAX_PAUSE_SECONDS, sorted(pauses)[-5:]


async def test_a_halt_lands_within_a_second_while_a_key_sends_hostile_bodies(place: Any) -> None:
    place.provider.gate = asyncio.Event()
    body = b'{"model":"gpt-4o-mini","messages":%s}' % HOSTILE["escaped letters"]
    hostile, quiet = place.key("hostile"), place.key()
    ask = {"model": GPT, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    async with httpx2.AsyncClient(timeout=120, base_url=place.base) as http:
        headers = {"authorization": f"Bearer {quiet}"}
        streaming = asyncio.ensure_future(http.post("/chat/completions", json=ask, headers=headers))
        await asyncio.wait_for(place.provider.reached_gate.wait(), 20)
        floods = [
            asyncio.ensure_future(
                http.post("/chat/completions", content=body, headers={"authorization": f"Bearer {hostile}"})
            )
            for _ in range(4)
        ]
        await asyncio.sleep(0.5)
        began = time.perf_counter()
        await place.app.store.commit(halt("fleet", "ada", "h1", "stop"))
        answer = await asyncio.wait_for(streaming, 20)
        assert time.perf_counter() - began < 1.5
        assert "fleet was halted" in answer.text
        for flood in floods:
            flood.cancel()
        await asyncio.gather(*floods, return_exceptions=True)


async def test_a_body_above_the_limit_of_its_key_is_refused(place: Any) -> None:
    content = b'{"model":"gpt-4o-mini","messages":[{"role":"user","content":"%s"}]}' % (b"x" * 3 * 1024 * 1024)
    small, large = place.key("small", max_body_mb=1), place.key("large", max_body_mb=16, max_cost_usd_per_day=90)
    usual = place.key("usual")
    async with httpx2.AsyncClient(timeout=120, base_url=place.base) as http:

        async def send(key: str, data: bytes, **headers: str) -> httpx2.Response:
            headers = {"authorization": f"Bearer {key}", **headers}
            return await http.post("/chat/completions", content=data, headers=headers)

        refused = await send(small, content)
        assert (refused.status_code, "larger than 1 MB" in refused.text) == (413, True), refused.text
        packed = await send(small, gzip.compress(content), **{"content-encoding": "gzip"})
        assert (packed.status_code, "larger than 1 MB" in packed.text) == (413, True), packed.text
        tripled = content.replace(b"xxx", b"xxxxxxxxx")
        assert (await send(usual, tripled)).status_code == 413
        assert (await send(large, tripled)).status_code == 200


@pytest.mark.parametrize("name", BODIES)
def test_what_is_read_of_a_body_is_short(name: str) -> None:
    """The loop works with what is read, so it must not grow with the body."""
    body = BODIES[name]
    body_read = read_request(ReadRequest("chat", body, "identity", len(body), masks=False), str)
    call = body_read.call and msgspec.structs.replace(body_read.call, body=b"")
    assert len(msgspec.msgpack.encode((call, body_read.problem))) < 64 * 1024
    if body_read.call is not None:
        assert len(body_read.call.with_limit(5, 100_000)) < len(body) + 4096


@pytest.mark.parametrize("streams", [False, True])
async def test_a_huge_answer_passes_unread_and_settles_at_its_hold(place: Any, *, streams: bool) -> None:
    place.provider.texts = ("x" * 3 * 1024 * 1024,)
    key = place.key(max_cost_usd_per_day=5)
    pauses: list[float] = []
    async with httpx2.AsyncClient(timeout=120) as http:
        task = asyncio.ensure_future(watch_pauses(pauses))
        headers = {"authorization": f"Bearer {key}"}
        ask = {"model": GPT, "stream": streams, "input": "hi", "max_output_tokens": 500}
        answer = await http.post(f"{place.base}/responses", json=ask, headers=headers)
        task.cancel()
    assert len(answer.content) > 3 * 1024 * 1024
    await place.settled()
    (started,), (settled,) = await place.events(RequestStarted), await place.events(RequestSettled)
    assert await place.spent() == max(leg.amount for leg in started.legs if leg.unit == "usd")
    assert settled.outcome == "ok"
    assert max(pauses) < MAX_PAUSE_SECONDS, sorted(pauses)[-5:]


@pytest.mark.parametrize("separator", [b"\n\n", b"\r\n\r\n", b"\r\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 100])
def test_events_are_whole_however_they_arrive(separator: bytes, size: int) -> None:
    data = separator.join([b"data: one", b"data: two", b"data: three", b"data: fo"])
    buffer, events = bytearray(), list[bytes]()
    for start in range(0, len(data), size):
        events += [part] if (part := drain_events(buffer, data[start : start + size])) else []
    assert b"".join(events) + buffer == data
    assert buffer == b"data: fo"
    assert all(part.endswith(separator) for part in events)


def test_a_line_that_is_too_long_leaves_no_usage_and_the_next_ones_are_read() -> None:
    meter = UsageReader("openai", "", 100)
    meter.feed(b'data: {"usage":{"prompt_tokens":5,"completion_tokens":5}}\n\n')
    for _ in range(5):
        meter.feed(b"x" * 50)
    assert meter.usage is None
    meter.feed(b'xx\n\ndata: {"model":"m","choices":[{"finish_reason":"stop"}]}\n\n')
    meter.close()
    assert (meter.usage, meter.final, meter.finished) == (None, False, True)
