"""Every mistake in what starts sessions and whom they tell is a sentence with file, line, key and fix."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.config.agent_files import parse_agent
from halter.config.merge import FleetConfig, parse_fleet
from halter.config.resolve import resolve_agent
from halter.config.yaml_reader import Document, load_bytes
from halter.core.errors import ConfigError
from halter.spec.tasks import Tasks

KEY = "sk-proj-mAdeUpKeyThatOpensNothing1234567890"


def read(text: str, bound: str = "", folder: Path | None = None) -> Tasks:
    fleet = parse_fleet(load_bytes(bound.encode(), "halter.yaml")) if bound else FleetConfig()
    return resolve_agent(
        fleet, parse_agent(load_bytes(f"name: night-watch\n{text}".encode(), "agent.yaml")), folder
    ).tasks


def read_refusal(text: str, bound: str = "", folder: Path | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        read(text, bound, folder)
    return str(error.value)


def schedule(*lines: str) -> str:
    return "schedules:\n- name: nightly\n" + "".join(f"  {line}\n" for line in lines)


def schedule_at(*lines: str) -> str:
    return schedule("prompt: Look.", *lines)


def watch(*lines: str) -> str:
    return "watches:\n- name: mail\n  prompt: Read it.\n" + "".join(f"  {line}\n" for line in lines)


def channel(*lines: str) -> str:
    return "notify:\n  channels:\n  - name: ops\n" + "".join(f"    {line}\n" for line in lines)


def mail(*lines: str) -> str:
    return channel("type: email", "to: [ada@example.com]", "sender: h@example.com", "host: mail.example.com", *lines)


SCHEDULES = [
    (schedule("every: 1h"), "line 3: `schedules[1]` starts sessions without a task; write a `prompt` or a `playbook`."),
    (
        schedule("every: 1h", "prompt: ' '"),
        "line 3: `schedules[1]` starts sessions without a task; write a `prompt` or a `playbook`.",
    ),
    (
        schedule("every: 1h", "prompt: a", "playbook: b"),
        "line 6: `schedules[1]` has both `prompt` and `playbook`; keep one of them.",
    ),
    (schedule_at(), "line 3: `schedules[1]` has no time; write `cron`, `every` or `at`."),
    (
        schedule_at("every: 1h", "at: 2036-01-01 09:00"),
        "line 6: `schedules[1]` has both `every` and `at`; keep one of them.",
    ),
    (
        schedule_at("cron: 0 9 * * *", "every: 1h"),
        "line 6: `schedules[1]` has both `cron` and `every`; keep one of them.",
    ),
    (
        schedule_at("every: 30s"),
        "line 5: `schedules[1].every` is 30s, which is shorter than its `min_interval`, 1m; write that or more.",
    ),
    (
        schedule_at("every: 0"),
        "line 5: `schedules[1].every` is 0, which is shorter than its `min_interval`, 1m",
    ),
    (
        schedule_at("every: 5m", "min_interval: 10m"),
        "line 5: `schedules[1].every` is 5m, which is shorter than its `min_in",
    ),
    (
        schedule_at("every: 5m", "min_interval: 59s"),
        "line 6: `schedules[1].min_interval` is 59s, but the minimum is 1m; write that or more.",
    ),
    (
        schedule_at("every: 5m", "min_interval: 0"),
        "line 6: `schedules[1].min_interval` is 0, but the minimum is 1m",
    ),
    (
        schedule_at("every: 5m", "jitter: 5m"),
        "line 6: `schedules[1].jitter` is 5m, as long as its `every` or longer",
    ),
    (
        schedule_at("every: 5m", "overlap: both"),
        "line 6: `schedules[1].overlap` is the text 'both', which is not one of its values; they are `queue`,",
    ),
    (
        schedule_at("every: 5m", "catch_up: all"),
        "line 6: `schedules[1].catch_up` is the text 'all', which is not one of its values; they are `never`,",
    ),
    (
        schedule_at("every: 5m", "timezone: Mars"),
        "line 6: `schedules[1].timezone` is the text 'Mars', but must be a time z",
    ),
    (
        schedule_at("every: 5m", "active_hours: {start: '08:00', end: '08:00'}"),
        "line 6: `schedules[1].active_hours` starts and ends at 08:00; change one of them, or remove the key to",
    ),
    (
        schedule_at("every: 1h", "max_cost_usd: 0"),
        "line 6: `schedules[1].max_cost_usd` is 0, so nothing could run; write a number of dollars, or `none`",
    ),
    (
        schedule_at("every: 1h", "max_cost_usd: -1"),
        "line 6: `schedules[1].max_cost_usd` is the number -1, but must be a n",
    ),
    (
        schedule_at("every: 1h", "max_cost_usd_per_day: 0"),
        "line 6: `schedules[1].max_cost_usd_per_day` is 0, so nothing",
    ),
    (
        schedule_at("every: 1h", "max_cost_usd_per_hour: 0"),
        "line 6: `schedules[1].max_cost_usd_per_hour` is 0, so nothing",
    ),
    (
        schedule_at("every: 1h", "inputs: {a: 1}"),
        "line 6: `schedules[1].inputs` applies to a `playbook`, which is missing; write it.",
    ),
    (
        schedule_at("every: 1h", "collections: [books]"),
        "line 6: `schedules[1].collections[1]` is `books`, which is not a collection; the `collections` of this",
    ),
    (
        f"{schedule_at('every: 1h', 'collections: [contract]')}collections: {{contracts: {{path: a}}}}\n",
        "line 6: `schedules[1].collections[1]` is `contract`, which is not a collection; did you mean",
    ),
    (
        schedule("every: 1h", "playbook: a.yaml", "inputs: {key: '${secret:A}'}"),
        "line 6: `schedules[1].inputs.key` names the secret `A`, which is not in the agent's `secrets`; add it",
    ),
    ("schedules: {a: 1}\n", "line 2: `schedules` is a mapping, but must be a list"),
]
MOMENTS = [
    (schedule_at("cron: 0 0 30 2 *"), "line 5: `schedules[1].cron` cannot be used. "),
    (schedule_at("cron: soon"), "line 5: `schedules[1].cron` cannot be used. "),
    (schedule_at("cron: 61 * * * *"), "line 5: `schedules[1].cron` cannot be used. "),
    (schedule_at("at: tomorrow"), "line 5: `schedules[1].at` cannot be used. "),
    (schedule_at("at: 2036-02-30 09:00"), "line 5: `schedules[1].at` cannot be used. "),
]
TWICE = schedule_at("every: 1h") + "- {name: nightly, prompt: a, every: 2h}\n"
WATCHES = [
    (TWICE, "line 6: `schedules[2].name` is `nightly`, which is also the name of `schedules[1]`; choose another"),
    (
        f"{schedule_at('every: 1h')}watches: [{{name: nightly, prompt: a, path: b}}]\n",
        "line 6: `watches[1].name` is `nightly`, which is also the name of `schedules[1]`; choose another name.",
    ),
    (watch(), "line 3: `watches[1]` has nothing to watch; write a `path` or a `collection`."),
    (
        f"{watch('path: a', 'collection: b')}collections: {{b: {{path: c}}}}\n",
        "line 6: `watches[1]` has both `path` and `collection`; keep one of them.",
    ),
    (
        watch("collection: b"),
        "line 5: `watches[1].collection` is `b`, which is not a collection; the `collections` of this file are",
    ),
    (
        f"{watch('collection: b', 'pattern: x')}collections: {{b: {{path: c}}}}\n",
        "line 6: `watches[1].pattern` applies to a `path`, but this watches a collection; write it there",
    ),
    (
        watch('path: "a\\0b"'),
        "line 5: `watches[1].path` is `a\\x00b`, which is not a folder; name the folder that contains the",
    ),
    (watch("path: a", "pattern: ../*.md"), "line 6: `watches[1].pattern` is `../*.md`, which leads out of its folder"),
    (watch("path: a", "pattern: /etc/*"), "line 6: `watches[1].pattern` is `/etc/*`, which leads out of its folder"),
    (watch("path: a", "max_attempts: 0"), "line 6: `watches[1].max_attempts` is the number 0, but must be a whole nu"),
    (watch("path: a", "max_parallel: 0"), "line 6: `watches[1].max_parallel` is the number 0, but must be a whole nu"),
    *(
        (
            f"tools: {{shell: {{root: {root}}}}}\n{watch(f'path: {path}')}",
            (
                "line 6: `watches[1].path` overlaps with the folder of commands (`tools.shell.root`), so the "
                "agent's own output would trigger it"
            ),
        )
        for root, path in ((".", "inbox"), ("desk/out", "desk"), ("desk", "desk"), ("desk", "x/../desk"))
    ),
    (
        f"tools: {{shell: {{root: .}}}}\n{watch('collection: b')}collections: {{b: {{path: c}}}}\n",
        "line 6: `watches[1].collection` overlaps with the folder of commands (`tools.shell.root`), so the",
    ),
    (
        "webhooks:\n- {name: push, prompt: a, token: '${secret:HOOK}'}\n",
        "line 3: `webhooks[1].token` names the secret `HOOK`, which is not in the agent's `secrets`; add it",
    ),
    (
        f"webhooks:\n- {{name: push, prompt: a, token: {KEY}}}\n",
        "line 3: `webhooks[1].token` must be a reference to a secret, as in ${secret:OPENAI} for the key in",
    ),
    ("webhooks:\n- {name: push, prompt: a}\n", "line 3: `token` is missing from `webhooks[1]`; write it."),
    (
        "secrets: [A]\nwebhooks:\n- {name: push, prompt: a, token: '${secret:A}', scheme: githup}\n",
        "line 4: `webhooks[1].scheme` is the text 'githup', which is not one of its values; did you mean `github`",
    ),
    (
        "secrets: [A]\nwebhooks:\n- {name: push, prompt: a, token: '${secret:A}', previous_token: '${secret:B}'}\n",
        "line 4: `webhooks[1].previous_token` names the secret `B`, which is not in the agent's `secrets`; add it",
    ),
    (
        "secrets: [A]\nwebhooks:\n- {name: push, prompt: a, token: '${secret:A}', scheme: github, tolerance: 5m}\n",
        "line 4: `webhooks[1].tolerance` does not apply to the scheme `github`, which signs no time; only `linear`,",
    ),
    (
        "secrets: [A]\nwebhooks:\n- {name: push, prompt: a, token: '${secret:A}', scheme: slack, tolerance: 0s}\n",
        "line 4: `webhooks[1].tolerance` is 0, so every delivery would be refused",
    ),
    (f"webhooks:\n- {KEY}\n", "line 3: `webhooks[1]` must be a mapping"),
    ("collections:\n  a: {pattern: b}\n", "line 3: `path` is missing from `collections.a`; write it."),
    ("collections:\n  a: {path: b, pattern: ~/c}\n", "line 3: `collections.a.pattern` is `~/c`, which leads out of"),
]
CHANNELS = [
    (
        channel("type: fax"),
        "line 5: `notify.channels[1].type` is the text 'fax', which is not one of its values; they are",
    ),
    (channel("type: email"), "line 4: `notify.channels[1]` is of type email, which needs `to`; write it."),
    (
        channel("type: email", "to: [ada@example.com]", "sender: h@example.com"),
        "line 4: `notify.channels[1]` is of type email, which needs `host`; write it.",
    ),
    (channel("type: webhook"), "line 4: `notify.channels[1]` is of type webhook, which needs `url`; write it."),
    (channel("type: apprise"), "line 4: `notify.channels[1]` is of type apprise, which needs `service`; write it."),
    (
        channel("type: in_app", "host: a"),
        "line 6: `notify.channels[1].host` does not apply to a channel of type in_app, which takes only a name;",
    ),
    (
        channel("type: webhook", "url: https://a.example", "to: [a@b.c]"),
        "line 7: `notify.channels[1].to` does not apply to a channel of type webhook, which takes `url`,",
    ),
    (
        channel("type: email", "to: [ada]", "sender: h@example.com", "host: a"),
        "line 6: `notify.channels[1].to[1]` is not an e-mail address; write one address, as in ada@example.com.",
    ),
    (
        channel("type: email", "to: [a@b.c]", 'sender: "h@example.com\\r\\nBcc: x@y.z"', "host: a"),
        "line 7: `notify.channels[1].sender` is not an e-mail address; write one address, as in ada@example.com.",
    ),
    (
        mail("username: ada"),
        "line 9: `notify.channels[1].username` needs a `password`; write it, or remove `username`.",
    ),
    (
        f"secrets: [P]\n{mail('password: ${secret:P}')}",
        "line 10: `notify.channels[1].password` needs a `username`; write it, or remove `password`.",
    ),
    (
        f"secrets: [P]\n{mail('username: ada', 'password: ${secret:P}', 'security: none')}",
        "line 12: `notify.channels[1].security` is none, so the password would be sent in plain text; write startt",
    ),
    (
        mail("username: ada", "password: ${secret:P}"),
        "line 10: `notify.channels[1].password` names the secret `P`, which is not in the agent's `secrets`; add",
    ),
    (
        channel("type: webhook", "url: https://a.example", "headers: {X-Key: '${secret:P}'}"),
        "line 7: `notify.channels[1].headers.X-Key` names the secret `P`, which is not in the agent's `secrets`;",
    ),
    (
        channel("type: apprise", "service: ${secret:P}"),
        "line 6: `notify.channels[1].service` names the secret `P`, which is not in the agent's `secrets`; add",
    ),
    (channel("type: apprise", f"service: json://{KEY}"), "line 6: `notify.channels[1].service` must be a reference"),
    (mail("username: ada", f"password: {KEY}"), "line 10: `notify.channels[1].password` must be a reference"),
    (f"notify: {{channels: [{KEY}]}}\n", "line 2: `notify.channels[1]` must be a mapping"),
    (
        channel("type: webhook", "url: wss://a.example"),
        "line 6: `notify.channels[1].url` is a WebSocket URL; write one that begins with https:// or http://.",
    ),
    (mail("port: 0"), "line 9: `notify.channels[1].port` is the number 0, but must be a whole number from 1 to 65535."),
    (
        f"{channel('type: in_app')}  - {{name: ops, type: in_app}}\n",
        "line 6: `notify.channels[2].name` is `ops`, which is also the name of another channel; choose another",
    ),
    (
        "notify: {on: [done]}\n",
        "line 2: `notify.on[1]` is the text 'done', which is not one of its values; they are `failed`, `halted`,",
    ),
]
OTHERS = [
    (
        "verbs: [shout]\n",
        "line 2: `verbs[1]` is the text 'shout', which is not one of its values; they are `emit_finding`,",
    ),
    (
        "anonymize: {names: [Ada]}\n",
        "line 2: `anonymize.names` has no effect while anonymization is off; write `enabled: true`.",
    ),
    ("anonymize: 5\n", "line 2: `anonymize` is the number 5, but must be a mapping"),
    ("idle_halt_minutes: -1\n", "line 2: `idle_halt_minutes` is the number -1, but must be a number from 0"),
    ("concurrency: 0\n", "line 2: `concurrency` is the number 0, but must be a whole number from 1 up."),
    ("concurrency: 2.5\n", "line 2: `concurrency` is the number 2.5, but must be a whole number from 1 up."),
    ("concurrency: none\n", "line 2: `concurrency` is the text 'none', but must be a whole number from 1 up."),
    ("concurrency:\n", "line 2: `concurrency` is"),
    (
        "review: {judges: [nobody:x]}\n",
        "line 2: `review.judges[1]` has the unknown provider `nobody`; define it under `providers`; the known",
    ),
    (
        "allowed_models: ['openai:*']\nreview: {judges: ['anthropic:x']}\n",
        "line 3: `review.judges[1]` is `anthropic:x`, which is not in the `allowed_models` of agent.yaml line 2;",
    ),
    (
        "allowed_models: ['openai:*']\nmodel_for: {judge: 'anthropic:x'}\n",
        "line 3: `model_for.judge` is `anthropic:x`, which is not in the `allowed_models` of agent.yaml line 2;",
    ),
    ("model_for: {jury: 'openai:x'}\n", "line 2: `jury` is not a key of `model_for`; its keys are"),
]


@pytest.mark.parametrize(("text", "sentence"), SCHEDULES + WATCHES + CHANNELS + OTHERS)
def test_what_cannot_be_meant_is_refused_with_file_line_key_and_fix(text: str, sentence: str) -> None:
    if "cron:" in text or "at:" in text:
        pytest.importorskip("halter.core.schedules")
    output = read_refusal(text)
    assert output.startswith(f"agent.yaml {sentence}")
    assert KEY not in output


@pytest.mark.parametrize(("text", "sentence"), MOMENTS)
def test_times_that_never_come_are_refused_at_once(text: str, sentence: str) -> None:
    pytest.importorskip("halter.core.schedules")
    assert read_refusal(text).startswith(f"agent.yaml {sentence}")


def test_a_playbook_must_stand_in_the_agents_folder(tmp_path: Path) -> None:
    folder = tmp_path / "agent"
    folder.mkdir()
    (tmp_path / "out.yaml").write_text("- call: x\n")
    text = schedule("every: 1h", "playbook: night.yaml")
    assert "line 5: `schedules[1].playbook` names `night.yaml`, which is missing" in read_refusal(text, folder=folder)
    text = schedule("every: 1h", "playbook: ../out.yaml")
    assert "names `../out.yaml`, which leads out of the agent's folder; name a file" in read_refusal(
        text, folder=folder
    )


def test_a_watched_file_is_no_folder_but_one_that_is_not_there_yet_may_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "`watches[1].path` is `file`, which is not a folder; name the folder" in read_refusal(
        watch("path: file"), folder=tmp_path
    )
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    assert "`watches[1].path` is `circle`, which is not a folder; name the folder" in read_refusal(
        watch("path: circle"), folder=tmp_path
    )
    assert read(watch("path: later"), folder=tmp_path).watches


def test_a_link_is_followed_before_it_is_compared_with_where_commands_write(tmp_path: Path) -> None:
    (tmp_path / "desk").mkdir()
    (tmp_path / "inbox").symlink_to(tmp_path / "desk")
    text = f"tools: {{shell: {{root: desk}}}}\n{watch('path: inbox')}"
    assert "`watches[1].path` overlaps with the folder of commands (`tools.shell.root`)" in read_refusal(
        text, folder=tmp_path
    )


@pytest.mark.parametrize("key", [f"type: webhook, url: 'https://hooks.example.com/{KEY}'", "HOST"])
def test_the_hosts_of_the_fleet_bound_where_an_agent_tells_things(key: str) -> None:
    text = "type: email, to: [a@b.c], sender: a@b.c, host: hooks.example.com" if key == "HOST" else key
    output = read_refusal(f"notify:\n  channels:\n  - {{name: ops, {text}}}\n", "allowed_hosts: [api.example.com]\n")
    assert "is at `hooks.example.com`, but halter.yaml line 1 allows only `api.example.com`" in output
    assert KEY not in output


def test_the_models_of_the_fleet_bound_the_judges() -> None:
    text = read_refusal("review: {judges: ['anthropic:x']}\n", "allowed_models: ['openai:*']\n")
    assert text.startswith("agent.yaml line 2: `review.judges[1]` is `anthropic:x`, but halter.yaml line 1 allows only")


def test_a_channel_of_the_fleet_is_looked_at_in_its_own_file() -> None:
    text = read_refusal("", "notify:\n  channels:\n  - {name: ops, type: webhook}\n")
    assert text == "halter.yaml line 3: `notify.channels[1]` is of type webhook, which needs `url`; write it."


def test_an_agent_cannot_have_a_channel_of_the_fleets_name() -> None:
    text = read_refusal(channel("type: in_app"), "notify:\n  channels:\n  - {name: ops, type: in_app}\n")
    assert text.startswith(
        "agent.yaml line 4: `notify.channels[1].name` is `ops`, which is also a channel in halter.yaml line 2;"
    )


WHOLE = """
secrets: [HOOK, KEY]
phases: {look: [retrieve_chunks], tell: all}
tools: {shell: {root: desk}}
collections: {contracts: {path: docs, pattern: '*.md', description: a}}
schedules:
- {name: a, prompt: b, every: 1h, jitter: 1m, min_interval: 5m, collections: [contracts], max_cost_usd: 0.1}
- {name: b, prompt: c, every: 2h, timezone: Europe/Rome, active_hours: {start: '08:00', end: '09:00'}}
watches:
- {name: c, prompt: d, path: in, pattern: '*.pdf', debounce: 1s}
- {name: d, prompt: d, collection: contracts}
webhooks: [{name: e, prompt: f, token: '${secret:HOOK}', max_bytes: 9}]
review: {judges: ['ollama:a'], max_cost_per_message_usd: 1}
notify:
  on: [failed]
  channels:
  - {name: m, type: email, to: [a@b.c], sender: a@b.c, host: h, username: u, password: '${secret:KEY}'}
  - {name: w, type: webhook, url: 'https://a.example', headers: {X: '${secret:KEY}'}}
  - {name: s, type: apprise, service: '${secret:KEY}'}
