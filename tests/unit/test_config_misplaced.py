"""Mistakes of a tired operator: wrong nesting, two kinds mixed, a list where a map belongs, a number with a unit."""

import pytest

from halter.config.agent_files import parse_agent
from halter.config.merge import FleetConfig, parse_fleet
from halter.config.resolve import resolve_agent
from halter.config.yaml_reader import load_bytes
from halter.core.errors import ConfigError


def sensor(keys: str) -> str:
    return f"sensors: [{{name: a, {keys}}}]\n"


def signal(keys: str) -> str:
    return sensor(f"type: poll, source: {{tool: t}}, signals: [{{name: s, {keys}}}]")


def channel(keys: str) -> str:
    return f"notify: {{channels: [{{name: ops, {keys}}}]}}\n"


AGENT = [
    ("max_steps: 5\n", "`max_steps` is not a key of agent.yaml; write it under `limits`."),
    ("timeout: 5m\n", "`timeout` is not a key of agent.yaml; write it under `limits` or `gateway`."),
    ("notify: {type: email, to: [a@b.c]}\n", "`type` is not a key of `notify`; write it under `channels`."),
    (sensor("type: poll, tool: look"), "`tool` is not a key of `sensors[1]`; write it under `source`."),
    (signal("half_life: 5"), "`half_life` is not a key of `sensors[1].signals[1]`; write it under `detector`."),
    ("shedules: []\n", "`shedules` is not a key of agent.yaml; did you mean `schedules`?"),
    ("limits: {max_cost_used: 5}\n", "`max_cost_used` is not a key of `limits`; did you mean `max_cost_usd`?"),
    ("mode: semi\n", "`mode` is the text 'semi', which is not one of its values; did you mean `SEMI`?"),
    ("limits:\n\tmax_steps: 3\n", "this line starts with a tab; indent with spaces."),
    ("limits:\n- max_steps: 3\n", "`limits` is a list, but must be a mapping, with a `key: value` on each line."),
    ("schedules:\n  nightly: {every: 1h}\n", "`schedules` is a mapping, but must be a list, as in [one, two]."),
    (
        "limits: {max_cost_usd: $5}\n",
        "`limits.max_cost_usd` is the text '$5', but must be a number of dollars, as in 0.50, or none for no cap.",
    ),
    ("limits: {max_steps: 20 steps}\n", "`limits.max_steps` is the text '20 steps', but must be a whole number from 1"),
    ("notify:\n  on: yes\n", "`notify.on` is the text 'yes', but must be a list, as in [one, two]."),
    (
        sensor("type: poll, source: {path: inbox}"),
        "`sensors[1].source.path` does not apply to a sensor of type poll, which needs a `tool` or a `url`; remove it,",
    ),
    (
        sensor("type: stream, interval: 5s, source: {url: 'https://a.example'}"),
        "`sensors[1].interval` applies to sensors of type poll, but this one is of type stream; remove it.",
    ),
    (
        sensor("type: poll, source: {tool: t, told_by: tool}"),
        "`told_by` is not a key of `sensors[1].source`; its keys are `tool`, `arguments`.",
    ),
    (sensor("type: {poll: yes}, source: {tool: t}"), "`sensors[1].type` is a mapping, which is not one of its values;"),
    (sensor("source: {tool: look}"), "`type` is missing from `sensors[1]`; write it."),
    (
        signal("detector: {}, prompt: Look."),
        "`sensors[1].signals[1].prompt` applies to a `model`, which is missing; write it.",
    ),
    (
        channel("type: webhook, host: mail.example.com, url: 'https://a.example'"),
        "`notify.channels[1].host` does not apply to a channel of type webhook, which takes `url`, `headers`; remove",
    ),
    (channel("type: slack, url: 'https://a.example'"), "`notify.channels[1].type` is the text 'slack', which is not"),
]
FLEET = [
    ("agent: {limits: {max_steps: 5}}\n", "`agent` is not a key of halter.yaml; did you mean `agents`?"),
    (
        "policy: {quiet_hours: {start: '08:00', end: '08:00'}}\n",
        "`policy.quiet_hours` starts and ends at 08:00, so no hour is quiet; change one of them.",
    ),
]


@pytest.mark.parametrize(("text", "sentence"), AGENT)
def test_a_key_in_the_wrong_place_or_form_is_told_where_it_belongs(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_agent(FleetConfig(), parse_agent(load_bytes(f"name: night-watch\n{text}".encode(), "agent.yaml")), None)
    assert str(error.value).partition(": ")[2].startswith(sentence)
    assert str(error.value).startswith("agent.yaml line ")


@pytest.mark.parametrize(("text", "sentence"), FLEET)
def test_the_fleets_file_says_it_too(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_fleet(load_bytes(text.encode(), "halter.yaml"))
    assert str(error.value) == f"halter.yaml line 1: {sentence}"


@pytest.mark.parametrize(
    "text",
    [
        channel("type: webhook, url: 'https://a.example', security: starttls"),
        channel("type: in_app, headers: {}"),
        sensor("type: stream, interval: 60s, jitter: 0.1, source: {url: 'https://a.example', pattern: '*'}"),
        sensor("type: poll, source: {tool: t, headers: {}}"),
    ],
)
def test_a_key_of_another_kind_is_passed_over_where_it_changes_nothing(text: str) -> None:
    resolve_agent(FleetConfig(), parse_agent(load_bytes(f"name: night-watch\n{text}".encode(), "agent.yaml")), None)
