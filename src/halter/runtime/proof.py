"""Checks a receipt against an exported journal, without a store."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from halter.core.ids import inbox_stream, session_stream
from halter.core.money import DOLLAR
from halter.core.ports import Stored
from halter.core.public_json import encode_public_json
from halter.core.text import shorten
from halter.journal.export import CheckedExport
from halter.state.receipt import make_receipt

PROOF_LIMITS: Final = (
    "A file cannot show that events were cut off its end before the export was written, or that journal and receipt "
    "were both made up. Signed checkpoints outside the store show that: run `halter verify`."
)
"""Added to the notes of every proof."""

MAX_LISTED_DIFFERENCES: Final = 50
"""Maximum number of differences that are listed."""


AMOUNTS: Final = ("held_usd", "cost_usd")
LATER_FIELDS: Final = frozenset({"format", "follows", "because"})
"""Fields of receipts that were added in 0.8."""
LATER_MODEL_FIELDS: Final = frozenset(
    {"cache_write_1h_tokens", "web_searches", "audio_tokens", "audio_cached_tokens", "code_executions"}
)
"""Fields of a receipt's models that were added in 0.8."""


class Proof(msgspec.Struct, frozen=True):
    """The result of checking a receipt against a journal: `ok`, and the differences."""

    ok: bool
    session: str
    events: int
    erased: int
    findings: tuple[str, ...]
    notes: tuple[str, ...]


def encode_receipt(events: Sequence[Stored], inbox: Sequence[Stored]) -> bytes:
    return encode_public_json(make_receipt(events, inbox))


