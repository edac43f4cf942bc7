"""The entry point of `python -m halter`."""

from halter.cli import main

if __name__ == "__main__":
    main()
