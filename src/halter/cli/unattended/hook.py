"""`halter hook`: guard the tool calls of Claude Code, Codex and other programs."""

import os
import shutil
from pathlib import Path
from typing import Annotated, Final

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
from halter.config.agent_files import read_agent
from halter.core.clock import SECOND
from halter.core.errors import ConfigError, NotDone
from halter.core.ids import can_decide
from halter.hooks import client
from halter.hooks.install import (
    MARGIN_SECONDS,
    TERMS,
    InstallationStatus,
    find_settings_file,
    find_terms,
    install_hooks,
    list_status,
    read_version,
    remove_hooks,
    write_policy,
)
from halter.hooks.protocol import DIALECTS
from halter.hooks.registry import DEFAULT_WAIT_SECONDS, HookedProgram, HookFolder, find_hook_folder
from halter.runtime.runtime import Runtime

ForOption = Annotated[str, typer.Option("--for", metavar="PROGRAM", help="Program: claude, codex, gemini or cursor.")]
AgentOption = Annotated[
    str, typer.Option("--agent", metavar="NAME", help="Agent whose sessions these are (default: by program).")
]
BinaryOption = Annotated[
    str, typer.Option("--binary", metavar="PATH", help="Executable of the program, to read its version.")
]
MAX_PRICE: Final = 1000


def answer(program: ForOption = "", *, agent: AgentOption = "") -> None:
    """Answer one hook event from stdin, in the format of the program. Exits 2, which blocks the call, on any failure.

    `halter hook install` writes a faster command than this to the settings of a program.
    """

    def find() -> tuple[str, str]:
        return agent or find_terms(program).agent, str(find_hook_folder(read_cli_settings(None)).path)

    name, folder = report_errors(find, EXIT_USAGE)
    raise typer.Exit(client.main([program, name, folder, str(DEFAULT_WAIT_SECONDS + MARGIN_SECONDS)]))


def install(
    *,
    program: ForOption,
    agent: AgentOption = "",
    folder: Annotated[
        Path | None, typer.Option("--folder", metavar="FOLDER", help="Folder of its agent.yaml (default: a new one).")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help="Settings file (default: the program's own).")
    ] = None,
    wait: Annotated[str, typer.Option("--wait", metavar="TIME", help="How long a call waits for a decision.")] = "100s",
    price: Annotated[
        list[str] | None,
        typer.Option("--price", metavar="TOOL=USD", help="Cost of each call of a tool. Repeatable."),
    ] = None,
    binary: BinaryOption = "",
    as_json: JsonOption = False,
) -> None:
    """Add Halter's hooks to a program's settings. Other settings are kept.

    Then each tool call of the program passes the guard, and none runs while no `halter serve` answers. A version of the
    program that runs a tool although its hook fails is rejected.
    """
    settings = read_cli_settings(None)
    if not can_decide(settings.person):
        fail(f"Only a person can install hooks; this command runs inside an agent ({settings.person}).", EXIT_FAILED)
    seconds, prices = parse_typed_duration(wait) // SECOND, dict(_parse_price(each) for each in price or ())
    hook_folder = _hook_folder()

    def do() -> HookedProgram:
        terms = find_terms(program)
        version = read_version(program, binary or _find_binary(terms.binary))
        name = agent or terms.agent
        policy = folder.absolute() if folder else write_policy(hook_folder, name, DIALECTS[program].TITLE)
        _check_policy(policy, name)
        existing = hook_folder.agents().get(name)
        if existing is not None and existing.program != program:
            raise NotDone(f"{name} is already used for {existing.program}. Choose another with --agent.", "refused")
        entry = HookedProgram(
            agent=name,
            program=program,
            folder=str(policy),
            wait_seconds=seconds,
            prices=prices,
            version=version,
            installed=existing.installed if existing else (),
        )
        return install_hooks(entry, hook_folder, file or find_settings_file(program, os.environ, Path.home()))

    entry = report_errors(do)
    if as_json:
        answer_json(
            {"agent": entry.agent, "program": program, "folder": entry.folder, "file": entry.installed[-1].file}
        )
        return
    _show_installed(entry, DIALECTS[program].TITLE, TERMS[program].note)


