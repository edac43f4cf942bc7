"""A model behind a wire: OpenAI's, Anthropic's or Google's protocol, at whatever address speaks it.

One `ask` is one request: it ends in one reply or one error. A reply tells what was used only if the provider's final
report came; an error tells what was reported until then, and whether that was final.
"""

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from halter.core.counting import most_tokens
from halter.core.errors import ModelError, ModelUnavailable
from halter.core.messages import Hear, Prompt, Reply
from halter.core.mind import WireFormat
from halter.core.tools import Locked, Permit
from halter.core.usage import ModelName, Usage
from halter.models.wire_clients import Connection, connect, settings
from halter.models.wire_errors import cut, failure, failures
from halter.models.wire_exchange import USUAL_TERMS, Exchange, Terms, exchange
from halter.models.wire_messages import Definitions, answer, history, joiner, words_of

if TYPE_CHECKING:
    from pydantic_ai.messages import ModelResponse


class Wire:
    """A model of a provider.

    `url` is where it is reached, and `base_url` is that again if the provider's usual address is another one.
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
        terms: Terms = USUAL_TERMS,
    ) -> None:
        self.name = name
        self.base_url = base_url
        self.wire: WireFormat = wire
        self._url = url
        self._key = key
        self._temperature = temperature
        self.terms = terms
        self._definitions = Definitions()
        self._connection: Connection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connecting = asyncio.Lock()

    def count(self, prompt: Prompt) -> int:
        """Bound from above how many input tokens a prompt has."""
        return most_tokens(prompt)

    async def ask(self, prompt: Prompt, permit: Permit, hear: Hear | None = None) -> Reply:
        """Answer, as a stream if there is somebody to hear it."""
        send = _send.open(permit)
        async with exchange() as seen:
            try:
                model, request = (await self._connected()).model, self._request(prompt)
                response = await send(model, request, hear, partial(self._failed, seen))
            except asyncio.CancelledError:
                permit.unsent = not seen.sent
                raise
        return self._finished(response, seen, streamed=hear is not None)

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
                made = await asyncio.to_thread(connect, self.name, self.wire, self._url, self._key, self.terms)
                self._connection = made
            return self._connection

    def _request(self, prompt: Prompt) -> dict[str, Any]:
        return {
            "messages": history(prompt.messages, cache_points=self.wire == "anthropic"),
            "model_settings": settings(self.wire, prompt.max_output_tokens, self._temperature),
            "model_request_parameters": self._definitions.parameters(prompt),
        }

    def _failed(self, seen: Exchange, error: Exception, *, begun: bool) -> ModelError:
        return failure(error, self.name, self._key, seen, begun=begun, bills_errors=self.terms.bills_errors)

    def _finished(self, response: "ModelResponse", seen: Exchange, *, streamed: bool) -> Reply:
        """Take an answer for a whole one only if it says so itself.

        Some servers of OpenAI's protocol do not say it of an answer that comes in one piece, which cannot be cut.
        """
        said = (response.provider_details or {}).get("finish_reason")
        ended = said is not None or response.finish_reason == "content_filter"
        if not ended and (streamed or self.wire != "openai"):
            raise cut(self.name, seen)
        if response.finish_reason == "error":
            sentence = f"BadAnswer: {self.name} failed to answer: {said}"
            raise ModelUnavailable(sentence, usage=seen.usage, final=seen.final)
        return answer(response, _final(response, seen))


@Locked
async def _send(model: Any, request: dict[str, Any], hear: Hear | None, failed: "Failed") -> "ModelResponse":
    """Send one request, and return the whole answer; where there is somebody to hear it, as it comes."""
    from pydantic_ai.direct import model_request, model_request_stream

    begun = False
    join = joiner()
    try:
        if hear is None:
            return await model_request(model, **request)
        async with model_request_stream(model, **request) as stream:
            begun = True
            async for event in stream:
                if words := join(words_of(event)):
                    hear(words)
            return stream.get()
    except failures() as error:
        raise failed(error, begun=begun) from None


class Failed(Protocol):
    """Whoever knows what an error of the library means."""

    def __call__(self, error: Exception, *, begun: bool) -> ModelError:
        """Say what it means; `begun` says that an answer had begun to come."""
        ...


def _final(response: "ModelResponse", seen: Exchange) -> Usage | None:
    """Tell what a whole answer used. A report that came too early, or counts no output of an answer, is none."""
    usage = seen.usage if seen.final else None
    return None if usage is not None and response.parts and not usage.output_tokens else usage
