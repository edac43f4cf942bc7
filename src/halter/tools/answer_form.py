"""The form of an answer: a type and the validators of a program."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from halter.core.tools import Tool
from halter.tools.function_tool import tool

Validator = Callable[[Any], Awaitable[Any]]


class AnswerForm:
    """The form of an answer. The model gives its answer by calling `tool`.

    An answer that does not match is rejected, and the model tries again.
    """

    def __init__(self, name: str, output_type: type[Any], validators: Sequence[Validator] = ()) -> None:
        self._output_type = output_type
        self._validators = validators
        self._accepted: list[Any] = []

        async def answer(value: Any) -> str:
            self._accepted = [await self._check(value)]
            return "Answer accepted."

        answer.__annotations__["value"] = output_type
        answer.__doc__ = "Give your final answer. Your turn ends with it."
        self.tool: Tool = tool(
            answer, name=name, level="SAFE", effect="read", idempotent=True, reads="nothing", reach="none"
        )

    async def read(self, arguments: str) -> Any:
        """Return the accepted answer as the validators returned it.

        The validators run again if another process accepted the answer.
        """
        if self._accepted:
            return self._accepted[-1]
        from pydantic import TypeAdapter

        return await self._check(
            TypeAdapter(self._output_type).validate_python(msgspec.json.decode(arguments)["value"])
        )

    async def _check(self, value: Any) -> Any:
        for validator in self._validators:
            value = await validator(value)
        return value
