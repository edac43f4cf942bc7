"""The price table of the store: fetched by a command or daily, raised immediately, lowered by a person alone."""

import asyncio
import json
import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, cast

import pytest

from halter import Agent
from halter.config.policy import canonicalize_policy
from halter.core.clock import DAY, MINUTE, SystemClock
from halter.core.errors import ConfigError, NotDone
from halter.core.events import PricesChanged, RequestStarted
from halter.core.ids import FLEET, SessionId, session_stream
from halter.core.ports import read_stream
from halter.core.usage import ModelName
from halter.models.price_tables import find_default_url
from halter.models.scripted import Scripted
from halter.models.tariffs import MARGIN, Tariff
from halter.operations import money
from halter.operations.actor import Actor, Principal
from halter.runtime import runtime
from halter.runtime.runtime import Runtime, follow_prices, open_runtime
from halter.runtime.worker import update_prices_daily
from halter.settings import Settings, read_settings
from halter.testing.fakes import ManualClock
from tests.processes import Halter
from tests.story.loops import says

OPUS = "claude-opus-5-5"
"""$4 in, $20 out in the bundled table."""
CLERK = """
name: clerk
model: reflex
reflex: [{yield: {mode: sleep, sleep: 10m, reason: nothing to do}}]
autonomy: {enabled: true}
"""


