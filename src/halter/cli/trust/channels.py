"""`halter channels`: the people who can answer from a phone."""

from typing import Annotated

import msgspec
import typer

from halter.cli.command import (
    JsonOption,
    ReasonOption,
    StoreOption,
    group,
    is_never_used,
    make_desk,
    read_cli_settings,
    report_errors,
    run_with_app,
)
from halter.cli.output import answer_json, answer_table, print_sentence
from halter.operations.channels import PairingCode, list_approvers, offer_pairing, remove_approver
from halter.runtime.runtime import Runtime

ChannelArgument = Annotated[str, typer.Argument(metavar="CHANNEL", help="Channel: telegram, ntfy or slack.")]
PersonArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the person, recorded in every event.")]


def list_channels(*, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List the people who can answer decisions over each channel.

    Each has a name, which is in every event, a role, the agents that they see, and an account of the platform.
    """
    approvers = run_with_app(store, lambda app: list_approvers(make_desk(app, store)), allow_missing=True)
    if as_json:
        answer_json([msgspec.structs.asdict(each) for each in approvers])
    elif approvers:
        rows = [
            [each.channel, each.name, each.role, ", ".join(each.agents) or "all", each.account] for each in approvers
        ]
        answer_table("Channels", ["channel", "name", "role", "agents", "account"], rows)
    else:
        print_sentence("No one is paired with a channel. Make a code with `halter channels pair telegram NAME`.")


def pair(
    channel: ChannelArgument,
    name: PersonArgument,
    *,
    role: Annotated[
        str, typer.Option("--role", metavar="ROLE", help="viewer, approver, operator or admin.")
    ] = "approver",
    agent: Annotated[
        list[str] | None, typer.Option("--agent", metavar="AGENT", help="Only this agent. Repeatable.")
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a code that pairs an account of a platform with a person. It is valid once, for ten minutes.

    The first account that sends the code to the bot is paired with the person. halter.yaml configures the platform, and
    `halter serve`, `halter up` or a worker receives the code.
    """

    async def job(app: Runtime) -> tuple[PairingCode, str]:
        code = await offer_pairing(make_desk(app, store), channel, name, role, agent or ())
        from halter.channels.codes import send_code

        return code, await send_code(app, code)

    settings = report_errors(lambda: read_cli_settings(store))
    code, problem = run_with_app(store, job, new=is_never_used(settings, store))
    if as_json:
        answer_json(msgspec.structs.asdict(code))
        return
    print_sentence(code.code)
    if code.place:
        print_sentence(f"Subscribe to the topic {code.place} in the ntfy app, and keep its name secret: it is the key.")
        print_sentence(
            f"{problem} Publish the code to {code.place}-re."
            if problem
            else "Then press Pair in the message that arrives there."
        )
        return
    print_sentence(
        f"Send this code to the bot within ten minutes, from the account that answers as {code.name} ({code.role})."
    )


def unpair(
    channel: ChannelArgument,
    name: PersonArgument,
    *,
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove a person from a channel. Their replies become invalid immediately.

    Use this after a phone was lost. Unused codes of the person become invalid, too.
    """
    result = run_with_app(store, lambda app: remove_approver(make_desk(app, store), channel, name, reason))
    if as_json:
        answer_json({"subject": result.subject, "done": True})
    else:
        print_sentence(result.sentence)


channels = group(
    "List who answers decisions by phone; pair or unpair a person.",
    {"list": list_channels, "pair": pair, "unpair": unpair},
)
