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
    "What no file can show by itself: that events were cut off the end before the export was written, or that journal "
    "and receipt were both made up. The signed checkpoints outside of the store show that: `halter verify`."
)
"""Added to the notes of every proof."""

MAX_DIFFERENCES_SHOWN: Final = 50
"""Most differences that are listed."""


AMOUNTS: Final = ("held_usd", "cost_usd")
LATER_FIELDS: Final = frozenset({"format", "follows", "because"})
"""Fields that receipts have since 0.8."""
LATER_MODEL_FIELDS: Final = frozenset(
    {"cache_write_1h_tokens", "web_searches", "audio_tokens", "audio_cached_tokens", "code_executions"}
)
"""Fields that the models of a receipt have since 0.8."""


class Proof(msgspec.Struct, frozen=True):
    """Whether a receipt follows from a journal, and the differences."""

    ok: bool
    session: str
    events: int
    erased: int
    findings: tuple[str, ...]
    notes: tuple[str, ...]


def encode_receipt(events: Sequence[Stored], inbox: Sequence[Stored]) -> bytes:
    return encode_public_json(make_receipt(events, inbox))


def parse_receipt(text: bytes) -> dict[str, Any]:
    """Parses a receipt. Raises ValueError where it is none, or has a key twice."""
    try:
        said = json.loads(text, object_pairs_hook=_reject_duplicate_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it cannot be read as a receipt ({error})") from error
    found = cast("dict[str, Any]", said) if isinstance(said, dict) else {}
    if type(found.get("session")) is not str:
        raise ValueError("it is no receipt: it names no session")
    return found


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuses a key that occurs twice: two readers could read different values."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("something in it is said twice")
    return found


def prove_receipt(raw: dict[str, Any], journal: CheckedExport) -> Proof:
    """Makes the receipt again from the journal's events, and compares the two field by field."""
    session = str(raw["session"])
    events = journal.streams.get(session_stream(session), [])
    inbox = journal.streams.get(inbox_stream(session), [])
    findings = [*journal.findings]
    notes = [PROOF_LIMITS]
    if not events:
        findings.append(f"The journal holds no event of session {session}, whose receipt this is.")
    else:
        try:
            made = json.loads(encode_receipt(events, inbox))
        except KeyError as missing:
            findings.append(f"No receipt can be made of these events: the beginning of {missing} is missing.")
        else:
            findings += _compare_receipts(raw, made, events, notes)
    if journal.erased:
        notes.insert(0, f"{journal.erased} bodies were erased; what happened can be checked without them.")
    told = (
        *findings[:MAX_DIFFERENCES_SHOWN],
        *(
            [f"There are {len(findings) - MAX_DIFFERENCES_SHOWN} more."]
            if len(findings) > MAX_DIFFERENCES_SHOWN
            else []
        ),
    )
    return Proof(not findings, session, journal.events, journal.erased, told, tuple(notes))


def _compare_receipts(
    raw: dict[str, Any], made: dict[str, Any], events: Sequence[Stored], notes: list[str]
) -> list[str]:
    earlier = _explain_older_receipt(raw, events)
    if earlier:
        return [earlier]
    if "format" not in raw:
        made = downgrade_receipt(made)
        notes.insert(0, "The receipt was made by Halter 0.7 or earlier: its amounts are micro-dollars.")
    erased = raw.get("erased")
    if type(erased) is int and 0 <= erased < made["erased"]:
        notes.insert(0, "Some of it was erased after the receipt was made.")
        raw = {**raw, "erased": made["erased"]}
    return [*compare_json("", raw, made)]


def downgrade_receipt(made: dict[str, Any]) -> dict[str, Any]:
    """Converts a receipt to the form before 0.8: no format number, amounts in micro-dollars."""
    overruns = [{**each, "amount": _micros(each["amount"], each["unit"])} for each in made["overruns"]]
    judges = [_rename_keys(each, {"most_usd": "usd", "cap_usd": "cap"}) for each in made["judges"]]
    earlier = {**made, "overruns": overruns, "judges": judges}
    for name in ("calls", "requests"):
        lines = (_rename_keys(each, {}) for each in made[name])
        # Lines left out an amount of nothing.
        earlier[name] = [{key: each for key, each in line.items() if each != 0 or key not in AMOUNTS} for line in lines]
    models = (_rename_keys(each, {}) for each in made["models"])
    earlier["models"] = [{key: each for key, each in line.items() if key not in LATER_MODEL_FIELDS} for line in models]
    earlier = _rename_keys(earlier, {"spent_by_purpose_usd": "spent"})
    return {key: each for key, each in earlier.items() if key not in LATER_FIELDS}


def _rename_keys(made: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(key, key): _micros(each) if key.endswith("_usd") else each for key, each in made.items()}


def _micros(amount: Any, unit: str = "usd") -> Any:
    match amount:
        case dict():
            return {key: _micros(each, unit) for key, each in cast("dict[str, Any]", amount).items()}
        case int() | float() if unit == "usd":
            return round(amount * DOLLAR)
        case _:
            return amount


def _explain_older_receipt(raw: dict[str, Any], events: Sequence[Stored]) -> str:
    """Says that a receipt is only older than the export, because the session went on; else ""."""
    seen = raw.get("events")
    if type(seen) is not int or not 0 < seen < len(events) or events[seen - 1].hash.hex() != raw.get("hash"):
        return ""
    return (
        f"The receipt was made when the session had {seen} events, and now it has {len(events)}: make it anew with "
        "`halter receipt`, or compare it with an export of that time."
    )


def compare_json(where: str, said: Any, made: Any) -> Iterator[str]:
    if isinstance(said, dict) and isinstance(made, dict):
        yield from _compare_objects(where, cast("dict[str, Any]", said), cast("dict[str, Any]", made))
    elif isinstance(said, list) and isinstance(made, list):
        yield from _compare_lists(where, cast("list[Any]", said), cast("list[Any]", made))
    elif not _is_same(said, made):
        yield f"The receipt says {_show_value(said)} for {where}, and the events make it {_show_value(made)}."


def _compare_objects(where: str, raw: dict[str, Any], made: dict[str, Any]) -> Iterator[str]:
    for key in (*made, *(key for key in raw if key not in made)):
        inside = f"{where}.{key}" if where else key
        if key not in raw:
            yield f"The receipt says nothing of {inside}, and the events make it {_show_value(made[key])}."
        elif key not in made:
            yield f"The receipt says {_show_value(raw[key])} for {inside}, of which the events know nothing."
        else:
            yield from compare_json(inside, raw[key], made[key])


def _compare_lists(where: str, said: list[Any], made: list[Any]) -> Iterator[str]:
    if len(said) != len(made):
        yield f"The receipt has {len(said)} entries in {where}, and the events make it {len(made)}."
    for place, (one, other) in enumerate(zip(said, made, strict=False), 1):
        yield from compare_json(f"{where}[{place}]", one, other)


def _is_same(said: Any, made: Any) -> bool:
    # 1, 1.0 and true are three different values.
    return type(said) is type(made) and bool(said == made)


def _show_value(value: Any) -> str:
    return shorten(json.dumps(value, ensure_ascii=False, default=str), 80)
