"""The program that a hook runs: it takes one event to Halter's server, and prints what the server answers.

It starts for every tool call of another program, so it imports next to nothing: not even `socket`, whose enumerations
take longer to import than a decision takes to make. It fails closed: if anything goes wrong, it exits with 2 and says a
sentence on stderr, which every known program takes for a block.

Both sides prove that they know one key: the request and the answer are signed with it and with a nonce of the request.
A program in the server's place can neither read the key off the wire nor answer "yes".

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
LARGEST_EVENT = 16 * 1024 * 1024
"""Largest event in bytes, and largest answer; a larger one is blocked."""
BLOCKED = 2
"""The exit code that blocks a call."""
ATTENDED_VARIABLE = "CLAUDE_CODE_SESSION_ATTENDED"

_CHUNK = 1 << 18
_GRACE = 5


class Unusable(Exception):
    """Nothing that can be taken for an answer, and why."""


def sign(key: bytes, *parts: bytes) -> bytes:
    made = blake2b(key=key, digest_size=SIGNATURE_BYTES)
    for part in parts:
        made.update(len(part).to_bytes(8, "big") + part)
    return made.digest()


def pack(key: bytes, nonce: bytes, words: "tuple[bytes, ...]", *bodies: bytes) -> bytes:
    """Make a message: a line of words that ends with the lengths of the bodies, the bodies, and a signature."""
    head = b" ".join((PROTOCOL, *words, *(b"%d" % len(body) for body in bodies))) + b"\n"
    return b"".join((head, *bodies, sign(key, nonce, head, *bodies)))


def unpack(key: bytes, nonce: bytes, message: bytes, bodies: int) -> "tuple[list[bytes], list[bytes]]":
    """Read a whole message into its words and its bodies. Raises Unusable for anything else."""
    line, newline, rest = message.partition(b"\n")
    protocol, *words = line.split(b" ")
    if protocol != PROTOCOL or not newline or len(words) < bodies:
        raise Unusable("it speaks another version of the protocol: run `halter hook install` again")
    found, at = list[bytes](), 0
    for size in words[-bodies:]:
        if not size.isdigit():
            raise Unusable("its answer cannot be read")
        found.append(rest[at : at + int(size)])
        at += int(size)
    if len(rest) != at + SIGNATURE_BYTES or rest[at:] != sign(key, nonce, line + newline, *found):
        raise Unusable("its answer is incomplete, or is not signed with the key of this installation")
    return words[:-bodies], found


def read_event(descriptor: int) -> bytes:
    parts, size = list[bytes](), 0
    while part := os.read(descriptor, _CHUNK):
        parts.append(part)
        size += len(part)
        if size > LARGEST_EVENT:
            raise Unusable(f"the event is larger than {LARGEST_EVENT // 1024 // 1024} MiB")
    if not size:
        raise Unusable("the event on stdin is empty")
    return b"".join(parts)


def exchange(folder: str, words: "tuple[bytes, ...]", event: bytes, seconds: int) -> "tuple[int, bytes, bytes]":
    """Send an event to the server in a folder; return exit code, stdout and stderr."""
    key_file = os.open(f"{folder}/{KEY_FILE}", os.O_RDONLY | os.O_CLOEXEC)
    key, nonce = os.read(key_file, KEY_BYTES), os.urandom(NONCE_BYTES)
    if len(key) != KEY_BYTES:
        raise Unusable("its key is damaged: run `halter hook install` again")
    server = socket(AF_UNIX, SOCK_STREAM)
    server.settimeout(seconds)
    server.connect(f"{folder}/{SOCKET_FILE}")
    server.sendall(pack(key, nonce, (nonce.hex().encode(), *words), event))
    parts, size = list[bytes](), 0
    while part := server.recv(_CHUNK):
        parts.append(part)
        size += len(part)
        if size > 2 * LARGEST_EVENT:
            raise Unusable("its answer is too long")
    (code, *_), (out, err) = unpack(key, nonce, b"".join(parts), 2)
    return int(code), out, err


def explain(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError | ConnectionRefusedError):
        return "Halter's server does not run: start `halter serve` or `halter hook serve`"
    if isinstance(error, TimeoutError):
        return "Halter's server did not answer in time"
    return f"Halter's hook failed: {str(error) or type(error).__name__}"


def write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def main(argv: "list[str]") -> int:
    """Take the event on stdin to the server; the exit code is the answer's, or 2."""
    try:
        program, agent, folder, seconds = argv
        # A hang that no timeout below notices ends here: the shell around this program makes a block of it.
        alarm(int(seconds) + _GRACE)
        words = (program.encode(), agent.encode(), os.environ.get(ATTENDED_VARIABLE, "-")[:1].encode() or b"-")
        code, out, err = exchange(folder, words, read_event(0), int(seconds))
        write_all(2, err)
        write_all(1, out)
    except BaseException as error:  # noqa: BLE001 Everything that goes wrong here must block.
        write_all(2, f"{explain(error)}. This call is blocked.\n".encode("utf-8", "replace"))
        return BLOCKED
    return code


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
