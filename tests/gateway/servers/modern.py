"""A server that speaks only the newer protocol, written by hand: it asks for input by its answers.

Its one argument is a file, in which it notes what it was asked for.
"""

import json
import sys
from pathlib import Path
from typing import Any

notes = Path(sys.argv[1])
SCHEMA = {"type": "object", "properties": {"question": {"type": "string"}}, "required": ["question"]}
KEPT = {"ttlMs": 0, "cacheScope": "private"}
FORM = {"type": "object", "properties": {"colour": {"type": "string"}}, "required": ["colour"]}


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def answer(asked: dict[str, Any], result: dict[str, Any]) -> None:
    say({"id": asked["id"], "result": {"resultType": "complete", **result}})


def called(asked: dict[str, Any]) -> None:
    params = asked["params"]
    responses = params.get("inputResponses")
    if responses is None:
        form = {"mode": "form", "message": params["arguments"]["question"], "requestedSchema": FORM}
        request = {"method": "elicitation/create", "params": form}
        answer(asked, {"resultType": "input_required", "inputRequests": {"q": request}, "requestState": "state-1"})
        return
    with notes.open("a") as file:
        file.write(json.dumps([params["requestState"], responses]) + "\n")
    said = responses["q"]
    told = f"they like {said['content']['colour']}" if said["action"] == "accept" else f"they said {said['action']}"
    answer(asked, {"content": [{"type": "text", "text": told}]})


for line in sys.stdin:
    asked = json.loads(line)
    match asked.get("method"):
        case "server/discover":
            answer(
                asked,
                {
                    "supportedVersions": ["2026-07-28"],
                    "capabilities": {"tools": {}},
                    "ttlMs": 0,
                    "cacheScope": "private",
                },
            )
        case "tools/list":
            tool = {"name": "ask", "description": "Ask.", "inputSchema": SCHEMA, "annotations": {"readOnlyHint": True}}
            answer(asked, {"tools": [tool], **KEPT})
        case "tools/call":
            called(asked)
        case _ if "id" in asked:
            say({"id": asked["id"], "error": {"code": -32601, "message": "Method not found"}})
        case _:
            pass
