"""A program with an agent of a framework that kills itself, and is started again.

    python -m tests.external.killed_program FRAMEWORK FOLDER at-a-question|after-a-call

The first time it runs until a question waits, or until its first call is settled, and kills itself. The second time it
goes on from what the framework had saved by then.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from tests.adapters.conftest import Desk
from tests.external.driver import Driver, Mind
from tests.external.drivers import load_driver


class Payments(list[int]):
    """What was paid, in a file: it outlives the process."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def append(self, amount: int) -> None:
        with self._file.open("a") as file:
            file.write(f"{amount}\n")


def read_saved(saved: Path) -> bytes | None:
    return saved.read_bytes() if saved.exists() else None


def die_with(saved: Path, state: bytes) -> NoReturn:
    saved.write_bytes(state)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("A process outlived kill -9.")


async def run_until_question(driver_class: type[Driver], desk: Desk, saved: Path) -> str:
    driver = driver_class(desk, level="PRIVILEGED", max_output_tokens=100)
    if (state := read_saved(saved)) is not None:
        return await driver.resume(driver.load(state))
    die_with(saved, driver.save(await driver.ask()))


async def run_until_call(driver_class: type[Driver], desk: Desk, saved: Path) -> str:
    """Die in the request that follows the first call, and make the whole run again."""

    def die_once(result_count: int) -> None:
        if result_count == 1 and not saved.exists():
            die_with(saved, b"")

    mind = Mind(("pay", {"amount": 7}), ("pay", {"amount": 9}), on_results=die_once)
    return await driver_class(desk, mind, max_output_tokens=100).run("one")


WAYS = {"at-a-question": run_until_question, "after-a-call": run_until_call}

if __name__ == "__main__":
    name, folder, way = sys.argv[1:]
    desk = Desk(Path(folder))
    desk.paid = Payments(Path(folder) / "paid.txt")
    desk.lease = 1.0
    sys.stdout.write(asyncio.run(WAYS[way](load_driver(name), desk, Path(folder) / "saved")))