class Publisher(ThreadingHTTPServer):
    """A local server that publishes a price table."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.status = 200
        self.body = b""
        self.visits = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v2/data.json"

    def publish(self, prices: dict[str, tuple[Any, Any]]) -> None:
        models = [
            {
                "id": name,
                "match": {"equals": name},
                "prices": {
                    "input_mtok": plain,
                    "output_mtok": output,
                    "cache_read_mtok": 0.2,
                    "cache_write_mtok": 5,
                },
            }
            for name, (plain, output) in prices.items()
        ]
        seller = {"id": "anthropic", "name": "Anthropic", "api_pattern": "https://x", "models": models}
        self.body = json.dumps([seller]).encode()


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        publisher = cast("Publisher", self.server)
        publisher.visits += 1
        self.send_response(publisher.status)
        self.send_header("content-length", str(len(publisher.body)))
        self.send_header("location", "http://127.0.0.1:1/elsewhere")
        self.end_headers()
        self.wfile.write(publisher.body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    with Publisher() as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def settings(tmp_path: Path, publisher: Publisher) -> Settings:
    fleet = tmp_path / "halter.yaml"
    fleet.write_text(f"prices: {{url: '{publisher.url}'}}\n")
    return read_settings({"HALTER_FLEET": str(fleet), "HALTER_PERSON": "ada"}, tmp_path, str(tmp_path / "halter.db"))


async def list_changes(app: Runtime) -> list[PricesChanged]:
    return [each.event for each in await read_stream(app.store, FLEET) if isinstance(each.event, PricesChanged)]


def find_input_price(app: Runtime, name: str) -> int | None:
    """Return the dollars per million tokens of input that are in force in a process."""
    tariff = app.prices.tables.find(ModelName("anthropic", name), None, MARGIN)
    return tariff.find_rates(1, 0).plain // 10**18 if isinstance(tariff, Tariff) else None


def ada(app: Runtime, role: Any = "admin") -> Actor:
    return Actor(app, Principal("ada", role))


async def test_new_models_and_higher_prices_count_at_once_and_lower_ones_after_a_persons_yes(
    settings: Settings, publisher: Publisher
) -> None:
    async with open_runtime(settings) as app:
        publisher.publish({OPUS: (5, 10), "claude-new": (7, 8)})
        event = await money.update_prices(ada(app))
        assert event is not None
        assert (event.by, event.added, event.added_count) == ("ada", ("anthropic:claude-new",), 1)
        assert event.raised == (f"anthropic:{OPUS}: input $4 → $5",)
        assert event.waiting == (f"anthropic:{OPUS}: output $20 → $10",)
        assert event.source == publisher.url
        assert (find_input_price(app, OPUS), find_input_price(app, "claude-new")) == (5, 7)
        publisher.publish({OPUS: (2, 10), "claude-new": (7, 8)})
        await money.update_prices(ada(app))
        assert find_input_price(app, OPUS) == 5
        report = await money.read_prices(ada(app))
        assert report.waiting == (f"anthropic:{OPUS}: input $5 → $2, output $20 → $10",)
        accepted = await money.accept_prices(ada(app), report.digest[:12], "as on their page")
        assert "in force from now on" in accepted.sentence
        assert find_input_price(app, OPUS) == 2
        assert not (await money.read_prices(ada(app))).waiting
        changes = await list_changes(app)
        assert [change.accepted for change in changes] == [False, False, True]
        assert (changes[-1].by, changes[-1].reason, changes[-1].digest) == ("ada", "as on their page", report.digest)
        assert await money.update_prices(ada(app)) is None, "the same file again"


async def test_a_yes_is_a_persons_and_to_the_file_that_was_shown(settings: Settings, publisher: Publisher) -> None:
    async with open_runtime(settings) as app:
        with pytest.raises(NotDone, match="No price table was fetched"):
            await money.accept_prices(ada(app), "0" * 12)
        publisher.publish({OPUS: (2, 10)})
        await money.update_prices(ada(app))
        shown = (await money.read_prices(ada(app))).digest
        with pytest.raises(NotDone, match="Only a person can accept lower prices"):
            await money.accept_prices(Actor(app, Principal("agent:clerk", "admin")), shown)
        with pytest.raises(NotDone, match="admin"):
            await money.accept_prices(ada(app, "operator"), shown)
        publisher.publish({OPUS: (1, 10)})
        await money.update_prices(ada(app))
        for digest in (shown, "", shown[:5]):
            with pytest.raises(NotDone, match="The newest price table is"):
                await money.accept_prices(ada(app), digest)
        assert find_input_price(app, OPUS) == 4


@pytest.mark.parametrize(
    ("status", "body", "sentence"),
    [
        (404, b"", "answered with HTTP 404"),
        (302, b"", "answered with HTTP 302"),
        (200, b"<html>", "It is not JSON"),
        (200, b'[{"id": "anthropic", "name": "x", "api_pattern": "x", "models": [{"id": "m"}]}]', "has no `match`"),
    ],
)
async def test_a_file_that_cannot_be_used_changes_nothing_and_says_why(
    settings: Settings, publisher: Publisher, status: int, body: bytes, sentence: str
) -> None:
    async with open_runtime(settings) as app:
        publisher.status, publisher.body = status, body
        with pytest.raises(ConfigError) as refusal:
            await money.update_prices(ada(app))
        assert str(refusal.value).startswith("The price table was not updated, and the prices in force stay. ")
        assert sentence in str(refusal.value)
        assert await list_changes(app) == []


async def test_a_file_is_fetched_over_an_encrypted_connection_or_from_this_machine(
    settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "halter.yaml").write_text("prices: {url: 'http://prices.example/data.json'}\n")
    async with open_runtime(settings) as app:
        with pytest.raises(ConfigError, match="must begin with https://"):
            await money.update_prices(ada(app))
    assert find_default_url().startswith("https://")


async def test_a_running_process_uses_what_another_one_fetched_within_a_minute(
    settings: Settings, publisher: Publisher
) -> None:
    clock = ManualClock()
    async with open_runtime(settings, clock) as running, follow_prices(running), open_runtime(settings) as other:
        publisher.publish({OPUS: (6, 20)})
        await money.update_prices(ada(other))
        assert find_input_price(running, OPUS) == 4
        clock.advance(MINUTE)
        async with asyncio.timeout(10):
            while find_input_price(running, OPUS) != 6:  # noqa: ASYNC110 The store answers in a thread.
                await asyncio.sleep(0.01)


async def test_a_store_that_is_opened_again_keeps_its_prices_without_the_network(
    settings: Settings, publisher: Publisher
) -> None:
    async with open_runtime(settings) as app:
        publisher.publish({OPUS: (6, 20)})
        await money.update_prices(ada(app))
    publisher.status = 500
    async with open_runtime(settings) as app:
        assert find_input_price(app, OPUS) == 6
    assert publisher.visits == 1


async def test_a_table_that_the_store_has_lost_leaves_no_price_in_force_until_it_is_fetched_again(
    settings: Settings, publisher: Publisher
) -> None:
    publisher.publish({OPUS: (6, 20)})
    async with open_runtime(settings) as app:
        await money.update_prices(ada(app))
    with closing(sqlite3.connect(settings.store)) as connection:
        connection.execute("DELETE FROM blobs")
        connection.commit()
    async with open_runtime(settings) as app:
        assert find_input_price(app, OPUS) is None
        await money.update_prices(ada(app))
        assert find_input_price(app, OPUS) == 6


async def test_a_process_that_updates_daily_says_what_it_did_and_keeps_its_prices_when_that_fails(
    settings: Settings, publisher: Publisher
) -> None:
    clock, told = ManualClock(), asyncio.Queue[str]()
    async with open_runtime(settings, clock) as app:
        publisher.publish({OPUS: (6, 10)})
        task = asyncio.ensure_future(update_prices_daily(app, told.put_nowait))
        first = await asyncio.wait_for(told.get(), 30)
        assert "0 new models, 1 higher price, in force from now on. 1 model with a lower price" in first
        assert (await list_changes(app))[0].by == "halter.yaml"
        publisher.status = 500
        clock.advance(DAY)
        assert "the prices in force stay. 127.0.0.1 answered with HTTP 500" in await asyncio.wait_for(told.get(), 30)
        publisher.status = 200
        publisher.publish({OPUS: (7, 10)})
        clock.advance(DAY)
        assert "1 higher price" in await asyncio.wait_for(told.get(), 30)
        assert find_input_price(app, OPUS) == 7
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_an_agent_uses_a_new_model_after_an_update_and_with_a_guess_without_one(
    settings: Settings, publisher: Publisher
) -> None:
    def make_agent(**policy: Any) -> Agent:
        model = Scripted([says("Done.")], SystemClock(), ModelName("anthropic", "claude-new"))
        return Agent("desk", store=settings.store, settings=settings, model=model, policy=policy)

    refused = await make_agent().run("go")
    assert (refused.state, "Run `halter prices update`" in refused.sentence) == ("ERROR", True)
    guessed = await make_agent(policy={"unknown_price": "dearest"}).run("go")
    assert guessed.state == "COMPLETED"
    async with open_runtime(settings) as app:
        events = await read_stream(app.store, session_stream(SessionId(guessed.session)))
        (started,) = [each.event for each in events if isinstance(each.event, RequestStarted)]
        assert started.guess.startswith("priced at a guess until the price table knows it: $")
        publisher.publish({"claude-new": (7, 8)})
        await runtime.update_prices(app, "ada")
    known = await make_agent().run("go")
    assert known.state == "COMPLETED"
    assert known.cost_usd < guessed.cost_usd


def type_command(tmp_path: Path, *words: str, **environ: str) -> tuple[int, str, str]:
    values = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "HALTER_PERSON": "ada", "COLUMNS": "200", **environ}
    with Halter(words, env=values, cwd=tmp_path) as program:
        output, errors = program.communicate(timeout=120)
    assert b"Traceback" not in errors, errors.decode()
    return program.wait(), output.decode(), errors.decode()


def test_a_person_updates_the_prices_is_shown_what_waits_and_accepts_it(tmp_path: Path, publisher: Publisher) -> None:
    (tmp_path / "halter.yaml").write_text(f"prices: {{url: '{publisher.url}'}}\n")
    publisher.publish({OPUS: (5, 10), "claude-new": (7, 8)})
    code, output, _ = type_command(tmp_path, "prices", "update")
    assert code == 0
    assert "1 new model, 1 higher price, in force from now on. 1 model with a lower price, or free, wait" in output
    code, output, _ = type_command(tmp_path, "prices")
    assert "anthropic:claude-new" in output
    assert "output $20 → $10" in output
    (command,) = [line.partition("too: ")[2] for line in output.splitlines() if "halter prices accept" in line]
    code, _, errors = type_command(tmp_path, *command.split()[1:], HALTER_AGENT="clerk")
    assert (code, "Only a person" in errors) == (1, True)
    assert "1 lower price in it waits for your yes" in type_command(tmp_path, "doctor")[1]
    code, output, _ = type_command(tmp_path, *command.split()[1:])
    assert (code, "in force from now on" in output) == (0, True)
    assert json.loads(type_command(tmp_path, "prices", "--json")[1])["waiting"] == []
    assert "kept already" in type_command(tmp_path, "prices", "update")[1]
    publisher.body = b"[]"
    code, _, errors = type_command(tmp_path, "prices", "update")
    assert (code, "was not updated" in errors) == (3, True)


@pytest.mark.parametrize("words", [("proxy", "--listen", "127.0.0.1:0"), ("up", "clerk")], ids=["proxy", "up"])
@pytest.mark.parametrize("update", ["daily", "never"])
def test_what_runs_unattended_fetches_prices_only_where_the_file_says_so(
    tmp_path: Path, publisher: Publisher, words: tuple[str, ...], update: str
) -> None:
    (tmp_path / "clerk").mkdir()
    (tmp_path / "clerk" / "agent.yaml").write_text(CLERK)
    (tmp_path / "halter.yaml").write_text(f"prices: {{update: {update}, url: '{publisher.url}'}}\n")
    publisher.publish({OPUS: (5, 20)})
    type_command(tmp_path, "on", "clerk")
    values = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "HALTER_PERSON": "ada", "ANTHROPIC_API_KEY": "sk-x"}
    with Halter(words, env=values, cwd=tmp_path) as program:
        assert program.stdout is not None
        assert program.stdout.readline()
        for _ in range(200 if update == "daily" else 3):
            if json.loads(type_command(tmp_path, "prices", "--json")[1]).get("digest"):
                break
        program.send_signal(signal.SIGINT)
        program.communicate(timeout=60)
    assert publisher.visits == (1 if update == "daily" else 0)
    raised = json.loads(type_command(tmp_path, "prices", "--json")[1])["raised"]
    assert raised == ([f"anthropic:{OPUS}: input $4 → $5"] if update == "daily" else [])


def test_the_address_of_the_prices_and_their_updates_stay_in_the_file_of_their_machine(tmp_path: Path) -> None:
    assert "prices" not in canonicalize_policy({"prices": {"url": "https://prices.example"}, "mode": "FULL"})
