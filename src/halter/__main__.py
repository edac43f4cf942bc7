"""The entry point of `python -m halter`."""

from halter_agents import main

if __name__ == "__main__":
    main()
