"""An agent's folder: `agent.yaml`, skills, playbooks and the default providers. Nothing outside the folder is read.

A skill is a folder in `.agents/skills` with a SKILL.md. A playbook is a YAML list of calls, or a mapping with such a
list under `steps` and a `max_cost_usd` for all of them:

```yaml
- call: http__get
  with: {url: "https://example.com/${inputs.item}.json"}
  as: page
- call: files__write
  with: {path: price.txt, text: "${steps.page.json.offers.0.price}"}
```

`halter.core.agent_spec` defines the references.
"""

import errno
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

import msgspec
from msgspec import UNSET
from msgspec.structs import asdict, replace

from halter.config.decode import decode_document
from halter.config.yaml_reader import MAX_BYTES, Document, KeyPath, SourceMap, load_bytes, load_file
from halter.core.agent_spec import (
    REFERENCE_PATTERN,
    SCRIPT_RUNNERS,
    Playbook,
    Reference,
    Skill,
    SkillScript,
    Step,
    parse_reference,
)
from halter.core.errors import ConfigError
from halter.core.money import usd_to_micros
from halter.core.spec import AgentSpec, Limits
from halter.core.text import describe_value, shorten, suggest_nearest

AGENT_FILE: Final = "agent.yaml"
INSTRUCTIONS: Final = "AGENTS.md"


class AgentFile(msgspec.Struct, frozen=True):
    spec: AgentSpec
    source_map: SourceMap = SourceMap(AGENT_FILE)


def read_agent(path: Path, shown: str | None = None) -> AgentFile:
    return parse_agent(load_file(path / AGENT_FILE if path.is_dir() else path, shown))


def parse_agent(document: Document) -> AgentFile:
    spec = decode_document(document, AgentSpec)
    return AgentFile(replace(spec, limits=_merge_guardrails(spec, document.source_map)), document.source_map)


def _merge_guardrails(spec: AgentSpec, source_map: SourceMap) -> Limits:
    """Merge `guardrails` into `limits`: two spellings of one section."""
    written = {key: word for key, word in asdict(spec.guardrails).items() if word is not UNSET}
    for key in written:
        if getattr(spec.limits, key) is not UNSET:
            there = source_map.at(("limits", key))
            sentence = f"`guardrails.{key}` stands in {there} already, as `limits.{key}`; keep one of them."
            raise source_map.error_at(("guardrails", key), sentence)
    return replace(spec.limits, **written)


class UnusableFile(Exception):
    """Why a file cannot be used, as the end of a sentence about it."""


def read_beside(folder: Path, name: str) -> bytes | None:
    """Read a file below a folder; None if it does not exist."""
    path = _resolve_inside(folder, name)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UnusableFile("is not a file")
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnusableFile(f"cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_BYTES:
        raise UnusableFile(f"is larger than {MAX_BYTES:,} bytes")
    return data


def _resolve_inside(folder: Path, name: str) -> Path:
    try:
        root = folder.resolve()
        path = resolve_links(root / name)
    except (OSError, RuntimeError, ValueError) as error:
        raise UnusableFile("is not the name of a file") from error
    if not path.is_relative_to(root):
        raise UnusableFile("leads out of the agent's folder")
    return path


def resolve_links(path: Path) -> Path:
    """Resolve a path, which need not exist; links in a circle are an OSError, or before Python 3.13 a RuntimeError."""
    try:
        return path.resolve(strict=True)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise
        return path.resolve()


def decode_file_text(data: bytes) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UnusableFile(f"is not UTF-8 text in line {line}; save it as UTF-8") from None
    if "\0" in text:
        raise UnusableFile(f"holds a NUL in line {text.count(chr(10), 0, text.index(chr(0))) + 1}; remove it")
    return text


SKILLS: Final = ".agents/skills"
SKILL_FILE: Final = "SKILL.md"
_TOOL_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_FENCE: Final = "---"


def read_skills(folder: Path) -> dict[str, Skill]:
    home = folder / SKILLS
    if not home.is_dir():
        return {}
    found: dict[str, Skill] = {}
    for place in sorted(path for path in home.iterdir() if path.is_dir()):
        skill = read_skill(folder, place)
        if skill.name in found:
            raise ConfigError(f"{place / SKILL_FILE} is called {skill.name}, as another skill is: rename one of them.")
        found[skill.name] = skill
    return found


def read_skill(folder: Path, path: Path) -> Skill:
    file = path / SKILL_FILE
    try:
        data = read_beside(folder, str(file.relative_to(folder)))
        text = None if data is None else decode_file_text(data)
    except UnusableFile as why:
        raise ConfigError(f"{file} {why}.") from None
    if text is None:
        raise ConfigError(f"{path} has no {SKILL_FILE}: write one that says what the skill does, or remove the folder.")
    head, body = _split_front_matter(text)
    values = _head(head, str(file))
    name, description = values.get("name", path.name), values.get("description", "")
    if not isinstance(name, str) or not isinstance(description, str) or not name.strip():
        raise ConfigError(f"{file}: `name` and `description` must be text.")
    if not body.strip():
        raise ConfigError(f"{file} has no text below its front matter: write the instructions.")
    scripts = dict(_read_scripts(path, name.strip(), values.get("scripts", {})))
    return Skill(name.strip(), shorten(description.strip(), 1000), body.strip(), scripts, str(path))


def _read_scripts(path: Path, skill: str, written: Any) -> Iterator[tuple[str, SkillScript]]:
    """Read the programs that a skill declares, by the name of the tool that each becomes."""
    file = path / SKILL_FILE
    if not isinstance(written, dict):
        raise ConfigError(f"{file}: `scripts` is {describe_value(written)}, but must be a mapping of names to scripts.")
    for key, value in cast("dict[Any, Any]", written).items():
        where = f"{file}: `scripts.{shorten(str(key))}`"
        try:
            script = msgspec.convert(value, SkillScript)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where} does not fit: {error}.") from None
        name = f"{skill}_{key}"
        if not _TOOL_NAME.fullmatch(name):
            raise ConfigError(f"{where} would be the tool {name!r}: use letters, digits, - and _ in both names.")
        _check_script_file(path, script.file, where)
        yield name, script


