"""Shell lines of many forms have the risk that a person expects, and no form of a line is read endlessly."""

import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from halter.core.tools import ToolSpec, Valid
from halter.core.vocabulary import RiskLevel
from halter.risk.read_only import only_reads
from halter.risk.risk import RISK_ORDER, assess_risk

CORPUS = Path(__file__).parents[1] / "corpus"
SPEC = ToolSpec(name="act", description="Acts.", schema=b"{}", level="RESTRICTED", effect="write")
PICTURES = {0x2400 + code: chr(code) for code in range(32)}
ASKED = RISK_ORDER.index("HIGH")
SEED = 38
BASH = shutil.which("bash")
MAX_SECONDS = 10
"""Far more than any line takes: a line that is read endlessly takes all of it."""

TOO_LOUD = {
    "for i in $(seq 1 30); do curl -sf localhost:8080/health && break; sleep 1; done": "a private address",
    "until curl -sf http://127.0.0.1:8080/ready; do sleep 2; done": "a private address",
    'retry() { for i in 1 2 3; do "$@" && return; sleep 1; done; }; retry npm test': "functions are given no values",
    "[ -f .env ] || cp .env.example .env": "a file with secrets",
    'tmp=$(mktemp -d); trap \'rm -rf "$tmp"\' EXIT; cp a "$tmp"/': "the folder is known only at run time",
    "awk 'NR>1 && $3 ~ /^err/ { c[$2]++ } END { for (k in c) print k, c[k] | \"sort -k2nr\" }' log.txt": "awk runs it",
}
"""Harmless lines that a person is asked about, with the reason."""

SIMPLE = ("x=1 §", ">out §", "set -- ", "local ")
"""The beginnings of contexts that only a simple command fits."""


def rate(line: str) -> RiskLevel:
    return assess_risk(SPEC, Valid({"command": line}, b"{}")).level


def read_lines(name: str) -> list[str]:
    lines = (CORPUS / name).read_text("utf-8").split("\n")
    return [line.translate(PICTURES) for line in lines if line and not line.startswith(("# ", "= "))]


def read_cases() -> list[tuple[str, str]]:
    return [(level, line) for level, _, line in (line.partition("\t") for line in read_lines("shell_lines.txt"))]


def fits(level: RiskLevel, expected: str) -> bool:
    expected_rank, rank = RISK_ORDER.index(expected), RISK_ORDER.index(level)  # type: ignore[arg-type]
    return rank >= expected_rank if expected_rank >= ASKED else rank <= expected_rank


def fill_places(context: str, command: str) -> list[str]:
    """Put a command at each place of a context in turn; the other places do nothing."""
    parts = context.split("§")
    return [
        "".join(part + (command if index == place else ":") for index, part in enumerate(parts[:-1])) + parts[-1]
        for place in range(len(parts) - 1)
    ]


def test_the_corpus_has_700_different_lines() -> None:
    cases = read_cases()
    assert len({line for _, line in cases}) == len(cases) >= 700


def test_every_line_has_the_risk_that_a_person_expects() -> None:
    wrong = [(level, rate(line), line) for level, line in read_cases() if not fits(rate(line), level)]
    assert {line for _, _, line in wrong} == TOO_LOUD.keys(), wrong


@pytest.mark.parametrize("context", read_lines("shell_contexts.txt"))
def test_a_command_is_as_risky_wherever_a_line_runs_it(context: str) -> None:
    assert {line: rate(line) for line in fill_places(context, "rm -rf /") if rate(line) != "CRITICAL"} == {}
    assert {line: rate(line) for line in fill_places(context, "echo hi") if RISK_ORDER.index(rate(line)) >= ASKED} == {}


@pytest.mark.skipif(BASH is None, reason="bash is not installed")
def test_bash_runs_a_command_in_every_context(tmp_path: Path) -> None:
    program = tmp_path / "leave-trace"
    program.write_text('#!/bin/sh\necho ran >> "$TRACE"\n')
    program.chmod(0o755)
    unreached: list[str] = []
    for number, context in enumerate(read_lines("shell_contexts.txt")):
        trace = tmp_path / f"trace-{number}"
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TRACE": str(trace), "HOME": str(tmp_path)}
        for line in fill_places(context, program.name):
            subprocess.run(
                [str(BASH), "-c", line],
                check=False,
                cwd=tmp_path,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=MAX_SECONDS,
            )
        unreached += [] if trace.exists() else [context]
    assert unreached == []


def test_a_command_is_as_risky_in_contexts_within_contexts() -> None:
    random_source = random.Random(SEED)
    contexts = [context for context in read_lines("shell_contexts.txt") if not context.startswith(SIMPLE)]
    outer_contexts = [context for context in contexts if not set(context) & set("'\"`#\n")]
    lines = [
        random_source.choice(fill_places(random_source.choice(outer_contexts), inner))
        for context in contexts
        if "<<" not in context and "#" not in context
        for inner in fill_places(context, "rm -rf /")
        for _ in range(3)
    ]
    assert len(lines) > 400
    assert [line for line in lines if rate(line) != "CRITICAL"] == []


@pytest.mark.parametrize(
    "line",
    [
        "echo " + "a " * 50_000,
        "echo " + "a" * 100_000,
        "(" * 10_000 + "ls" + ")" * 10_000,
        "(" * 10_000,
        "$(" * 10_000,
        '"$(' * 5_000,
        "((" * 5_000,
        "$((" * 5_000,
        "((" * 15 + "( a )" * 20_000,
        "$((" * 15 + "( a )" * 20_000,
        "$((a b) ) " * 5_000,
        "((a'" * 9_000,
        "${a:-" * 5_000,
        "`" * 10_001,
        "a=(" * 5_000,
        "<(" * 5_000,
        ">(a);" * 900 + "x " * 40_000,
        "x " * 40_000 + ";>(a)" * 900,
        "{ " * 10_000 + "ls;" + " }" * 10_000,
        "if true; then " * 5_000,
        "case x in " * 5_000,
        "f() " * 5_000,
        "time (" * 10_000,
        "cat <<A\n" * 5_000,
        "cat " + "".join(f"<<A{number} " for number in range(3_000)) + "\n",
        "[[ " + "( " * 5_000,
        "ls | " * 20_000 + "ls",
        "ls |" + "\n" * 100_000 + "ls",
        "".join(f"alias a{number}='a{number - 1} a{number - 1}';" for number in range(1, 400)) + "a399 x",
        "alias a='" + "x " * 20_000 + "';" + "a;" * 900,
        "for d in " + "x " * 20_000 + "; do " + 'rm "$d";' * 900 + " done",
        "".join(map(chr, range(1, 256))) * 300,
    ],
    ids=lambda line: line[:12],
)
def test_a_very_long_or_deep_line_is_judged_in_bounded_time(line: str) -> None:
    started_at = time.perf_counter()
    assert rate(line) in RISK_ORDER
    assert rate(line + "\nrm -rf /") in {"HIGH", "CRITICAL"} or "<<" in line
    assert only_reads(line) in {True, False}
    assert time.perf_counter() - started_at < MAX_SECONDS
