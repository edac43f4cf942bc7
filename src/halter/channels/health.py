"""Checks of channels for `halter doctor`: connection, approvers and the serving process."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from halter.channels.channel import Transport, TransportFailed
from halter.channels.serve import Connect, connect_directly, make_transports, read_channels
from halter.core.errors import ConfigError
from halter.core.ports import Query
from halter.core.rows import WorkerRow
from halter.operations.channels import CHANNELS, read_who
from halter.operations.health import Check, combine_checks, fail_check, pass_check, warn_check
from halter.runtime.runtime import Runtime
from halter.state.channel import ChannelLog, ChannelState

PROBE_SECONDS: Final = 10.0


async def check_channels(app: Runtime, connect: Connect = connect_directly) -> AsyncGenerator[Check]:
    """Check each configured channel, and warn about people who are paired on a channel that is not configured."""
    try:
        transports = make_transports(app, read_channels(app), connect)
    except ConfigError:
        return  # Another check reports the file.
    live = {row.worker for row in await app.store.ask(Query("all_workers", WorkerRow)) if row.alive(app.clock.now())}
    states = {name: await ChannelLog(app.store, name).refresh() for name in CHANNELS}
    for transport in transports:
        name = transport.name
        checks = [await _probe(transport), _check_people(name, states[name]), _check_worker(name, states[name], live)]
        yield combine_checks(name, checks)
    for name in sorted({*CHANNELS} - {each.name for each in transports}):
        if approver_names := sorted({each.name for each in states[name].approvers.values()}):
            yield warn_check(
                name,
                f"{', '.join(approver_names)} cannot be reached: halter.yaml has no {name} under `channels`. Add it, "
                f"or unpair them with halter channels unpair {name} {approver_names[0]}.",
            )


async def _probe(transport: Transport) -> Check:
    name = transport.name
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            identity = await transport.probe()
    except TransportFailed as failed:
        return fail_check(name, str(failed).removesuffix(" Retrying."))
    except TimeoutError:
        return fail_check(name, f"No answer within {PROBE_SECONDS:.0f} seconds. Check its url and the network.")
    finally:
        await transport.close()
    return pass_check(name, f"Connected {identity}.")


def _check_people(name: str, state: ChannelState) -> Check:
    approver_names = sorted({each.name for each in state.approvers.values() if read_who(each).has_role("approver")})
    if not approver_names:
        return warn_check(name, f"No approver is paired. Pair a person with halter channels pair {name} NAME.")
    return pass_check(name, f"{', '.join(approver_names)} may decide here.")


def _check_worker(name: str, state: ChannelState, live: set[str]) -> Check:
    if state.worker not in live:
        return warn_check(
            name, "No process serves it. Start halter serve, halter up or a worker with this halter.yaml."
        )
    return pass_check(name, f"{state.worker} serves it.")
