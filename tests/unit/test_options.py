"""Options that a program gives by keyword: none is ignored."""

from collections.abc import Callable, Mapping
from functools import partial

import pytest

from halter.core.errors import ConfigError
from halter.external.guard import Guard
from halter.tools.function_tool import tool
from halter.tools.http import make_http_tools
from halter.tools.shell import make_shell_tool


def look(text: str) -> str:
    """Look."""
    return text


@pytest.mark.parametrize(
    ("make", "options", "sentence"),
    [
        (partial(tool, look), {"levl": "SAFE"}, "`levl` is not an option of a tool; did you mean `level`?"),
        (tool, {"colour": 1}, "`colour` is not an option of a tool; its options are `arguments`, `asks`, "),
        (
            partial(make_shell_tool, "."),
            {"sandboxed": 1},
            "`sandboxed` is not an option of the shell tool; did you mean `sandbox`?",
        ),
        (
            partial(make_http_tools, ["a.example"]),
            {"time_out": 1},
            "not an option of the http tools; did you mean `timeout`?",
        ),
        (partial(Guard, "memory:"), {"max_cost": 1}, "not an option of a guard; did you mean `max_cost_usd`?"),
        (partial(Guard("memory:").tool, look), {"effects": "read"}, "not an option of a tool; did you mean `effect`?"),
    ],
)
def test_an_option_that_does_not_exist_is_refused_with_the_nearest_one_that_does(
    make: Callable[..., object], options: Mapping[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        make(**options)
    assert sentence in str(refused.value)
