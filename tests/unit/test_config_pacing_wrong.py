"""Every mistake in how an agent paces itself is a sentence with file, line, key and fix, before anything runs."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.config.agent_files import parse_agent
from halter.config.merge import FleetConfig, parse_fleet
from halter.config.resolve import resolve_agent
from halter.config.yaml_reader import Document, load_bytes
from halter.core.errors import ConfigError
from halter.spec.autonomy import Pacing

KEY = "sk-proj-mAdeUpKeyThatOpensNothing1234567890"


def read_refusal(text: str, bound: str = "") -> str:
    fleet = parse_fleet(load_bytes(bound.encode(), "halter.yaml")) if bound else FleetConfig()
    with pytest.raises(ConfigError) as error:
        resolve_agent(fleet, parse_agent(load_bytes(f"name: night-watch\n{text}".encode(), "agent.yaml")), None)
    return str(error.value)


def sensor(source: str = "{tool: look}", more: str = "", kind: str = "poll") -> str:
    return f"sensors:\n- name: feed\n  type: {kind}\n  source: {source}\n{more}"


def signal(text: str) -> str:
    return sensor(more=f"  signals:\n  - {{name: odd, {text}}}\n")


def field(text: str) -> str:
    return f"hot_state:\n  fields:\n    cash: {{{text}}}\n"


def hours(text: str) -> str:
    return f"autonomy:\n  active_hours: {{{text}}}\n"


POLLED = "a sensor of type poll needs a `tool` or a `url`; write it."
AUTONOMY = [
    ("autonomy: true\n", "line 2: `autonomy` is true, but must be a mapping"),
    ("autonomy:\n", "line 2: `autonomy` is empty, but must be a mapping"),
    ("autonomy: {enable: true}\n", "line 2: `enable` is not a key of `autonomy`; did you mean `enabled`?"),
    ("autonomy: {enabled: yes}\n", "line 2: `autonomy.enabled` is the text 'yes', but must be true or false."),
    ("autonomy: {prompt: 5}\n", "line 2: `autonomy.prompt` is the number 5, but must be text"),
    (
        "autonomy:\n  min_sleep: 0\n",
        "line 3: `autonomy.min_sleep` is 0, so the agent might never pause; write a duration, as in 1s.",
    ),
    (
        "autonomy:\n  min_sleep: 0s\n",
        "line 3: `autonomy.min_sleep` is 0, so the agent might never pause; write a duration, as in 1s.",
    ),
    ("autonomy:\n  min_sleep: -1\n", "line 3: `autonomy.min_sleep` is the number -1, but must be a duration"),
    ("autonomy:\n  min_sleep: soon\n", "line 3: `autonomy.min_sleep` is the text 'soon', but must be a duration"),
    (
        "autonomy:\n  max_sleep: 30s\n  min_sleep: 1m\n",
        "line 4: `autonomy.min_sleep` (1m) is longer than `autonomy.max_sleep` (30s); change one of them.",
    ),
    (
        "autonomy:\n  max_sleep: 500ms\n",
        "line 2: `autonomy.min_sleep` (1s) is longer than `autonomy.max_sleep` (500ms); change one of them.",
    ),
    (
        "autonomy:\n  max_sleep: 0\n",
        "line 2: `autonomy.min_sleep` (1s) is longer than `autonomy.max_sleep` (0ms); change one of them.",
    ),
    (
        "autonomy: {max_consecutive_turns: 0}\n",
        "line 2: `autonomy.max_consecutive_turns` is the number 0, but must be a whole number from 1 up.",
    ),
    ("autonomy: {max_consecutive_turns: 1.5}\n", "line 2: `autonomy.max_consecutive_turns` is the number 1.5, but"),
    ("autonomy: {token_budget_per_hour: -1}\n", "line 2: `autonomy.token_budget_per_hour` is the number -1, but must"),
    ("autonomy: {max_actions_per_minute: 2/minute}\n", "line 2: `autonomy.max_actions_per_minute` is the text '2/min"),
    ("autonomy: {idle_timeout: never}\n", "line 2: `autonomy.idle_timeout` is the text 'never', but must be a duratio"),
    (hours("start: '08:00'"), "line 3: `end` is missing from `autonomy.active_hours`; write it."),
    (
        hours("start: '8:00', end: '23:00'"),
        "line 3: `autonomy.active_hours.start` is the text '8:00', but must be a time",
    ),
    (hours("start: '08:00', end: '24:00'"), "line 3: `autonomy.active_hours.end` is the text '24:00', but must be a"),
    (hours("start: 8, end: 23"), "line 3: `autonomy.active_hours.start` is the number 8, but must be a time of day"),
    (hours("start: 08:00, end: 12:60"), "line 3: `autonomy.active_hours.end` is the text '12:60', but must be a time"),
    (
        hours("start: 08:00, end: 08:00"),
        "line 3: `autonomy.active_hours` starts and ends at 08:00; change one of them, or remove the key to",
    ),
    (
        hours("start: 08:00, end: 09:00, timezone: Mars"),
        "line 3: `autonomy.active_hours.timezone` is the text 'Mars', but must be a time zone",
    ),
    (
        hours("start: 08:00, end: 09:00, zone: UTC"),
        "line 3: `zone` is not a key of `autonomy.active_hours`; did you mean `timezone`?",
    ),
]
GATE = [
    (
        "autonomy: {gate: {on: changes}}\n",
        "line 2: `autonomy.gate.on` is the text 'changes', which is not one of its values; did you mean",
    ),
    (
        "autonomy:\n  gate:\n    expression: hot.cash >\n",
        "line 4: the expression `hot.cash >` is not a CEL expression: mismatched input",
    ),
    (
        "autonomy:\n  gate: {expression: value > 3}\n",
        "line 3: the expression `value > 3` uses `value`, but the gate has only `hot`, `before`, `changed`, `ski",
    ),
    (
        "autonomy:\n  gate: {expression: nosuch(hot)}\n",
        "line 3: the expression `nosuch(hot)` cannot be evaluated: Undefined variable or function: 'nosuch'.",
    ),
    ("autonomy: {gate: {model: small}}\n", "line 2: `autonomy.gate.model` is the text 'small', but must be one model"),
    (
        "autonomy: {gate: {model: 'olama:s'}}\n",
        "line 2: `autonomy.gate.model` has the unknown provider `olama`; define it under `providers`; did you",
    ),
    (
        "autonomy: {precheck_model: 'olama:s'}\n",
        "line 2: `autonomy.precheck_model` has the unknown provider `olama`; define it under `providers`; did",
    ),
    ("autonomy: {precheck_model: scripted}\n", "line 2: `autonomy.precheck_model` is `scripted`, but there is no `scr"),
    ("autonomy: {gate: {model: reflex}}\n", "line 2: `autonomy.gate.model` is `reflex`, but there is no `reflex`; wri"),
    (
        "autonomy:\n  gate: {model: 'ollama:a'}\n  precheck_model: ollama:b\n",
        "line 4: `autonomy.precheck_model` is `ollama:b`, but `autonomy.gate.model` is `ollama:a`; both set the",
    ),
    (
        "autonomy:\n  gate: {prompt: Look.}\n",
        "line 3: `autonomy.gate.prompt` needs a `model`, which is missing; write it, or remove the prompt.",
    ),
    ("autonomy: {gate: {max_skips: -1}}\n", "line 2: `autonomy.gate.max_skips` is the number -1, but must be a whole"),
    ("autonomy: {gate: always}\n", "line 2: `autonomy.gate` is the text 'always', but must be a mapping"),
    (
        "allowed_models: [a:b]\nautonomy: {gate: {model: 'ollama:s'}}\n",
        "line 3: `autonomy.gate.model` is `ollama:s`, w",
    ),
]
FIELDS = [
    ("hot_state: {cash: {}}\n", "line 2: `cash` is not a key of `hot_state`; its keys are `fields`."),
    ("hot_state: {fields: [cash]}\n", "line 2: `hot_state.fields` is a list, but must be a mapping"),
    (
        "hot_state: {fields: {cash: number}}\n",
        "line 2: `hot_state.fields.cash` is the text 'number', but must be a map",
    ),
    ("hot_state: {fields: {'a b': {}}}\n", "line 2: `hot_state.fields.a b` is the text 'a b', but must be a name"),
    (
        field("type: list"),
        "line 4: `hot_state.fields.cash.type` is the text 'list', which is not one of its values; they are",
    ),
    (field("ttl: -5"), "line 4: `hot_state.fields.cash.ttl` is the number -5, but must be a duration"),
    (
        field("refresh_tool: ''"),
        "line 4: `hot_state.fields.cash.refresh_tool` is the text '', but must be text that is",
    ),
    (
        field("auto_refresh: true"),
        "line 4: `hot_state.fields.cash.auto_refresh` needs a `refresh_tool`, which is missing; write it, or remove",
    ),
    (
        field("refresh_arguments: {a: 1}"),
        "line 4: `hot_state.fields.cash.refresh_arguments` needs a `refresh_tool`, which",
    ),
    (
        field("refresh_tool: a, refresh_arguments: [b]"),
        "line 4: `hot_state.fields.cash.refresh_arguments` is a list, but must",
    ),
    (
        field("type: object, max_items: 5"),
        "line 4: `hot_state.fields.cash.max_items` applies to arrays, but the field's type is object; write",
    ),
    (
        field("max_items: 5"),
        "line 4: `hot_state.fields.cash.max_items` applies to arrays, but the field's type is any; write `type:",
    ),
    (
        field("type: array, max_items: 0"),
        "line 4: `hot_state.fields.cash.max_items` is the number 0, but must be a who",
    ),
    (
        field("refresh_tool: look, refresh_arguments: {key: ['${secret:API}']}"),
        "line 4: `hot_state.fields.cash.refresh_arguments.key[1]` names the secret `API`, which is not in the",
    ),
]
SOURCES = [
    ("sensors: {feed: {}}\n", "line 2: `sensors` is a mapping, but must be a list"),
    ("sensors: [feed]\n", "line 2: `sensors[1]` is the text 'feed', but must be a mapping"),
    ("sensors: [{name: feed}]\n", "line 2: `type` is missing from `sensors[1]`; write it."),
    ("sensors: [{name: feed, type: poll}]\n", "line 2: `source` is missing from `sensors[1]`; write it."),
    (
        sensor(kind="pol"),
        "line 4: `sensors[1].type` is the text 'pol', which is not one of its values; did you mean `poll`?",
    ),
    (sensor("{}"), f"line 5: `sensors[1].source` is incomplete: {POLLED}"),
    (
        sensor("look"),
        "line 5: `sensors[1].source` must be a mapping, with a `key: value` on each line. The value is not",
    ),
    (sensor("{tool: ''}"), "line 5: `sensors[1].source.tool` is the text '', but must be text that is not empty"),
    (
        sensor("{tool: a, url: 'http://a'}"),
        "line 5: `sensors[1].source` has both `tool` and `url`; keep one of the",
    ),
    (
        sensor("{tool: a, path: b}"),
        "line 5: `sensors[1].source.path` does not apply to a sensor of type poll, which needs a `tool` or a",
    ),
    (
        sensor("{tool: a, format: sse}"),
        "line 5: `sensors[1].source.format` does not apply to a sensor of type poll, which needs a `tool` or a",
    ),
    (
        sensor("{tool: a, pattern: '*.x'}"),
        "line 5: `sensors[1].source.pattern` does not apply to a sensor of type poll, which needs a `tool` or a",
    ),
    (
        sensor("{tool: a, headers: {B: c}}"),
        "line 5: `sensors[1].source.headers` applies to a `url`, which is missing; remove it.",
    ),
    (
        sensor("{url: 'http://a', arguments: {b: c}}"),
        "line 5: `sensors[1].source.arguments` applies to a `tool`; for a `url`, write it into the query.",
    ),
    (
        sensor("{url: 'ws://a'}"),
        "line 5: `sensors[1].source.url` is a WebSocket, which cannot be polled; write `type: s",
    ),
    (
        sensor("{url: a.example}"),
        "line 5: `sensors[1].source.url` must be a URL, as in https://api.example.com/prices or",
    ),
    (
        sensor("{url: 'ftp://a'}"),
        "line 5: `sensors[1].source.url` must be a URL, as in https://api.example.com/prices or",
    ),
    (
        sensor("{url: 'http://a:99999/'}"),
        "line 5: `sensors[1].source.url` must be a URL, as in https://api.example.com/prices or",
    ),
    (
        sensor("{url: 'http://a/${secret:B}'}"),
        "line 5: `sensors[1].source.url` must be a URL, as in https://api.example.com/prices or",
    ),
    (
        sensor("{}", kind="files"),
        "line 5: `sensors[1].source` is incomplete: a sensor of type files needs a `path` to a file or a folder;",
    ),
    (sensor("{path: ''}", kind="files"), "line 5: `sensors[1].source.path` is the text '', but must be text that is"),
    (sensor("{path: a, pattern: ''}", kind="files"), "line 5: `sensors[1].source.pattern` is the text '', but must"),
    (
        sensor("{tool: a}", kind="files"),
        "line 5: `sensors[1].source.tool` does not apply to a sensor of type files, which needs a `path` to a",
    ),
    (
        sensor("{url: 'http://a'}", kind="files"),
        "line 5: `sensors[1].source.url` does not apply to a sensor of type files, which needs a `path` to a",
    ),
    (
        sensor("{}", kind="stream"),
        "line 5: `sensors[1].source` is incomplete: a sensor of type stream needs a `url` that begins with",
    ),
    (
        sensor("{tool: a}", kind="stream"),
        "line 5: `sensors[1].source.tool` does not apply to a sensor of type stream, which needs a `url` that",
    ),
    (
        sensor("{url: 'ws://a', format: sse}", kind="stream"),
        "line 5: `sensors[1].source.format` is sse, but a URL with ws:// uses websocket; remove it, or change",
    ),
    (
        sensor("{url: 'https://a', format: websocket}", kind="stream"),
        "line 5: `sensors[1].source.format` is websocket, but a URL with https:// uses sse; remove it, or change",
    ),
    (sensor("{url: 'http://a', format: grpc}", kind="stream"), "line 5: `sensors[1].source.format` is the text 'grpc'"),
    (
        sensor("{url: 'http://a', headers: {'a b': c}}"),
        "line 5: `sensors[1].source.headers.a b` is the text 'a b', but",
    ),
    (
        sensor('{url: "http://a", headers: {b: "c\\nd"}}'),
        "line 5: `sensors[1].source.headers.b` must be one line of ASCII text; write a key as in Bearer",
    ),
    (
        sensor("{url: 'http://a', headers: {b: '${secret:}'}}"),
        "line 5: `sensors[1].source.headers.b` must be one line of ASCII text; write a key as in Bearer",
    ),
    (
        sensor("{url: 'http://a', headers: {b: 'Bearer ${secret:API}'}}"),
        "line 5: `sensors[1].source.headers.b` names the secret `API`, which is not in the agent's `secrets`;",
    ),
    (
        sensor("{tool: a, arguments: {b: {c: 'x ${secret:API}'}}}"),
        "line 5: `sensors[1].source.arguments.b.c` names the secret `API`, which is not in the agent's",
    ),
    (sensor("{tool: a, arguments: b}"), "line 5: `sensors[1].source.arguments` is the text 'b', but must be a mapping"),
]
READINGS = [
    (sensor(more="  interval: 0\n"), "line 6: `sensors[1].interval` is 0; write a duration, as in 5s."),
    (sensor(more="  timeout: 0\n"), "line 6: `sensors[1].timeout` is 0; write a duration, as in 5s."),
    (sensor(more="  jitter: 2\n"), "line 6: `sensors[1].jitter` is the number 2, but must be a number from 0 to 1."),
    (
        sensor("{path: a}", "  interval: 5\n", "files"),
        "line 6: `sensors[1].interval` applies to sensors of type poll, but this one is of type files; remove",
    ),
    (
        sensor("{url: 'ws://a'}", "  jitter: 0\n", "stream"),
        "line 6: `sensors[1].jitter` applies to sensors of type poll, but this one is of type stream; remove it.",
    ),
    (sensor(more="  updates: [cash]\n"), "line 6: `sensors[1].updates[1]` is the text 'cash', but must be a mapping"),
    (sensor(more="  updates: [{path: a}]\n"), "line 6: `field` is missing from `sensors[1].updates[1]`; write it."),
    (
        sensor(more="  updates: [{field: a, path: 'b['}]\n"),
        "line 6: `sensors[1].updates[1].path` is the text 'b[', but must be a path into a reading, as in quotes.AAPL",
    ),
    (sensor(more="  updates: [{field: a, path: .b}]\n"), "line 6: `sensors[1].updates[1].path` is the text '.b', but"),
    (sensor(more="  updates: [{field: a, path: 'b[-1]'}]\n"), "line 6: `sensors[1].updates[1].path` is the text 'b[-1"),
    (
        sensor(more="  updates: [{field: log, append: true}]\n"),
        "line 6: `sensors[1].updates[1].append` applies to arrays, but the field `log` is not one; under",
    ),
    (
        field("type: object") + sensor(more="  updates: [{field: cash, append: true}]\n"),
        "line 9: `sensors[1].updates[1].append` applies to arrays, but the field `cash` is not one; under",
    ),
    (sensor(more="  updates: [{field: a}, {field: a, path: b}]\n"), "line 6: `sensors[1].updates[2].field` is `a` aga"),
]
SIGNALS = [
    (
        signal("notify: true"),
        "line 7: `sensors[1].signals[1]` has no score; write an `expression`, a `model` or a `detector`.",
    ),
    (
        signal("expression: 'true', detector: {}"),
        "line 7: `sensors[1].signals[1]` has both `expression` and `detector`; keep one of them.",
    ),
    (signal("model: 'ollama:s', prompt: a, detector: {}"), "line 7: `sensors[1].signals[1]` has both `model` and `det"),
    (signal("model: 'ollama:s'"), "line 7: `sensors[1].signals[1]` has a `model` but no `prompt`; write what the mod"),
    (signal("model: 'ollama:s', prompt: ' '"), "line 7: `sensors[1].signals[1]` has a `model` but no `prompt`"),
    (
        signal("detector: {}, prompt: a"),
        "line 7: `sensors[1].signals[1].prompt` applies to a `model`, which is missing; write it.",
    ),
    (
        signal("model: 'nobody:s', prompt: a"),
        "line 7: `sensors[1].signals[1].model` has the unknown provider `nobody`; define it under `providers`;",
    ),
    (signal("model: scripted, prompt: a"), "line 7: `sensors[1].signals[1].model` is `scripted`, but there is no `sc"),
    (
        signal("model: 'ollama:s', prompt: a, threshold: 80"),
        "line 7: `sensors[1].signals[1].threshold` is 80, but a mo",
    ),
    (signal("model: 'ollama:s', prompt: a, threshold: 0"), "line 7: `sensors[1].signals[1].threshold` is 0, but a mod"),
    (signal("detector: {}, threshold: -1"), "line 7: `sensors[1].signals[1].threshold` is -1, which every number reac"),
    (signal("detector: {}, threshold: high"), "line 7: `sensors[1].signals[1].threshold` is the text 'high', but must"),
    (
        signal("detector: {half_life: 0}"),
        "line 7: `sensors[1].signals[1].detector.half_life` is the number 0, but must",
    ),
    (signal("detector: {warmup: 1}"), "line 7: `sensors[1].signals[1].detector.warmup` is the number 1, but must be a"),
    (signal("detector: {path: 'a..b'}"), "line 7: `sensors[1].signals[1].detector.path` is the text 'a..b', but must"),
    (signal("detector: {}, cooldown: a while"), "line 7: `sensors[1].signals[1].cooldown` is the text 'a while', but"),
    (signal("expression: ''"), "line 7: `sensors[1].signals[1].expression` is the text '', but must be text that is n"),
    (
        signal("expression: reading > 3"),
        "line 7: the expression `reading > 3` uses `reading`, but a signal has only `value`, `hot`.",
    ),
    (signal("expression: value >"), "line 7: the expression `value >` is not a CEL expression: mismatched input"),
    (signal("expression: nosuch(value)"), "line 7: the expression `nosuch(value)` cannot be evaluated: Undefined var"),
]
NAMES = [
    (
        "hot_state:\n  fields:\n    message: {}\n",
        "line 4: `hot_state.fields.message` is `message`, which is reserved: it always wakes the agent; choose",
    ),
    (sensor(more="  updates: [{field: decision}]\n"), "line 6: `sensors[1].updates[1].field` is `decision`, which is"),
    ("sensors: [{name: message, type: poll, source: {tool: a}}]\n", "line 2: `sensors[1].name` is `message`, which is"),
    (sensor(more="  signals: [{name: decision, detector: {}}]\n"), "line 6: `sensors[1].signals[1].name` is `decisio"),
    (
        sensor() + "- {name: feed, type: poll, source: {tool: b}}\n",
        "line 6: `sensors[2].name` is `feed`, which is already the name of a sensor; choose another name.",
    ),
    (
        sensor(more="  signals: [{name: odd, detector: {}}, {name: odd, detector: {}}]\n"),
        "line 6: `sensors[1].signals[2].name` is `odd`, which is already the name of a signal; choose another",
    ),
    (
        signal("detector: {}")
        + "- {name: other, type: poll, source: {tool: b}, signals: [{name: odd, expression: 'true'}]}\n",
        "line 8: `sensors[2].signals[1].name` is `odd`, which is already the name of a signal; choose another",
    ),
    (
        sensor(more="  signals: [{name: feed, detector: {}}]\n"),
        "line 6: `sensors[1].signals[1].name` is `feed`, which is already the name of a sensor; choose another",
    ),
    (
        field("") + sensor(more="  signals: [{name: cash, detector: {}}]\n"),
        "line 9: `sensors[1].signals[1].name` is `cash`, which is already the name of a field; choose another",
    ),
    (
        "hot_state: {fields: {feed: {}}}\n" + sensor(more="  updates: [{field: cash}]\n"),
        "line 4: `sensors[1].name` is `feed`, which is already the name of a field; choose another name.",
    ),
    (
        sensor(more="  updates: [{field: a}]\n")
        + "- {name: b, type: poll, source: {tool: b}, updates: [{field: feed}]}\n",
        "line 3: `sensors[1].name` is `feed`, which is already the name of a field; choose another name.",
    ),
    (sensor().replace("feed", "'a b'"), "line 3: `sensors[1].name` is the text 'a b', but must be a name of up to 64"),
]
WRONG = [*AUTONOMY, *GATE, *FIELDS, *SOURCES, *READINGS, *SIGNALS, *NAMES]


@pytest.mark.parametrize(("text", "sentence"), WRONG)
def test_a_mistake_is_a_sentence_with_file_line_key_and_fix(text: str, sentence: str) -> None:
    output = read_refusal(text)
    assert output.startswith(f"agent.yaml {sentence}")
    assert output.endswith((".", "?"))
    assert output.isprintable()


@pytest.mark.parametrize(
    "source",
    [
        KEY,
        f"{{url: 'https://me:{KEY}@a.example'}}",
        f"{{url: '{KEY}'}}",
        f"{{url: 'http://a', headers: {KEY}}}",
        f"{{url: 'http://a', headers: {{Authorization: [{KEY}]}}}}",
        f'{{url: "http://a", headers: {{Authorization: "{KEY}\\n"}}}}',
        f"{{url: 'http://a', headers: {{Authorization: '${{secret:{KEY} }}'}}}}",
        f"{{url: 'ws://a/?key={KEY}'}}",
        f"{{url: 'http://a/?key={KEY}', format: sse}}",
    ],
)
def test_no_sentence_about_a_source_quotes_what_may_be_a_key(source: str) -> None:
    assert "mAdeUp" not in read_refusal(sensor(source))


def test_no_sentence_about_a_host_quotes_what_may_be_a_key() -> None:
    sentence = read_refusal(sensor(f"{{url: 'https://a.example/?key={KEY}'}}"), "allowed_hosts: [b.example]\n")
    assert "`a.example`" in sentence
    assert "mAdeUp" not in sentence


def test_an_expression_over_several_lines_cannot_steer_the_terminal() -> None:
    text = read_refusal('autonomy:\n  gate:\n    expression: "hot.a >\\n\\e[31m"\n')
    assert text.startswith("agent.yaml line 4: the expression `hot.a >\\n\\x1b[31m` is not a CEL expression")
    assert text.isprintable()


WHOLE = """
autonomy:
  enabled: true
  min_sleep: 1s
  active_hours: {start: '08:00', end: '23:00', timezone: UTC}
  gate: {on: change, expression: skips > 3, model: 'ollama:a', prompt: b, max_skips: 3}
  precheck_model: ollama:a
