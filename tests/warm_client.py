"""Has a program forked from the process of `warm.py`, and stands for it: streams, signals and exit code.

A Python without its usual modules runs this in a few milliseconds:
`python -IS warm_client.py SOCKET IMPORTS halter|python WORD…`, where the forking process imports IMPORTS once.
"""

import json
import os
import signal
import socket
import struct
import sys


def main() -> int:
    place, imports, kind, *words = sys.argv[1:]
    request = {
        "kind": kind,
        "words": words,
        "imports": [name for name in imports.split(",") if name],
        "environ": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109  pathlib takes longer to import than all else here
        "terminal": False,
    }
    text = json.dumps(request).encode()
    line = socket.socket(socket.AF_UNIX)
    line.connect(place)
    socket.send_fds(line, [struct.pack("!I", len(text))], [0, 1, 2])
    line.sendall(text)
    (pid,) = struct.unpack("!i", line.recv(4))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    (status,) = struct.unpack("!i", line.recv(4))
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
