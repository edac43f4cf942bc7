"""The pytest plugin with the `world` fixture: a runtime in virtual time.

An `async def` test that takes the `world` runs in its loop, before any other async plugin's loop is used. Async
fixtures still run in that other loop, so make what belongs to the world in the test itself.

`@pytest.mark.world(lease=30 * MINUTE)` gives a test a world that is made with these arguments.

Halter is imported only when a test asks for a world, so installing it does not slow down other tests.
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
"""The world of an async test, and the original test function."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --halter-seed, which replays a run or tries another one."""
    group = parser.getgroup("halter")
    group.addoption(
        "--halter-seed",
        type=int,
        metavar="N",
        help="the seed of every world; by default, each test has its own, made from its name",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Describe the mark by which a test says how its world is made."""
    config.addinivalue_line("markers", "world(**arguments): the arguments that the test's world is made with")


@pytest.fixture
def world(request: pytest.FixtureRequest) -> "Iterator[World]":
    """A whole runtime in virtual time, new for each test."""
    from halter.testing.world import World

    given: int | None = request.config.getoption("--halter-seed")
    seed = zlib.crc32(request.node.name.encode()) if given is None else given
    request.node.add_report_section("setup", "halter", f"This world replays with --halter-seed={seed}")
    mark: pytest.Mark | None = request.node.get_closest_marker("world")
    made: dict[str, Any] = dict(mark.kwargs) if mark else {}
    with World(seed, **made) as fresh:
        if inspect.iscoroutinefunction(request.function):
            request.node.stash[_INSIDE] = (fresh, request.function)
        yield fresh


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an async test in its world. Another plugin may have wrapped the test by now; the original is called."""
    inside = pyfuncitem.stash.get(_INSIDE, None)
    if inside is None:
        return None
    world, test = inside
    world.run(test(**{name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}))
    return True
