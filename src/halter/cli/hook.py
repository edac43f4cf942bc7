"""`halter hook`: put the tool calls of Claude Code, Codex and others under Halter's guard."""

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from halter.cli.command import (
    JsonOption,
    StoreOption,
    fail,
    group,
    parse_typed_duration,
    read_cli_settings,
    report_errors,
    require_person,
    run_with_app,
)
from halter.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from halter.cli.output import answer_json, answer_table, print_sentence, warn
from halter.core.clock import SECOND
from halter.core.errors import ConfigError, NotDone
from halter.core.ids import may_decide
from halter.runtime.runtime import Runtime

if TYPE_CHECKING:
    from halter.hooks.install import InstallationStatus
    from halter.hooks.registry import HookedProgram, HookFolder

ForOption = Annotated[
    str, typer.Option("--for", metavar="PROGRAM", help="The program: claude, codex, gemini or cursor.")
]
AgentOption = Annotated[
    str, typer.Option("--agent", metavar="NAME", help="The agent that stands for it (default: by the program).")
]
BinaryOption = Annotated[
    str, typer.Option("--binary", metavar="PATH", help="The program itself, to ask for its version.")
]
MAX_PRICE: Final = 1000


def answer(program: ForOption = "", *, agent: AgentOption = "") -> None:
    """Answer one hook event on stdin, as a program with hooks sends it. Exits 2, which blocks, if anything fails.

    `halter hook install` writes a faster command than this into the settings of a program.
    """
    from halter.hooks import client
    from halter.hooks.install import MARGIN_SECONDS, find_terms
    from halter.hooks.registry import DEFAULT_WAIT_SECONDS, find_hook_folder

    def find() -> tuple[str, str]:
        return agent or find_terms(program).agent, str(find_hook_folder(read_cli_settings(None)).path)

    name, folder = report_errors(find, EXIT_USAGE)
    raise typer.Exit(client.main([program, name, folder, str(DEFAULT_WAIT_SECONDS + MARGIN_SECONDS)]))


def install(
    *,
    program: ForOption,
    agent: AgentOption = "",
    folder: Annotated[
        Path | None, typer.Option("--folder", metavar="FOLDER", help="Where its agent.yaml is (default: a new one).")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help="The settings file (default: the program's own).")
    ] = None,
    wait: Annotated[
        str, typer.Option("--wait", metavar="TIME", help="How long a call waits for a person's decision.")
    ] = "30s",
    price: Annotated[
        list[str] | None,
        typer.Option("--price", metavar="TOOL=USD", help="What each call of a tool costs; may be repeated."),
    ] = None,
    binary: BinaryOption = "",
    as_json: JsonOption = False,
) -> None:
    """Write Halter's hooks into a program's settings, beside what is there.

    From then on each of its tool calls passes the guard, and none runs while no `halter serve` answers. A version that
    would run a tool whose hook fails is refused.
    """
    from halter.hooks import install as hooks
    from halter.hooks.protocol import DIALECTS
    from halter.hooks.registry import HookedProgram

    settings = read_cli_settings(None)
    if not may_decide(settings.person):
        fail(f"Only a person may install hooks, and this was started by an agent ({settings.person}).", EXIT_FAILED)
    seconds, prices = parse_typed_duration(wait) // SECOND, dict(_parse_price(each) for each in price or ())
    place = _hook_folder()

    def do() -> HookedProgram:
        terms = hooks.find_terms(program)
        version = hooks.read_version(program, binary or _find_binary(terms.binary))
        name = agent or terms.agent
        policy = folder.absolute() if folder else hooks.write_policy(place, name, DIALECTS[program].TITLE)
        _check_policy(policy, name)
        known = place.agents().get(name)
        if known is not None and known.program != program:
            raise NotDone(f"{name} stands for {known.program} already: name another with --agent.", "refused")
        entry = HookedProgram(
            agent=name,
            program=program,
            folder=str(policy),
            wait_seconds=seconds,
            prices=prices,
            version=version,
            installed=known.installed if known else (),
        )
        return hooks.install(entry, place, file or hooks.find_settings_file(program, os.environ, Path.home()))

    entry = report_errors(do)
    if as_json:
        answer_json(
            {"agent": entry.agent, "program": program, "folder": entry.folder, "file": entry.installed[-1].file}
        )
        return
    _show_installed(entry, DIALECTS[program].TITLE, hooks.TERMS[program].note)


