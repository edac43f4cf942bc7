"""Models for tests of agents: one that is a function, and one that tries every tool.

```python
with agent.override(model=TestModel()):
    result = agent.run_sync("Is it going to rain in Oslo?")
```

They cost nothing and need no key. Everything else is real: the guard, the journal, the tools.
"""

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, cast

from halter.core.messages import (
    Message,
    Prompt,
    Reply,
    Text,
    TextListener,
    ToolCall,
    ToolResult,
    bound_prompt_tokens,
)
from halter.core.tools import Permit, ToolSpec
from halter.models.scripted import SCRIPTED

Said = str | ToolCall | Sequence[ToolCall] | Reply
Answers = Callable[[Prompt], Said | Awaitable[Said]]

_LEFT_OUT: Final = ("ask_user", "final_answer", "read_output", "yield")
"""Tools of the loop itself, which an agent does not bring."""


class FunctionModel:
    """A model that is a function: it gets the prompt, and returns a text, a call, several calls, or a whole reply.

    `asked` are the prompts that it received, in order.
    """

    name = SCRIPTED
    base_url: None = None

    def __init__(self, function: Answers) -> None:
        self.asked: list[Prompt] = []
        self._function = function

    def count(self, prompt: Prompt) -> int:
        return bound_prompt_tokens(prompt)

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        permit.use()
        self.asked.append(prompt)
        said = self._function(prompt)
        reply = _make_reply(await said if inspect.isawaitable(said) else said)
        if on_text is not None and reply.text:
            on_text(reply.text)
        return reply


class TestModel(FunctionModel):
    """Calls each tool once, with made-up arguments that fit its schema, and then says what they returned.

    With `calls` it calls only these; with `text` that is its answer.
    """

    __test__ = False  # It is no test itself.

    def __init__(self, text: str = "", calls: Sequence[str] | None = None) -> None:
        super().__init__(self._answer)
        self._text = text
        self._calls = calls

    def _answer(self, prompt: Prompt) -> Said:
        results = _list_results(prompt.messages)
        answers = [tool for tool in prompt.tools if tool.name == "final_answer"]
        tried = [tool for tool in prompt.tools if self._is_tried(tool)]
        if tried and not results:
            return [_make_call(tool) for tool in tried]
        if answers:
            return _make_call(answers[0])
        return (
            self._text or json.dumps({each.tool: each.text for each in results}) if results else self._text or "Done."
        )

    def _is_tried(self, tool: ToolSpec) -> bool:
        if self._calls is not None:
            return tool.name in self._calls
        return tool.name not in _LEFT_OUT


def _make_reply(said: Said) -> Reply:
    match said:
        case Reply():
            return said
        case str():
            return Reply((Text(said, "model", trusted=False),))
        case ToolCall():
            return Reply((said,), "calls")
        case _:
            return Reply(tuple(said), "calls")


def _make_call(tool: ToolSpec) -> ToolCall:
    schema = json.loads(tool.schema or b"{}")
    return ToolCall("", tool.name, json.dumps(make_arguments(schema, schema.get("$defs", {}))))


def _list_results(messages: Sequence[Message]) -> list[ToolResult]:
    """The results since a person last spoke."""
    found: list[ToolResult] = []
    for message in messages:
        parts = [part for part in message.parts if isinstance(part, ToolResult)]
        if message.role == "user" and not parts:
            found = []
        found += parts
    return found


def make_arguments(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Any:
    """Make the smallest value that fits a JSON Schema, as far as tools have them."""
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
            known = schema.get("properties", {})
            return {name: make_arguments(known.get(name, {}), definitions) for name in schema.get("required", ())}
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
