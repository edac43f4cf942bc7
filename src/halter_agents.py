"""The start of the command `halter`, before any code of the package `halter` runs.

The distribution is called `halter-agents`, since `halter` on the package index is another project, with a package and a
command of the same name. In an environment with both, nobody can say whose files run: nothing of either is started.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

DISTRIBUTION: Final = "halter-agents"
"""The name to install; the package and the command are called `halter`."""

VERSION: Final = "1.0.0"


def main() -> None:
    problem = find_namesake(Path(__file__).parent)
    if problem is not None:
        sys.stderr.write(f"{problem}\n")
        raise SystemExit(3)
    import halter.cli

    halter.cli.main()


def find_namesake(folder: Path) -> str | None:
    """Describe another distribution whose files mix with those in the folder, or hide them; None if there is none."""
    package = find_spec("halter")
    if package is None or package.origin is None or Path(package.origin).parent != folder / "halter":
        location = package and package.origin
    else:
        location = next((str(found) for found in folder.glob("halter-*.dist-info")), None)
        if location is None:
            return None
    return (
        f"Another package called `halter` is in this environment ({location}), with files of the same names. "
        f"Run: pip uninstall halter; pip install --force-reinstall {DISTRIBUTION}"
    )
