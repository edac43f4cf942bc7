"""An agent's folder: `agent.yaml`, skills and playbooks. Nothing outside the folder is read.

A skill is a folder in `.agents/skills` or `.claude/skills` with a SKILL.md. A playbook is a YAML list of calls, or a
mapping with such a list under `steps` and a `max_cost_usd` for the whole playbook:

```yaml
- call: http__get
  arguments: {url: "https://example.com/${inputs.item}.json"}
  as: page
- call: files__write
  arguments: {path: price.txt, text: "${steps.page.json.offers.0.price}"}
```

`halter.spec.playbook` defines the references.
"""

import errno
import json
import os
import re
import stat
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

import msgspec
from msgspec import UNSET
from msgspec.structs import asdict, replace

from halter.config.decode import decode_document
from halter.config.yaml_reader import MAX_BYTES, Document, KeyPath, SourceMap, load_bytes, load_file
from halter.core.errors import ConfigError
from halter.core.money import usd_to_micros
from halter.core.text import describe_value, shorten, suggest_nearest
from halter.spec.agent import AgentSpec
from halter.spec.limits import Limits
from halter.spec.playbook import REFERENCE_PATTERN, Playbook, Reference, Step, parse_reference
from halter.spec.skills import SCRIPT_RUNNERS, Skill, SkillScript

AGENT_FILE: Final = "agent.yaml"
INSTRUCTIONS: Final = "AGENTS.md"


class AgentFile(msgspec.Struct, frozen=True):
    spec: AgentSpec
    source_map: SourceMap = SourceMap(AGENT_FILE)


def read_agent(path: Path, display_name: str | None = None) -> AgentFile:
    return parse_agent(load_file(path / AGENT_FILE if path.is_dir() else path, display_name))


def parse_agent(document: Document) -> AgentFile:
    spec = decode_document(document, AgentSpec)
    return AgentFile(replace(spec, limits=_merge_guardrails(spec, document.source_map)), document.source_map)


def _merge_guardrails(spec: AgentSpec, source_map: SourceMap) -> Limits:
    """Merge `guardrails`, a former name of four of the `limits`, into these."""
    values = {key: value for key, value in asdict(spec.guardrails).items() if value is not UNSET}
    for key in values:
        if getattr(spec.limits, key) is not UNSET:
            location = source_map.at(("limits", key))
            sentence = f"`guardrails.{key}` is already set in {location} as `limits.{key}`; keep one of them."
            raise source_map.error_at(("guardrails", key), sentence)
    if values:
        source_map.rename((), "guardrails", "limits")
    return replace(spec.limits, **values)


class UnusableFile(Exception):
    """A file cannot be used. The message is the end of a sentence about the file."""


def read_folder_file(folder: Path, name: str) -> bytes | None:
    """Read a file below a folder. Returns None if it does not exist."""
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
        raise UnusableFile("is not a valid file name") from error
    if not path.is_relative_to(root):
        raise UnusableFile("leads out of the agent's folder")
    return path


def resolve_links(path: Path) -> Path:
    """Resolve a path, which need not exist. A loop of links raises OSError, or RuntimeError before Python 3.13."""
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
        raise UnusableFile(
            f"contains a NUL character in line {text.count(chr(10), 0, text.index(chr(0))) + 1}; remove it"
        )
    return text


GUIDANCE_FILES: Final = ("CLAUDE.md", ".claude/CLAUDE.md")
"""Instructions that other programs read, too. They follow AGENTS.md."""
MAX_IMPORT_DEPTH: Final = 5
MAX_IMPORTS: Final = 100
MAX_IMPORT_WORDS: Final = 2000
"""Different words after `@` that are looked up. Each costs several calls to the file system."""
_NO_PROSE: Final = re.compile(
    r"^[ \t>]*(?P<fence>`{3,}|~{3,}).*?(?:^[ \t>]*(?P=fence)[`~]*[ \t]*$|\Z)|(?P<ticks>`+)|<!--",
    re.DOTALL | re.MULTILINE,
)
"""Code and comments, in which nothing is an import: a whole block of code, or what opens the others."""
_IMPORT: Final = re.compile(r"(?:^|(?<=\s))@((?:[^\s\\]|\\ )+)", re.MULTILINE)
_ENDS_SENTENCE: Final = ".,;:!?)]}'\""


