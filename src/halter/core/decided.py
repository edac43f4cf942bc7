"""The rows of what people are asked and what they say."""

import msgspec

from halter.core.events import DecisionAsked, DecisionMade, DecisionWithdrawn, RuleMade
from halter.core.place import Known, Place, session_at
from halter.core.rows import DecisionRow, RuleRow


def decision_asked(event: DecisionAsked, place: Place, known: Known) -> DecisionRow:
    """A question stands before a person."""
    session = session_at(place, known)
    row = known.get(DecisionRow, event.decision) or DecisionRow(event.decision)
    return msgspec.structs.replace(
        row,
        about=event.about,
        session=session.session,
        agent=session.agent or event.agent,
        subject=event.subject,
        name=event.name,
        digest=event.digest,
        level=event.level or "",
        risk=event.risk or "",
        asked_at=place.at,
        expires_at=event.expires_at,
        same=event.same,
        keys=_json(event.keys),
        asked_seq=place.seq,
    )


def decision_made(event: DecisionMade, place: Place, known: Known) -> DecisionRow:
    """It is answered; which of the two is read first makes no difference."""
    row = known.get(DecisionRow, event.decision) or DecisionRow(event.decision)
    return msgspec.structs.replace(
        row,
        verdict=event.verdict,
        by=event.by,
        decided_digest=event.digest,
        decided_at=place.at,
        decided_seq=place.seq,
    )


def decision_withdrawn(event: DecisionWithdrawn, place: Place, known: Known) -> DecisionRow:
    """It waits for nobody any more. That nobody decided it is told by the missing time."""
    row = known.get(DecisionRow, event.decision) or DecisionRow(event.decision)
    return msgspec.structs.replace(row, verdict="withdrawn", decided_seq=place.seq)


def _json(words: tuple[str, ...]) -> str:
    return msgspec.json.encode(words).decode()


def rule_made(event: RuleMade, place: Place) -> RuleRow:
    """A person said "always"."""
    return RuleRow(
        rule=event.rule,
        tool=event.tool,
        scope=event.scope,
        owner=event.owner,
        matcher=event.matcher,
        keys=_json(event.keys),
        by=event.by,
        made_at=place.at,
        expires_at=event.expires_at,
    )
