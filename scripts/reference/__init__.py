"""The reference pages of the documentation, made from the code that they describe.

`python -m scripts.reference` writes them; a test checks that they are up to date.
"""

from collections.abc import Mapping

from scripts.reference import commands, events, http, keys, words


def pages() -> Mapping[str, str]:
    """Render all pages, by file name."""
    pages_by_name = {
        "cli.md": commands.page(),
        "agent-yaml.md": keys.agent_page(),
        "halter-yaml.md": keys.fleet_page(),
        "events.md": events.page(),
        "words.md": words.page(),
        "environment.md": words.environment_page(),
    }
    http_text = http.page()
    return pages_by_name | ({"http.md": http_text} if http_text else {})
