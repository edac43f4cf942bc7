"""How much a model thinks: asked for where it can be, within the limit of the output, and nowhere else."""

from typing import Any

import pytest

from halter.core.messages import Message, Prompt, ToolCall, ToolResult, make_user_message
from halter.core.usage import ModelName
from halter.models.wire import ModelHabits, WireModel, make_model_settings
from halter.models.wires.anthropic import choose_thinking

ASKED = make_user_message("Why?")
ACTED = (
    ASKED,
    Message("assistant", (ToolCall("c1", "look", "{}"),)),
    Message("user", (ToolResult("c1", "look", "ok", "seen"),)),
)


def settings(wire: Any, thinking: Any, prompt: Prompt, temperature: float | None = None) -> dict[str, Any]:
    habits = ModelHabits(temperature, thinking)
    model = WireModel(ModelName("house", "m"), wire, "http://127.0.0.1:9/v1", habits=habits)
    return dict(model._request(prompt, {})["model_settings"])  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("wire", ["openai", "google", "anthropic"])
def test_it_is_asked_for_and_bounded_by_the_output(wire: Any) -> None:
    fields = settings(wire, "low", Prompt(messages=(ASKED,), max_output_tokens=4096))
    assert (fields["thinking"], fields["max_tokens"]) == ("low", 4096)
    assert settings(wire, "off", Prompt(messages=(ASKED,)))["thinking"] is False
    assert "thinking" not in settings(wire, None, Prompt(messages=(ASKED,)))


def test_anthropic_is_not_asked_to_think_where_its_thoughts_are_missing_or_have_no_room() -> None:
    values = {"max_output_tokens": 20_000}
    assert choose_thinking("high", Prompt(messages=(ASKED,), **values)) == "high"
    assert choose_thinking("high", Prompt(messages=ACTED, **values)) is None
    assert choose_thinking("high", Prompt(messages=(ASKED,), max_output_tokens=4096)) is None
    assert "thinking" not in settings("anthropic", "high", Prompt(messages=ACTED, **values))
    assert settings("openai", "high", Prompt(messages=ACTED, **values))["thinking"] == "high"


def test_a_model_that_thinks_chooses_its_own_temperature() -> None:
    model_settings = make_model_settings(100, 0.5, "high")
    assert "temperature" not in model_settings
    assert make_model_settings(100, 0.5, "off").get("temperature") == 0.5
