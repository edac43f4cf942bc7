"""What keeps forks cheap in a process that has collected thousands of tests.

Many tools run in a fork of their process. A fork copies the page tables of all resident memory, and afterwards each
page that either side writes to. So freed memory goes back to the system, and the rest lies in huge pages where there
are some.
"""

import contextlib
import ctypes
import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

HUGE_PAGE = 2 << 20
MADV_HUGEPAGE = 14
MADV_COLLAPSE = 25
GROWN_PAGES = 8_000


class Memory:
    """A plugin that compacts the memory of this process, after the collection and whenever it has grown."""

    def __init__(self) -> None:
        self._resident = 0
        self._system: Any = ctypes.CDLL(None)

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        """Keep what is collected out of every later garbage collection, which would write to all of it."""
        gc.disable()
        try:
            return (yield)
        finally:
            gc.freeze()
            gc.set_threshold(5_000, 10, 10)
            gc.enable()
            self._compact()

    def pytest_runtest_logfinish(self) -> None:
        if _read_resident_pages() > self._resident + GROWN_PAGES:
            self._compact()

    def _compact(self) -> None:
        # Not every system has these; without them, the tests only take longer.
        with contextlib.suppress(AttributeError):
            self._system.malloc_trim(0)
            for start, end in _list_heaps():
                place = ctypes.c_void_p(start)
                self._system.madvise(place, ctypes.c_size_t(end - start), MADV_HUGEPAGE)
                self._system.madvise(place, ctypes.c_size_t(end - start), MADV_COLLAPSE)
        self._resident = _read_resident_pages()


def _list_heaps() -> Iterator[tuple[int, int]]:
    """List the private memory that can be written to, where it begins and ends with a huge page."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, _, _, inode, *name = line.split()
        if rights == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            first, last = (int(address, 16) for address in addresses.split("-"))
            start, end = -(-first // HUGE_PAGE) * HUGE_PAGE, last // HUGE_PAGE * HUGE_PAGE
            if start < end:
                yield start, end


def _read_resident_pages() -> int:
    # After each of thousands of tests: `Path.read_text` takes several times as long.
    file = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.read(file, 100).split()[1])
    finally:
        os.close(file)
