"""A model without network or cost: it answers with the first rule whose condition holds.

    - when: hot.disk_percent > 90
      call: {tool: clean_up, arguments: {folder: cache}}
      yield: {mode: sleep, sleep: 5m, reason: waiting for room}
    - when: results.exists(r, r.outcome != "ok")
      say: That did not work. A person has to look at it.
    - say: All is well.

A condition is a CEL expression over `hot`, the hot state; `message`, the last message of a person; `results`, the last
results of this turn, each with `tool`, `outcome` and `text`; and `step`, the number of answers in this turn. A
condition that refers to a missing value, or compares values that cannot be compared, does not hold.

The calls of a rule run in order, followed by its yield. A rule that has made its calls in this turn is skipped, unless
it has `once: false`. In the last answer after a cap, which has no tools, every rule with calls is skipped.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, cast

import msgspec

from halter.core.clock import parse_duration
from halter.core.errors import ConfigError
from halter.core.messages import Message, Prompt, Reply, Text, TextListener, ToolCall, ToolResult, bound_prompt_tokens
from halter.core.text import clean, join_names
from halter.core.tools import Permit
from halter.core.usage import ModelName, Usage
from halter.expressions import Expression, compile_expression, to_cel_value
from halter.models.scripted import LocateKey, split_validation_error

REFLEX: Final = ModelName("reflex", "rules")
NO_RULE: Final = "No rule applies."
YIELD: Final = "yield"

_NOTHING: Final[Mapping[str, Any]] = {"hot": {}, "message": "", "results": [], "step": 0}


class ReflexRule(msgspec.Struct, frozen=True, kw_only=True):
    when: Expression | None = None
    say: str = ""
    calls: tuple[ToolCall, ...] = ()
    once: bool = True

    def holds(self, context: dict[str, Any]) -> bool:
        """Return True if the condition is exactly true."""
        return self.when is None or self.when.holds(context)


class Reflex:
    base_url: None = None

    def __init__(self, rules: Sequence[ReflexRule], name: ModelName = REFLEX) -> None:
        self.name = name
        self._rules = tuple(rules)

    def count(self, prompt: Prompt) -> int:
        return bound_prompt_tokens(prompt)

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        permit.use()
        reply = answer_by_rules(self._rules, prompt)
        if on_text is not None and reply.text:
            on_text(reply.text)
        return reply


def answer_by_rules(rules: Sequence[ReflexRule], prompt: Prompt) -> Reply:
    turn = _turn(prompt.messages)
    context = _context(prompt, turn)
    past_calls = {
        (call.tool, call.arguments) for message in turn for call in message.parts if isinstance(call, ToolCall)
    }
    for rule in rules:
        is_done = bool(rule.calls) and all((call.tool, call.arguments) in past_calls for call in rule.calls)
        if not (rule.once and is_done) and (prompt.tools or not rule.calls) and rule.holds(context):
            texts = (Text(rule.say, "model", trusted=False),) if rule.say else ()
            return Reply((*texts, *rule.calls), "calls" if rule.calls else "end", Usage())
    return Reply((Text(NO_RULE, "model", trusted=False),), "end", Usage())


def _turn(messages: Sequence[Message]) -> Sequence[Message]:
    """Find the messages of this turn: from the last message of a person, or after the end of the turn before."""
    for index in range(len(messages) - 1, -1, -1):
        if _is_from_person(messages[index]):
            return messages[index:]
        if _is_turn_end(messages[index]):
            return messages[index + 1 :]
    return messages


def _is_from_person(message: Message) -> bool:
    return message.role == "user" and any(_is_person_text(part) for part in message.parts)


def _is_person_text(part: Any) -> bool:
    return isinstance(part, Text) and part.origin == "person" and not part.reason


def _is_turn_end(message: Message) -> bool:
    """Return True for an answer without calls, or an accepted yield."""
    if message.role == "assistant":
        return not any(isinstance(part, ToolCall) for part in message.parts)
    return any(isinstance(part, ToolResult) and part.tool == YIELD and part.outcome == "ok" for part in message.parts)


def _context(prompt: Prompt, turn: Sequence[Message]) -> dict[str, Any]:
    last_message = next((message for message in reversed(prompt.messages) if _is_from_person(message)), None)
    texts = [
        part.text
        for part in (last_message.parts if last_message else ())
        if isinstance(part, Text) and _is_person_text(part)
    ]
    result_groups = ([part for part in message.parts if isinstance(part, ToolResult)] for message in reversed(turn))
    results = next(filter(None, result_groups), ())
    return {
        "hot": to_cel_value(prompt.facts),
        "message": clean("\n".join(texts)),
        "results": [{"tool": each.tool, "outcome": each.outcome, "text": clean(each.text)} for each in results],
        "step": sum(message.role == "assistant" for message in turn),
    }


class _Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tool: str
    arguments: dict[str, Any] = {}


class _Yield(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A yield as a rule writes it and as its tool receives it."""

    mode: Literal["continue", "sleep", "shutdown"]
    sleep: str | float | None = None
    wake_early_if: tuple[str, ...] = ()
    reason: str = ""


