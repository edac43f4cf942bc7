"""Commands in a sandbox: bounded, killable with all they started, and shut in."""

import asyncio
import json
import os
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halter.core.errors import ConfigError
from halter.core.tools import Failed, Permit, Valid
from halter.tools.function_tool import FunctionTool
from halter.tools.shell import Sandbox, SandboxLimits, make_shell_tool


@pytest.fixture(scope="module", autouse=True)
def bubblewrap(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip loudly where no sandbox can be made; where everything is required, one that is installed must work."""
    installed = shutil.which("bwrap") is not None
    try:
        asyncio.run(Sandbox(tmp_path_factory.mktemp("probe")).verify())
    except Failed as failed:
        if installed and os.environ.get("HALTER_REQUIRE_ALL") == "1":
            pytest.fail(str(failed))
        pytest.skip(str(failed))


async def run_command(subject: FunctionTool, *argv: str, **more: Any) -> str:
    valid = subject.validate(json.dumps({"argv": argv, **more}).encode())
    assert isinstance(valid, Valid)
    return (await subject.run(valid, Permit("call-1", 0, {}))).text


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


async def test_a_command_works_below_its_root(root: Path) -> None:
    subject = make_shell_tool(root)
    assert subject.spec.level == "RESTRICTED"
    (root / "inner").mkdir()
    assert await run_command(subject, "pwd", folder="inner") == f"{root}/inner\n"
    assert await run_command(subject, "sh", "-c", "cat > note", stdin="grüße") == ""
    assert (root / "note").read_text() == "grüße"


async def test_arguments_are_never_read_by_a_shell(root: Path) -> None:
    assert await run_command(make_shell_tool(root), "echo", "$(id)", ";", "*", "`x`") == "$(id) ; * `x`\n"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["sh", "-c", "echo no; exit 3"], "no\n[exit code 3]"),
        (["false"], "[exit code 1]"),
        (["no-such-program"], "No such file or directory\n[exit code 127]"),
        (["sh", "-c", "kill -9 $$"], "[exit code 137]"),
        (["sh", "-c", "kill -9 -1; kill -9 1; echo alive"], ""),
        (["sh", "-c", "printf '\\000\\377'"], "[2 bytes that are not text, in base64]\nAP8="),
        (["sh", "-c", "printf 'caf\\351'"], "caf�"),
    ],
)
async def test_however_a_command_ends_its_end_is_reported(root: Path, argv: list[str], expected: str) -> None:
    assert expected in await run_command(make_shell_tool(root), *argv)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"argv": []}, "BadCommand: argv is empty"),
        ({"argv": ["a\0b"]}, "BadCommand: an argument cannot contain a NUL character"),
        ({"argv": ["ls"], "folder": "../.."}, "BadPath"),
        ({"argv": ["ls"], "folder": "/etc"}, "BadPath"),
        ({"argv": ["ls"], "folder": "missing"}, "FileNotFoundError"),
    ],
)
async def test_a_command_that_cannot_be_is_refused(root: Path, arguments: dict[str, Any], expected: str) -> None:
    subject = make_shell_tool(root)
    valid = subject.validate(json.dumps(arguments).encode())
    assert isinstance(valid, Valid)
    with pytest.raises(Failed, match=expected):
        await subject.run(valid, Permit("call-1", 0, {}))


async def test_a_gigabyte_of_output_does_not_fill_the_memory(root: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    text = await run_command(
        make_shell_tool(root, max_output=100_000), "sh", "-c", "echo first; yes | head -c 1000000000; echo last"
    )
    assert text.startswith("first\ny\n")
    assert text.endswith("y\nlast\n")
    assert "bytes omitted]" in text
    assert len(text) < 101_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


@pytest.mark.parametrize(
    "attempt",
    [
        "touch /usr/x",
        "touch /etc/x",
        "touch /x",
        "touch /dev/x",
        "echo x > {outside}/secret",
        "cat {outside}/secret",
        "ln -s {outside} link && cat link/secret",
        "cat ~root/.profile /etc/shadow /home/*/.profile",
        "echo x > /proc/sys/kernel/domainname",
        "mount -t tmpfs none /usr",
        "unshare --user --map-root-user mount -t tmpfs none /usr && touch /usr/x",
        "kill -9 {pid}",
        "dd if=/dev/zero of=/dev/null bs=3G count=1",
        "head -c 2000 /dev/zero > large",
    ],
)
async def test_a_sandbox_does_not_let_out(root: Path, attempt: str) -> None:
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "secret").write_text("not for agents")
    limits = SandboxLimits(file_size=1000) if "large" in attempt else SandboxLimits()
    command = attempt.format(outside=outside, pid=os.getpid())
    text = await run_command(make_shell_tool(root, limits=limits), "sh", "-c", command)
    assert "[exit code" in text
    assert "not for agents" not in text
    assert (outside / "secret").read_text() == "not for agents"


async def test_a_command_sees_no_process_no_variable_and_no_network_of_ours(root: Path) -> None:
    subject = make_shell_tool(root, environment={"GIVEN": "yes"})
    interfaces = await run_command(subject, "sed", "1,2d", "/proc/net/dev")
    assert [line.split(":")[0].strip() for line in interfaces.splitlines()] == ["lo"]
    assert await run_command(subject, "sh", "-c", "ls -d /proc/[0-9]* | wc -l") < "9"
    names = {line.partition("=")[0] for line in (await run_command(subject, "env")).splitlines()}
    assert names == {"PATH", "HOME", "LANG", "PWD", "GIVEN", "HALTER_AGENT"}


@pytest.mark.parametrize("escape", ["", "setsid ", "nohup setsid "])
async def test_stopping_a_command_kills_all_that_it_started(root: Path, escape: str) -> None:
    fifo = root / "fifo"
    os.mkfifo(fifo)
    command = f"{escape}sh -c 'exec 3> fifo; echo started >&3; sleep 600 & sleep 600' & sleep 600"
    task = asyncio.create_task(run_command(make_shell_tool(root), "sh", "-c", command))
    with await asyncio.to_thread(fifo.open) as alive:
        assert await asyncio.to_thread(alive.readline) == "started\n"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # The pipe ends only when the last of them that could write to it is gone.
        assert await asyncio.to_thread(alive.read) == ""


async def test_what_a_command_leaves_behind_ends_with_it(root: Path) -> None:
    fifo = root / "fifo"
    os.mkfifo(fifo)
    text = "setsid sh -c 'exec 3> fifo; echo started >&3; touch ready; exec sleep 600' &"
    task = asyncio.create_task(
        run_command(make_shell_tool(root), "sh", "-c", f"{text} while [ ! -e ready ]; do :; done; echo over")
    )
    with await asyncio.to_thread(fifo.open) as alive:
        assert await asyncio.to_thread(alive.readline) == "started\n"
        assert await task == "over\n"
        assert await asyncio.to_thread(alive.read) == ""


@pytest.mark.parametrize(
    ("breaks", "expected"),
    [
        (lambda walls: [part for part in walls if part != "--unshare-all"], "the network can be reached"),
        (lambda walls: [*walls, "--bind", "/usr", "/usr"], "/usr can be written"),
        (lambda walls: [*walls, "--bind", "/", "/", "--dev", "/dev"], "can be written"),
        (lambda walls: [*walls, "--tmpfs", "/dev"], "/dev/null cannot be written|/dev can be written"),
        (lambda walls: [*walls, "--no-such-option"], "Unknown option"),
    ],
)
async def test_a_sandbox_with_a_hole_runs_nothing(root: Path, breaks: Any, expected: str) -> None:
    class Broken(Sandbox):
        def _walls(self, folder: Path) -> list[str]:
            # The root may lie in what the hole covers, as in /dev.
            return [*breaks(super()._walls(folder)), "--bind", str(root), str(root)]

    with pytest.raises(Failed, match=f"NoSandbox: the sandbox is not effective: .*({expected})"):
        await Broken(root).run(["touch", "done"], root)
    assert not (root / "done").exists()


async def test_a_memory_limit_that_does_not_apply_is_found(root: Path) -> None:
    class Careless(SandboxLimits):
        def wrap(self, argv: Any) -> list[str]:
            return list(argv)

    with pytest.raises(Failed, match="the memory limit does not apply"):
        await Sandbox(root, Careless()).run(["true"], root)


async def test_without_a_sandbox_only_a_configuration_that_says_so_runs(root: Path) -> None:
    subject = make_shell_tool(root, sandbox=False)
    assert subject.spec.level == "PRIVILEGED"
    assert subject.spec.egress
    assert await run_command(subject, "pwd") == f"{root}\n"
    assert "[exit code" in await run_command(subject, "dd", "if=/dev/null", "of=/dev/null", "bs=3G", "count=1")


@pytest.mark.parametrize("folder", ["/", "/no-such-folder"])
def test_a_root_that_cannot_be_is_refused_at_once(folder: str) -> None:
    with pytest.raises(ConfigError, match="cannot be the root"):
        make_shell_tool(folder)


def test_limits_can_be_set_one_by_one() -> None:
    assert "--as=5" in replace(SandboxLimits(), memory=5).wrap(["true"])
