"""The results as a page of the docs."""

import json
from typing import Any

from bench.measure import DOCS, RESULTS

INTRODUCTION = """# Measurements

Made by `make bench`, which measures all rows of a group in one run, in turn, round after round; the figures are
medians. They are ratios to look at, not promises: the machine was small and shared.
"""


def write() -> str:
    """Write the page anew from all results, and return it."""
    sections = [_section(json.loads(path.read_text())) for path in sorted(RESULTS.glob("*.json"))]
    page = "\n".join([INTRODUCTION, *sections])
    (DOCS / "bench.md").write_text(page)
    return page


def _section(result: dict[str, Any]) -> str:
    machine = result["machine"]
    lines = [
        f"## {result['bench'].capitalize()}",
        "",
        f"Python {machine['python']} on {machine['machine']}, {machine['cores']} cores, {machine['system']}.",
        "",
    ]
    body = {"journal": _journal, "guard": _guard}[result["bench"]]
    return "\n".join([*lines, *body(result), ""])


def _journal(result: dict[str, Any]) -> list[str]:
    lines = [
        "| what | per second | CPU µs each | against raw | commits per event |",
        "|---|---:|---:|---:|---:|",
    ]
    base = {row["group"]: row["per_second"] for row in reversed(result["rows"]) if row["name"].startswith("raw")}
    for row in result["rows"]:
        commits = row["extra"].get("commits_per_event")
        shown = "1" if commits is None else f"{commits:.3f}"
        ratio = row["per_second"] / base[row["group"]]
        rate = f"{row['per_second']:,.0f} {row['unit']}s"
        lines.append(f"| {row['name']} | {rate} | {row['cpu_us']:,.0f} | {ratio:.2f}× | {shown} |")
    lines += ["", "| disk | bytes written per event | syncs per event | bytes kept per event |", "|---|---:|---:|---:|"]
    for name, disk in result["notes"].items():
        kept = f"{disk['bytes_kept_per_event']:,.0f}" if "bytes_kept_per_event" in disk else ""
        lines.append(
            f"| {name.removeprefix('disk of ')} | {disk['bytes_written_per_event']:,.0f} "
            f"| {disk['syncs_per_event']:.3f} | {kept} |"
        )
    return lines


def _guard(result: dict[str, Any]) -> list[str]:
    rows = {group: [row for row in result["rows"] if row["group"] == group] for group in ("calls", "usual", "hostile")}
    lines = ["| through the door | per second | CPU µs each |", "|---|---:|---:|"]
    lines += [
        f"| {row['name']} | {row['per_second']:,.0f} {row['unit']}s | {row['cpu_us']:,.1f} |" for row in rows["calls"]
    ]
    lines += ["", "| taking secrets out of a text | MB per second of CPU |", "|---|---:|"]
    lines += [f"| {row['name']} | {1e6 / row['cpu_us']:,.0f} |" for row in rows["usual"]]
    lines += ["", "| taking secrets out of a hostile megabyte | CPU ms |", "|---|---:|"]
    lines += [f"| {row['name']} | {row['cpu_us'] / 1000:,.0f} |" for row in rows["hostile"]]
    return lines
