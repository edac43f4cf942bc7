"""A model behind a wire: OpenAI's, Anthropic's or Google's protocol, at whatever address speaks it.

One `ask` is one request: it ends in one reply or one error, and what was used is told whenever the provider told it.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from halter.core.counting import most_tokens
from halter.core.errors import ModelError, ModelUnavailable
from halter.core.messages import Hear, Prompt, Reply
from halter.core.mind import WireFormat
from halter.core.tools import Locked, Permit
from halter.core.usage import ModelName, Usage
from halter.models.wire_clients import LARGEST, Connection, connect, letting_go, settings
from halter.models.wire_errors import cut, failure, failures
from halter.models.wire_messages import Definitions, answer, history, joiner, output_bound, reported, words_of

if TYPE_CHECKING:
    from pydantic_ai.messages import ModelResponse
    from pydantic_ai.models import StreamedResponse


class Wire:
    """A model of a provider.

    `url` is where it is reached, and `base_url` is that again if the provider's usual address is another one. No
    answer of more than `largest` bytes is read.
    """

    def __init__(
        self,
        name: ModelName,
        wire: WireFormat,
        url: str,
        key: str = "",
        *,
        base_url: str | None = None,
        temperature: float | None = None,
        largest: int = LARGEST,
    ) -> None:
        self.name = name
        self.base_url = base_url
        self.wire: WireFormat = wire
        self._url = url
        self._key = key
        self._temperature = temperature
        self._largest = largest
        self._definitions = Definitions()
        self._connection: Connection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connecting = asyncio.Lock()

    def count(self, prompt: Prompt) -> int:
        """Bound from above how many input tokens a prompt has."""
        return most_tokens(prompt)

    async def ask(self, prompt: Prompt, permit: Permit, hear: Hear | None = None) -> Reply:
        """Answer, as a stream if there is somebody to hear it."""
        exchange = _exchange.open(permit)
        model = (await self._connected()).model
        request = self._request(prompt)
        async with letting_go():
            response = await exchange(model, request, hear, self._broken)
        return self._finished(response, streamed=hear is not None)

    async def aclose(self) -> None:
        """Let go of all connections; asking again makes new ones."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.pool.aclose()

    async def _connected(self) -> Connection:
        """Connect at the first request. Connections belong to an event loop: another one has its own."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._connection, self._connecting = loop, None, asyncio.Lock()
        async with self._connecting:
            if self._connection is None:
                # The imports take seconds, in which leases have to be renewed.
                made = await asyncio.to_thread(connect, self.name, self.wire, self._url, self._key, self._largest)
                self._connection = made
            return self._connection

    def _request(self, prompt: Prompt) -> dict[str, Any]:
        return {
            "messages": history(prompt.messages, cache_points=self.wire == "anthropic"),
            "model_settings": settings(self.wire, prompt.max_output_tokens, self._temperature),
            "model_request_parameters": self._definitions.parameters(prompt),
        }

    def _broken(self, error: Exception, stream: "StreamedResponse | None") -> ModelError:
        usage = None if stream is None else _so_far(stream.get())
        return failure(error, self.name, self._key, usage, begun=stream is not None)

    def _finished(self, response: "ModelResponse", *, streamed: bool) -> Reply:
        """Take an answer for a whole one only if it says so itself.

        Some servers of OpenAI's protocol do not say it of an answer that comes in one piece, which cannot be cut.
        """
        said = (response.provider_details or {}).get("finish_reason")
        ended = said is not None or response.finish_reason == "content_filter"
        if not ended and (streamed or self.wire != "openai"):
            raise cut(self.name, _so_far(response))
        if response.finish_reason == "error":
            raise ModelUnavailable(f"BadAnswer: {self.name} failed to answer: {said}", usage=_so_far(response))
        return answer(response)


@Locked
async def _exchange(
    model: Any,
    request: dict[str, Any],
    hear: Hear | None,
    broken: "Callable[[Exception, StreamedResponse | None], ModelError]",
) -> "ModelResponse":
    """Send one request, and return the whole answer; where there is somebody to hear it, as it comes."""
    from pydantic_ai.direct import model_request, model_request_stream

    stream: StreamedResponse | None = None
    join = joiner()
    try:
        if hear is None:
            return await model_request(model, **request)
        async with model_request_stream(model, **request) as stream:
            async for event in stream:
                if words := join(words_of(event)):
                    hear(words)
            return stream.get()
    except failures() as error:
        raise broken(error, stream) from None


def _so_far(response: "ModelResponse") -> Usage | None:
    """Tell what was used by an answer that was not finished: what was reported, and no less output than came."""
    return reported(response.usage, output_bound(response))
