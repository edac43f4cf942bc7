"""Every command and every example of the documentation is tried out, as a reader would."""

import re
from typing import cast

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from halter.cli.commands import build_command_tree
from tests.docs.pages import Page, all_pages
from tests.docs.reading import WITH_A_MODEL, Reader, commands_of

PAGES = all_pages()
SHOWN = {"yaml", "json", "python", "console", "sh", "text", "ini", "nginx", "html"}

IN_FRAMEWORKS = "it needs the framework; tests/docs/test_framework_pages.py runs it in `make frameworks`"
NOT_RUN = {
    "README.md": ["it installs, and runs until you stop it", "installs from the network"],
    "docs/demo.md": [
        "it runs until you stop it; it has tests of its own",
        "it serves until you stop it",
        "it speaks to the demo, which has tests of its own",
    ],
    "docs/drills.md": ["takes minutes"],
    "docs/how-to/budget.md": ["the page's own store has no policy"],
    "docs/how-to/claude-code.md": ["it runs until you stop it; tests/proxy has one that serves"],
    "docs/how-to/codex.md": ["it runs until you stop it; tests/proxy has one that serves"],
    "docs/how-to/dashboard.md": ["needs a second machine", "needs a name and a certificate"],
    "docs/how-to/deploy.md": [
        "needs root",
        "needs Docker",
        "needs a PostgreSQL server; tests/docs/test_deploy_page.py has one",
        "needs root",
    ],
    "docs/how-to/claude-sdk.md": [IN_FRAMEWORKS],
    "docs/how-to/crewai.md": [IN_FRAMEWORKS],
    "docs/how-to/google-adk.md": [IN_FRAMEWORKS],
    "docs/how-to/sdk-clients.md": [
        "it asks a real model; tests/adapters/test_sdk_clients.py runs the same with a made-up one"
    ],
    "docs/how-to/gateway.md": ["it runs until you stop it; tests/gateway has one that serves"],
    "docs/how-to/hooks.md": ["needs Claude Code", "needs Claude Code", "needs Codex", "needs Gemini CLI and Cursor"],
    "docs/how-to/openai-clients.md": ["it runs until you stop it; tests/proxy has one that serves"],
    "docs/how-to/postgres.md": ["needs a PostgreSQL server"],
    "docs/how-to/siem.md": ["it runs until you stop it"],
    "docs/how-to/systemd.md": ["needs root"],
    "docs/how-to/traces.md": ["needs a collector"],
    "docs/support.md": ["installs from the network", "builds the package"],
    "docs/tasks.md": ["it needs bubblewrap; it has tests of its own"],
    "docs/traces.md": [
        "it needs a collector, and runs until you stop it",
        "it is a part of another program's configuration",
    ],
    "docs/tutorial.md": ["needs the key of a provider"],
}
"""The blocks that cannot run in a test, by page, each with its reason."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("page", PAGES, ids=str)
def test_what_a_page_shows_is_so(page: Page, reader: Reader) -> None:
    reader.opens(page)
    for block in page.blocks:
        if block.note("not run") is None:
            reader.tries(block)


def test_what_is_not_run_is_known_and_says_why() -> None:
    values = {page.name: [why for block in page.blocks if (why := block.note("not run")) is not None] for page in PAGES}
    assert {name: reasons for name, reasons in values.items() if reasons} == NOT_RUN


def test_every_block_says_what_it_is() -> None:
    assert [str(block) for page in PAGES for block in page.blocks if block.language not in SHOWN] == []


def test_no_block_hides_in_a_list_where_nobody_would_try_it() -> None:
    assert [page.name for page in PAGES if re.search(r"^[ >]+```", page.text, re.MULTILINE)] == []


def test_every_command_that_a_page_names_can_be_typed() -> None:
    texts = set(cast("TyperGroup", get_command(build_command_tree())).commands)
    named = {
        (page.name, word) for page in PAGES for word in re.findall(r"(?:`|^)halter ([a-z]+)", page.text, re.MULTILINE)
    }
    assert sorted(each for each in named if each[1] not in texts) == []


def test_examples_that_ask_a_provider_stand_where_a_provider_answers_them() -> None:
    asking = {page.name for page in PAGES for block in page.blocks if WITH_A_MODEL.search(block.text)}
    assert asking <= {"README.md", "docs/programs.md"}


def test_a_block_of_commands_has_commands() -> None:
    empty = [
        str(block)
        for page in PAGES
        for block in page.blocks
        if block.language == "sh" and block.note("not run") is None and not list(commands_of(block))
    ]
    assert empty == []
