"""`halter tools`: what each tool of an agent declares."""

from typing import TYPE_CHECKING

from halter.cli.command import (
    JsonOption,
    StoreOption,
    run_with_app,
)
from halter.cli.output import answer_json, answer_table, warn
from halter.runtime.assembly.folder_agent import open_folder_agent
from halter.runtime.runtime import Runtime
from halter.tasks.task_tools import list_verb_specs

if TYPE_CHECKING:
    from halter.core.provenance import Declaration
    from halter.core.tools import ProviderTool
from halter.cli.command import AgentArgument, resolve_agent_folder


def tools(agent: AgentArgument, *, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show the declared and inferred properties of each tool: who writes its results, its reach, its arguments.

    The provenance check uses these properties. Declare inferred ones in the tool or under policy.tools.
    """
    folder = resolve_agent_folder(agent)

    async def job(app: Runtime) -> "tuple[list[tuple[str, Declaration]], tuple[ProviderTool, ...]]":
        async with open_folder_agent(app, folder, report=warn) as assembled_agent:
            specs = (*(each.spec for each in assembled_agent.tools.values()), *list_verb_specs())
            return [
                (spec.name, assembled_agent.policy.declaration(spec)) for spec in specs
            ], assembled_agent.definition.model_settings.provider_tools

    declarations, provider_tools = run_with_app(store, job, new=True, runs_agents=True)
    if as_json:
        entries = [{"tool": name, "declaration": declaration} for name, declaration in declarations]
        answer_json(
            [*entries, *({"tool": each.name, "provider": True, "max_uses": each.max_uses} for each in provider_tools)]
        )
        return
    rows = [
        [name, each.reads, each.reach, ", ".join(_describe_uses(each)), ", ".join(each.guessed) or "nothing"]
        for name, each in declarations
    ]
    rows += [
        [
            each.name,
            "anyone",
            "others",
            f"run by the provider, not seen by the guard: {each.max_uses} per request",
            "nothing",
        ]
        for each in provider_tools
    ]
    columns = ["tool", "reads", "reach", "arguments", "inferred"]
    answer_table(f"Tools of {folder.name}", columns, rows, long="arguments inferred")


def _describe_uses(declaration: "Declaration") -> list[str]:
    return [f"{name} {use.role}{f':{use.kind}' if use.kind else ''}" for name, use in declaration.arguments.items()]
