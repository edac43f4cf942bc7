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


def answer(fields: dict[str, Any], result: dict[str, Any]) -> None:
    say({"id": fields["id"], "result": {"resultType": "complete", **result}})


def tell(listening: Any, method: str, **params: Any) -> None:
    """Tell of something on a stream that the client has opened."""
    meta = {"io.modelcontextprotocol/subscriptionId": listening}
    say({"method": f"notifications/{method}", "params": {**params, "_meta": meta}})


def change() -> None:
    tools[0]["description"] = "Something else entirely."
    for listening, fields in streams.items():
        if fields.get("toolsListChanged"):
            tell(listening, "tools/list_changed")


def think(fields: dict[str, Any], responses: dict[str, Any] | None) -> None:
    if responses is None:
        message = {"role": "user", "content": {"type": "text", "text": fields["params"]["arguments"]["about"]}}
        request = {"method": "sampling/createMessage", "params": {"messages": [message], "maxTokens": 50}}
        answer(fields, {"resultType": "input_required", "inputRequests": {"m": request}, "requestState": "s"})
        return
    answer(fields, {"content": [{"type": "text", "text": f"it thinks {responses['m']['content']['text']}"}]})


def begin(fields: dict[str, Any]) -> None:
    """Make a task of a call, or refuse it to a client that knows none."""
    params = fields["params"]
    result, capable = params["arguments"], params["_meta"]["io.modelcontextprotocol/clientCapabilities"]
    if TASKS not in capable.get("extensions", {}):
        say({"id": fields["id"], "error": {"code": -32021, "message": "Missing required client capability"}})
        return
    write(f"begin {result['what']}")
    jobs[result["what"]] = {**result, "said": {}}
    answer(fields, {**stand(result["what"], "working"), "resultType": "task"})


def stand(job: str, status: str, **more: Any) -> dict[str, Any]:
    at = {"createdAt": "2026-11-17T00:00:00Z", "lastUpdatedAt": "2026-11-17T00:00:00Z"}
    task = {"taskId": job, "status": status, "statusMessage": f"{job} is {status}", "ttlMs": None}
    return {**task, **at, "pollIntervalMs": 100, **more}


def tell_job(fields: dict[str, Any]) -> None:
    """Say how a job stands. It ends as its call said, once it has all the colours that it asks for."""
    params, job = fields["params"], jobs.get(fields["params"]["taskId"])
    if job is None:
        say({"id": fields["id"], "error": {"code": -32602, "message": "no such task"}})
        return
    job["said"] |= params.get("inputResponses", {})
    if fields["method"] != "tasks/get":
        write(f"{fields['method']} {job['what']} {json.dumps(params.get('inputResponses', {}))}")
        answer(fields, {})
        return
    form = {"mode": "form", "message": "Which?", "requestedSchema": FORM}
    open_still = {
        key: {"method": "elicitation/create", "params": form} for key in job["asks"] if key not in job["said"]
    }
    if open_still:
        answer(fields, stand(job["what"], "input_required", inputRequests=open_still))
        return
    colours = [result.get("content", {}).get("colour", result["action"]) for result in job["said"].values()]
    text = f"{job['what']} is done {' '.join(colours)}".strip()
    ended = {
        "completed": {"result": {"content": [{"type": "text", "text": text}], "isError": False}},
        "failed": {"error": {"code": -32603, "message": "it broke"}},
    }
    answer(fields, stand(job["what"], job["ends"], **ended.get(job["ends"], {}), **job.get("lies", {})))


def write(words: str) -> None:
    with notes.open("a") as file:
        file.write(words + "\n")


def called(fields: dict[str, Any]) -> None:
    params = fields["params"]
    if params["name"] == "job":
        begin(fields)
        return
    if params["name"] == "think":
        think(fields, params.get("inputResponses"))
        return
    if params["name"] == "forget":
        jobs.clear()
        answer(fields, {"content": []})
        return
    if params["name"] == "murmur":
        if params["_meta"].get("io.modelcontextprotocol/logLevel"):
            line = {"level": "warning", "logger": "inner", "data": {"words": params["arguments"]["words"]}}
            say({"method": "notifications/message", "params": line})
        for listening, payload in streams.items():
            for uri in payload.get("resourceSubscriptions", ()):
                tell(listening, "resources/updated", uri=uri)
        answer(fields, {"content": [{"type": "text", "text": "murmured"}]})
        return
    if params["name"] == "change":
        change()
        answer(fields, {"content": [{"type": "text", "text": "changed"}]})
        return
    responses = params.get("inputResponses")
    if responses is None:
        form = {"mode": "form", "message": params["arguments"]["question"], "requestedSchema": FORM}
        request = {"method": "elicitation/create", "params": form}
        answer(fields, {"resultType": "input_required", "inputRequests": {"q": request}, "requestState": "state-1"})
        return
    write(json.dumps([params["requestState"], responses]))
    result = responses["q"]
    text = (
        f"they like {result['content']['colour']}" if result["action"] == "accept" else f"they said {result['action']}"
    )
    answer(fields, {"content": [{"type": "text", "text": text}]})


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