class _Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"yields": YIELD}):
    when: str | None = None
    call: _Call | None = None
    calls: tuple[_Call, ...] = ()
    say: str = ""
    yields: _Yield | None = None
    once: bool = True


_KEYS: Final = join_names(_Written.__struct_encode_fields__)
_CALL: Final = "a call is written `call: {tool: NAME, arguments: {KEY: VALUE}}`"


def make_reflex_model(value: Any, locate: LocateKey, name: ModelName = REFLEX) -> Reflex:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{locate(())}: the rules must be a list of mappings with some of {_KEYS}.")
    rules = [_rule(each, index, locate) for index, each in enumerate(cast("Sequence[Any]", value))]
    return Reflex(rules, name)


def _rule(value: Any, index: int, locate: LocateKey) -> ReflexRule:
    try:
        fields = msgspec.convert(value, _Written)
    except msgspec.ValidationError as error:
        problem, path = split_validation_error(str(error))
        raise ConfigError(f"{locate((index, *path))}: {problem}. A rule has the keys {_KEYS}; {_CALL}.") from None
    if fields.call is not None and fields.calls:
        raise ConfigError(
            f"{locate((index, 'call'))}: a rule has `call` for one call or `calls` for several, not both."
        )
    calls = _calls(fields, index, locate)
    if not (calls or fields.say):
        raise ConfigError(f"{locate((index,))}: this rule does nothing: give it `call`, `calls`, `say` or `yield`.")
    when = (
        None
        if fields.when is None
        else compile_expression(fields.when, _NOTHING, locate((index, "when")), subject="a rule")
    )
    return ReflexRule(when=when, say=fields.say, calls=calls, once=fields.once)


def _calls(fields: _Written, index: int, locate: LocateKey) -> tuple[ToolCall, ...]:
    """Build the calls of a rule in order, each in a separate group."""
    calls = [(call.tool, call.arguments) for call in (*filter(None, (fields.call,)), *fields.calls)]
    if fields.yields is not None:
        location = locate((index, YIELD, "sleep"))
        if isinstance(fields.yields.sleep, str):
            try:
                parse_duration(fields.yields.sleep)
            except ConfigError as error:
                raise ConfigError(f"{location}: {error}") from None
        elif fields.yields.sleep is not None and not fields.yields.sleep >= 0:
            raise ConfigError(f"{location}: {fields.yields.sleep} is not a duration; write it like 5m.")
        calls.append((YIELD, msgspec.to_builtins(fields.yields)))
    return tuple(
        ToolCall(f"{index}.{number}", tool, msgspec.json.encode(arguments).decode(), number)
        for number, (tool, arguments) in enumerate(calls)
    )
