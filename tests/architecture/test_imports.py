"""Imports point down, and the plain package stays light."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WEB_STACK = frozenset({"fastapi", "starlette", "uvicorn", "nicegui", "pydantic_ai"})


def lint_imports(project: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-logo", "--no-cache"]
    environment = os.environ | {"PYTHONPATH": str(project / "src")}
    return subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def loaded_after(statement: str) -> frozenset[str]:
    report = f"{statement}; import sys; print(*sys.modules)"
    process = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, timeout=60, check=True)
    return frozenset(name.partition(".")[0] for name in process.stdout.split())


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_imports_point_down_and_mind_and_hands_stay_apart() -> None:
    process = lint_imports(ROOT)
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.parametrize(
    ("module", "imports", "broken"),
    [
        ("core/wrong.py", "halter.state", "core is not allowed to import halter.state"),
        ("state/wrong.py", "halter.guard", "state is not allowed to import halter.guard"),
        ("journal/wrong.py", "halter.models", "journal is not allowed to import halter.models"),
        ("journal/wrong.py", "halter.guard", "journal is not allowed to import halter.guard"),
        ("guard/wrong.py", "halter.journal", "guard is not allowed to import halter.journal"),
        ("loop/wrong.py", "halter.models", "loop is not allowed to import halter.models"),
        ("guard/wrong.py", "halter_drills", "halter is not allowed to import halter_drills"),
        ("nowhere.py", "halter.core", "halter.nowhere"),
    ],
)
def test_an_import_in_the_wrong_direction_is_found(copied: Path, module: str, imports: str, broken: str) -> None:
    wrong = copied / "src/halter" / module
    wrong.parent.mkdir(exist_ok=True)
    wrong.write_text(f'"""Breaks a rule on purpose."""\n\nimport {imports}\n')
    process = lint_imports(copied)
    assert process.returncode == 1
    assert broken in process.stdout


def test_importing_halter_loads_no_web_stack() -> None:
    assert not loaded_after("import halter") & WEB_STACK


def test_the_plain_install_brings_no_web_stack() -> None:
    lines = (ROOT / "requirements/plain.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].replace("-", "_") for line in lines if "==" in line}
    assert "msgspec" in pinned
    assert not pinned & (WEB_STACK | {"pydantic_ai_slim"})