anonymize: {enabled: true, names: [Ada]}
verbs: [notify]
idle_halt_minutes: 3
concurrency: 2
"""
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=9), inner, max_size=3),
    max_leaves=5,
)
ODD = st.sampled_from(
    ["a", "\0", "..", "/", "~", "review", "ws://a", "https://[", "${secret:X}", "in_app", "a@b\nc", "0"]
)


def put(value: Any, steps: list[int], result: Any) -> Any:
    """Put something else in one place of a document; the steps choose which."""
    if not steps or not isinstance(value, dict | list) or not value:
        return result
    if isinstance(value, list):
        at = steps[0] % len(value)
        return [put(each, steps[1:], result) if index == at else each for index, each in enumerate(value)]
    key = sorted(value)[steps[0] % len(value)]
    return {**value, key: put(value[key], steps[1:], result)}


@given(st.lists(st.integers(0, 20), min_size=1, max_size=7), ANYTHING | ODD)
def test_whatever_stands_there_is_read_or_is_a_sentence(steps: list[int], other: Any) -> None:
    whole = load_bytes(WHOLE.encode(), "agent.yaml")
    document = Document({"name": "x", **put(whole.value, steps, other)}, whole.source_map)
    found: Tasks | str
    try:
        found = resolve_agent(FleetConfig(), parse_agent(document), None).tasks
    except ConfigError as error:
        found = str(error)
    assert isinstance(found, Tasks) or found.startswith("agent.yaml")


def test_the_whole_of_it_is_right() -> None:
    tasks = read(WHOLE)
    assert (len(tasks.triggers()), len(tasks.notify.channels)) == (5, 3)
