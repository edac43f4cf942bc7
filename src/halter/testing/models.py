"""Models for tests of agents: a function as a model, and a model that calls every tool.

```python
with agent.override(model=TestModel(), store="memory:"):
    result = agent.run_sync("Is it going to rain in Oslo?")
```

They cost nothing and need no key. Everything else is real: the guard, the journal, the tools.
"""

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, cast

from halter.core.messages import Message, Prompt, Reply, Text, TextListener, ToolCall, ToolResult, bound_prompt_tokens
from halter.core.renamed import RenamedAttribute
from halter.core.tools import Permit, ToolSpec
from halter.models.scripted import SCRIPTED

Said = str | ToolCall | Sequence[ToolCall] | Reply
Answers = Callable[[Prompt], Said | Awaitable[Said]]

_LOOP_TOOLS: Final = ("ask_user", "final_answer", "read_output", "yield")
"""Tools of the loop itself, which do not belong to the agent."""


class FunctionModel:
    """A function as a model: it gets the prompt, and returns a text, a call, several calls, or a whole reply.

    `requests` are the prompts that it received, in order.
    """

    name = SCRIPTED
    base_url: None = None
    asked = RenamedAttribute("requests")

    def __init__(self, function: Answers) -> None:
        self.requests: list[Prompt] = []
        self._function = function

    def count(self, prompt: Prompt) -> int:
        return bound_prompt_tokens(prompt)

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        permit.use()
        self.requests.append(prompt)
        answer = self._function(prompt)
        reply = _make_reply(await answer if inspect.isawaitable(answer) else answer)
        if on_text is not None and reply.text:
            on_text(reply.text)
        return reply


class TestModel(FunctionModel):
    """A model that calls each tool once, with generated arguments that fit its schema, and answers with their results.

    With `calls` it calls only these tools; `text` replaces its answer.
    """

    __test__ = False  # pytest must not collect this class.

    def __init__(self, text: str = "", calls: Sequence[str] | None = None) -> None:
        super().__init__(self._answer)
        self._text = text
        self._calls = calls

    def _answer(self, prompt: Prompt) -> Said:
        results = _list_results(prompt.messages)
        answer_tools = [tool for tool in prompt.tools if tool.name == "final_answer"]
        tools = [tool for tool in prompt.tools if self._is_tried(tool)]
        if tools and not results:
            return [_make_up_call(tool) for tool in tools]
        if answer_tools:
            return _make_up_call(answer_tools[0])
        return (
            self._text or json.dumps({each.tool: each.text for each in results}) if results else self._text or "Done."
        )

    def _is_tried(self, tool: ToolSpec) -> bool:
        if self._calls is not None:
            return tool.name in self._calls
        return tool.name not in _LOOP_TOOLS


def make_call(tool: str, /, **arguments: Any) -> ToolCall:
    """Make a call of a tool, for a function that is a model: `make_call("pay", order=7)`."""
    return ToolCall("", tool, json.dumps(arguments))


def _make_reply(answer: Said) -> Reply:
    match answer:
        case Reply():
            return answer
        case str():
            return Reply((Text(answer, "model", trusted=False),))
        case ToolCall():
            return Reply((answer,), "calls")
        case _:
            return Reply(tuple(answer), "calls")


def _make_up_call(tool: ToolSpec) -> ToolCall:
    schema = json.loads(tool.schema or b"{}")
    return ToolCall("", tool.name, json.dumps(make_arguments(schema, schema.get("$defs", {}))))


def _list_results(messages: Sequence[Message]) -> list[ToolResult]:
    """List the tool results since the last user message."""
    results: list[ToolResult] = []
    for message in messages:
        message_results = [part for part in message.parts if isinstance(part, ToolResult)]
        if message.role == "user" and not message_results:
            results = []
        results += message_results
    return results


def make_arguments(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Any:
    """Make the smallest value that fits a JSON Schema; only the keywords that tools use are supported."""
    if "$ref" in schema:
        return make_arguments(definitions.get(str(schema["$ref"]).rpartition("/")[2], {}), definitions)
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    if schema.get("enum"):
        return schema["enum"][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return make_arguments(schema[key][0], definitions)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    match cast("str", kind[0] if isinstance(kind, list) else kind):
        case "object":
            properties = schema.get("properties", {})
            return {name: make_arguments(properties.get(name, {}), definitions) for name in schema.get("required", ())}
        case "array":
            return [make_arguments(schema.get("items", {}), definitions)] * schema.get("minItems", 0)
        case "integer":
            return schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
        case "number":
            return schema.get("minimum", schema.get("exclusiveMinimum", -1.0) + 1)
        case "boolean":
            return False
        case "null":
            return None
        case _:
            return "a" * max(1, schema.get("minLength", 1))