class Guidance(msgspec.Struct, frozen=True):
    """The text of the guidance files and of what they import, the files that it comes from, and what was left out."""

    text: str = ""
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_guidance(folder: Path, data_places: Iterable[Path] = ()) -> Guidance:
    """Read CLAUDE.md, and the files that it imports with `@path`. What cannot be read is left out, with a note.

    An imported file is below the folder, and not in one of the `data_places`, where the agent may have written it.
    """
    return _GuidanceReader(folder, data_places).read()


class _GuidanceReader:
    def __init__(self, folder: Path, data_places: Iterable[Path]) -> None:
        self._root = folder.resolve()
        self._data_places = tuple(data_places)
        self._seen = {self._root / INSTRUCTIONS, (self._root / INSTRUCTIONS).resolve()}
        self._words = set[tuple[Path, str]]()
        self._texts: list[str] = []
        self._files: list[str] = []
        self._notes: list[str] = []

    def read(self) -> Guidance:
        for name in GUIDANCE_FILES:
            path = self._root / name
            try:
                data = read_folder_file(self._root, name)
                text = None if data is None else decode_file_text(data)
            except UnusableFile as error:
                self._notes.append(f"{path} is left out: it {error}.")
                continue
            if text is not None and (target := path.resolve()) not in self._seen:
                self._seen.add(target)
                self._add(name, text.strip(), path, 0)
        return Guidance("\n\n".join(filter(None, self._texts)), tuple(self._files), tuple(self._notes))

    def _add(self, name: str, text: str, path: Path, depth: int) -> None:
        self._files.append(name)
        self._texts.append(f"Contents of {name}:\n\n{text}" if depth else text)
        for match in _IMPORT.finditer(_strip_code(text)):
            name = match[1].replace("\\ ", " ").partition("#")[0]
            if (path.parent, name) in self._words:
                continue
            if len(self._words) == MAX_IMPORT_WORDS:
                self._omit(name, path, f"at most {MAX_IMPORT_WORDS:,} different words after @ are looked up")
                return
            self._words.add((path.parent, name))
            self._import(name, path, depth + 1)

    def _import(self, name: str, importer: Path, depth: int) -> None:
        """Import a file. A word that names no file is not an import."""
        names = (name, name.rstrip(_ENDS_SENTENCE))
        paths = [importer.parent / os.path.expanduser(each) for each in names if each and "\0" not in each]  # noqa: PTH111
        try:
            path = next((path.resolve() for path in paths if path.is_file()), None)
        except (OSError, RuntimeError):
            path = None
        if path is None or path in self._seen or path == self._root:
            if path is None and name.startswith(("~/", "../")):
                self._omit(names[-1], importer, "it does not exist, and imports are below the agent's folder")
            return
        if objection := self._find_objection(path, depth):
            self._omit(names[-1], importer, objection)
            return
        inner_name = path.relative_to(self._root).as_posix()
        try:
            text = decode_file_text(read_folder_file(self._root, inner_name) or b"")
        except UnusableFile as error:
            self._omit(names[-1], importer, f"it {error}")
            return
        self._seen.add(path)
        self._add(inner_name, text.strip(), path, depth)

    def _find_objection(self, path: Path, depth: int) -> str:
        if not path.is_relative_to(self._root):
            return f"it is outside the agent's folder; copy it there, or put its text into {INSTRUCTIONS}"
        if any(path.is_relative_to(place) for place in self._data_places):
            return "it is in a folder of data, which the agent may have written; move it"
        if depth > MAX_IMPORT_DEPTH:
            return f"imports are at most {MAX_IMPORT_DEPTH} levels deep"
        return f"at most {MAX_IMPORTS} files are imported" if len(self._files) > MAX_IMPORTS else ""

    def _omit(self, name: str, importer: Path, why: str) -> None:
        self._notes.append(f"{importer}: @{name} is not imported: {why}.")


