"""`make bench`: run the measurements and write their results."""

import argparse
import sys

from bench import guard, journal, tables

GROUPS = {"guard": guard.run, "journal": journal.run}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("groups", nargs="*", help=f"which of {', '.join(GROUPS)}; all if none is named")
    parser.add_argument("--rounds", type=int, default=5, help="how often each row is measured")
    asked = parser.parse_args()
    unknown = set(asked.groups) - set(GROUPS)
    if unknown:
        sys.exit(f"There is no group {', '.join(sorted(unknown))}: there are {', '.join(GROUPS)}.")
    for name in asked.groups or GROUPS:
        GROUPS[name](asked.rounds, lambda note: print(f"  {note}", file=sys.stderr))
    print(tables.write())


if __name__ == "__main__":
    main()
