"""The package as it is installed: a wheel, the plain dependencies, an empty home, and no checkout."""

import json
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
POSTGRES = "postgresql://nobody@127.0.0.1:1/nothing"

MODEL = "name: clerk\nmodel: openai:gpt-5-mini\n"
REFLEX = "name: clerk\nmodel: reflex\nreflex: [{say: Done.}]\n"
RULE = "name: clerk\nmodel: reflex\nreflex: [{when: 'size(message) > 2', say: Done.}]\n"
SENSOR = f"{REFLEX}sensors: [{{name: inbox, type: files, source: {{path: .}}}}]\nautonomy: {{max_sleep: 1h}}\n"
MAIL = f"{REFLEX}notify: {{channels: [{{name: mail, type: email, to: [a@b.example], sender: c@d.example, host: h}}]}}\n"
SERVICE = f"{REFLEX}secrets: [S]\nnotify: {{channels: [{{name: phone, type: apprise, service: '${{secret:S}}'}}]}}\n"
WEBHOOK = f"{REFLEX}secrets: [HOOK]\nwebhooks: [{{name: new, prompt: Look, token: '${{secret:HOOK}}'}}]\n"
SERVER = json.dumps({"mcpServers": {"files": {"command": "cat"}}})


@dataclass(frozen=True)
class Installed:
    """Halter in an environment of its own."""

    environment: Path
    home: Path

    def halter(self, *words: str, seconds: int = 60, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.environment / "bin" / "halter", *words],
            cwd=self.home,
            env={"HOME": str(self.home), "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "COLUMNS": "200", **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("halter_agents-*.whl"))


@pytest.fixture(scope="session")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and the plain dependencies, which are lent by the one that the tests run in."""
    path = tmp_path_factory.mktemp("plain") / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", path], check=True)
    packages = next(path.glob("lib/python*/site-packages"))
    for name in re.findall(r"^([\w.-]+)==", (ROOT / "requirements" / "plain.txt").read_text(), re.MULTILINE):
        _lend(name, packages)
    install = [sys.executable, "-m", "pip", "--python", path / "bin" / "python", "install"]
    subprocess.run([*install, "--quiet", "--no-index", "--no-deps", "--no-compile", wheel], check=True)
    return path


def _lend(name: str, packages: Path) -> None:
    try:
        found = distribution(name)
    except PackageNotFoundError:  # It is for another system.
        return
    for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
        if not (packages / top).exists():
            (packages / top).symlink_to(Path(str(found.locate_file(top))))


@pytest.fixture
def installed(environment: Path, tmp_path: Path) -> Installed:
    return Installed(environment, tmp_path)


def test_the_wheel_has_every_file_of_the_source(wheel: Path) -> None:
    files = (file for file in SOURCE.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    assert {str(file.relative_to(SOURCE)) for file in files} - {*zipfile.ZipFile(wheel).namelist()} == set()


def test_an_agent_is_made_and_run(installed: Installed) -> None:
    assert installed.halter("init", "clerk").returncode == 0
    ran = installed.halter("run", "clerk", "hello")
    assert "Hello." in ran.stdout + ran.stderr
    assert ran.returncode == 0


def test_the_guard_of_the_readme_works_without_any_extra(installed: Installed) -> None:
    """A call is made and paid for, and the command line shows it and its budget."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    (program,) = [block for block in blocks if "asyncio.run(main())" in block]
    (installed.home / "mail.py").write_text(program)
    python = installed.environment / "bin" / "python"
    environ = {"HOME": str(installed.home), "PATH": "/usr/bin:/bin"}
    ran = subprocess.run([python, "mail.py"], cwd=installed.home, env=environ, capture_output=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, b"ok sent to ada\n"), ran.stderr
    assert "send" in installed.halter("audit", "--store", "runs.db").stdout
    assert "$0.02" in installed.halter("budget", "--store", "runs.db").stdout
    assert installed.halter("verify", "--store", "runs.db").returncode == 0


LACKS = [
    ("serve reflex", "The server needs the extra `server`: pip install 'halter-agents[server]'"),
    (f"sessions --store {POSTGRES}", "needs the extra `postgres`: pip install 'halter-agents[postgres]'"),
    ("run model hello", "openai:gpt-5-mini needs the extra `models`: pip install 'halter-agents[models]'"),
    (
        "run rule hello",
        "condition `size(message) > 2` needs the extra `autonomy`: pip install 'halter-agents[autonomy]'",
    ),
    ("run sensor hello", "The sensor inbox needs the extra `autonomy`: pip install 'halter-agents[autonomy]'"),
    ("run mail hello", "The channel mail needs the extra `notify`: pip install 'halter-agents[notify]'"),
    ("run service hello", "The channel phone needs the extra `notify`: pip install 'halter-agents[notify]'"),
    ("run mcp hello", "The MCP server files needs the extra `mcp`: pip install 'halter-agents[mcp]'"),
]
MORE = [
    (f"worker reflex --store {POSTGRES}", "needs the extra `postgres`: pip install 'halter-agents[postgres]'"),
    ("up webhook", "The server needs the extra `server`: pip install 'halter-agents[server]'"),
    ("drill billing", "The drill billing needs the extra `models`: pip install 'halter-agents[models]'"),
]


@pytest.mark.parametrize(
    ("words", "sentence"), [*LACKS, *(pytest.param(*each, marks=pytest.mark.soak) for each in MORE)]
)
def test_what_needs_an_extra_says_so(installed: Installed, words: str, sentence: str) -> None:
    agents = {"reflex": REFLEX, "model": MODEL, "webhook": WEBHOOK, "rule": RULE, "sensor": SENSOR, "mail": MAIL}
    agents |= {"mcp": REFLEX, "service": SERVICE}
    for name, text in agents.items():
        (installed.home / name).mkdir()
        (installed.home / name / "agent.yaml").write_text(text)
    (installed.home / "mcp" / ".mcp.json").write_text(SERVER)
    if "run mcp" in words:
        assert installed.halter("trust", "mcp").returncode == 0
    process = installed.halter(*words.split(), OPENAI_API_KEY="none", HALTER_SECRET_HOOK="0123456789abcdef")
    assert sentence in process.stderr + process.stdout
    assert "ModuleNotFoundError" not in process.stderr
    assert process.returncode == 3


def test_a_library_of_an_extra_that_is_missing_anywhere_is_named(installed: Installed) -> None:
    """The last door of the command line knows every library, wherever its import fails."""
    probe = (
        "import sys; from halter.cli import commands, entrypoint as door; sys.argv = ['halter']\n"
        "def broken(): raise ModuleNotFoundError(\"No module named 'uvicorn'\", name='uvicorn.protocols')\n"
        "commands.build_command_tree = lambda: lambda **_: broken()\n"
        "raise SystemExit(door.run_program())"
    )
    python = installed.environment / "bin" / "python"
    process = subprocess.run([python, "-c", probe], env={"HOME": str(installed.home)}, capture_output=True, check=False)
    assert process.returncode == 3
    assert b"pip install 'halter-agents[server]'" in process.stderr


@pytest.mark.soak
def test_every_command_and_the_demo_work(installed: Installed) -> None:
    helped = installed.halter("--help").stdout
    commands = re.findall(r"^│ ([a-z]+) ", helped, re.MULTILINE)
    assert len(commands) > 30
    assert [name for name in commands if installed.halter(name, "--help").returncode] == []
    night = json.loads(installed.halter("demo", "--night-only", "--json", seconds=600).stdout)
    assert night
    assert installed.halter("drill", "race", "--seeds", "1", seconds=600).returncode == 0


@pytest.mark.soak
def test_pip_installs_the_wheel_into_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """With every dependency from where pip finds them, as a user does it."""
    path = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", path], check=True)
    install = [path / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "--require-hashes", "-r", ROOT / "requirements" / "plain.txt"], check=True)
    subprocess.run([*install, "--no-index", wheel], check=True, env={**os.environ})
    (tmp_path / "home").mkdir()
    installed = Installed(path, tmp_path / "home")
    assert installed.halter("init", "clerk").returncode == 0
    assert installed.halter("run", "clerk", "hello").returncode == 0


