"""The risk of reading or writing a path, a host or a URL, and of SQL and GraphQL."""

import ipaddress
import posixpath
import re
from collections.abc import Iterator, Sequence
from typing import Final
from urllib.parse import urlsplit

from halter.core.text import word_set
from halter.core.tools import Effect
from halter.core.vocabulary import RiskLevel

RiskFinding = tuple[RiskLevel, str]

HOME: Final = "~"
_GLOB: Final = frozenset("*?[")
_SYSTEM: Final = word_set(
    "etc usr bin sbin lib lib32 lib64 libx32 boot dev proc sys var root opt run nix snap efi System Library "
    "Applications private"
)
_HARMLESS_DEVICES: Final = frozenset({"/dev/null", "/dev/stdout", "/dev/stderr", "/dev/zero", "/dev/tty"})
_KEYS: Final = frozenset({".ssh", ".gnupg", ".aws", ".kube", ".docker", ".azure"})
_SECRET_FILES: Final = word_set(
    ".env .netrc .npmrc .pypirc .pgpass .git-credentials .envrc id_rsa id_ed25519 credentials.json"
)
_ACCOUNTS: Final = frozenset({"/etc/passwd", "/etc/shadow", "/etc/sudoers", "/etc/gshadow"})
_STARTUP: Final = word_set(
    ".bashrc .bash_profile .bash_login .bash_logout .bash_aliases .profile .zshrc .zshenv .zprofile .zlogin .zlogout "
    ".kshrc .cshrc .tcshrc .login .inputrc .gitconfig .vimrc .gvimrc .exrc .emacs .pythonrc .pythonrc.py .perldb "
    ".irbrc .gdbinit .lldbinit .xinitrc .xprofile .xsession .xsessionrc .tmux.conf .screenrc .psqlrc .sqliterc "
    ".Rprofile config.fish sitecustomize.py usercustomize.py"
)
"""Files that a shell or another program runs when it starts."""

_RUN_LATER: Final = (
    *(
        (".git", "hooks"),
        (".git", "config"),
        (".husky",),
        (".githooks",),
        (".github", "workflows"),
        (".gitlab-ci.yml",),
    ),
    *((".config", "systemd"), (".config", "autostart"), (".config", "git"), (".config", "fish"), (".config", "nvim")),
    *((".local", "bin"), (".local", "share", "systemd"), ("cron.d",), ("crontabs",), (".vscode", "tasks.json")),
    *(("LaunchAgents",), ("LaunchDaemons",), (".pre-commit-config.yaml",), (".circleci",), ("Jenkinsfile",)),
    *((".cargo", "config.toml"), (".cargo", "bin"), (".m2", "settings.xml"), (".gradle", "init.gradle")),
)
"""Files that something runs by itself: hooks, units, schedules, builds."""

_POLICY: Final = frozenset({"agent.yaml", "agent.yml", "halter.yaml", "halter.yml", "trust.json"})
_GUIDANCE: Final = frozenset({".mcp.json", "AGENTS.md", "SKILL.md"})
_OWN_STATE: Final = ((".local", "state", "halter"), (".config", "halter"))
_HOOK_SETTINGS: Final = (
    *((".claude", "settings.json"), (".claude", "settings.local.json"), (".claude", "plugins"), (".codex",)),
    *((".gemini", "settings.json"), (".cursor", "hooks.json"), ("claude-code", "managed-settings.json")),
)
"""Where the hooks of other agents are switched on and off."""
_INTERNAL: Final = (".local", ".internal", ".localhost", ".lan", ".home.arpa", ".corp")
_METADATA: Final = frozenset({"169.254.169.254", "metadata.google.internal", "fd00:ec2::254"})
_BYTES: Final = 4
_BYTE: Final = 255
_SCHEMES: Final = frozenset({"http", "https", "ws", "wss"})


def normalize_path(path: str) -> str:
    """Normalize a path: `~` for the home folder, no `.` and no `..` that can be resolved."""
    for home in ("${HOME}", "$HOME"):
        if path.startswith(home):
            path = HOME + path[len(home) :]
    path = posixpath.normpath(path.replace("\\", "/")) if path else "."
    return "/" + path.lstrip("/") if path.startswith("/") else path


def is_root(path: str) -> bool:
    """Whether a path is or contains a whole system, a home, or all homes."""
    if not normalize_path(path).startswith(("/", HOME)):
        return False
    parts = [part for part in normalize_path(path).split("/") if part not in {"*", "**", ".*"}]
    match parts:
        case [] | [""] | ["", ""] | ["~"] | ["", "home" | "Users" | "root"] | ["", "home" | "Users", _]:
            return True
        case ["", top]:
            return top in _SYSTEM or not _GLOB.isdisjoint(top)
        case _:
            return parts[0].startswith("~") and len(parts) == 1


