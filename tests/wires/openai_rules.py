"""What OpenAI's own API answers 400 to, where a lenient server would answer: in the words of the real one."""

import re
from typing import Any

REASONS = re.compile(r"gpt-(?:5\.6|[6-9])")
"""The models that take function tools over Chat Completions only while they do not reason."""
NEVER_OFF = re.compile(r"gpt-6-astra|gpt-6\.1-sol")


def object_to(path: str, body: dict[str, Any], sealed: dict[str, str]) -> str:
    """Say what is wrong with a request; empty if nothing is. `sealed` maps encrypted reasoning to its model."""
    if path.startswith("/v1/chat/completions"):
        return object_to_chat(body)
    items = body["input"] if isinstance(body["input"], list) else []
    return object_to_settings(body) or next(
        filter(None, (object_to_item(items, at, body, sealed) for at, _ in enumerate(items))), ""
    )


def object_to_chat(body: dict[str, Any]) -> str:
    reasons = REASONS.match(body["model"]) and body.get("reasoning_effort") != "none"
    if reasons and any(tool["type"] == "function" for tool in body.get("tools", [])):
        what = f"Function tools with reasoning_effort are not supported for {body['model']} in /v1/chat/completions."
        return f"{what} To use function tools, use /v1/responses or set reasoning_effort to 'none'."
    return ""


def object_to_settings(body: dict[str, Any]) -> str:
    model, effort = body["model"], body.get("reasoning", {}).get("effort")
    reasons = REASONS.match(model) is not None
    if "messages" in body or "max_tokens" in body or "max_completion_tokens" in body:
        return "Unsupported parameter: this is not the Chat Completions API."
    if body.get("max_output_tokens", 16) < 16:
        return "Invalid 'max_output_tokens': integer below minimum value. Expected a value >= 16."
    if not reasons and "reasoning.encrypted_content" in body.get("include", []):
        return "Encrypted content is not supported with this model."
    if not reasons and "reasoning" in body:
        return "Unsupported parameter: 'reasoning.effort' is not supported with this model."
    if effort == "minimal" or (effort == "none" and NEVER_OFF.match(model)):
        return f"Unsupported value: '{effort}' is not supported with the '{model}' model."
    if reasons and effort != "none" and body.get("temperature") is not None:
        return "Unsupported parameter: 'temperature' is not supported with this model."
    marked = [part for item in body["input"] for part in item.get("content") or [] if "prompt_cache_breakpoint" in part]
    if not reasons and ("prompt_cache_options" in body or marked):
        return "Prompt cache options are not supported with this model."
    if body.get("prompt_cache_options", {}).get("comparison_response_id"):
        return "Response not found."
    return ""


def object_to_item(items: list[dict[str, Any]], at: int, body: dict[str, Any], sealed: dict[str, str]) -> str:
    item = items[at]
    key, kind = item.get("id"), item.get("type", "message")
    if key and kind == "reasoning":
        if not item.get("encrypted_content") and body.get("store") is False:
            return missing(key)
        if sealed.get(item["encrypted_content"]) != body["model"]:
            return f"The encrypted content for item {key} could not be verified."
        following = items[at + 1] if at + 1 < len(items) else {}
        by_model = following.get("role") == "assistant" or following.get("type") in {"function_call", "reasoning"}
        return "" if by_model else f"Item '{key}' of type 'reasoning' was provided without its required following item."
    if key and kind == "function_call" and (not at or items[at - 1].get("type") != "reasoning"):
        return f"Item '{key}' of type 'function_call' was provided without its required 'reasoning' item."
    if key and body.get("store") is False:
        return missing(key)
    if kind == "function_call_output" and item["call_id"] not in {each.get("call_id") for each in items[:at]}:
        return f"No tool call found for function call output with call_id {item['call_id']}."
    if kind == "function_call" and item["call_id"] not in {
        each.get("call_id") for each in items[at:] if each.get("type") == "function_call_output"
    }:
        return f"No tool output found for function call {item['call_id']}."
    return ""


def find_code(objection: str) -> str | None:
    return "invalid_encrypted_content" if objection.startswith("The encrypted content") else None


def missing(key: str) -> str:
    return f"Item with id '{key}' not found. Items are not persisted when `store` is set to false."
