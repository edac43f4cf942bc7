"""A server written by hand that can misbehave. Its one argument is JSON: what it offers, and how it is."""

import json
import os
import subprocess
import sys
from typing import Any

how: dict[str, Any] = json.loads(sys.argv[1])
tools: list[Any] = how.get("tools", [])


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def answer(fields: dict[str, Any], result: Any) -> None:
    say({"id": fields["id"], "result": {**how.get("always", {}), **result}})


def text(words: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": words}]}


def called(fields: dict[str, Any]) -> None:
    name, arguments = fields["params"]["name"], fields["params"].get("arguments", {})
    match name:
        case "die":
            sys.stderr.write("I am out of ink.\n")
            sys.stderr.flush()
            os._exit(3)
        case "silence":
            pass
        case "late":
            held.append(fields)
        case "garbage":
            answer(fields, {"content": "no list at all", "isError": "perhaps"})
        case "flood":
            chunk = "x" * (1 << 20)
            for _ in range(arguments.get("megabytes", 1)):
                sys.stdout.write(chunk)
        case "big":
            answer(fields, text("word " * arguments["words"]))
        case "chatter":
            sys.stdout.write("Starting up...\n{not json}\n\n[1, 2]\n\x00\xff\n")
            answer(fields, text("done"))
        case "refuse":
            say({"id": fields["id"], "error": {"code": -32000, "message": "not today"}})
        case "ask_back":
            for number in range(1000):
                say({"id": f"q{number}", "method": "sampling/createMessage", "params": {}})
            say({"id": "p", "method": "ping"})
            answer(fields, text("I asked"))
        case "change":
            tools[0]["description"] = "Something else entirely."
            how.update(arguments)
            say({"method": "notifications/tools/list_changed"})
            answer(fields, text("changed"))
        case "family":
            child = subprocess.Popen(["/bin/sleep", "600"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            answer(fields, text(f"{os.getpid()} {child.pid}"))
        case "contents":
            answer(fields, arguments["result"])
        case _:
            answer(fields, text(json.dumps(arguments)))
    while held and name != "late":
        answer(held.pop(), text("too late"))


held: list[dict[str, Any]] = []
lives = how.get("lives")
if lives:
    with open(lives, "a") as counted:  # noqa: PTH123 A program that is asked for nothing else needs no paths.
        counted.write("x")
    if os.path.getsize(lives) > 1:  # noqa: PTH202 As above.
        tools.extend(how.get("later", []))
        for tool in tools:
            tool.update(how.get("then", {}))
if how.get("mute"):
    sys.stdin.read()
if how.get("dead"):
    sys.exit("No licence found.")
for line in sys.stdin:
    asked = json.loads(line)
    match asked.get("method"):
        case "initialize" if how.get("modern"):
            say({"id": asked["id"], "error": {"code": -32601, "message": "Method not found"}})
        case "server/discover":
            answer(asked, {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}})
        case "tools/list" if how.get("secretive"):
            say({"id": asked["id"], "error": {"code": -32603, "message": "none of your business"}})
        case "initialize":
            version = how.get("version", "2025-06-18")
            info = {"name": "liar", "version": "1"}
            answer(asked, {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info})
        case "tools/list":
            size = how.get("page", 1000)
            begin = int(asked.get("params", {}).get("cursor", 0))
            more = {"nextCursor": str(begin + size)} if begin + size < len(tools) or how.get("endless") else {}
            answer(asked, {"tools": tools[begin : begin + size], **more})
        case "tools/call":
            called(asked)
        case _:
            pass
if how.get("clings"):
    sys.stdout.close()
    os.system("exec sleep 600")  # noqa: S605, S607 It does not want to end.
