"""The risk of programs that fetch and send."""

from collections.abc import Iterator, Mapping
from typing import Final

from halter.core.text import expand_names
from halter.risk.commands import Command
from halter.risk.places import host_risk, path_risk, url_risk
from halter.risk.programs import Judge, JudgeFinding, NestedCommand, has_flag, list_operands, list_option_values

_DELETING_METHODS: Final = frozenset({"DELETE", "PURGE"})
_CHANGING: Final = frozenset({"PUT", "PATCH", "POST"})
_SENDING_OPTIONS: Final = (
    *("--data", "--data-raw", "--data-binary", "--data-urlencode", "--json", "--form", "--form-string"),
    *("--upload-file", "--post-file", "--post-data", "--body-file", "--body-data"),
)


def method_risk(method: str) -> Iterator[JudgeFinding]:
    if method.upper() in _DELETING_METHODS:
        yield "HIGH", f"{method.upper()} deletes external data"
    elif method.upper() in _CHANGING:
        yield "MEDIUM", f"{method.upper()} changes an external system"


def _fetch(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    sends_data = has_flag(words, "dFT", *_SENDING_OPTIONS)
    yield "HIGH" if sends_data else "MEDIUM", "sends data to a host" if sends_data else "fetches data"
    for method in list_option_values(words, "-X", "--request", "--method"):
        yield from method_risk(method)
    for path in list_option_values(
        words, "-o", "--output", "-O", "--output-document", "-P", "--directory-prefix", "-D"
    ):
        yield from path_risk(path, "write")
    for line in list_option_values(words, "--use-askpass"):
        yield NestedCommand(line)
    if has_flag(words, "K", "--config"):
        yield "HIGH", "reads its options from a file"
    for word in list_operands(words):
        yield from _address_risk(word)


def _address_risk(word: str) -> Iterator[JudgeFinding]:
    """Judge a possible address: a URL, or a host without a scheme."""
    if "://" in word:
        yield from url_risk(word)
        return
    host = word.partition("/")[0].partition("?")[0].rsplit("@", maxsplit=1)[-1]
    host = host.partition(":")[0] if host.count(":") == 1 else host.strip("[]")
    if host and (host[0].isdigit() or host == "localhost" or host.startswith("metadata") or ":" in host):
        yield from (finding for finding in host_risk(host.lower()) if finding[0] != "MEDIUM")


def _httpie(command: Command) -> Iterator[JudgeFinding]:
    words = list_operands(command.argv[1:])
    yield "MEDIUM", "fetches data"
    if words:
        yield from method_risk(words[0])
    sends_data = any("=" in word and "==" not in word for word in words[1:])
    if sends_data:
        yield "HIGH", "sends data to a host"
    for word in words:
        yield from _address_risk(word)


def _remote_copy(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    for line in list_option_values(words, "-S"):
        yield NestedCommand(line)
    for option in list_option_values(words, "-o"):
        if "command" in option.lower():
            yield NestedCommand(option.replace("=", " ", 1).partition(" ")[2])
    *sources, target = list_operands(words) or [""]
    yield "HIGH" if ":" in target else "MEDIUM", "sends files to another machine" if ":" in target else "fetches files"
    yield from path_risk(target, "write")
    for path in sources:
        yield from path_risk(path, "read")


def _listener(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    yield "HIGH", f"{command.program} opens a network connection"
    for line in list_option_values(words, "-e", "-c", "--exec", "--sh-exec"):
        yield "CRITICAL", "connects a program to the other end of a connection"
        yield NestedCommand(line)
    for word in words:
        kind, _, line = word.partition(":")
        if kind.upper() in {"EXEC", "SYSTEM", "SHELL"}:
            yield "CRITICAL", "connects a program to the other end of a connection"
            yield NestedCommand(line.partition(",")[0])


def _ssh(command: Command) -> Iterator[JudgeFinding]:
    """Judge a remote login; what runs there is judged separately."""
    yield "MEDIUM", "runs commands on another machine"
    if command.is_fed:
        yield "HIGH", "sends data to another machine"
    if has_flag(command.argv[1:], "RLD"):
        yield "HIGH", "opens a tunnel"


def _mail(command: Command) -> Iterator[JudgeFinding]:
    yield "HIGH", "sends a message"
    for path in (*list_option_values(command.argv[1:], "-a", "--attach"), *command.reads):
        yield from path_risk(path, "read")


NETWORK_JUDGES: Final[Mapping[str, Judge]] = expand_names(
    {
        "curl wget aria2c axel fetch": _fetch,
        "http https xh xhs": _httpie,
        "scp sftp": _remote_copy,
        "nc ncat netcat socat telnet": _listener,
        "mail mailx mutt sendmail msmtp swaks": _mail,
        "ssh slogin autossh mosh": _ssh,
    }
)