def _strip_code(text: str) -> str:
    """Leave out code and comments, in time that is proportional to the text, also if many of them have no end."""
    ends: dict[str, list[int]] = {}
    for run in re.finditer("`+", text):
        ends.setdefault(run[0], []).append(run.end())
    last_comment_end = text.rfind("-->")
    prose: list[str] = []
    at = 0
    while match := _NO_PROSE.search(text, at):
        prose.append(text[at : match.start()])
        at = match.end()
        if ticks := match["ticks"]:
            later_ends = ends.get(ticks, [])
            index = bisect_right(later_ends, at)
            at = later_ends[index] if index < len(later_ends) else at
        elif not match["fence"] and at <= last_comment_end:
            at = text.index("-->", at) + len("-->")
    return "".join((*prose, text[at:]))


SKILLS: Final = ".agents/skills"
SKILL_FOLDERS: Final = (SKILLS, ".claude/skills")
"""The folders of skills: Halter's own, and that of another program."""
SKILL_FILE: Final = "SKILL.md"
_TOOL_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_FENCE: Final = "---"


def read_skills(folder: Path) -> dict[str, Skill]:
    """Read the skills of an agent. One that is linked into both folders is one skill."""
    skills: dict[str, Skill] = {}
    seen: set[Path] = set()
    for skill_folder in list_skill_folders(folder):
        target = skill_folder.resolve()
        if target in seen:
            continue
        seen.add(target)
        skill = read_skill(folder, skill_folder)
        if skill.name in skills:
            raise ConfigError(
                f"{skill_folder / SKILL_FILE}: another skill is also called {skill.name}; rename one of them."
            )
        skills[skill.name] = skill
    return skills


def list_skill_folders(folder: Path) -> list[Path]:
    places = [folder / name for name in SKILL_FOLDERS if (folder / name).is_dir()]
    return [path for place in places for path in sorted(place.iterdir()) if path.is_dir()]


def read_skill(folder: Path, path: Path) -> Skill:
    file = path / SKILL_FILE
    try:
        data = read_folder_file(folder, str(file.relative_to(folder)))
        text = None if data is None else decode_file_text(data)
    except UnusableFile as error:
        raise ConfigError(f"{file} {error}.") from None
    if text is None:
        raise ConfigError(f"{path} has no {SKILL_FILE}. Write one that describes the skill, or remove the folder.")
    front_matter, body = _split_front_matter(text)
    values = _head(front_matter, str(file))
    name, description = values.get("name", path.name), values.get("description", "")
    if not isinstance(name, str) or not isinstance(description, str) or not name.strip():
        raise ConfigError(f"{file}: `name` and `description` must be text.")
    if not body.strip():
        raise ConfigError(f"{file} has no text below its front matter. Write the instructions.")
    scripts = dict(_read_scripts(path, name.strip(), values.get("scripts", {})))
    return Skill(name.strip(), shorten(description.strip(), 1000), body.strip(), scripts, str(path))


def _read_scripts(path: Path, skill: str, raw_scripts: Any) -> Iterator[tuple[str, SkillScript]]:
    """Yield the scripts that a skill declares, with the name of each one's tool."""
    file = path / SKILL_FILE
    if not isinstance(raw_scripts, dict):
        raise ConfigError(
            f"{file}: `scripts` is {describe_value(raw_scripts)}, but must be a mapping of names to scripts."
        )
    for key, value in cast("dict[Any, Any]", raw_scripts).items():
        where = f"{file}: `scripts.{shorten(str(key))}`"
        try:
            script = msgspec.convert(value, SkillScript)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where} is invalid: {error}.") from None
        name = f"{skill}_{key}"
        if not _TOOL_NAME.fullmatch(name):
            raise ConfigError(f"{where} would become the tool {name!r}; use letters, digits, - and _ in both names.")
        _check_script_file(path, script.file, where)
        yield name, script