@pytest.mark.parametrize("own_is_last", [True, False])
def test_beside_the_other_project_called_halter_nothing_runs(wheel: Path, tmp_path: Path, *, own_is_last: bool) -> None:
    """It has a package and a command of the same name, so that its files and ours are mixed."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    install = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install", "--no-index"]
    wheels = [build_namesake(tmp_path), wheel]
    for each in wheels if own_is_last else reversed(wheels):
        subprocess.run([*install, "--quiet", "--no-deps", "--no-compile", each], check=True)
    if not own_is_last:  # Its command replaced ours, which `python -m` still reaches.
        (environment / "bin" / "halter").write_text(
            f"#!{environment}/bin/python\nimport halter_agents\nhalter_agents.main()\n"
        )
    process = Installed(environment, tmp_path).halter("--version")
    assert "pip uninstall halter; pip install --force-reinstall halter-agents" in process.stderr
    assert "A stranger's code" not in process.stdout
    assert process.returncode == 3


def build_namesake(folder: Path) -> Path:
    """Build a wheel of another project with our package's name and command."""
    path = folder / "halter-9.9.0-py3-none-any.whl"
    about = "halter-9.9.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("halter/__init__.py", 'print("A stranger\'s code")\n')
        archive.writestr("halter/cli/__init__.py", 'def main():\n    print("A stranger\'s code")\n')
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: halter\nVersion: 9.9.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/entry_points.txt", "[console_scripts]\nhalter = halter.cli:main\n")
        archive.writestr(f"{about}/RECORD", "")
    return path
