"""The pages of frameworks that only `make frameworks` installs are tried out there."""

from pathlib import Path

import pytest

from tests.clients.providers import Provider, calls, text
from tests.docs.pages import Page
from tests.docs.reading import Reader
from tests.external.drivers import APART, DRIVERS, is_installed


@pytest.mark.timeout(300)
@pytest.mark.parametrize("framework", APART)
def test_what_the_page_of_a_framework_shows_is_so(framework: str, reader: Reader, tmp_path: Path) -> None:
    if not is_installed(DRIVERS[framework][0]):
        pytest.skip(f"{framework} is not installed: run make frameworks")
    # Only Claude Code asks a provider; the others have a made-up model on their page.
    read = calls(("toolu_1", "Read", {"file_path": str(tmp_path / "notes.txt")}))
    with Provider([read, text("It says that you should buy milk.")]) as provider:
        reader.terminal.environ |= {
            "ANTHROPIC_BASE_URL": provider.url,
            "ANTHROPIC_API_KEY": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CREWAI_DISABLE_TELEMETRY": "true",
            "CREWAI_TRACING_ENABLED": "false",
            "OTEL_SDK_DISABLED": "true",
        }
        page = Page(f"docs/how-to/{framework.replace('_', '-')}.md")
        reader.opens(page)
        for block in page.blocks:
            reader.tries(block)