def path_risk(path: str, effect: Effect) -> Iterator[RiskFinding]:
    where = normalize_path(path)
    parts = where.split("/")
    writes = effect == "write"
    if where in _HARMLESS_DEVICES:
        return
    if where in _ACCOUNTS or where.startswith("/etc/sudoers.d/") or not _KEYS.isdisjoint(parts):
        yield "CRITICAL" if writes else "HIGH", f"{where} holds keys or accounts"
    elif _is_secret_file(parts[-1]):
        yield "HIGH", f"{where} holds secrets"
    elif writes and (parts[-1] in _POLICY or any(_contains_parts(parts, place) for place in _OWN_STATE)):
        yield "CRITICAL", f"{where} says what an agent may do"
    elif writes and any(_contains_parts(parts, place) for place in _HOOK_SETTINGS):
        yield "CRITICAL", f"{where} switches hooks on and off"
    elif any(_contains_parts(parts, place) for place in _OWN_STATE):
        yield "HIGH", f"{where} holds what Halter keeps for itself"
    elif writes and parts[-1] in _GUIDANCE:
        yield "HIGH", f"{where} says what an agent does"
    elif writes and (parts[-1] in _STARTUP or parts[-1].endswith(".pth")):
        yield "HIGH", f"{where} is run when a program starts"
    elif writes and any(_contains_parts(parts, place) for place in _RUN_LATER):
        yield "HIGH", f"{where} is run by itself"
    elif parts[-1] == "environ" and parts[1:2] == ["proc"]:
        yield "HIGH", f"{where} holds secrets"
    elif where == "/proc/sysrq-trigger" and writes:
        yield "CRITICAL", f"{where} stops the machine"
    elif where.startswith("/dev/") and writes:
        yield "CRITICAL", f"{where} is a device"
    elif where.startswith("/") and parts[1] in _SYSTEM:
        if writes:
            yield "HIGH", f"{where} belongs to the system"
    elif parts[0] == "..":
        yield "HIGH" if writes else "MEDIUM", f"{where} is outside the folder"
    elif writes and (where.startswith("/") or parts[0].startswith("~")):
        yield "MEDIUM", f"{where} is outside the folder"


def is_policy(path: str) -> bool:
    """Whether a path names a file that defines what an agent may do."""
    return " " not in path and path.rpartition("/")[2] in _POLICY


def _contains_parts(parts: Sequence[str], place: Sequence[str]) -> bool:
    width = len(place)
    return place[0] in parts and any(tuple(parts[at : at + width]) == place for at in range(len(parts) - width + 1))


def _is_secret_file(name: str) -> bool:
    return name in _SECRET_FILES or (name.startswith(".env.") and not name.endswith((".example", ".sample")))


def url_risk(url: str) -> Iterator[RiskFinding]:
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        yield "HIGH", "a URL that cannot be read"
        return
    if parts.scheme not in _SCHEMES:
        yield "HIGH", f"the scheme {parts.scheme} does not lead to the web"
        return
    if parts.scheme in {"http", "ws"}:
        yield "MEDIUM", f"{host} is asked without encryption"
    if port not in {None, 80, 443}:
        yield "MEDIUM", f"{port} is no port of the web"
    if parts.username or parts.password:
        yield "MEDIUM", "a URL with a user in it"
    yield from host_risk(host)


def host_risk(host: str) -> Iterator[RiskFinding]:
    address = _parse_address(host)
    if host in _METADATA or (address is not None and str(address) in _METADATA):
        yield "CRITICAL", f"{host} gives away the machine's own credentials"
    elif address is not None and not address.is_global:
        yield "HIGH", f"{host} is inside the network"
    elif address is not None:
        yield "MEDIUM", f"{host} is an address without a name"
    elif not host or host == "localhost" or host.endswith(_INTERNAL) or "." not in host:
        yield "HIGH", f"{host or 'no host'} is inside the network"