def _check_script_file(path: Path, name: str, where: str) -> None:
    """Refuse a script that is no file of the skill's own folder, or that nothing could run."""
    file = path / name
    if not resolve_links(file).is_relative_to(path.resolve()):
        raise ConfigError(f"{where} names {name}, which lies outside of the skill's folder: move it there.")
    if not file.is_file():
        raise ConfigError(f"{where} names {name}, and there is no such file in {path}.")
    if file.suffix not in SCRIPT_RUNNERS and not os.access(file, os.X_OK):
        raise ConfigError(f"{where}: {name} cannot be run. Make it executable (chmod +x), or a .py or .sh file.")


def _split_front_matter(text: str) -> tuple[str, str]:
    lines = text.splitlines(keepends=True)
    if not lines or lines[0].strip() != _FENCE:
        return "", text
    for number, line in enumerate(lines[1:], 1):
        if line.strip() == _FENCE:
            return "".join(lines[1:number]), "".join(lines[number + 1 :])
    return "", text


def _head(text: str, file: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    value = load_bytes(text.encode(), file).value
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


MAX_STEPS: Final = 1000

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_KEYS: Final = ("call", "with", "as")
_BESIDE: Final = ("steps", "max_cost_usd")
MOST_DOLLARS: Final = 1_000_000
_FORMS: Final = "write ${inputs.NAME}, ${steps.NAME.text}, ${steps.NAME.json.PATH} or ${secret:NAME}"


def read_playbook(path: Path, shown: str | None = None) -> Playbook:
    return parse_playbook(load_file(path, shown))


def parse_playbook(document: Document) -> Playbook:
    source_map = document.source_map
    above, value, cap = _steps(document)
    if not isinstance(value, list) or not value:
        raise source_map.error_at(
            above, f"a playbook is a list of steps, each with a `call`, but this is {describe_value(value)}."
        )
    written = cast("list[Any]", value)
    if len(written) > MAX_STEPS:
        raise source_map.error_at((*above, MAX_STEPS), f"a playbook has at most {MAX_STEPS} steps; split it.")
    steps: list[Step] = []
    inputs: dict[str, None] = {}
    for index, step in enumerate(written):
        steps.append(_step(step, source_map, (*above, index), [done.name for done in steps if done.name]))
        inputs |= dict.fromkeys(found.name for found in _list_references(step.get("with")) if found.source == "inputs")
    return Playbook(tuple(steps), source_map.file, tuple(inputs), cap)


def _steps(document: Document) -> tuple[KeyPath, Any, int | None]:
    whole: Any = document.value
    if not isinstance(whole, dict) or "steps" not in whole:
        return (), cast("Any", whole), None
    value, source_map = cast("dict[str, Any]", whole), document.source_map
    for key in value:
        if key not in _BESIDE:
            raise source_map.error_at(
                (key,), f"`{shorten(key)}` is unknown; {suggest_nearest(key, _BESIDE, 'the keys of a playbook')}"
            )
    cap = value.get("max_cost_usd")
    if cap is None:
        return ("steps",), value["steps"], None
    if isinstance(cap, bool) or not isinstance(cap, int | float) or not 0 < cap < MOST_DOLLARS:
        raise source_map.error_at(
            ("max_cost_usd",), f"`max_cost_usd` is {describe_value(cap)}, but must be an amount, as in 0.50."
        )
    return ("steps",), value["steps"], usd_to_micros(cap)


def _step(value: Any, source_map: SourceMap, path: KeyPath, earlier: list[str]) -> Step:
    step = _check_step(value, source_map, path)
    name, arguments = step.get("as", ""), step.get("with", {})
    if "as" in step and not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise source_map.error_at(
            (*path, "as"), f"`as` is {describe_value(name)}, but must be a name of letters, digits, - and _."
        )
    if name in earlier:
        raise source_map.error_at((*path, "as"), f"an earlier step is called `{name}` already; choose another name.")
    if not isinstance(arguments, dict):
        raise source_map.error_at(
            (*path, "with"), f"`with` is {describe_value(arguments)}, but must be a mapping of arguments."
        )
    for at, text in list_texts(cast("dict[str, Any]", arguments), (*path, "with")):
        for body in REFERENCE_PATTERN.findall(text):
            _check_reference(body, source_map, at, earlier)
    line = source_map.lines.get(path, 0)
    return Step(step["call"], json.dumps(arguments, separators=(",", ":")).encode(), name, line)


def _check_step(value: Any, source_map: SourceMap, path: KeyPath) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise source_map.error_at(path, f"a step is a mapping with a `call`, but this is {describe_value(value)}.")
    step = cast("dict[str, Any]", value)
    if "skill" in step:
        raise source_map.error_at(
            (*path, "skill"), "steps with a `skill` are not supported by this version; write a `call`."
        )
    for key in step:
        if key not in _KEYS:
            raise source_map.error_at(
                (*path, key), f"`{key}` is not a key of a step; {suggest_nearest(key, _KEYS, 'its keys')}"
            )
    call = step.get("call")
    if not isinstance(call, str) or not call:
        raise source_map.error_at((*path, "call"), "a step needs a `call` that names a tool.")
    return step


def _check_reference(body: str, source_map: SourceMap, path: KeyPath, earlier: list[str]) -> None:
    if body.startswith("secret:"):
        return
    found = parse_reference(body)
    if found is None:
        raise source_map.error_at(path, f"`${{{shorten(body)}}}` is not a reference; {_FORMS}.")
    if found.source != "inputs" and found.name not in earlier:
        hint = suggest_nearest(found.name, earlier, "the steps named before it")
        raise source_map.error_at(path, f"`${{{body}}}` refers to no earlier step; {hint}")


def list_texts(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    match value:
        case str():
            yield path, value
        case dict():
            for key, item in cast("dict[str, Any]", value).items():
                yield from list_texts(item, (*path, key))
        case list():
            for index, item in enumerate(cast("list[Any]", value)):
                yield from list_texts(item, (*path, index))
        case _:
            return


def _list_references(value: Any) -> Iterator[Reference]:
    for _, text in list_texts(value, ()):
        yield from (found for body in REFERENCE_PATTERN.findall(text) if (found := parse_reference(body)) is not None)


_NAME_LINE: Final = re.compile(
    r"^name:[ \t]*(?P<q>['\"]?)(?P<name>[A-Za-z0-9_.-]{1,64})(?P=q)[ \t]*(?:#.*)?$", re.MULTILINE
)
_HEAD: Final = 20_000


def find_neighbour_agents(path: Path | None) -> Mapping[str, Path]:
    """Finds the agents in the folders beside an agent's own, by the names in their files. Runs none of their code."""
    if path is None:
        return {}
    own, found = path.resolve(), dict[str, Path]()
    for file in sorted(own.parent.glob(f"*/{AGENT_FILE}")):
        try:
            with file.open(encoding="utf-8", errors="replace") as text:
                head = text.read(_HEAD)
        except OSError:
            continue
        named = _NAME_LINE.search(head)
        if named is not None and file.parent != own:
            found.setdefault(named["name"], file.parent)
    return found
