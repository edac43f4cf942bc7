"""Messages of a server are cut into lines in bounded memory, and a server that asks back is not heard."""

from itertools import chain
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCNotification, JSONRPCRequest, JSONRPCResponse

from halter.tools.mcp_transport import ConnectionEnding, LineSplitter, ServerInput, ServerOutput


@given(st.lists(st.binary(max_size=20)))
def test_lines_do_not_depend_on_how_they_arrive(chunks: list[bytes]) -> None:
    lines = LineSplitter(1000)
    cut = [line for chunk in chunks for line in lines.cut(chunk)]
    assert cut == b"".join(chunks).split(b"\n")[:-1]


@pytest.mark.parametrize("chunks", [[b"x" * 11 + b"\n"], [b"x" * 11], [b"x" * 6] * 2, [b"a\n", b"x" * 11 + b"\n"]])
def test_a_line_longer_than_agreed_is_not_kept(chunks: list[bytes]) -> None:
    lines = LineSplitter(10)
    with pytest.raises(OverflowError):
        list(chain.from_iterable(map(lines.cut, chunks)))


def request(number: int, method: str) -> Any:
    return SessionMessage(JSONRPCRequest(jsonrpc="2.0", id=number, method=method))


async def test_questions_of_a_server_wait_in_bounded_numbers() -> None:
    ending = ConnectionEnding()
    memory_object_send_stream, inner = anyio.create_memory_object_stream[Any](1000)
    outward, memory_object_receive_stream = anyio.create_memory_object_stream[Any](1000)
    async with memory_object_send_stream, inner, outward, memory_object_receive_stream:
        server_output = ServerOutput(inner, ending)
        server_input = ServerInput(outward, server_output)
        for number in range(300):
            memory_object_send_stream.send_nowait(request(number, "ping" if number % 2 else "sampling/createMessage"))
        memory_object_send_stream.send_nowait(ValueError("a message that cannot be read"))
        memory_object_send_stream.send_nowait(SessionMessage(JSONRPCNotification(jsonrpc="2.0", method="last")))
        methods = [(await server_output.receive()).message.method for _ in range(101)]
        assert methods == ["ping"] * 100 + ["last"]
        await server_input.send(SessionMessage(JSONRPCResponse(jsonrpc="2.0", id=1, result={})))
        memory_object_send_stream.send_nowait(request(301, "ping"))
        assert (await server_output.receive()).message.id == 301


async def test_the_end_of_a_connection_is_noticed() -> None:
    ending = ConnectionEnding()
    memory_object_send_stream, inner = anyio.create_memory_object_stream[Any](1)
    async with ServerOutput(inner, ending) as server_output:
        memory_object_send_stream.send_nowait(SessionMessage(JSONRPCNotification(jsonrpc="2.0", method="last")))
        memory_object_send_stream.close()
        assert not ending.ended.is_set()
        assert [item.message.method async for item in server_output] == ["last"]
    assert ending.ended.is_set()
