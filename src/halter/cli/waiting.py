"""What waits for a person, as the terminal puts it before them."""

from halter.app.desk.waiting import Waiting, put
from halter.core.durations import shown_duration


def as_facts(one: Waiting, now: int) -> list[tuple[str, str]]:
    """Write a decision for people: what it is about, what a yes or a no does, and how to type them."""
    words, more = put(one), " --cap AMOUNT" if one.about == "cap_raise" else ""
    return [
        ("decision", one.decision),
        ("what", words.what),
        ("why", "; ".join(one.reasons)),
        ("shown", words.shown),
        ("agent", f"{one.agent}, session {one.session}" if one.session else one.agent),
        (
            "waits",
            f"{shown_duration(max(0, now - one.asked_at))}, for at most {shown_duration(one.expires_at - now)} more",
        ),
        ("yes", f"{words.yes}: halter approve {one.decision}{more}"),
        ("no", f"{words.no}: halter deny {one.decision}"),
    ]
