"""Write the reference pages into `docs/reference`."""

from pathlib import Path

from scripts.reference import pages

FOLDER = Path(__file__).parents[2] / "docs" / "reference"

FOLDER.mkdir(exist_ok=True)
for name, text in pages().items():
    (FOLDER / name).write_text(text, "utf-8")
