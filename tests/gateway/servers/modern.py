"""A server that speaks only the newer protocol, written by hand: it asks for input by its answers, and knows tasks.

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


def tell(listening: Any, method: str, **params: Any) -> None:
    """Tell of something on a stream that the client has opened."""
    meta = {"io.modelcontextprotocol/subscriptionId": listening}
    say({"method": f"notifications/{method}", "params": {**params, "_meta": meta}})


def change() -> None:
    tools[0]["description"] = "Something else entirely."
    for listening, wanted in streams.items():
        if wanted.get("toolsListChanged"):
            tell(listening, "tools/list_changed")


def think(asked: dict[str, Any], responses: dict[str, Any] | None) -> None:
    if responses is None:
        message = {"role": "user", "content": {"type": "text", "text": asked["params"]["arguments"]["about"]}}
        request = {"method": "sampling/createMessage", "params": {"messages": [message], "maxTokens": 50}}
        answer(asked, {"resultType": "input_required", "inputRequests": {"m": request}, "requestState": "s"})
        return
    answer(asked, {"content": [{"type": "text", "text": f"it thinks {responses['m']['content']['text']}"}]})


def begin(asked: dict[str, Any]) -> None:
    """Make a task of a call, or refuse it to a client that knows none."""
    params = asked["params"]
    given, capable = params["arguments"], params["_meta"]["io.modelcontextprotocol/clientCapabilities"]
    if TASKS not in capable.get("extensions", {}):
        say({"id": asked["id"], "error": {"code": -32021, "message": "Missing required client capability"}})
        return
    write(f"begin {given['what']}")
    jobs[given["what"]] = {**given, "said": {}}
    answer(asked, {**stand(given["what"], "working"), "resultType": "task"})


def stand(job: str, status: str, **more: Any) -> dict[str, Any]:
    at = {"createdAt": "2026-11-17T00:00:00Z", "lastUpdatedAt": "2026-11-17T00:00:00Z"}
    task = {"taskId": job, "status": status, "statusMessage": f"{job} is {status}", "ttlMs": None}
    return {**task, **at, "pollIntervalMs": 100, **more}


def tell_job(asked: dict[str, Any]) -> None:
    """Say how a job stands. It ends as its call said, once it has all the colours that it asks for."""
    params, job = asked["params"], jobs.get(asked["params"]["taskId"])
    if job is None:
        say({"id": asked["id"], "error": {"code": -32602, "message": "no such task"}})
        return
    job["said"] |= params.get("inputResponses", {})
    if asked["method"] != "tasks/get":
        write(f"{asked['method']} {job['what']} {json.dumps(params.get('inputResponses', {}))}")
        answer(asked, {})
        return
    form = {"mode": "form", "message": "Which?", "requestedSchema": FORM}
    open_still = {
        key: {"method": "elicitation/create", "params": form} for key in job["asks"] if key not in job["said"]
    }
    if open_still:
        answer(asked, stand(job["what"], "input_required", inputRequests=open_still))
        return
    colours = [said.get("content", {}).get("colour", said["action"]) for said in job["said"].values()]
    text = f"{job['what']} is done {' '.join(colours)}".strip()
    ended = {
        "completed": {"result": {"content": [{"type": "text", "text": text}], "isError": False}},
        "failed": {"error": {"code": -32603, "message": "it broke"}},
    }
    answer(asked, stand(job["what"], job["ends"], **ended.get(job["ends"], {}), **job.get("lies", {})))


def write(words: str) -> None:
    with notes.open("a") as file:
        file.write(words + "\n")


def called(asked: dict[str, Any]) -> None:
    params = asked["params"]
    if params["name"] == "job":
        begin(asked)
        return
    if params["name"] == "think":
        think(asked, params.get("inputResponses"))
        return
    if params["name"] == "forget":
        jobs.clear()
        answer(asked, {"content": []})
        return
    if params["name"] == "murmur":
        if params["_meta"].get("io.modelcontextprotocol/logLevel"):
            line = {"level": "warning", "logger": "inner", "data": {"words": params["arguments"]["words"]}}
            say({"method": "notifications/message", "params": line})
        for listening, wanted in streams.items():
            for uri in wanted.get("resourceSubscriptions", ()):
                tell(listening, "resources/updated", uri=uri)
        answer(asked, {"content": [{"type": "text", "text": "murmured"}]})
        return
    if params["name"] == "change":
        change()
        answer(asked, {"content": [{"type": "text", "text": "changed"}]})
        return
    responses = params.get("inputResponses")
    if responses is None:
        form = {"mode": "form", "message": params["arguments"]["question"], "requestedSchema": FORM}
        request = {"method": "elicitation/create", "params": form}
        answer(asked, {"resultType": "input_required", "inputRequests": {"q": request}, "requestState": "state-1"})
        return
    write(json.dumps([params["requestState"], responses]))
    said = responses["q"]
    told = f"they like {said['content']['colour']}" if said["action"] == "accept" else f"they said {said['action']}"
    answer(asked, {"content": [{"type": "text", "text": told}]})


READ = {"readOnlyHint": True}
TASKS = "io.modelcontextprotocol/tasks"
jobs: dict[str, dict[str, Any]] = {}
tools: list[dict[str, Any]] = [
    {"name": "ask", "description": "Ask.", "inputSchema": SCHEMA, "annotations": READ},
    {"name": "think", "description": "Think.", "inputSchema": {"type": "object"}, "annotations": READ},
    {"name": "murmur", "description": "Log.", "inputSchema": {"type": "object"}, "annotations": READ},
    {"name": "job", "description": "Take long.", "inputSchema": {"type": "object"}},
    {"name": "forget", "description": "Forget all tasks.", "inputSchema": {"type": "object"}, "annotations": READ},
    {"name": "change", "description": "Become another.", "inputSchema": {"type": "object"}, "annotations": READ},
]
streams: dict[Any, dict[str, Any]] = {}
for line in sys.stdin:
    asked = json.loads(line)
    match asked.get("method"):
        case "server/discover":
            answer(
                asked,
                {
                    "supportedVersions": ["2026-07-28"],
                    "capabilities": {
                        "tools": {},
                        "resources": {"subscribe": True},
                        "logging": {},
                        "extensions": {TASKS: {}},
                    },
                    "ttlMs": 0,
                    "cacheScope": "private",
                },
            )
        case "tools/list":
            answer(asked, {"tools": tools, **KEPT})
        case "resources/list":
            answer(asked, {"resources": [{"uri": "modern://all", "name": "all"}], **KEPT})
        case "notifications/cancelled":
            streams.pop(asked["params"]["requestId"], None)
        case "subscriptions/listen":
            wanted = streams[asked["id"]] = asked["params"]["notifications"]
            tell(asked["id"], "subscriptions/acknowledged", notifications=wanted)
        case "tools/call":
            called(asked)
        case "tasks/get" | "tasks/update" | "tasks/cancel":
            tell_job(asked)
        case _ if "id" in asked:
            say({"id": asked["id"], "error": {"code": -32601, "message": "Method not found"}})
        case _:
            pass
