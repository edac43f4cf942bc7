"""The garbage collector and the threads' turns are set for processes that run sessions, and for no other."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from halter.cli.command import COLLECTOR_THRESHOLDS, SWITCH_INTERVAL, run_with_app
from halter.runtime.runtime import Runtime


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    yield
    gc.set_threshold(*before)
    if frozen:
        gc.freeze()


async def look(_: Runtime) -> tuple[tuple[int, ...], int]:
    return gc.get_threshold(), gc.get_freeze_count()


def test_only_a_process_that_runs_sessions_collects_rarely_and_until_it_is_done(tmp_path: Path) -> None:
    store, before = str(tmp_path / "store.db"), gc.get_threshold()
    gc.unfreeze()
    assert run_with_app(store, look, new=True) == (before, 0)
    thresholds, frozen = run_with_app(store, look, runs="halter up")
    assert thresholds == COLLECTOR_THRESHOLDS != before
    assert frozen > 0
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)


async def turn(_: Runtime) -> float:
    return sys.getswitchinterval()


def test_only_in_a_process_that_runs_sessions_threads_take_turns_less_often_until_it_is_done(tmp_path: Path) -> None:
    store, before = str(tmp_path / "store.db"), sys.getswitchinterval()
    assert run_with_app(store, turn, new=True) == before
    assert run_with_app(store, turn, runs="halter up") == SWITCH_INTERVAL != before
    assert sys.getswitchinterval() == before
