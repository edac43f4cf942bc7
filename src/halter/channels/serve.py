"""Serves the channels that the fleet's file configures, in any process that runs agents or the server."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Final

from msgspec import UNSET

from halter.channels.channel import DecisionChannel, ReportSentence, Transport, TransportFailed, describe_error
from halter.channels.ntfy import NtfyTransport
from halter.channels.slack import SlackTransport
from halter.channels.telegram import TelegramTransport
from halter.core.clock import MINUTE
from halter.core.errors import ConfigError, require_module
from halter.core.ports import Query
from halter.core.tools import substitute_secrets
from halter.dispatch.workers import WorkerRow
from halter.loop.concurrency import raise_if_cancelled, run_together
from halter.net.client import HttpClient
from halter.net.httpx_transport import connect_directly
from halter.operations.channels import CHANNELS, read_who
from halter.operations.doctor.check import Check, combine_checks, fail_check, pass_check, warn_check
from halter.policy.hours import parse_active_hours
from halter.redaction.secrets import read_environment_secrets
from halter.runtime.runtime import Runtime, read_local_fleet
from halter.spec.fleet import ChannelsSpec
from halter.state.channel import ChannelLog, ChannelState

Connect = Callable[[], HttpClient]
RESTART_INTERVAL: Final = MINUTE


def read_channels(app: Runtime) -> ChannelsSpec:
    """Read the channels of the local fleet file; a store's policy has none."""
    fleet_file = read_local_fleet(app.settings)
    return ChannelsSpec() if fleet_file is None else fleet_file.spec.channels


def make_transports(app: Runtime, spec: ChannelsSpec, connect: Connect = connect_directly) -> Sequence[Transport]:
    transports: list[Transport] = []
    if spec.telegram is not UNSET:
        token = partial(_reveal, app, spec.telegram.token, "channels.telegram.token")
        transports.append(TelegramTransport(token, spec.telegram.url, connect))
    if spec.ntfy is not UNSET:
        key = spec.ntfy.token
        access = None if key is UNSET else partial(_reveal, app, key, "channels.ntfy.token")
        transports.append(NtfyTransport(spec.ntfy.url, access, connect))
    if spec.slack is not UNSET:
        require_module("websockets", "notify", "The channel slack")
        bot = partial(_reveal, app, spec.slack.token, "channels.slack.token")
        reveal_app_token = partial(_reveal, app, spec.slack.app_token, "channels.slack.app_token")
        transports.append(SlackTransport(bot, reveal_app_token, spec.slack.url, connect))
    return transports


def _reveal(app: Runtime, reference: str, key: str) -> str:
    try:
        return substitute_secrets(reference, read_environment_secrets(app.environ).value)
    except KeyError as missing:
        name = missing.args[0]
        sentence = f"`{key}` needs the secret {name}, which is not set. Set HALTER_SECRET_{name} and restart."
        raise TransportFailed(sentence, may_retry=True, retry_after=MINUTE) from None


async def serve_channels(app: Runtime, report: ReportSentence, connect: Connect = connect_directly) -> None:
    """Serve every channel until cancelled. Without channels, return."""
    try:
        spec = read_channels(app)
        transports = make_transports(app, spec, connect)
    except ConfigError as error:
        report(f"Channels are not served: {error}")
        return
    acts = [partial(_serve, app, each, report, spec) for each in transports]
    if acts:
        await run_together(acts)


async def _serve(app: Runtime, transport: Transport, report: ReportSentence, spec: ChannelsSpec) -> None:
    """Serve one channel; restart it after a failure, which must not end the other tasks of the process."""
    dashboard = "" if spec.dashboard is UNSET else spec.dashboard
    while True:
        try:
            quiet = None if spec.quiet_hours is UNSET else parse_active_hours(spec.quiet_hours)
            await DecisionChannel(app, transport, report, dashboard, quiet).run()
        except Exception as error:  # noqa: BLE001 no failure here may stop an agent or the server
            raise_if_cancelled()
            report(f"The channel {transport.name} failed and is restarted: {describe_error(error)}")
        finally:
            await transport.close()
        await app.clock.sleep(RESTART_INTERVAL)


PROBE_SECONDS: Final = 10.0


async def check_channels(app: Runtime, connect: Connect = connect_directly) -> AsyncGenerator[Check]:
    """Check each configured channel, and warn about people who are paired on a channel that is not configured."""
    try:
        spec = read_channels(app)
    except ConfigError:
        return  # Another check reports the file.
    try:
        transports = make_transports(app, spec, connect)
    except ConfigError as error:
        yield fail_check("channels", str(error))
        return
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
