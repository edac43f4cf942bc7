"""A program with what is peculiar to a framework, which kills itself and is started again.

    python -m tests.adapters.killed_program FRAMEWORK FOLDER

OpenAI's agent has an agent that is a tool, and dies at its question. A crew runs in a loop, and dies after its call.
The second time, both go on from what they kept.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, NoReturn

from tests.adapters.conftest import Desk
from tests.external.killed_program import Payments


class Program:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kept = folder / "kept.json"

    def at_desk(self) -> Desk:
        desk = Desk(self.folder)
        desk.paid = Payments(self.folder / "paid.txt")
        return desk

    def load(self) -> Any:
        return json.loads(self._kept.read_bytes()) if self._kept.exists() else None

    def keep_and_die(self, body: bytes) -> NoReturn:
        self._kept.write_bytes(body)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("A process outlived kill -9.")


async def run_agent_in_tool(program: Program) -> str:
    from agents import RunState

    from tests.adapters import test_openai_agents

    runner = test_openai_agents.make_boss(program.at_desk(), "PRIVILEGED")
    if (result := program.load()) is None:
        first = await runner.run("Pay the bill.", conversation="one")
        program.keep_and_die(json.dumps(first.to_state().to_json()).encode())
    state: RunState[Any] = await RunState.from_json(runner.agent, result)
    state.approve(state.get_interruptions()[0])
    return (await runner.run(state, conversation="one")).final_output


async def run_crew_in_loop(program: Program) -> str:
    """The crew is killed after a call, and the same kickoff takes its session up."""
    os.environ |= {"CREWAI_STORAGE_DIR": str(program.folder / "crewai"), "HOME": str(program.folder)}
    from tests.adapters import test_crewai

    class Dying(test_crewai.FunctionModel):
        def _say(self, text: str) -> Any:
            if "Observation: paid 7" in text and program.load() is None:
                program.keep_and_die(b"{}")
            return super()._say(text)

    desk = program.at_desk()
    desk.lease = 1.0
    crew = test_crewai.make_guarded(desk, "SAFE", model=Dying(max_tokens=4096))
    return await test_crewai.kickoff(crew, "akickoff", conversation="one")


PROGRAMS: Mapping[str, Callable[[Program], Coroutine[Any, Any, str]]] = {
    "openai_agents": run_agent_in_tool,
    "crewai": run_crew_in_loop,
}

if __name__ == "__main__":
    sys.stdout.write(asyncio.run(PROGRAMS[sys.argv[1]](Program(Path(sys.argv[2])))))