def _show_installed(entry: HookedProgram, title: str, note: str) -> None:
    print_sentence(f"{title} {entry.version} asks Halter before each tool call: {entry.installed[-1].file}")
    print_sentence(f"Its policy is {entry.folder}/agent.yaml; its sessions belong to the agent {entry.agent}.")
    if note:
        print_sentence(note)
    print_sentence("Start or restart `halter serve` now: without it, every tool call is blocked.")


def uninstall(*, program: ForOption, agent: AgentOption = "", as_json: JsonOption = False) -> None:
    """Remove Halter's hooks from a program's settings.

    A file that was not changed since is restored byte for byte; in any other file only these hooks are removed.
    """
    settings = read_cli_settings(None)
    if not can_decide(settings.person):
        fail(f"Only a person can remove hooks; this command runs inside an agent ({settings.person}).", EXIT_FAILED)
    hook_folder = _hook_folder()
    sentences = report_errors(lambda: remove_hooks(hook_folder.find(agent or find_terms(program).agent), hook_folder))
    if as_json:
        answer_json({"program": program, "done": sentences})
    else:
        print_sentence("\n".join(sentences) or "Nothing was installed.")


def status(*, binary: BinaryOption = "", as_json: JsonOption = False) -> None:
    """Show where hooks are installed, whether they are intact, whether the server answers, and known bypasses.

    Exits 1 if any hook is not effective.
    """
    hook_folder = _hook_folder()

    def read_status() -> list[InstallationStatus]:
        binaries = {entry.program: binary for entry in hook_folder.agents().values()} if binary else {}
        return list(list_status(hook_folder, binaries))

    installations = report_errors(read_status)
    if as_json:
        answer_json(installations)
    elif not installations:
        print_sentence("No hooks are installed. Install them with: halter hook install --for claude")
    else:
        _show_status(installations)
    if any(not each.intact or each.problem or not each.server for each in installations):
        raise typer.Exit(EXIT_FAILED)


def _show_status(installations: list[InstallationStatus]) -> None:
    rows = [
        [
            installation.agent,
            installation.program,
            installation.version or "?",
            "yes" if installation.intact else "no",
            "yes" if installation.server else "no",
        ]
        for installation in installations
    ]
    answer_table("Hooks", ["agent", "program", "version", "installed", "server answers"], rows)
    for installation in installations:
        print_sentence(f"{installation.agent}: {installation.file}, policy in {installation.folder}/agent.yaml.")
        if installation.problem:
            warn(installation.problem, "red")
        if not installation.server:
            warn("No server answers: every tool call is blocked until `halter serve` or `halter hook serve` runs.")
        if installation.note:
            print_sentence(installation.note)
        print_sentence("Bypasses of these hooks:\n" + "\n".join(f"  {bypass}" for bypass in installation.bypasses))


def serve(*, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Answer hooks until interrupted, without the dashboard.

    `halter serve` does both if hooks are installed. While neither runs, programs with hooks cannot call tools.
    """

    def on_ready(path: Path) -> None:
        if as_json:
            answer_json({"name": "serving", "socket": str(path)})
        else:
            print_sentence(f"Answering hooks at {path}. Ctrl-C stops it; then every tool call is blocked.")

    async def job(app: Runtime) -> None:
        from halter.hooks.server import serve_hooks

        require_person(app, "answer hooks")
        await serve_hooks(app, warn, on_ready)

    run_with_app(store, job, new=True, runs_agents=True, until_interrupted=True)


def _hook_folder() -> HookFolder:
    return report_errors(lambda: find_hook_folder(read_cli_settings(None)))


def _find_binary(name: str) -> str:
    return shutil.which(name) or name


def _check_policy(folder: Path, agent: str) -> None:
    name = read_agent(folder).spec.name
    if name != agent:
        raise ConfigError(
            f"{folder}/agent.yaml defines the agent {name}. Pass --agent {name}, or choose another folder."
        )


def _parse_price(text: str) -> tuple[str, float]:
    tool, _, amount = text.partition("=")
    try:
        usd = float(amount)
    except ValueError:
        usd = -1
    if not tool or not 0 <= usd <= MAX_PRICE:
        fail(f"Invalid price {text!r}. Use a form such as WebSearch=0.01.", EXIT_USAGE)
    return tool, usd


hook = group(
    "Answer a hook event on stdin; install, remove or check hooks.",
    {"install": install, "uninstall": uninstall, "status": status, "serve": serve},
    default=answer,
)
