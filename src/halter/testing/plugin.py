"""The pytest plugin that hands tests a world in virtual time.

An `async def` test that takes the `world` runs inside of it, whatever other plugin for async tests is installed:
it is called here, before that plugin's own loop would be used. An async fixture still runs in that loop, so what
belongs to the world is made in the test itself.

Nothing of Halter is imported before a test asks for a world, so that installing Halter slows down nobody's tests.
"""

import inspect
import zlib
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from halter.testing.world import World

_AsyncTest = Callable[..., Coroutine[Any, Any, None]]
_INSIDE = pytest.StashKey[tuple["World", _AsyncTest]]()
"""The world that an async test takes, and the test as it was written."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the seed be given, to replay a run or to try another one."""
    group = parser.getgroup("halter")
    group.addoption(
        "--halter-seed",
        type=int,
        metavar="N",
        help="the seed of every world; without it, each test has one of its own, made from its name",
    )


@pytest.fixture
def world(request: pytest.FixtureRequest) -> "Iterator[World]":
    """A whole runtime in virtual time, made anew for this test."""
    from halter.testing.world import World

    given: int | None = request.config.getoption("--halter-seed")
    seed = zlib.crc32(request.node.name.encode()) if given is None else given
    request.node.add_report_section("setup", "halter", f"This world replays with --halter-seed={seed}")
    with World(seed) as fresh:
        if inspect.iscoroutinefunction(request.function):
            request.node.stash[_INSIDE] = (fresh, request.function)
        yield fresh


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an async test that takes the world inside of it.

    By now another plugin may have put a function of its own in the test's place; the one that was there before
    any of them is called.
    """
    inside = pyfuncitem.stash.get(_INSIDE, None)
    if inside is None:
        return None
    world, test = inside
    world.run(test(**{name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}))
    return True