hot_state:
  fields:
    cash: {type: array, ttl: 1, refresh_tool: a, refresh_arguments: {b: [c]}, auto_refresh: true, max_items: 3}
sensors:
  - name: a
    type: poll
    source: {url: 'https://a.example', headers: {b: c}}
    interval: 5
    updates: [{field: cash, path: 'a[0]', append: true}]
    signals: [{name: b, detector: {path: c}, threshold: 3}, {name: d, expression: value > 3, cooldown: 1m}]
  - {name: e, type: stream, source: {url: 'ws://a', format: websocket}}
  - {name: f, type: files, source: {path: a, pattern: b}}
"""
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=9), inner, max_size=3),
    max_leaves=5,
)
WORDS = st.sampled_from(
    ["a", "cash", "message", "poll", "files", "watch", "ws://a", "https://[", "http://a:b", "ollama:a", "${secret:X}"]
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


@given(st.lists(st.integers(0, 20), min_size=1, max_size=7), ANYTHING | WORDS)
def test_whatever_stands_there_is_read_or_is_a_sentence(steps: list[int], other: Any) -> None:
    whole = load_bytes(WHOLE.encode(), "agent.yaml")
    document = Document({"name": "x", **put(whole.value, steps, other)}, whole.source_map)
    found: Pacing | str
    try:
        found = resolve_agent(FleetConfig(), parse_agent(document), None).pacing
    except ConfigError as error:
        found = str(error)
    assert isinstance(found, Pacing) or found.startswith("agent.yaml")


def test_the_whole_of_it_is_right() -> None:
    found = resolve_agent(FleetConfig(), parse_agent(load_bytes(f"name: x{WHOLE}".encode(), "agent.yaml")), None).pacing
    assert len(found.sensors) == 3
