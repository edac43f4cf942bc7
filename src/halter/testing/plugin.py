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
_WORLD_KEY = pytest.StashKey[tuple["World", _AsyncTest]]()
"""The world of an async test, and the original test function."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --halter-seed, which replays a run or tries another seed."""
    group = parser.getgroup("halter")
    group.addoption(
        "--halter-seed",
        type=int,
        metavar="N",
        help="seed of every world (default: derived from the test's name)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Describe the `world` mark, which sets the arguments of a test's world."""
    config.addinivalue_line("markers", "world(**arguments): arguments of the test's World")


@pytest.fixture
def world(request: pytest.FixtureRequest) -> "Iterator[World]":
    """A whole runtime in virtual time, new for each test."""
    from halter.testing.world import World

    requested_seed: int | None = request.config.getoption("--halter-seed")
    seed = zlib.crc32(request.node.name.encode()) if requested_seed is None else requested_seed
    request.node.add_report_section("setup", "halter", f"Replay this world with --halter-seed={seed}")
    marker: pytest.Mark | None = request.node.get_closest_marker("world")
    arguments: dict[str, Any] = dict(marker.kwargs) if marker else {}
    with World(seed, **arguments) as new_world:
        if inspect.iscoroutinefunction(request.function):
            request.node.stash[_WORLD_KEY] = (new_world, request.function)
        yield new_world


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an async test in its world. Another plugin may have wrapped the test by now; the original is called."""
    inside = pyfuncitem.stash.get(_WORLD_KEY, None)
    if inside is None:
        return None
    world, test = inside
    world.run(test(**{name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}))
    return True
