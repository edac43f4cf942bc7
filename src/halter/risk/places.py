"""Judges the risk of paths, hosts, URLs, SQL and GraphQL."""

import ipaddress
import posixpath
import re
from collections.abc import Iterator, Sequence
from typing import Final
from urllib.parse import urlsplit

from halter.core.text import make_word_set
from halter.core.tools import Effect
from halter.core.vocabulary import RiskLevel

RiskFinding = tuple[RiskLevel, str]

HOME: Final = "~"
_GLOB: Final = frozenset("*?[(")
_SYSTEM_FOLDERS: Final = make_word_set(
    "etc usr bin sbin lib lib32 lib64 libx32 boot dev proc sys var root opt run nix snap efi System Library "
    "Applications private"
)
_HARMLESS_DEVICES: Final = frozenset({"/dev/null", "/dev/stdout", "/dev/stderr", "/dev/zero", "/dev/tty"})
_KEY_FOLDERS: Final = frozenset({".ssh", ".gnupg", ".aws", ".kube", ".docker", ".azure"})
_SECRET_FILES: Final = make_word_set(
    ".env .netrc .npmrc .pypirc .pgpass .git-credentials .envrc id_rsa id_ed25519 credentials.json"
)
_ACCOUNT_FILES: Final = frozenset({"/etc/passwd", "/etc/shadow", "/etc/sudoers", "/etc/gshadow"})
_STARTUP_FILES: Final = make_word_set(
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
"""Files that are run automatically: hooks, units, schedules, builds."""

_POLICY_FILES: Final = frozenset({"agent.yaml", "agent.yml", "halter.yaml", "halter.yml", "trust.json"})
_GUIDANCE_FILES: Final = frozenset({".mcp.json", "AGENTS.md", "CLAUDE.md", "SKILL.md"})
_OWN_STATE: Final = ((".local", "state", "halter"), (".config", "halter"))
_HOOK_SETTINGS: Final = (
    *((".claude", "settings.json"), (".claude", "settings.local.json"), (".claude", "plugins"), (".codex",)),
    *((".gemini", "settings.json"), (".cursor", "hooks.json"), ("claude-code", "managed-settings.json")),
)
"""Files that enable or disable the hooks of other agents."""
_INTERNAL_SUFFIXES: Final = (".local", ".internal", ".localhost", ".lan", ".home.arpa", ".corp")
_METADATA_HOSTS: Final = frozenset(
    {
        *("169.254.169.254", "metadata.google.internal", "fd00:ec2::254", "fd20:ce::254", "168.63.129.16"),
        *("100.100.100.200", "192.0.0.192", "169.254.170.2", "169.254.170.23"),
    }
)
"""Addresses at which a cloud gives its machines their keys and settings."""
_IPV4_BYTES: Final = 4
_MAX_BYTE: Final = 255
_WEB_SCHEMES: Final = frozenset({"http", "https", "ws", "wss"})


def normalize_path(path: str) -> str:
    """Normalize a path: `~` for the home folder, without `.` and without `..` that can be resolved."""
    for home in ("${HOME}", "$HOME"):
        if path.startswith(home):
            path = HOME + path[len(home) :]
    path = posixpath.normpath(path.replace("\\", "/")) if path else "."
    return "/" + path.lstrip("/") if path.startswith("/") else path


def is_root(path: str) -> bool:
    """Return true if a path is a system folder, a home folder, or a parent of them."""
    if not normalize_path(path).startswith(("/", HOME)):
        return False
    parts = [part for part in normalize_path(path).split("/") if part not in {"*", "**", ".*"}]
    match parts:
        case [] | [""] | ["", ""] | ["~"] | ["", "home" | "Users" | "root"] | ["", "home" | "Users", _]:
            return True
        case ["", top]:
            return top in _SYSTEM_FOLDERS or not _GLOB.isdisjoint(top)
        case _:
            return parts[0].startswith("~") and len(parts) == 1


def path_risk(path: str, effect: Effect) -> Iterator[RiskFinding]:
    normalized_path = normalize_path(path)
    parts = normalized_path.split("/")
    writes = effect == "write"
    if normalized_path in _HARMLESS_DEVICES or normalized_path.startswith("/dev/fd/"):
        return
    if (
        normalized_path in _ACCOUNT_FILES
        or normalized_path.startswith("/etc/sudoers.d/")
        or not _KEY_FOLDERS.isdisjoint(parts)
    ):
        yield "CRITICAL" if writes else "HIGH", f"{normalized_path} contains keys or accounts"
    elif _is_secret_file(parts[-1]):
        yield "HIGH", f"{normalized_path} contains secrets"
    elif writes and (parts[-1] in _POLICY_FILES or any(_contains_parts(parts, place) for place in _OWN_STATE)):
        yield "CRITICAL", f"{normalized_path} defines what an agent may do"
    elif writes and any(_contains_parts(parts, place) for place in _HOOK_SETTINGS):
        yield "CRITICAL", f"{normalized_path} enables or disables hooks"
    elif any(_contains_parts(parts, place) for place in _OWN_STATE):
        yield "HIGH", f"{normalized_path} contains Halter's own state"
    elif writes and parts[-1] in _GUIDANCE_FILES:
        yield "HIGH", f"{normalized_path} instructs an agent"
    elif writes and (parts[-1] in _STARTUP_FILES or parts[-1].endswith(".pth")):
        yield "HIGH", f"{normalized_path} is run when a program starts"
    elif writes and any(_contains_parts(parts, place) for place in _RUN_LATER):
        yield "HIGH", f"{normalized_path} is run automatically"
    elif parts[-1] == "environ" and parts[1:2] == ["proc"]:
        yield "HIGH", f"{normalized_path} contains secrets"
    elif normalized_path == "/proc/sysrq-trigger" and writes:
        yield "CRITICAL", f"{normalized_path} stops the machine"
    elif normalized_path.startswith("/dev/") and writes:
        yield "CRITICAL", f"{normalized_path} is a device"
    elif normalized_path.startswith("/") and parts[1] in _SYSTEM_FOLDERS:
        if writes:
            yield "HIGH", f"{normalized_path} belongs to the system"
    elif parts[0] == "..":
        yield "HIGH" if writes else "MEDIUM", f"{normalized_path} is outside the folder"
    elif writes and (normalized_path.startswith("/") or parts[0].startswith("~")):
        yield "MEDIUM", f"{normalized_path} is outside the folder"


def is_policy(path: str) -> bool:
    """Return true if a path names a file that defines what an agent may do."""
    return " " not in path and path.rpartition("/")[2] in _POLICY_FILES


def _contains_parts(parts: Sequence[str], sequence: Sequence[str]) -> bool:
    length = len(sequence)
    return sequence[0] in parts and any(
        tuple(parts[index : index + length]) == sequence for index in range(len(parts) - length + 1)
    )


def _is_secret_file(name: str) -> bool:
    return name in _SECRET_FILES or (name.startswith(".env.") and not name.endswith((".example", ".sample")))


def url_risk(url: str) -> Iterator[RiskFinding]:
    try:
        url_parts = urlsplit(url)
        host, port = (url_parts.hostname or "").rstrip("."), url_parts.port
    except ValueError:
        yield "HIGH", "an invalid URL"
        return
    if url_parts.scheme not in _WEB_SCHEMES:
        yield "HIGH", f"the URL scheme {url_parts.scheme} is not for the web"
        return
    if url_parts.scheme in {"http", "ws"}:
        yield "MEDIUM", f"{host} is contacted without encryption"
    if port not in {None, 80, 443}:
        yield "MEDIUM", f"{port} is not a web port"
    if url_parts.username or url_parts.password:
        yield "MEDIUM", "a URL with a user name"
    yield from host_risk(host)


def host_risk(host: str) -> Iterator[RiskFinding]:
    address = _parse_address(host)
    if host in _METADATA_HOSTS or (address is not None and str(address) in _METADATA_HOSTS):
        yield "CRITICAL", f"{host} exposes the machine's credentials"
    elif address is not None and not address.is_global:
        yield "HIGH", f"{host} is in a private network"
    elif address is not None:
        yield "MEDIUM", f"{host} is an IP address without a name"
    elif not host or host == "localhost" or host.endswith(_INTERNAL_SUFFIXES) or "." not in host:
        yield "HIGH", f"{host or 'no host'} is in a private network"


def _parse_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parse an IP address, also in the legacy forms of resolvers: decimal, hex, octal, shortened."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        try:
            numbers = [
                int(digits, 16 if digits[:2] in {"0x", "0X"} else 8 if digits[:1] == "0" else 10)
                for digits in host.split(".")
            ]
        except ValueError:
            return None
        *first, last = numbers
        if (
            len(numbers) > _IPV4_BYTES
            or any(number > _MAX_BYTE for number in first)
            or last > 256 ** (_IPV4_BYTES - len(first)) - 1
        ):
            return None
        return ipaddress.IPv4Address(sum(number << (24 - 8 * index) for index, number in enumerate(first)) + last)
    return getattr(address, "ipv4_mapped", None) or address


_PART: Final = re.compile(r"--[^\n]*|/\*(?:[^*]|\*(?!/))*(?:\*/)?|'(?:[^']|'')*'?|\"[^\"]*\"?|\w+|;|[^\s\w]")
_STATEMENT_KEYWORDS: Final = make_word_set(
    "SELECT WITH INSERT UPDATE DELETE DROP TRUNCATE ALTER CREATE GRANT REVOKE MERGE REPLACE COPY VACUUM EXPLAIN SHOW "
    "PRAGMA BEGIN SET CALL DO EXEC"
)
_CHANGING: Final = frozenset({"INSERT", "UPDATE", "DELETE", "MERGE", "REPLACE", "CREATE", "COPY", "CALL", "DO", "EXEC"})


_OBJECTS: Final = make_word_set(
    "TABLE DATABASE SCHEMA INDEX VIEW USER ROLE SEQUENCE FUNCTION TRIGGER TYPE MATERIALIZED EXTENSION PROCEDURE "
    "COLLECTION KEYSPACE TABLESPACE COLUMN OWNED"
)
_RIGHTS: Final = make_word_set("USER ROLE LOGIN GROUP POLICY SERVER SUBSCRIPTION PUBLICATION CREDENTIAL")
_CLAUSES: Final = frozenset({"WHERE", "USING", "RETURNING", "LIMIT", "ORDER"})
_INSERTING: Final = frozenset({"VALUES", "SELECT", "DEFAULT"})
_SQL_CHANGE_VERB: Final = re.compile(
    r"\b(?:drop|alter|create|truncate|delete|update|insert|replace|grant|revoke)\b", re.IGNORECASE
)


def split_sql_statements(text: str) -> list[list[str]]:
    statements: list[list[str]] = [[]]
    for symbol in _PART.findall(text):
        if symbol == ";":
            statements.append([])
        elif symbol[0].isalnum() or symbol[0] == "_":
            statements[-1].append(symbol.upper())
    return [words for words in statements if words]


def looks_like_sql(text: str) -> bool:
    """Return true if the value of a field such as `query` is SQL."""
    statements = split_sql_statements(text)
    return (
        bool(statements)
        and all(words[0] in _STATEMENT_KEYWORDS for words in statements)
        and any(len(words) > 1 for words in statements)
    )


def is_statement(text: str) -> bool:
    """Return true for a statement that changes a database, but not for prose that begins with such a verb."""
    return bool(_SQL_CHANGE_VERB.search(text)) and any(_is_change(words, text) for words in split_sql_statements(text))


def _is_change(words: Sequence[str], text: str) -> bool:
    match words:
        case ["DROP" | "ALTER" | "CREATE", object_kind, _, *_]:
            return object_kind in _OBJECTS
        case ["TRUNCATE", "TABLE", _, *_] | ["TRUNCATE", _]:
            return True
        case ["DELETE", "FROM", _, *remaining]:
            return (
                not remaining
                or len(remaining) == 1
                or not {remaining[0], remaining[1], remaining[2] if remaining[2:] else ""}.isdisjoint(_CLAUSES)
            )
        case ["UPDATE", _, *remaining]:
            return "=" in text and ("SET" in remaining[:2] or (remaining[:1] == ["AS"] and "SET" in remaining[2:3]))
        case ["INSERT" | "REPLACE", "INTO", _, *remaining]:
            return not _INSERTING.isdisjoint(remaining)
        case ["GRANT" | "REVOKE", *remaining]:
            return "ON" in remaining and not {"TO", "FROM"}.isdisjoint(remaining)
        case ["WITH" | "EXPLAIN", *remaining]:
            return not _CHANGING.isdisjoint(remaining) and "SELECT" in words
        case _:
            return False


def sql_risk(text: str) -> Iterator[RiskFinding]:
    for words in split_sql_statements(text):
        words_present = set(words)
        verb = words[0]
        if verb in {"DROP", "TRUNCATE"}:
            yield "CRITICAL", f"{verb} deletes whole tables"
        elif "DELETE" in words_present and "WHERE" not in words_present and verb in {"DELETE", "WITH", "EXPLAIN"}:
            yield "CRITICAL", "DELETE without WHERE deletes every row"
        elif verb in {"ALTER", "GRANT", "REVOKE"}:
            yield "HIGH", f"{verb} changes tables or rights"
        elif "UPDATE" in words_present and "WHERE" not in words_present and verb in {"UPDATE", "WITH"}:
            yield "HIGH", "UPDATE without WHERE changes every row"
        elif verb == "CREATE" and ((words[1:2] and words[1] in _RIGHTS) or "DEFINER" in words_present):
            yield "HIGH", f"CREATE {words[1]} changes who may do what"
        elif verb in _CHANGING or (verb == "WITH" and words_present & _CHANGING):
            yield "MEDIUM", f"{verb} changes rows"


_GRAPHQL_PART: Final = re.compile(r'#[^\n]*|"""[\s\S]*?(?:"""|$)|"(?:[^"\\\n]|\\.)*"?|[{}():]|\$?\w+')
_GRAPHQL_START: Final = re.compile(r"[\s,]*(?:#[^\n]*\n[\s,]*)*(?:mutation|query|subscription|fragment|\{)")
_DELETING: Final = re.compile(r"(?:delete|remove|destroy|drop|purge|erase|wipe|truncate|terminate)", re.IGNORECASE)


def graphql_risk(text: str) -> Iterator[RiskFinding]:
    """Judge the mutations of a GraphQL document; other text has no risk."""
    if "mutation" not in text or "{" not in text or not _GRAPHQL_START.match(text):
        return
    yield from (_field_risk(name) for name in _list_mutations(text))


def _list_mutations(text: str) -> Iterator[str]:
    braces = parentheses = 0
    mutates = False
    for symbol in _GRAPHQL_PART.findall(text):
        if symbol == "(":
            parentheses += 1
        elif symbol == ")":
            parentheses -= 1
        elif symbol == "{" and not parentheses:
            braces += 1
        elif symbol == "}" and not parentheses:
            braces -= 1
            mutates = mutates and braces > 0
        elif not braces and not parentheses and symbol in {"mutation", "query", "subscription", "fragment"}:
            mutates = symbol == "mutation"
        elif mutates and braces == 1 and not parentheses and symbol[0].isalpha():
            yield symbol


def _field_risk(name: str) -> RiskFinding:
    if _DELETING.match(name):
        return "HIGH", f"the mutation {name} deletes external data"
    return "MEDIUM", f"the mutation {name} changes external data"
