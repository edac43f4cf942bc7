"""A reader of the documentation, in an empty folder with the examples."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.docs.reading import Reader
from tests.docs.terminal import Terminal


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    terminal = Terminal(tmp_path)
    yield Reader(terminal, tmp_path)
    terminal.close()
