"""The command line. Little is imported here, so that an interrupt is answered from the first moment on."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def build() -> "typer.Typer":
    """Make the whole tree of commands."""
    from halter.cli.tree import tree

    return tree()


def main() -> None:
    """Run the command that was typed."""
    try:
        from halter.cli.door import enter

        code = enter()
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
