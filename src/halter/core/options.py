"""The keyword options of public functions."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from halter.core.errors import ConfigError
from halter.core.text import suggest_nearest

F = TypeVar("F", bound=Callable[..., Any])


def reject_unknown_options(options: Iterable[str], option_names: Iterable[str], noun: str) -> None:
    """Reject an unknown option, and suggest the nearest one."""
    names = sorted(option_names)
    for name in options:
        if name not in names:
            raise ConfigError(f"`{name}` is not an option of {noun}; {suggest_nearest(name, names, 'its options')}")


def write_out_options(options: type) -> Callable[[F], F]:
    """Have `help`, IDEs and notebooks show the keys of a TypedDict in place of a function's `**options`."""
    from inspect import Parameter, signature

    def show(function: F) -> F:
        plain = signature(function)
        written_out = [each for each in plain.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
        written_out += [
            Parameter(name, Parameter.KEYWORD_ONLY, default=..., annotation=annotation)
            for name, annotation in options.__annotations__.items()
        ]
        vars(function)["__signature__"] = plain.replace(parameters=written_out)
        return function

    return show
