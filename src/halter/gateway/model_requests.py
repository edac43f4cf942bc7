"""A model request of a server, which the gateway makes with the agent's own model."""

from typing import Final

from mcp_types import CreateMessageRequestParams, CreateMessageResult, TextContent

from halter.core.messages import Message, Prompt, Text
from halter.core.text import clean
from halter.core.tools import Failed
from halter.guard.halts import BudgetBusy, RateLimited
from halter.guard.request import AnsweredRequest, FailedRequest, RefusedRequest, RequestOutcome

MAX_SAMPLED_TOKENS: Final = 4096


def make_sampling_prompt(server: str, params: CreateMessageRequestParams) -> Prompt:
    """Make the prompt of a server's model request. Raises Failed for anything but text."""
    messages: list[Message] = []
    for message in params.messages:
        if params.tools or not isinstance(message.content, TextContent):
            raise Failed("Sampling", "only text messages without tools are supported.")
        messages.append(
            Message(message.role, (Text(clean(message.content.text), "tool", trusted=False, source=server),))
        )
    limit = max(1, min(params.max_tokens, MAX_SAMPLED_TOKENS))
    return Prompt(system=clean(params.system_prompt or ""), messages=tuple(messages), max_output_tokens=limit)


def make_sampling_result(outcome: RequestOutcome, model: str) -> CreateMessageResult:
    """Make the result for the server. Raises Failed if the model has not answered."""
    match outcome:
        case AnsweredRequest(reply=reply):
            content = TextContent(text=reply.text)
            return CreateMessageResult(role="assistant", content=content, model=model, stop_reason="endTurn")
        case RefusedRequest(sentence=sentence):
            raise Failed("Sampling", sentence)
        case FailedRequest(error=error):
            raise Failed("Sampling", f"the model did not answer: {error}")
        case BudgetBusy() | RateLimited():
            raise Failed("Sampling", "other requests use the budget or the rate of the model. Try again later.")
