"""Halter's part of the loop benchmark: the same work as bench/peers, in its own process."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from bench.peers.workloads import DONE, LONG, Run, Script, main
from halter.core.messages import Prompt, Reply, Text, TextListener, ToolCall, bound_prompt_tokens
from halter.core.tools import Permit
from halter.core.usage import ModelName, Usage

KEPT = (
    "a SQLite file: the intent and the outcome of each request and of each call are committed, with a sync, before "
    "anything else acts; an outcome and the next intent share a commit"
)
LIMITS = {"max_steps": LONG + 1}


class Fake:
    """Answers from the script. It counts tokens like every model, because the guard holds money by the count."""

    name = ModelName("scripted", "bench")
    base_url: None = None

    def __init__(self, script: Script) -> None:
        self._script = script

    def count(self, prompt: Prompt) -> int:
        return bound_prompt_tokens(prompt)

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        permit.use()
        done_count = len(prompt.messages) // 2
        arguments = await self._script.answer(done_count)
        if arguments is None:
            return Reply((Text(DONE, "model", trusted=False),), "end", Usage(1, 1))
        return Reply((ToolCall(f"call-{done_count}", "add", json.dumps(arguments)),), "calls", Usage(1, 1))


@asynccontextmanager
async def opened(script: Script, folder: Path | None) -> AsyncGenerator[Run]:
    from halter import Agent, tool

    store = "memory:" if folder is None else str(folder / "runs.db")
    add = tool(script.tool(), level="SAFE", effect="read")
    async with Agent("bench", model=Fake(script), tools=[add], store=store, limits=LIMITS) as agent:

        async def run(_: str) -> str:
            return (await agent.run("go")).text

        yield run


def there() -> bool:
    """Return True if this Halter has a loop."""
    try:
        from halter import Agent  # noqa: F401 - asked for only to see whether it is there
    except ImportError:
        return False
    return True


if __name__ == "__main__":
    main(opened, KEPT)