def _parse_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Read an address, also in the legacy forms of resolvers: decimal, hex, octal, shortened."""
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        try:
            numbers = [
                int(part, 16 if part[:2] in {"0x", "0X"} else 8 if part[:1] == "0" else 10) for part in host.split(".")
            ]
        except ValueError:
            return None
        *first, last = numbers
        if len(numbers) > _BYTES or any(number > _BYTE for number in first) or last > 256 ** (_BYTES - len(first)) - 1:
            return None
        return ipaddress.IPv4Address(sum(number << (24 - 8 * index) for index, number in enumerate(first)) + last)
    return getattr(found, "ipv4_mapped", None) or found


_PART: Final = re.compile(r"--[^\n]*|/\*(?:[^*]|\*(?!/))*(?:\*/)?|'(?:[^']|'')*'?|\"[^\"]*\"?|\w+|;|[^\s\w]")
_VERBS: Final = word_set(
    "SELECT WITH INSERT UPDATE DELETE DROP TRUNCATE ALTER CREATE GRANT REVOKE MERGE REPLACE COPY VACUUM EXPLAIN SHOW "
    "PRAGMA BEGIN SET CALL DO EXEC"
)
_CHANGING: Final = frozenset({"INSERT", "UPDATE", "DELETE", "MERGE", "REPLACE", "CREATE", "COPY", "CALL", "DO", "EXEC"})


_OBJECTS: Final = word_set(
    "TABLE DATABASE SCHEMA INDEX VIEW USER ROLE SEQUENCE FUNCTION TRIGGER TYPE MATERIALIZED EXTENSION PROCEDURE "
    "COLLECTION KEYSPACE TABLESPACE COLUMN OWNED"
)
_CLAUSES: Final = frozenset({"WHERE", "USING", "RETURNING", "LIMIT", "ORDER"})
_INSERTING: Final = frozenset({"VALUES", "SELECT", "DEFAULT"})
_BEGINS: Final = re.compile(
    r"\b(?:drop|alter|create|truncate|delete|update|insert|replace|grant|revoke)\b", re.IGNORECASE
)


def split_sql_statements(text: str) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for part in _PART.findall(text):
        if part == ";":
            found.append([])
        elif part[0].isalnum() or part[0] == "_":
            found[-1].append(part.upper())
    return [words for words in found if words]


def looks_like_sql(text: str) -> bool:
    """Tell SQL from other values of a field called `query`."""
    parts = split_sql_statements(text)
    return bool(parts) and all(words[0] in _VERBS for words in parts) and any(len(words) > 1 for words in parts)


def is_statement(text: str) -> bool:
    """Tell a statement that changes a database from prose such as "Delete from the list what is old"."""
    return bool(_BEGINS.search(text)) and any(_is_change(words, text) for words in split_sql_statements(text))


def _is_change(words: Sequence[str], text: str) -> bool:
    match words:
        case ["DROP" | "ALTER" | "CREATE", kind, _, *_]:
            return kind in _OBJECTS
        case ["TRUNCATE", "TABLE", _, *_] | ["TRUNCATE", _]:
            return True
        case ["DELETE", "FROM", _, *rest]:
            return (
                not rest or len(rest) == 1 or not {rest[0], rest[1], rest[2] if rest[2:] else ""}.isdisjoint(_CLAUSES)
            )
        case ["UPDATE", _, *rest]:
            return "=" in text and ("SET" in rest[:2] or (rest[:1] == ["AS"] and "SET" in rest[2:3]))
        case ["INSERT" | "REPLACE", "INTO", _, *rest]:
            return not _INSERTING.isdisjoint(rest)
        case ["GRANT" | "REVOKE", *rest]:
            return "ON" in rest and not {"TO", "FROM"}.isdisjoint(rest)
        case ["WITH" | "EXPLAIN", *rest]:
            return not _CHANGING.isdisjoint(rest) and "SELECT" in words
        case _:
            return False


def sql_risk(text: str) -> Iterator[RiskFinding]:
    for words in split_sql_statements(text):
        present = set(words)
        verb = words[0]
        if verb in {"DROP", "TRUNCATE"}:
            yield "CRITICAL", f"{verb} deletes whole tables"
        elif "DELETE" in present and "WHERE" not in present and verb in {"DELETE", "WITH", "EXPLAIN"}:
            yield "CRITICAL", "DELETE without WHERE deletes every row"
        elif verb in {"ALTER", "GRANT", "REVOKE"}:
            yield "HIGH", f"{verb} changes tables or rights"
        elif "UPDATE" in present and "WHERE" not in present and verb in {"UPDATE", "WITH"}:
            yield "HIGH", "UPDATE without WHERE changes every row"
        elif verb in _CHANGING or (verb == "WITH" and present & _CHANGING):
            yield "MEDIUM", f"{verb} changes rows"


_GRAPHQL_PART: Final = re.compile(r'#[^\n]*|"""[\s\S]*?(?:"""|$)|"(?:[^"\\\n]|\\.)*"?|[{}():]|\$?\w+')
_GRAPHQL_BEGINS: Final = re.compile(r"[\s,]*(?:#[^\n]*\n[\s,]*)*(?:mutation|query|subscription|fragment|\{)")
_DELETING: Final = re.compile(r"(?:delete|remove|destroy|drop|purge|erase|wipe|truncate|terminate)", re.IGNORECASE)


def graphql_risk(text: str) -> Iterator[RiskFinding]:
    """Judge the mutations of a document; other text has no risk."""
    if "mutation" not in text or "{" not in text or not _GRAPHQL_BEGINS.match(text):
        return
    yield from (_field_risk(name) for name in _list_mutations(text))


def _list_mutations(text: str) -> Iterator[str]:
    braces = parentheses = 0
    mutates = False
    for part in _GRAPHQL_PART.findall(text):
        if part == "(":
            parentheses += 1
        elif part == ")":
            parentheses -= 1
        elif part == "{" and not parentheses:
            braces += 1
        elif part == "}" and not parentheses:
            braces -= 1
            mutates = mutates and braces > 0
        elif not braces and not parentheses and part in {"mutation", "query", "subscription", "fragment"}:
            mutates = part == "mutation"
        elif mutates and braces == 1 and not parentheses and part[0].isalpha():
            yield part


def _field_risk(name: str) -> RiskFinding:
    if _DELETING.match(name):
        return "HIGH", f"the mutation {name} deletes something outside"
    return "MEDIUM", f"the mutation {name} changes something outside"