def _check_script_file(path: Path, name: str, where: str) -> None:
    """Require that a script is a file in the skill's folder and can be run."""
    script = path / name
    if not resolve_links(script).is_relative_to(path.resolve()):
        raise ConfigError(f"{where} names {name}, which is outside the skill's folder; move it there.")
    if not script.is_file():
        raise ConfigError(f"{where} names {name}, which does not exist in {path}.")
    if script.suffix not in SCRIPT_RUNNERS and not os.access(script, os.X_OK):
        raise ConfigError(f"{where}: {name} cannot be run. Make it executable (chmod +x), or use a .py or .sh file.")


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

_STEP_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_STEP_KEYS: Final = ("call", "arguments", "as")
_FORMER_STEP_KEY: Final = "with"
"""The former name of `arguments`."""

_PLAYBOOK_KEYS: Final = ("steps", "max_cost_usd")
MAX_DOLLARS: Final = 1_000_000
_REFERENCE_FORMS: Final = "write ${inputs.NAME}, ${steps.NAME.text}, ${steps.NAME.json.PATH} or ${secret:NAME}"


def read_playbook(path: Path, display_name: str | None = None) -> Playbook:
    return parse_playbook(load_file(path, display_name))


def parse_playbook(document: Document) -> Playbook:
    source_map = document.source_map
    list_path, value, cap = _steps(document)
    if not isinstance(value, list) or not value:
        raise source_map.error_at(
            list_path, f"a playbook is a list of steps, each with a `call`, but this is {describe_value(value)}."
        )
    if len(cast("list[Any]", value)) > MAX_STEPS:
        raise source_map.error_at((*list_path, MAX_STEPS), f"a playbook has at most {MAX_STEPS} steps; split it.")
    items = [
        _rename_former_key(item, source_map, (*list_path, index)) for index, item in enumerate(cast("list[Any]", value))
    ]
    steps: list[Step] = []
    inputs: dict[str, None] = {}
    for index, step in enumerate(items):
        steps.append(_step(step, source_map, (*list_path, index), [earlier.name for earlier in steps if earlier.name]))
        inputs |= dict.fromkeys(
            reference.name for reference in _list_references(step.get("arguments")) if reference.source == "inputs"
        )
    return Playbook(tuple(steps), source_map.file, tuple(inputs), cap)


def _steps(document: Document) -> tuple[KeyPath, Any, int | None]:
    content: Any = document.value
    if not isinstance(content, dict) or "steps" not in content:
        return (), cast("Any", content), None
    mapping, source_map = cast("dict[str, Any]", content), document.source_map
    for key in mapping:
        if key not in _PLAYBOOK_KEYS:
            raise source_map.error_at(
                (key,),
                f"`{shorten(key)}` is not a key of a playbook; {suggest_nearest(key, _PLAYBOOK_KEYS, 'its keys')}",
            )
    cap = mapping.get("max_cost_usd")
    if cap is None:
        return ("steps",), mapping["steps"], None
    if isinstance(cap, bool) or not isinstance(cap, int | float) or not 0 < cap < MAX_DOLLARS:
        raise source_map.error_at(
            ("max_cost_usd",), f"`max_cost_usd` is {describe_value(cap)}, but must be an amount, as in 0.50."
        )
    return ("steps",), mapping["steps"], usd_to_micros(cap)


