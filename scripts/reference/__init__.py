"""The reference pages of the documentation, made from the code that they describe.

`python -m scripts.reference` writes them; a test makes them anew and compares, so that they are never out of date.
"""

from collections.abc import Mapping

from scripts.reference import commands, events, http, keys, words


def pages() -> Mapping[str, str]:
    """Make all pages, by the name of their file."""
    made = {
        "cli.md": commands.page(),
        "agent-yaml.md": keys.agent_page(),
        "halter-yaml.md": keys.fleet_page(),
        "events.md": events.page(),
        "words.md": words.page(),
        "environment.md": words.environment_page(),
    }
    served = http.page()
    return made | ({"http.md": served} if served else {})
