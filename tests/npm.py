"""Packages of npm that tests use: installed once from their lock files, into a folder that git ignores."""

import fcntl
import hashlib
import shutil
import subprocess
from pathlib import Path


class NpmMissing(Exception):
    """A package cannot be had on this machine."""


def install_locked(of: Path, cache: Path, text: str) -> Path:
    """Install what the lock file names, unless it is there already; processes that start together take turns."""
    npm = shutil.which("npm")
    if npm is None:
        raise NpmMissing(f"{text} need node and npm: please install them.")
    cache.mkdir(exist_ok=True)
    with (cache / "lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        path = cache / f"{hashlib.sha256((of / 'package-lock.json').read_bytes()).hexdigest()}.installed"
        if not path.exists():
            _install(npm, of, cache, text)
            path.touch()
    return cache / "node_modules"


def _install(npm: str, of: Path, cache: Path, output: str) -> None:
    for name in ("package.json", "package-lock.json"):
        shutil.copy(of / name, cache / name)
    command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"]
    try:
        process = subprocess.run(command, cwd=cache, capture_output=True, text=True, check=False, timeout=100)
    except subprocess.TimeoutExpired:
        raise NpmMissing(f"{output} need npm to install a package, but that takes too long.") from None
    if process.returncode:
        raise NpmMissing(f"{output} need npm to install a package, but it says: {process.stderr.strip()[-300:]}")
