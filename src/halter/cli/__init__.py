"""The command line. Few imports here, so that an interrupt is handled from the start."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def build() -> "typer.Typer":
    from halter.cli.commands import build_command_tree

    return build_command_tree()


def main() -> None:
    try:
        from halter.cli.entrypoint import run_program

        code = run_program()
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
