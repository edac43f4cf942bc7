"""Executes the bytes that were checked: a file of trusted code is read once, compared with its digest, and run as read.

The digest of a folder and the start of its code are two moments, and the files may change in between. So whatever runs
from such a folder in Halter's processes is read through `TrustedFiles`, and an import from it as well.
"""

import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
)
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

import msgspec

from halter.core.errors import ConfigError

_LINK: Final = "link "
"""Begins the entry of a link that leads to no file: its target, which may be a folder."""


class TrustedFiles(msgspec.Struct, frozen=True):
    """The digest of each file of a folder in the version that a person trusted.

    `root` is a real path, and names are relative to it. Data in `data_folders` was not trusted and is not checked.
    """

    root: str
    digest_by_name: Mapping[str, str]
    data_folders: tuple[str, ...] = ()

    def has(self, name: str) -> bool:
        return name in self.digest_by_name

    def read(self, path: str | Path) -> bytes:
        """Read a file once. Raises ConfigError unless its bytes are the trusted ones."""
        parent, name = os.path.split(path)
        relative_name = os.path.relpath(os.path.join(os.path.realpath(parent), name), self.root)  # noqa: PTH118 Imports pass text.
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
        if hashlib.sha256(data).hexdigest() != self.digest_by_name.get(relative_name):
            raise ConfigError(
                f"{path} is not the version that was trusted: it changed after the check. Nothing of it was run. "
                f"Review it, then run: halter trust {self.root}"
            )
        return data

    def copy_below(self, folder: Path, destination: Path) -> None:
        """Copy the trusted files below a folder, each from the bytes that were compared."""
        start = os.path.relpath(os.path.realpath(folder), self.root)
        for name, digest in self.digest_by_name.items():
            if not Path(name).is_relative_to(start):
                continue
            source, copy = Path(self.root, name), destination / os.path.relpath(name, start)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if digest.startswith(_LINK):
                copy.symlink_to(digest.removeprefix(_LINK))
            else:
                copy.write_bytes(self.read(source))
                copy.chmod(0o700 if os.access(source, os.X_OK) else 0o600)

    def with_only_modules(self) -> "TrustedFiles":
        """Return a copy with the modules of Python alone, for another process."""
        suffixes = (*SOURCE_SUFFIXES, *EXTENSION_SUFFIXES)
        modules = {name: digest for name, digest in self.digest_by_name.items() if name.endswith(suffixes)}
        return TrustedFiles(self.root, modules, self.data_folders)

    def covers(self, folder: str) -> bool:
        """Tell whether code in a folder must be the trusted one. The interpreter's own environment is not."""
        path = Path(os.path.realpath(folder))
        exempt_folders = (os.path.realpath(sys.prefix), *self.data_folders)
        return path.is_relative_to(self.root) and not any(map(path.is_relative_to, exempt_folders))


TrustCheck = Callable[[], TrustedFiles]
"""Returns the trusted files of a program. Raises unless a person trusts its current version."""


class TrustedLoader(SourceFileLoader):
    """Loads a module from the bytes that were compared, never from bytecode."""

    def __init__(self, name: str, path: str, files: TrustedFiles) -> None:
        super().__init__(name, path)
        self._files = files

    def get_data(self, path: str) -> bytes:
        return self._files.read(path)

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


class TrustedExtensionLoader(ExtensionFileLoader):
    """Loads compiled code from a private copy of the bytes that were compared."""

    def __init__(self, name: str, path: str, files: TrustedFiles) -> None:
        super().__init__(name, path)
        self._files = files

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        # Only a folder with compiled code needs it: the import would slow down every other program.
        from tempfile import TemporaryDirectory

        data = self._files.read(self.path)
        with TemporaryDirectory() as folder:
            copy = Path(folder, Path(self.path).name)
            copy.write_bytes(data)
            module = super().create_module(ModuleSpec(spec.name, self, origin=str(copy)))
        module.__file__ = self.path
        return module


_FILES_BY_ROOT: Final[dict[str, TrustedFiles]] = {}


def guard_imports(files: TrustedFiles) -> None:
    """Let this process import from a folder only what is trusted, also later, and in its forks."""
    if _find_module_finder not in sys.path_hooks:
        sys.path_hooks.insert(0, _find_module_finder)
    _FILES_BY_ROOT[files.root] = files
    for folder in list(sys.path_importer_cache):
        if files.covers(folder):
            del sys.path_importer_cache[folder]


def _find_module_finder(folder: str) -> FileFinder:
    """Make the finder of a folder on the path. Raises ImportError for one without trusted code: others find there."""
    for files in _FILES_BY_ROOT.values():
        if files.covers(folder):
            source_loader: Any = partial(TrustedLoader, files=files)
            extension_loader: Any = partial(TrustedExtensionLoader, files=files)
            return FileFinder(folder, (extension_loader, EXTENSION_SUFFIXES), (source_loader, SOURCE_SUFFIXES))
    raise ImportError(f"{folder} has no code that was checked.")
