"""No framework: a loop of the program's own over `Guard`."""

from collections.abc import AsyncGenerator, Mapping
from typing import Any, ClassVar

import msgspec

from halter.core.tools import ToolSpec
from halter.core.usage import Usage
from halter.external.effects import DecisionPending, EffectRefused, ModelResult
from halter.external.guard import GuardedSession
from tests.external.driver import INPUT_TOKENS, TASK, Driver, Turn

DEFAULT_LIMIT = 4096


class BareGuard(Driver):
    LACKS: ClassVar = {
        "stream": "A stream of the program's own is an effect like any other.",
        "pulled_stream": "As above.",
        "reopen": "`Guard.session` ends with an error, and the program begins another one.",
        "own_approval": "The program has no approval of its own.",
        "run_structured": "The form of an answer is the program's own.",
        "hand_off": "The program passes its session on.",
        "run_blocking": "tests/story/test_guard.py has the blocking guard.",
    }

    async def run(self, conversation: str = "") -> str:
        self.guard.allow_external_tools()
        async with self.guard, self.guard.session(TASK, id=conversation or None) as session:
            results: list[str] = []
            while (turn := await self._think(session, results)).name:
                results.append(await self._call(session, turn))
            return turn.text

    async def _think(self, session: GuardedSession, results: list[str]) -> Turn:
        async def request(limit: int) -> ModelResult[Turn]:
            turn = await self.mind.think(results, limit)
            return ModelResult(turn, turn.text, Usage(INPUT_TOKENS, turn.output_tokens))

        limit = self.limit.get("max_output_tokens", DEFAULT_LIMIT)
        return await session.ask(
            "function:desk", msgspec.json.encode(results).decode(), request, max_output_tokens=limit
        )

    async def _call(self, session: GuardedSession, turn: Turn) -> str:
        options = self.tool_options[turn.name]
        level, effect = options.get("level", "CONTROLLED"), options.get("effect", "write")
        schema = b'{"properties":{"to":{"type":"string"}}}' if turn.name == "send_mail" else b"{}"
        spec = ToolSpec(name=turn.name, description="", schema=schema, level=level, effect=effect)

        async def act(arguments: Mapping[str, Any]) -> str:
            return getattr(self, turn.name)(**arguments)

        try:
            return await session.act(spec, turn.arguments, act, name=turn.id)
        except EffectRefused as refused:
            if refused.terminal:
                raise
            return str(refused)

    def read(self) -> AsyncGenerator[str]:
        raise NotImplementedError

    async def ask(self) -> Any:
        try:
            await self.run("one")
        except DecisionPending as pending:
            return pending.decision
        raise AssertionError("Nothing was asked.")

    async def resume(self, state: Any) -> str:
        try:
            return await self.run("one")
        except DecisionPending as pending:
            return str(pending)

    def save(self, state: Any) -> bytes:
        return state.encode()

    def load(self, saved: bytes) -> Any:
        return saved.decode()
