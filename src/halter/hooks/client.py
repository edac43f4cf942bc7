"""The program that a hook runs: it sends one event to Halter's server, and prints the server's answer.

It starts for every tool call of another program, so it imports almost nothing: even `socket`, with its enumerations,
takes longer to import than a decision takes to make. It fails closed: on any error it exits with 2 and prints a
sentence on stderr, which every known program treats as a block.

Both sides prove that they have the same key: the request and the answer are signed with it and with the request's
nonce. A program that poses as the server can neither read the key from the socket nor answer "yes".

It runs as `python -I -S client.py PROGRAM AGENT FOLDER SECONDS`, with the event on stdin.
"""

import os
import sys
from _blake2 import blake2b
from _signal import alarm  # pyright: ignore[reportMissingImports, reportUnknownVariableType] No stub has this module.
from _socket import AF_UNIX, SOCK_STREAM, socket

PROTOCOL = b"halter-hook/1"
KEY_FILE = "key"
SOCKET_FILE = "socket"
KEY_BYTES = 32
NONCE_BYTES = 16
SIGNATURE_BYTES = 32
MAX_EVENT_BYTES = 16 * 1024 * 1024
"""Maximum size of an event and of an answer, in bytes. A larger one blocks the call."""
BLOCKED = 2
"""The exit code that blocks a call."""
ATTENDED_VARIABLE = "CLAUDE_CODE_SESSION_ATTENDED"

_CHUNK = 1 << 18
_GRACE_SECONDS = 5


class Unusable(Exception):
    """The message cannot be used; the text is the reason."""


def sign(key: bytes, *parts: bytes) -> bytes:
    hasher = blake2b(key=key, digest_size=SIGNATURE_BYTES)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "big") + part)
    return hasher.digest()


def pack(key: bytes, nonce: bytes, words: "tuple[bytes, ...]", *bodies: bytes) -> bytes:
    """Make a message: a line of words that ends with the sizes of the bodies, then the bodies and a signature."""
    head = b" ".join((PROTOCOL, *words, *(b"%d" % len(body) for body in bodies))) + b"\n"
    return b"".join((head, *bodies, sign(key, nonce, head, *bodies)))


def unpack(key: bytes, nonce: bytes, message: bytes, body_count: int) -> "tuple[list[bytes], list[bytes]]":
    """Parse a whole message into its words and its bodies. Raises Unusable for anything else."""
    line, newline, payload = message.partition(b"\n")
    protocol, *words = line.split(b" ")
    if protocol != PROTOCOL or not newline or len(words) < body_count:
        raise Unusable("the protocol version differs; run `halter hook install` again")
    bodies, offset = list[bytes](), 0
    for size in words[-body_count:]:
        if not size.isdigit():
            raise Unusable("the answer cannot be read")
        bodies.append(payload[offset : offset + int(size)])
        offset += int(size)
    if len(payload) != offset + SIGNATURE_BYTES or payload[offset:] != sign(key, nonce, line + newline, *bodies):
        raise Unusable("the answer is incomplete, or is not signed with the key of this installation")
    return words[:-body_count], bodies


def read_event(descriptor: int) -> bytes:
    chunks, size = list[bytes](), 0
    while chunk := os.read(descriptor, _CHUNK):
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_EVENT_BYTES:
            raise Unusable(f"the event is larger than {MAX_EVENT_BYTES // 1024 // 1024} MiB")
    if not size:
        raise Unusable("the event on stdin is empty")
    return b"".join(chunks)


def exchange(folder: str, words: "tuple[bytes, ...]", event: bytes, seconds: int) -> "tuple[int, bytes, bytes]":
    """Send an event to the server in a folder; return exit code, stdout and stderr."""
    key_file = os.open(f"{folder}/{KEY_FILE}", os.O_RDONLY | os.O_CLOEXEC)
    key, nonce = os.read(key_file, KEY_BYTES), os.urandom(NONCE_BYTES)
    if len(key) != KEY_BYTES:
        raise Unusable("the key file is damaged; run `halter hook install` again")
    server = socket(AF_UNIX, SOCK_STREAM)
    server.settimeout(seconds)
    server.connect(f"{folder}/{SOCKET_FILE}")
    server.sendall(pack(key, nonce, (nonce.hex().encode(), *words), event))
    chunks, size = list[bytes](), 0
    while chunk := server.recv(_CHUNK):
        chunks.append(chunk)
        size += len(chunk)
        if size > 2 * MAX_EVENT_BYTES:
            raise Unusable("the answer is too large")
    (code, *_), (stdout, stderr) = unpack(key, nonce, b"".join(chunks), 2)
    return int(code), stdout, stderr


def explain(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError | ConnectionRefusedError):
        return "Halter's server is not running; start `halter serve` or `halter hook serve`"
    if isinstance(error, TimeoutError):
        return "Halter's server did not answer in time"
    return f"Halter's hook failed: {str(error) or type(error).__name__}"


def write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def main(argv: "list[str]") -> int:
    """Send the event on stdin to the server; return the exit code of the answer, or 2."""
    try:
        program, agent, folder, seconds = argv
        # The alarm ends a hang that no timeout below detects. The shell around this program then blocks the call.
        alarm(int(seconds) + _GRACE_SECONDS)
        words = (program.encode(), agent.encode(), os.environ.get(ATTENDED_VARIABLE, "-")[:1].encode() or b"-")
        code, stdout, stderr = exchange(folder, words, read_event(0), int(seconds))
        write_all(2, stderr)
        write_all(1, stdout)
    except BaseException as error:  # noqa: BLE001 Every error here must block the call.
        write_all(2, f"{explain(error)}. This call is blocked.\n".encode("utf-8", "replace"))
        return BLOCKED
    return code


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
