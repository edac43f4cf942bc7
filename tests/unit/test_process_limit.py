"""As root, for whom the kernel counts no processes, a sandboxed command has a limit of processes all the same."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from halter.core.tools import Failed
from halter.tools.shell import Sandbox, SandboxLimits, find_own_pids_group, is_counted_by_kernel, make_pids_group

LIMIT = 24
FORKS = f"i=0; while [ $i -lt {3 * LIMIT} ]; do sleep 5 & i=$((i+1)); done; echo all started"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.fixture
def enclosed(root: Path) -> Sandbox:
    sandbox = Sandbox(root, SandboxLimits(processes=LIMIT))
    try:
        asyncio.run(sandbox.verify())
    except Failed as failed:
        if shutil.which("bwrap") is not None and os.environ.get("HALTER_REQUIRE_ALL") == "1":
            pytest.fail(str(failed))
        pytest.skip(str(failed))
    return sandbox


async def test_a_command_that_forks_without_end_meets_the_limit(enclosed: Sandbox, root: Path) -> None:
    process_exit = await enclosed.run(["/bin/sh", "-c", FORKS], root)
    assert "all started" not in process_exit.text
    assert "fork" in process_exit.text.lower()


async def test_commands_at_the_same_time_have_a_limit_each(enclosed: Sandbox, root: Path) -> None:
    few = f"i=0; while [ $i -lt {LIMIT // 2} ]; do sleep 0 & i=$((i+1)); done; wait; echo all started"
    exits = await asyncio.gather(*(enclosed.run(["/bin/sh", "-c", few], root) for _ in range(4)))
    assert [process_exit.text for process_exit in exits] == ["all started\n"] * 4


async def test_nothing_is_left_of_the_group_afterwards_even_if_the_call_is_cancelled(
    enclosed: Sandbox, root: Path
) -> None:
    if is_counted_by_kernel():
        pytest.skip("The kernel counts the processes of this user.")
    own_group = find_own_pids_group()
    assert own_group is not None
    before = set(own_group.iterdir())
    await enclosed.run(["/bin/true"], root)
    fifo = root / "fifo"
    os.mkfifo(fifo)
    task = asyncio.create_task(enclosed.run(["/bin/sh", "-c", "echo started > fifo; sleep 60"], root))
    assert await asyncio.to_thread(fifo.read_text) == "started\n"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not {path for path in own_group.iterdir() if path.name.startswith(f"halter-{os.getpid()}-")} - before


MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
39 31 0:36 {root} {place} rw - cgroup cgroup rw,pids
"""


@pytest.mark.parametrize(
    ("groups", "root", "own"),
    [
        ("9:name=systemd:/\n8:pids:/\n0::/\n", "/", "."),
        ("8:cpu,pids:/user/a\n", "/", "user/a"),
        ("8:pids:/docker/1234/inner\n", "/docker/1234", "inner"),
        ("8:pids:/elsewhere\n", "/docker/1234", None),
        ("8:cpu:/\n", "/", None),
    ],
)
def test_the_group_of_the_process_is_found_below_its_mount(
    tmp_path: Path, groups: str, root: str, own: str | None
) -> None:
    mounts = MOUNTS.format(root=root, place=tmp_path)
    assert find_own_pids_group(groups, mounts) == (None if own is None else tmp_path / own)


def test_a_group_of_the_second_version_is_found_where_it_is_mounted(tmp_path: Path) -> None:
    mounts = f"41 31 0:38 / {tmp_path} rw - cgroup2 cgroup2 rw\n"
    (tmp_path / "system.slice/halter.service").mkdir(parents=True)
    (tmp_path / "system.slice/halter.service/cgroup.controllers").write_text("memory pids\n")
    own_group = find_own_pids_group("0::/system.slice/halter.service\n", mounts)
    assert own_group == tmp_path / "system.slice/halter.service"


@pytest.mark.parametrize(
    ("user", "mapping", "counted"),
    [
        (0, "         0          0 4294967295\n", False),
        (1000, "         0          0 4294967295\n", True),
        (0, "         0       1000          1\n", True),
        (0, "         0     100000      65536\n", True),
        (1000, "      1000          0          1\n", False),
    ],
)
def test_root_of_a_user_namespace_is_counted_and_root_of_the_machine_is_not(
    user: int, mapping: str, *, counted: bool
) -> None:
    assert is_counted_by_kernel(user, mapping) is counted


def test_where_no_group_can_be_made_the_sentence_says_why(tmp_path: Path) -> None:
    with pytest.raises(Failed, match=r"NoProcessLimit: .* root starts, and no control group .* Run Halter as another"):
        make_pids_group(LIMIT, None)
    with pytest.raises(Failed, match=r"NoProcessLimit: .* cannot be made: No such file or directory"):
        make_pids_group(LIMIT, tmp_path / "none")


def test_a_group_that_takes_no_limit_is_removed(tmp_path: Path) -> None:
    (tmp_path / "cgroup.subtree_control").mkdir()
    with pytest.raises(Failed, match=r"NoProcessLimit: .* takes no limit"):
        make_pids_group(LIMIT, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["cgroup.subtree_control"]


async def test_without_a_group_root_runs_no_sandboxed_command(root: Path) -> None:
    if is_counted_by_kernel():
        pytest.skip("The kernel counts the processes of this user.")

    class Groupless(Sandbox):
        def _find_group(self) -> None:
            return None

    with pytest.raises(Failed, match=r"NoProcessLimit: .*Nothing was run; set `sandbox: false`"):
        await Groupless(root).run(["/bin/touch", "done"], root)
    assert not await asyncio.to_thread(os.listdir, root)
    await Groupless(root, is_enclosed=False).run(["/bin/touch", "done"], root)
    assert await asyncio.to_thread(os.listdir, root) == ["done"]
