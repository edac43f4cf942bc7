"""What an answer must fit: a type, and the checks of a program."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from halter.core.tools import Tool
from halter.tools.function_tool import tool

Validator = Callable[[Any], Awaitable[Any]]


class AnswerForm:
    """The form of an answer. `tool` is that with which the model gives it.

    An answer that does not fit is rejected, and asked for again.
    """

    def __init__(self, name: str, output_type: type[Any], validators: Sequence[Validator] = ()) -> None:
        self._type = output_type
        self._validators = validators
        self._accepted: list[Any] = []

        async def answer(value: Any) -> str:
            self._accepted = [await self._check(value)]
            return "Your answer was taken."

        answer.__annotations__["value"] = output_type
        answer.__doc__ = "Give your final answer. Your turn ends with it."
        self.tool: Tool = tool(
            answer, name=name, level="SAFE", effect="read", idempotent=True, reads="nothing", reach="none"
        )

    async def read(self, arguments: str) -> Any:
        """Returns the accepted answer, as the checks returned it; they run again where another process took it."""
        if self._accepted:
            return self._accepted[-1]
        from pydantic import TypeAdapter

        return await self._check(TypeAdapter(self._type).validate_python(msgspec.json.decode(arguments)["value"]))

    async def _check(self, value: Any) -> Any:
        for validator in self._validators:
            value = await validator(value)
        return value
