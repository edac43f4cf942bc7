"""Programs that fetch, send and listen."""

from collections.abc import Iterator, Mapping
from typing import Final

from halter.guard.commands import Command
from halter.guard.judges.found import Found, Judge, Runs, has, operands, values_of
from halter.guard.places import host_risk, path_risk, url_risk

_DELETING: Final = frozenset({"DELETE", "PURGE"})
_CHANGING: Final = frozenset({"PUT", "PATCH", "POST"})
_SENDING: Final = (
    *("--data", "--data-raw", "--data-binary", "--data-urlencode", "--json", "--form", "--form-string"),
    *("--upload-file", "--post-file", "--post-data", "--body-file", "--body-data"),
)


def method_risk(method: str) -> Iterator[Found]:
    """Judge a method of HTTP."""
    if method.upper() in _DELETING:
        yield "HIGH", f"{method.upper()} deletes something outside"
    elif method.upper() in _CHANGING:
        yield "MEDIUM", f"{method.upper()} changes something outside"


def _fetch(command: Command) -> Iterator[Found]:
    words = command.argv[1:]
    sends = has(words, "dFT", *_SENDING)
    yield "HIGH" if sends else "MEDIUM", "data is sent to a host" if sends else "something is fetched"
    for method in values_of(words, "-X", "--request", "--method"):
        yield from method_risk(method)
    for path in values_of(words, "-o", "--output", "-O", "--output-document", "-P", "--directory-prefix", "-D"):
        yield from path_risk(path, "write")
    for line in values_of(words, "--use-askpass"):
        yield Runs(line)
    if has(words, "K", "--config"):
        yield "HIGH", "what is fetched stands in a file"
    for word in operands(words):
        yield from _address(word)


def _address(word: str) -> Iterator[Found]:
    """Judge what may be an address: an URL, or a host without a scheme."""
    if "://" in word:
        yield from url_risk(word)
        return
    host = word.partition("/")[0].partition("?")[0].rsplit("@", maxsplit=1)[-1]
    host = host.partition(":")[0] if host.count(":") == 1 else host.strip("[]")
    if host and (host[0].isdigit() or host == "localhost" or host.startswith("metadata") or ":" in host):
        yield from (found for found in host_risk(host.lower()) if found[0] != "MEDIUM")


def _httpie(command: Command) -> Iterator[Found]:
    words = operands(command.argv[1:])
    yield "MEDIUM", "something is fetched"
    if words:
        yield from method_risk(words[0])
    sends = any("=" in word and "==" not in word for word in words[1:])
    if sends:
        yield "HIGH", "data is sent to a host"
    for word in words:
        yield from _address(word)


def _copy_over(command: Command) -> Iterator[Found]:
    words = command.argv[1:]
    for line in values_of(words, "-S"):
        yield Runs(line)
    for option in values_of(words, "-o"):
        if "command" in option.lower():
            yield Runs(option.replace("=", " ", 1).partition(" ")[2])
    *sources, target = operands(words) or [""]
    yield "HIGH" if ":" in target else "MEDIUM", "files go to another machine" if ":" in target else "files are fetched"
    yield from path_risk(target, "write")
    for path in sources:
        yield from path_risk(path, "read")


def _listener(command: Command) -> Iterator[Found]:
    words = command.argv[1:]
    yield "HIGH", f"{command.program} opens a way in or out"
    for line in values_of(words, "-e", "-c", "--exec", "--sh-exec"):
        yield "CRITICAL", "a program is given to whoever is at the other end"
        yield Runs(line)
    for word in words:
        kind, _, line = word.partition(":")
        if kind.upper() in {"EXEC", "SYSTEM", "SHELL"}:
            yield "CRITICAL", "a program is given to whoever is at the other end"
            yield Runs(line.partition(",")[0])


def _ssh(command: Command) -> Iterator[Found]:
    """Judge a way to another machine; what runs there is judged apart."""
    yield "MEDIUM", "something runs on another machine"
    if command.is_fed:
        yield "HIGH", "data goes to another machine"
    if has(command.argv[1:], "RLD"):
        yield "HIGH", "a way in or out is opened"


def _mail(command: Command) -> Iterator[Found]:
    yield "HIGH", "a message goes to somebody"
    for path in (*values_of(command.argv[1:], "-a", "--attach"), *command.reads):
        yield from path_risk(path, "read")


NETWORK: Final[Mapping[str, Judge]] = {
    **dict.fromkeys(("curl", "wget", "aria2c", "axel", "fetch"), _fetch),
    **dict.fromkeys(("http", "https", "xh", "xhs"), _httpie),
    **dict.fromkeys(("scp", "sftp"), _copy_over),
    **dict.fromkeys(("nc", "ncat", "netcat", "socat", "telnet"), _listener),
    **dict.fromkeys(("mail", "mailx", "mutt", "sendmail", "msmtp", "swaks"), _mail),
    **dict.fromkeys(("ssh", "slogin", "autossh", "mosh"), _ssh),
}
