"""What starts sessions, what they read and whom they tell: every key of it ends where somebody looks at it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from msgspec import UNSET
from msgspec.structs import replace

from halter.config.agent_files import AgentFile, parse_agent
from halter.config.decode import agent_schema, fleet_schema
from halter.config.merge import FleetConfig, parse_fleet
from halter.config.resolve import IN_APP_CHANNEL, REVIEW_PHASES, resolve_agent, resolve_policy
from halter.config.tool_names import check_named_tools
from halter.config.yaml_reader import load_bytes
from halter.core.clock import MINUTE, SECOND
from halter.core.money import Cap
from halter.spec.autonomy import ActiveHours
from halter.spec.channels import EmailChannel, InAppChannel, Notify
from halter.spec.tasks import VERBS, Review, Tasks


def fleet(text: str = "") -> FleetConfig:
    return parse_fleet(load_bytes(text.encode(), "halter.yaml")) if text else FleetConfig()


def agent(text: str = "") -> AgentFile:
    return parse_agent(load_bytes(f"name: night-watch\n{text}".encode(), "agent.yaml"))


def tasks(text: str = "", bound: str = "", folder: Path | None = None) -> Tasks:
    if "cron:" in text or "at:" in text:
        pytest.importorskip("halter.core.schedules")
    return resolve_agent(fleet(bound), agent(text), folder).tasks


def schedule(text: str = "every: 15m") -> str:
    prompt = "" if "playbook" in text else "prompt: Look., "
    return f"schedules: [{{name: nightly, {prompt}{text}}}]\n"


def watch(text: str = "path: in") -> str:
    return f"watches: [{{name: mail, prompt: Read it., {text}}}]\n"


def webhook(text: str = "") -> str:
    return f"secrets: [HOOK]\nwebhooks: [{{name: push, prompt: Look., token: '${{secret:HOOK}}'{text}}}]\n"


def channel(text: str) -> str:
    return f"secrets: [KEY]\nnotify: {{channels: [{{name: ops, {text}}}]}}\n"


MAIL = "type: email, to: [ada@example.com], sender: halter@example.com, host: mail.example.com"
HOOK = "type: webhook, url: 'https://hooks.example.com/a?b=c'"
DOCS = "collections: {contracts: {path: docs}}\n"


def read_trigger_key(kind: str, key: str) -> Any:
    return lambda t: getattr(getattr(t, kind)[0], key)


def list_common_keys(kind: str, write: Any, first: str) -> list[tuple[str, str, Any, Any]]:
    """List the keys that all triggers have."""
    text = first + ", " if first else ""
    return [
        (
            f"{kind}/name",
            write(first),
            read_trigger_key(kind, "name"),
            write("").partition("name: ")[2].partition(",")[0],
        ),
        (
            f"{kind}/prompt",
            write(first),
            read_trigger_key(kind, "prompt"),
            write("").partition("prompt: ")[2].partition(",")[0],
        ),
        (f"{kind}/max_cost_usd", write(f"{text}max_cost_usd: 0.1"), read_trigger_key(kind, "max_cost_usd"), 100_000),
        (f"{kind}/max_cost_usd", write(f"{text}max_cost_usd: none"), read_trigger_key(kind, "max_cost_usd"), None),
        (
            f"{kind}/max_cost_usd_per_hour",
            write(f"{text}max_cost_usd_per_hour: 1"),
            lambda t: getattr(t, kind)[0].caps(),
            (Cap(1_000_000, "hour"),),
        ),
        (
            f"{kind}/max_cost_usd_per_day",
            write(f"{text}max_cost_usd_per_day: 2"),
            lambda t: getattr(t, kind)[0].caps(),
            (Cap(2_000_000, "day"),),
        ),
        (
            f"{kind}/collections",
            DOCS + write(f"{text}collections: [contracts]"),
            read_trigger_key(kind, "collections"),
            ("contracts",),
        ),
    ]


def list_playbook_keys(kind: str, body: str, before: str = "") -> list[tuple[str, str, Any, Any]]:
    text = f"{before}{kind}: [{{name: x, {body}, playbook: night.yaml, inputs: {{item: 3}}}}]\n"
    return [
        (f"{kind}/playbook", text, read_trigger_key(kind, "playbook"), "night.yaml"),
        (f"{kind}/inputs", text, read_trigger_key(kind, "inputs"), {"item": 3}),
    ]


def webhook_with(text: str) -> str:
    return webhook(f", {text}" if text else "")


HOURS = "active_hours: {start: '08:00', end: '18:00'%s}"
HALF = 30 * MINUTE
KEYS: list[tuple[str, str, Any, Any]] = [
    *list_common_keys("schedules", schedule, "every: 15m"),
    *list_playbook_keys("schedules", "every: 15m"),
    ("schedules/cron", schedule("cron: '0 9 * * 1-5'"), read_trigger_key("schedules", "cron"), "0 9 * * 1-5"),
    ("schedules/every", schedule("every: 15m"), read_trigger_key("schedules", "every"), 15 * MINUTE),
    ("schedules/at", schedule("at: 2036-12-24 09:00"), read_trigger_key("schedules", "at"), "2036-12-24 09:00"),
    (
        "schedules/timezone",
        schedule("every: 1h, timezone: Europe/Berlin"),
        read_trigger_key("schedules", "timezone"),
        "Europe/Berlin",
    ),
    ("schedules/overlap", schedule("every: 1h, overlap: queue"), read_trigger_key("schedules", "overlap"), "queue"),
    ("schedules/catch_up", schedule("every: 1h, catch_up: never"), read_trigger_key("schedules", "catch_up"), "never"),
    ("schedules/jitter", schedule("every: 1h, jitter: 30s"), read_trigger_key("schedules", "jitter"), 30 * SECOND),
    (
        "schedules/min_interval",
        schedule("every: 1h, min_interval: 5m"),
        read_trigger_key("schedules", "min_interval"),
        5 * MINUTE,
    ),
    *(
        (
            f"schedules/active_hours/{key}",
            schedule(f"every: 1h, {HOURS % ', timezone: Europe/Rome'}"),
            read_trigger_key("schedules", "active_hours"),
            ActiveHours(start="08:00", end="18:00", timezone="Europe/Rome"),
        )
        for key in ("start", "end", "timezone")
    ),
    *list_common_keys("watches", watch, "path: in"),
    *list_playbook_keys("watches", "path: in"),
    ("watches/path", watch(), read_trigger_key("watches", "path"), "in"),
    ("watches/pattern", watch("path: in, pattern: '*.pdf'"), read_trigger_key("watches", "pattern"), "*.pdf"),
    (
        "watches/collection",
        DOCS + watch("collection: contracts"),
        read_trigger_key("watches", "collection"),
        "contracts",
    ),
    ("watches/debounce", watch("path: in, debounce: 10s"), read_trigger_key("watches", "debounce"), 10 * SECOND),
    ("watches/max_attempts", watch("path: in, max_attempts: 1"), read_trigger_key("watches", "max_attempts"), 1),
    ("watches/max_parallel", watch("path: in, max_parallel: 1"), read_trigger_key("watches", "max_parallel"), 1),
    ("watches/existing", watch("path: in, existing: false"), read_trigger_key("watches", "existing"), False),
    *list_common_keys("webhooks", webhook_with, ""),
    *list_playbook_keys("webhooks", "token: '${secret:HOOK}'", "secrets: [HOOK]\n"),
    ("webhooks/token", webhook(), read_trigger_key("webhooks", "token"), "${secret:HOOK}"),
    ("webhooks/scheme", webhook(", scheme: github"), read_trigger_key("webhooks", "scheme"), "github"),
    (
        "webhooks/previous_token",
        webhook(", previous_token: '${secret:HOOK}'"),
        read_trigger_key("webhooks", "previous_token"),
        "${secret:HOOK}",
    ),
    (
        "webhooks/tolerance",
        webhook(", scheme: slack, tolerance: 1m"),
        read_trigger_key("webhooks", "tolerance"),
        MINUTE,
    ),
    ("webhooks/max_bytes", webhook(", max_bytes: 10"), read_trigger_key("webhooks", "max_bytes"), 10),
    ("collections/*/path", DOCS, lambda t: t.collections["contracts"].path, "docs"),
    (
        "collections/*/pattern",
        "collections: {a: {path: b, pattern: '**/*.md'}}\n",
        lambda t: t.collections["a"].pattern,
        "**/*.md",
    ),
    (
        "collections/*/description",
        "collections: {a: {path: b, description: All of it.}}\n",
        lambda t: t.collections["a"].description,
        "All of it.",
    ),
    ("verbs", "verbs: [notify, emit_finding]\n", lambda t: t.verbs, ("emit_finding", "notify")),
    ("review/judges", "review: {judges: [openai/gpt-5]}\n", lambda t: t.review.judges, ("openai:gpt-5",)),
    ("review/instructions", "review: {instructions: Be strict.}\n", lambda t: t.review.instructions, "Be strict."),
    (
        "review/max_cost_per_message_usd",
        "review: {max_cost_per_message_usd: 0.05}\n",
        lambda t: t.review.max_cost_per_message_usd,
        50_000,
    ),
    ("notify/on", "notify: {on: [failed]}\n", lambda t: t.notify.on, ("failed",)),
    ("anonymize", "anonymize: true\n", lambda t: t.anonymize, ()),
    ("anonymize/enabled", "anonymize: {enabled: true}\n", lambda t: t.anonymize, ()),
    ("anonymize/names", "anonymize: {enabled: true, names: [Ada]}\n", lambda t: t.anonymize, ("Ada",)),
    (
        "heartbeat",
        "heartbeat: 30m\n",
        lambda t: (t.schedules[0].name, t.schedules[0].every),
        ("heartbeat", 30 * MINUTE),
    ),
    ("idle_halt_minutes", "idle_halt_minutes: 0.5\n", lambda t: t.idle_halt, MINUTE // 2),
    ("idle_halt_minutes", "idle_halt_minutes: 0\n", lambda t: t.idle_halt, 0),
    ("concurrency", "concurrency: 3\n", lambda t: t.concurrency, 3),
]


def read_channel_key(key: str) -> Any:
    return lambda t: getattr(t.notify.channels[0], key)


CHANNELS: list[tuple[str, str, Any, Any]] = [
    ("name", channel("type: in_app"), read_channel_key("name"), "ops"),
    ("type", channel("type: in_app"), lambda t: type(t.notify.channels[0]), InAppChannel),
    ("to", channel(MAIL), read_channel_key("to"), ("ada@example.com",)),
    ("sender", channel(MAIL), read_channel_key("sender"), "halter@example.com"),
    ("host", channel(MAIL), read_channel_key("host"), "mail.example.com"),
    ("port", channel(f"{MAIL}, port: 2525"), read_channel_key("port"), 2525),
    ("security", channel(f"{MAIL}, security: tls"), read_channel_key("security"), "tls"),
    ("username", channel(f"{MAIL}, username: ada, password: '${{secret:KEY}}'"), read_channel_key("username"), "ada"),
    (
        "password",
        channel(f"{MAIL}, username: ada, password: '${{secret:KEY}}'"),
        read_channel_key("password"),
        "${secret:KEY}",
    ),
    ("url", channel(HOOK), read_channel_key("url"), "https://hooks.example.com/a?b=c"),
    (
        "headers",
        channel(f"{HOOK}, headers: {{X-Key: '${{secret:KEY}}'}}"),
        read_channel_key("headers"),
        {"X-Key": "${secret:KEY}"},
    ),
    ("service", channel("type: apprise, service: '${secret:KEY}'"), read_channel_key("service"), "${secret:KEY}"),
]
ALL = [*KEYS, *((f"notify/channels/{key}", *rest) for key, *rest in CHANNELS)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "night.yaml").write_text("- call: look\n")
    return tmp_path


@pytest.mark.parametrize(("key", "text", "look", "expected"), ALL)
def test_each_key_ends_in_the_agents_tasks(key: str, text: str, look: Any, expected: Any, folder: Path) -> None:
    found = tasks(text, folder=folder)
    assert look(found) == expected, key
    assert found != tasks()


@pytest.mark.parametrize(("key", "text"), [case[:2] for case in ALL])
def test_no_key_touches_the_policy(key: str, text: str) -> None:
    bare = "".join(line for line in text.splitlines(keepends=True) if line.startswith("secrets:"))
    assert resolve_policy(FleetConfig(), agent(text)).digest() == resolve_policy(FleetConfig(), agent(bare)).digest(), (
        key
    )


@pytest.mark.parametrize(("key", "text"), [case[:2] for case in ALL])
def test_what_is_read_is_right_for_the_schema_too(key: str, text: str) -> None:
    value = load_bytes(f"name: night-watch\n{text}".encode(), "agent.yaml").value
    assert list(Draft202012Validator(agent_schema()).iter_errors(value)) == [], key


@pytest.mark.parametrize(
    ("key", "text", "look", "expected"), [case for case in CHANNELS if "secret" not in case[1][15:]]
)
def test_each_key_of_a_channel_of_the_fleet_reaches_every_agent(key: str, text: str, look: Any, expected: Any) -> None:
    bound = text.partition("\n")[2]
    assert look(tasks("", bound)) == expected, key
    value = load_bytes(bound.encode(), "halter.yaml").value
    assert list(Draft202012Validator(fleet_schema()).iter_errors(value)) == []


def keys(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    """List every key below one, items of lists and kinds included; free keys are written as a star."""
    kinds, items, free = schema.get("anyOf", ()), schema.get("items", {}), schema.get("additionalProperties")
    parts = (schema, *kinds, items, *items.get("anyOf", ()))
    below = [each for part in parts for each in part.get("properties", {}).items()]
    if isinstance(free, dict) and "properties" in free:
        below.append(("*", free))
    if len({"properties" in kind for kind in kinds}) > 1:
        yield path
    yield from dict.fromkeys(key for name, part in below for key in keys(part, f"{path}/{name}")) or [path]


def test_no_key_is_without_a_test_that_shows_its_reader() -> None:
    schema = agent_schema()["properties"]
    tops = ("schedules", "watches", "webhooks", "collections", "verbs", "review", "notify", "anonymize")
    texts = [key for top in (*tops, "heartbeat", "idle_halt_minutes", "concurrency") for key in keys(schema[top], top)]
    assert sorted(texts) == sorted({key for key, *_ in ALL})
    assert schema["notify"]["properties"] == fleet_schema()["properties"]["notify"]["properties"]


def test_an_agent_without_these_keys_has_no_tasks_and_notifies_in_the_app() -> None:
    assert tasks() == Tasks(notify=Notify(channels=(IN_APP_CHANNEL,)))
    assert tasks().idle_halt == 5 * MINUTE
    assert tasks().concurrency is None
    assert tasks().triggers() == ()


def test_the_walk_of_a_review_has_five_phases_with_exactly_their_grants() -> None:
    walk = {phase.name: phase.grants for phase in resolve_policy(FleetConfig(), agent("phases: review\n")).phases}
    assert walk == {
        "intake": ("retrieve_chunks",),
        "analysis": ("retrieve_chunks", "run_skill", "run_playbook", "propose_precedent"),
        "drafting": ("run_skill", "emit_finding", "propose_memory", "propose_precedent"),
        "ethics_review": ("emit_finding",),
        "delivery": ("notify",),
    }
    assert resolve_policy(FleetConfig(), agent("phases: review\n")).phases == REVIEW_PHASES


def test_a_review_has_all_verbs_and_hides_what_is_personal() -> None:
    found = tasks("phases: review\n")
    assert (found.verbs, found.anonymize) == (VERBS, ())
    assert tasks("phases: review\nanonymize: false\n").anonymize is None
    assert tasks("phases: review\nanonymize: {enabled: false, names: [Ada]}\n").anonymize is None
    assert tasks("phases: review\nanonymize: {names: [Ada]}\n").anonymize == ("Ada",)
    assert tasks("phases: work\n").anonymize is None


def test_an_agent_has_the_verbs_that_its_phases_grant_and_one_for_its_documents() -> None:
    assert tasks("phases: {look: [read_file, run_skill], tell: [notify]}\n").verbs == ("run_skill", "notify")
    assert tasks("phases: {look: all}\nverbs: [notify]\n").verbs == ("notify",)
    assert tasks(DOCS).verbs == ("retrieve_chunks",)
    assert tasks(watch()).verbs == ("retrieve_chunks",)
    assert tasks(schedule()).verbs == ()


def test_a_verb_that_a_phase_grants_is_not_taken_for_a_missing_tool() -> None:
    for text in ("phases: review\n", "phases: {tell: [notify]}\n"):
        check_named_tools(resolve_policy(FleetConfig(), agent(text)), agent(text), ())


def test_times_are_those_of_the_fleet_where_a_schedule_names_no_zone() -> None:
    (found,) = tasks(schedule(f"every: 1h, {HOURS % ''}"), "zone: Asia/Tokyo\n").schedules
    assert found.timezone == "Asia/Tokyo"
    assert found.active_hours is not UNSET
    assert found.active_hours.timezone == "Asia/Tokyo"
    (other,) = tasks(schedule(f"every: 1h, timezone: Europe/Rome, {HOURS % ''}"), "zone: Asia/Tokyo\n").schedules
    assert other.active_hours is not UNSET
    assert other.active_hours.timezone == "Europe/Rome"


def test_the_channels_of_the_fleet_come_before_the_agents_own() -> None:
    bound = "notify: {channels: [{name: all, type: in_app}], on: [failed]}\n"
    found = tasks(channel(HOOK), bound).notify
    assert [each.name for each in found.channels] == ["all", "ops"]
    assert found.on == ("failed",)
    text = "notify: {on: [halted, failed, waiting, quarantined]}\n"
    assert tasks(text, bound).notify.on == ("halted", "failed", "waiting", "quarantined")


def test_a_program_without_places_may_say_what_is_told_too() -> None:
    agent_file = agent()
    spoken = replace(agent_file, spec=replace(agent_file.spec, notify=Notify(on=("halted",))))
    assert resolve_agent(FleetConfig(), spoken, None).tasks.notify.on == ("halted",)


def test_a_trigger_is_found_by_its_name() -> None:
    found = tasks(schedule() + watch())
    assert [trigger.name for trigger in found.triggers()] == ["nightly", "mail"]
    assert found.trigger("mail") == found.watches[0]
    assert found.trigger("other") is None


def test_the_defaults_are_those_that_are_documented() -> None:
    (timed,), (watched,), (pushed_to,) = (
        tasks(schedule()).schedules,
        tasks(watch()).watches,
        tasks(webhook()).webhooks,
    )
    assert (timed.overlap, timed.catch_up, timed.jitter, timed.min_interval) == ("skip", "once", 0, MINUTE)
    assert (watched.debounce, watched.max_attempts, watched.max_parallel) == (2 * SECOND, 3, 4)
    assert (watched.pattern, watched.existing, pushed_to.max_bytes) == ("*", True, 262144)
    assert tasks().review == Review()
    assert EmailChannel(name="a", to=("a@b.c",), sender="a@b.c", host="b.c").security == "starttls"
