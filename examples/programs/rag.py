"""Answer questions about a folder of Markdown pages, and name the sections that the answer is from.

    python rag.py docs "How do I give an agent more money?"

The search is SQLite's full-text index. To use another one, such as vectors, replace `index_pages` and the query.
"""

import re
import sqlite3
import sys
from pathlib import Path

from halter import Agent, Deps

librarian = Agent(
    "librarian",
    model="anthropic:claude-sonnet-5-5",
    store="runs.db",
    deps_type=sqlite3.Connection,
    instructions="Search before you answer. Answer from the sections that you found, and name them.",
)


@librarian.tool(level="SAFE", effect="read", reads="trusted")
async def search(words: str, index: Deps[sqlite3.Connection]) -> str:
    """Find the five sections that fit some words best."""
    query = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", words)) or '""'
    sections = index.execute("SELECT title, text FROM pages WHERE pages MATCH ? ORDER BY rank LIMIT 5", [query])
    return "\n\n".join(f"## {title}\n{text}" for title, text in sections) or "No section has these words."


def index_pages(folder: Path) -> sqlite3.Connection:
    """Split the pages at their headings, and index the sections."""
    index = sqlite3.connect(":memory:")
    index.execute("CREATE VIRTUAL TABLE pages USING fts5(title, text)")
    for page in sorted(folder.rglob("*.md")):
        for section in re.split(r"^#+ ", page.read_text("utf-8"), flags=re.MULTILINE):
            heading, _, text = section.partition("\n")
            index.execute("INSERT INTO pages VALUES (?, ?)", [f"{page.name}: {heading}", text.strip()])
    return index


def main(folder: str, question: str) -> None:
    print(librarian.run_sync(question, deps=index_pages(Path(folder))).require_output())


if __name__ == "__main__":
    main(*sys.argv[1:])
