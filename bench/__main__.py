"""`make bench`: run the benchmarks and write their results."""

import argparse
import sys
from collections.abc import Callable
from functools import partial

from bench import (
    adapters,
    autonomy,
    growth,
    guard,
    hook,
    inject,
    journal,
    loop,
    past,
    proxy,
    scale,
    start,
    stream,
    tables,
)
from bench.measure import Measured, keep, result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    options = _asked(parser)
    groups: dict[str, Callable[..., Measured]] = {
        "adapters": adapters.run,
        "autonomy": partial(autonomy.run, quick=options.quick),
        "growth": partial(growth.run, quick=options.quick),
        "guard": guard.run,
        "hook": hook.run,
        "inject": partial(inject.run, quick=options.quick, kept=options.kept),
        "journal": journal.run,
        "loop": partial(loop.run, quick=options.quick, only=options.only),
        "past": partial(past.run, quick=options.quick),
        "proxy": proxy.run,
        "scale": partial(scale.run, quick=options.quick),
        "start": start.run,
        "stream": stream.run,
    }
    unknown = set(options.groups) - set(groups)
    if unknown:
        sys.exit(f"Unknown group {', '.join(sorted(unknown))}. Use {', '.join(groups)}.")
    failed_groups: list[str] = []
    for name in options.groups or groups:
        try:
            measurement = groups[name](1 if options.quick else options.rounds, _say)
        except Exception as error:  # noqa: BLE001  the other groups are measured, and then it fails
            _say(f"{name} could not be measured; its previous results are kept: {type(error).__name__}: {error}")
            failed_groups.append(name)
            continue
        if options.quick or options.only:
            print(tables.section(result(name, *measurement)))
        else:
            keep(name, *measurement)
    if not (options.quick or options.only):
        print(tables.write())
    if failed_groups:
        sys.exit(f"Not measured: {', '.join(failed_groups)}.")


def _say(note: str) -> None:
    print(f"  {note}", file=sys.stderr)


def _asked(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument(
        "groups",
        nargs="*",
        help="groups to measure: adapters, autonomy, growth, guard, hook, inject, journal, loop, past, proxy, scale, "
        "start, stream",
    )
    parser.add_argument("--rounds", type=int, default=5, help="number of measurements per row")
    parser.add_argument("--kept", action="store_true", help="for inject, show only results cached for this code")
    parser.add_argument("--quick", action="store_true", help="run one short round without saving results")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        choices=[loop.HALTER, *(peer.name for peer in loop.PEERS)],
        help="measure only this contender in the loop, without saving results; repeatable",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
