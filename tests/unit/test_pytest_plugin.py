"""What the pytest plugin promises to somebody who tests agents with it."""

import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]

INSIDE = """
    import asyncio
    import pytest

    HOUR = 3_600_000_000

    async def test_a_function(world, tmp_path):
        assert asyncio.get_running_loop() is world.clock
        before = world.now
        await world.advance(HOUR)
        assert world.now == before + HOUR
        assert tmp_path.exists()

    class TestAClass:
        @pytest.mark.parametrize("number", [1, 2])
        async def test_a_method(self, number, world):
            assert asyncio.get_running_loop() is world.clock

    def test_a_plain_function(world):
        world.run(world.advance(HOUR))
"""

MADE_AS_MARKED = """
    import pytest

    @pytest.mark.world(lease=7)
    async def test_marked(world):
        assert world.lease == 7

    async def test_unmarked(world):
        assert world.lease == 15_000_000
"""

BESIDE = """
    import asyncio
    import pytest

    @pytest.fixture
    def world():
        return "a world of their own"

    async def test_theirs(world):
        assert world == "a world of their own"
        assert type(asyncio.get_running_loop()).__name__ != "SeedLoop"

    async def test_none():
        assert type(asyncio.get_running_loop()).__name__ != "SeedLoop"
"""

SHOWS_ITS_CHANCE = """
    async def test_chance(world):
        print("drew", world.random.random(), await world.start())
        assert world.seed == 0
"""

# Each run would import all plugins that are installed here, with all that they import.
ALONE = ("--disable-plugin-autoload", "-p", "halter")
MODES = ("-o", "asyncio_default_fixture_loop_scope=function", "-o")
AUTO = (*ALONE, "-p", "asyncio", *MODES, "asyncio_mode=auto")
STRICT = (*ALONE, "-p", "asyncio", *MODES, "asyncio_mode=strict")


@pytest.mark.parametrize("options", [AUTO, STRICT, ALONE], ids=["auto", "strict", "none"])
def test_async_tests_run_inside_their_world_whatever_async_plugin_there_is(
    pytester: pytest.Pytester, options: tuple[str, ...]
) -> None:
    pytester.makepyfile(INSIDE)
    pytester.runpytest_subprocess(*options).assert_outcomes(passed=4)


def test_a_world_is_made_as_the_mark_of_its_test_says(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(MADE_AS_MARKED)
    pytester.runpytest_subprocess(*AUTO, "--strict-markers").assert_outcomes(passed=2)


def test_tests_without_a_world_of_halter_are_unchanged(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(BESIDE)
    pytester.runpytest_subprocess(*AUTO).assert_outcomes(passed=2)


def find_drawn_line(result: pytest.RunResult) -> str:
    return next(line for line in result.outlines if line.startswith("drew"))


def test_a_failing_test_replays_from_its_name_and_from_the_seed_that_it_shows(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SHOWS_ITS_CHANCE)
    first = pytester.runpytest_subprocess(*AUTO)
    first.assert_outcomes(failed=1)
    option = next(line for line in first.outlines if "--halter-seed=" in line).split()[-1]
    assert find_drawn_line(pytester.runpytest_subprocess(*AUTO)) == find_drawn_line(first)
    assert find_drawn_line(pytester.runpytest_subprocess(*AUTO, option)) == find_drawn_line(first)
    assert find_drawn_line(pytester.runpytest_subprocess(*AUTO, "--halter-seed=7")) != find_drawn_line(first)


def test_the_plugin_is_loaded_automatically_and_a_passing_test_shows_no_seed(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SHOWS_ITS_CHANCE)
    result = pytester.runpytest_subprocess(*MODES, "asyncio_mode=auto", "--halter-seed=0")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*replays*")


def test_at_start_up_the_plugin_loads_nothing_but_itself() -> None:
    report = "import pytest, sys; old = set(sys.modules); import halter.testing.plugin; print(*set(sys.modules) - old)"
    process = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, timeout=60, check=True)
    assert set(process.stdout.split()) == {"halter", "halter_agents", "halter.testing", "halter.testing.plugin"}
