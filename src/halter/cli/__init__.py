"""The command line. Few imports here, so that an interrupt is handled from the start."""

import sys


def main() -> None:
    try:
        from halter.cli.entrypoint import run_program

        code = run_program()
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
