"""The desk of the drivers: the store that guarded agents of every framework leave behind."""

from pathlib import Path

import pytest

from tests.adapters.conftest import Desk


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)