def parse_receipt(text: bytes) -> dict[str, Any]:
    """Parse a receipt. Raises ValueError if it is not a receipt or has a key twice."""
    try:
        decoded = json.loads(text, object_pairs_hook=_reject_duplicate_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it cannot be read as a receipt ({error})") from error
    receipt = cast("dict[str, Any]", decoded) if isinstance(decoded, dict) else {}
    if type(receipt.get("session")) is not str:
        raise ValueError("it is not a receipt: it has no session")
    return receipt


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raise ValueError for a key that occurs twice: two readers could read different values."""
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key occurs twice")
    return values


def prove_receipt(raw: dict[str, Any], journal: CheckedExport) -> Proof:
    """Make the receipt again from the journal's events, and compare the two field by field."""
    session = str(raw["session"])
    events = journal.streams.get(session_stream(session), [])
    inbox = journal.streams.get(inbox_stream(session), [])
    findings = [*journal.findings]
    notes = [PROOF_LIMITS]
    if not events:
        findings.append(f"The export has no events of session {session}, to which this receipt belongs.")
    else:
        try:
            rebuilt = json.loads(encode_receipt(events, inbox))
        except KeyError as missing:
            findings.append(f"No receipt can be made from these events: the start of {missing} is missing.")
        else:
            findings += _compare_receipts(raw, rebuilt, events, notes)
    if journal.erased_count:
        notes.insert(0, f"{journal.erased_count} bodies were erased. The events can be verified without them.")
    listed_findings = (
        *findings[:MAX_LISTED_DIFFERENCES],
        *(
            [f"There are {len(findings) - MAX_LISTED_DIFFERENCES} more."]
            if len(findings) > MAX_LISTED_DIFFERENCES
            else []
        ),
    )
    return Proof(not findings, session, journal.events, journal.erased_count, listed_findings, tuple(notes))


def _compare_receipts(
    raw: dict[str, Any], rebuilt: dict[str, Any], events: Sequence[Stored], notes: list[str]
) -> list[str]:
    explanation = _explain_older_receipt(raw, events)
    if explanation:
        return [explanation]
    if "format" not in raw:
        rebuilt = downgrade_receipt(rebuilt)
        notes.insert(0, "The receipt was made by Halter 0.7 or earlier: its amounts are micro-dollars.")
    erased_count = raw.get("erased")
    if type(erased_count) is int and 0 <= erased_count < rebuilt["erased"]:
        notes.insert(0, "Some bodies were erased after the receipt was made.")
        raw = {**raw, "erased": rebuilt["erased"]}
    return [*compare_json("", raw, rebuilt)]


def downgrade_receipt(receipt: dict[str, Any]) -> dict[str, Any]:
    """Convert a receipt to the format before 0.8: no format number, amounts in micro-dollars."""
    overruns = [{**each, "amount": _micros(each["amount"], each["unit"])} for each in receipt["overruns"]]
    judges = [_rename_keys(each, {"most_usd": "usd", "cap_usd": "cap"}) for each in receipt["judges"]]
    earlier = {**receipt, "overruns": overruns, "judges": judges}
    for name in ("calls", "requests"):
        lines = (_rename_keys(each, {}) for each in receipt[name])
        # Before 0.8, lines omitted amounts of zero.
        earlier[name] = [{key: each for key, each in line.items() if each != 0 or key not in AMOUNTS} for line in lines]
    models = (_rename_keys(each, {}) for each in receipt["models"])
    earlier["models"] = [{key: each for key, each in line.items() if key not in LATER_MODEL_FIELDS} for line in models]
    earlier = _rename_keys(earlier, {"spent_by_purpose_usd": "spent"})
    return {key: each for key, each in earlier.items() if key not in LATER_FIELDS}


def _rename_keys(values: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(key, key): _micros(each) if key.endswith("_usd") else each for key, each in values.items()}


def _micros(amount: Any, unit: str = "usd") -> Any:
    match amount:
        case dict():
            return {key: _micros(each, unit) for key, each in cast("dict[str, Any]", amount).items()}
        case int() | float() if unit == "usd":
            return round(amount * DOLLAR)
        case _:
            return amount


def _explain_older_receipt(raw: dict[str, Any], events: Sequence[Stored]) -> str:
    """Describe a receipt that is correct but older than the export, because the session continued; else ""."""
    event_count = raw.get("events")
    if (
        type(event_count) is not int
        or not 0 < event_count < len(events)
        or events[event_count - 1].hash.hex() != raw.get("hash")
    ):
        return ""
    return (
        f"The receipt covers {event_count} events of the session, and the export has {len(events)}. Make a new one "
        "with `halter show --receipt`, or use an export of that time."
    )


def compare_json(where: str, claimed: Any, actual: Any) -> Iterator[str]:
    if isinstance(claimed, dict) and isinstance(actual, dict):
        yield from _compare_objects(where, cast("dict[str, Any]", claimed), cast("dict[str, Any]", actual))
    elif isinstance(claimed, list) and isinstance(actual, list):
        yield from _compare_lists(where, cast("list[Any]", claimed), cast("list[Any]", actual))
    elif not _is_same(claimed, actual):
        yield f"The receipt has {_show_value(claimed)} for {where}; the events give {_show_value(actual)}."


def _compare_objects(where: str, claimed: dict[str, Any], actual: dict[str, Any]) -> Iterator[str]:
    for key in (*actual, *(key for key in claimed if key not in actual)):
        inside = f"{where}.{key}" if where else key
        if key not in claimed:
            yield f"The receipt has no {inside}; the events give {_show_value(actual[key])}."
        elif key not in actual:
            yield f"The receipt has {_show_value(claimed[key])} for {inside}; the events give no such field."
        else:
            yield from compare_json(inside, claimed[key], actual[key])


def _compare_lists(where: str, claimed: list[Any], actual: list[Any]) -> Iterator[str]:
    if len(claimed) != len(actual):
        yield f"The receipt has {len(claimed)} entries in {where}; the events give {len(actual)}."
    for number, (claimed_item, actual_item) in enumerate(zip(claimed, actual, strict=False), 1):
        yield from compare_json(f"{where}[{number}]", claimed_item, actual_item)


def _is_same(claimed: Any, actual: Any) -> bool:
    # 1, 1.0 and true are three different values.
    return type(claimed) is type(actual) and bool(claimed == actual)


def _show_value(value: Any) -> str:
    return shorten(json.dumps(value, ensure_ascii=False, default=str), 80)