def _show_installed(entry: "HookedProgram", title: str, note: str) -> None:
    print_sentence(f"{title} {entry.version} asks Halter before each tool call: {entry.installed[-1].file}")
    print_sentence(
        f"What it may do is in {entry.folder}/agent.yaml; its sessions are those of the agent {entry.agent}."
    )
    if note:
        print_sentence(note)
    print_sentence("Start `halter serve` now, or start it again: without it, every tool call is blocked.")


def uninstall(*, program: ForOption, agent: AgentOption = "", as_json: JsonOption = False) -> None:
    """Take Halter's hooks out of a program's settings.

    A file that was not changed since is put back byte for byte; any other keeps all but these hooks.
    """
    from halter.hooks import install as hooks

    settings = read_cli_settings(None)
    if not may_decide(settings.person):
        fail(f"Only a person may remove hooks, and this was started by an agent ({settings.person}).", EXIT_FAILED)
    place = _hook_folder()
    done = report_errors(lambda: hooks.uninstall(place.find(agent or hooks.find_terms(program).agent), place))
    if as_json:
        answer_json({"program": program, "done": done})
    else:
        print_sentence("\n".join(done) or "Nothing was installed.")


def status(*, binary: BinaryOption = "", as_json: JsonOption = False) -> None:
    """Show where hooks are installed, whether they hold, whether the server answers, and what goes round them.

    Exits 1 if one of them does not hold.
    """
    from halter.hooks import install as hooks

    place = _hook_folder()

    def read_status() -> "list[InstallationStatus]":
        binaries = {entry.program: binary for entry in place.agents().values()} if binary else {}
        return list(hooks.list_status(place, binaries))

    found = report_errors(read_status)
    if as_json:
        answer_json(found)
    elif not found:
        print_sentence("No hooks are installed: halter hook install --for claude")
    else:
        _show_status(found)
    if any(not each.intact or each.problem or not each.server for each in found):
        raise typer.Exit(EXIT_FAILED)


def _show_status(found: "list[InstallationStatus]") -> None:
    rows = [
        [each.agent, each.program, each.version or "?", "yes" if each.intact else "no", "yes" if each.server else "no"]
        for each in found
    ]
    answer_table("Hooks", ["agent", "program", "version", "installed", "server answers"], rows)
    for each in found:
        print_sentence(f"{each.agent}: {each.file}, policy in {each.folder}/agent.yaml.")
        if each.problem:
            warn(each.problem, "red")
        if not each.server:
            warn("No server answers: every tool call is blocked until `halter serve` or `halter hook serve` runs.")
        if each.note:
            print_sentence(each.note)
        print_sentence("What goes round these hooks:\n" + "\n".join(f"  {way}" for way in each.bypasses))


def serve(*, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Answer hooks until you interrupt it, without the dashboard.

    `halter serve` does both, once hooks are installed. While neither runs, the programs with hooks call no tool.
    """

    def on_ready(path: Path) -> None:
        if as_json:
            answer_json({"name": "serving", "socket": str(path)})
        else:
            print_sentence(f"Hooks are answered at {path}. Ctrl-C ends it; then every tool call is blocked.")

    async def job(app: Runtime) -> None:
        from halter.hooks.server import serve_hooks

        require_person(app, "answer hooks")
        await serve_hooks(app, warn, on_ready)

    run_with_app(store, job, new=True, acts=True, following=True)


def _hook_folder() -> "HookFolder":
    from halter.hooks.registry import find_hook_folder

    return report_errors(lambda: find_hook_folder(read_cli_settings(None)))


def _find_binary(name: str) -> str:
    return shutil.which(name) or name


def _check_policy(folder: Path, agent: str) -> None:
    from halter.config.agent_files import read_agent

    found = read_agent(folder).spec.name
    if found != agent:
        raise ConfigError(f"{folder}/agent.yaml is of the agent {found}: say --agent {found}, or name another folder.")


def _parse_price(typed: str) -> tuple[str, float]:
    tool, _, amount = typed.partition("=")
    try:
        usd = float(amount)
    except ValueError:
        usd = -1
    if not tool or not 0 <= usd <= MAX_PRICE:
        fail(f"{typed!r} is no price: write it like WebSearch=0.01.", EXIT_USAGE)
    return tool, usd


hook = group(
    "Answer a hook on stdin; install, remove and check hooks.",
    {"install": install, "uninstall": uninstall, "status": status, "serve": serve},
    default=answer,
)