def _step(value: Any, source_map: SourceMap, path: KeyPath, earlier: list[str]) -> Step:
    step = _check_step(value, source_map, path)
    name, arguments = step.get("as", ""), step.get("arguments", {})
    if "as" in step and not (isinstance(name, str) and _STEP_NAME.fullmatch(name)):
        raise source_map.error_at(
            (*path, "as"), f"`as` is {describe_value(name)}, but must be a name of letters, digits, - and _."
        )
    if name in earlier:
        raise source_map.error_at((*path, "as"), f"an earlier step is already called `{name}`; choose another name.")
    if not isinstance(arguments, dict):
        raise source_map.error_at(
            (*path, "arguments"), f"`arguments` is {describe_value(arguments)}, but must be a mapping of arguments."
        )
    for at, text in list_texts(cast("dict[str, Any]", arguments), (*path, "arguments")):
        for body in REFERENCE_PATTERN.findall(text):
            _check_reference(body, source_map, at, earlier)
    line = source_map.lines.get(path, 0)
    return Step(step["call"], json.dumps(arguments, separators=(",", ":")).encode(), name, line)


def _rename_former_key(item: Any, source_map: SourceMap, path: KeyPath) -> Any:
    if not isinstance(item, dict) or _FORMER_STEP_KEY not in item:
        return cast("Any", item)
    if "arguments" in item:
        sentence = f"`{_FORMER_STEP_KEY}` and `arguments` are two names of one key; keep one of them."
        raise source_map.error_at((*path, _FORMER_STEP_KEY), sentence)
    source_map.rename(path, _FORMER_STEP_KEY, "arguments")
    step = cast("dict[str, Any]", item)
    return {"arguments" if key == _FORMER_STEP_KEY else key: value for key, value in step.items()}


def _check_step(value: Any, source_map: SourceMap, path: KeyPath) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise source_map.error_at(path, f"a step is a mapping with a `call`, but this is {describe_value(value)}.")
    step = cast("dict[str, Any]", value)
    if "skill" in step:
        raise source_map.error_at(
            (*path, "skill"), "steps with a `skill` are not supported by this version; write a `call`."
        )
    for key in step:
        if key not in _STEP_KEYS:
            raise source_map.error_at(
                (*path, key), f"`{key}` is not a key of a step; {suggest_nearest(key, _STEP_KEYS, 'its keys')}"
            )
    call = step.get("call")
    if not isinstance(call, str) or not call:
        raise source_map.error_at((*path, "call"), "a step needs a `call` that names a tool.")
    return step


def _check_reference(body: str, source_map: SourceMap, path: KeyPath, earlier: list[str]) -> None:
    if body.startswith("secret:"):
        return
    reference = parse_reference(body)
    if reference is None:
        raise source_map.error_at(path, f"`${{{shorten(body)}}}` is not a reference; {_REFERENCE_FORMS}.")
    if reference.source != "inputs" and reference.name not in earlier:
        hint = suggest_nearest(reference.name, earlier, "the steps named before it")
        raise source_map.error_at(path, f"`${{{body}}}` does not refer to an earlier step; {hint}")


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
        yield from (
            reference for body in REFERENCE_PATTERN.findall(text) if (reference := parse_reference(body)) is not None
        )


_NAME_LINE: Final = re.compile(
    r"^name:[ \t]*(?P<q>['\"]?)(?P<name>[A-Za-z0-9_.-]{1,64})(?P=q)[ \t]*(?:#.*)?$", re.MULTILINE
)
_MAX_HEAD: Final = 20_000


def find_neighbour_agents(path: Path | None) -> Mapping[str, Path]:
    """Find the agents in the sibling folders of an agent, by the names in their files. Their code is not run."""
    if path is None:
        return {}
    own_folder, folders = path.resolve(), dict[str, Path]()
    for file in sorted(own_folder.parent.glob(f"*/{AGENT_FILE}")):
        try:
            with file.open(encoding="utf-8", errors="replace") as text:
                head = text.read(_MAX_HEAD)
        except OSError:
            continue
        match = _NAME_LINE.search(head)
        if match is not None and file.parent != own_folder:
            folders.setdefault(match["name"], file.parent)
    return folders
