"""The drills' own checks: what they must find, shown on the smallest examples."""

import random

from halter.core.clock import SECOND
from halter.redaction.key_patterns import SECRET_FAMILIES
from halter.redaction.redact import Redactor
from halter_drills import approval, halt, kill
from halter_drills.approval import CASES, HONEST
from halter_drills.checker import LateFinding, RecordedEvent, Stall, split_lateness
from halter_drills.halt import KINDS, Mark
from halter_drills.kill import STEPS
from halter_drills.secrets import KEYS, SPELLINGS, SearchedPlace, find_leaks, key, plan_leaks, spell, values
from halter_drills.workload import PERSON, ToolEffect

HONESTLY = [f"0-{place}\tpay\t{case.runs}" for place, case in enumerate(HONEST)]
DONE = [ToolEffect(name, order, f"k{order}") for order, name in enumerate(STEPS, 1)]


def test_what_ran_by_a_forged_approval_is_found_and_so_is_an_honest_one_that_did_not_run() -> None:
    assert approval.find_violations(HONESTLY) == []
    (text,) = approval.find_violations([*HONESTLY, f"0-{len(HONEST)}\tpay\torder-2"])
    assert text == "One byte of the arguments changed after the approval. Even so, pay ran for order-2."
    assert approval.find_violations(HONESTLY[1:]) == ["An honest approval. It ran 0 times."]
    assert approval.find_violations([*HONESTLY, HONESTLY[0]]) == ["An honest approval. It ran 2 times."]


def test_every_forgery_says_what_it_does_in_words_of_its_own() -> None:
    assert len({case.words for case in CASES}) == len(CASES)


def test_a_plain_write_that_was_done_twice_or_never_is_found() -> None:
    assert kill.find_violations(DONE) == []
    assert kill.find_violations([*DONE, DONE[2]]) == ["Step 3, a plain write, ran 2 times."]
    assert kill.find_violations(DONE[:-1]) == ["Step 7 (pay) did not run."]


def test_an_idempotent_write_may_be_repeated_under_its_own_key_only() -> None:
    assert kill.find_violations([*DONE, DONE[1]]) == []
    assert kill.find_violations([*DONE, ToolEffect("put", 2, "other")]) == [
        "Step 2 (put) was repeated under another key: k2, other."
    ]


def test_a_doubt_without_a_decision_is_found_and_so_is_a_needless_decision() -> None:
    assert kill.find_undecided([("c1", "pay"), ("c2", "put")], ["c1"]) == []
    assert kill.find_undecided([("c1", "pay")], []) == ["The write c1 was in doubt, but had no decision."]
    assert kill.find_undecided([("c2", "put")], ["c2"]) == ["The call c2 had a decision, but was not in doubt."]


def record_event(kind: str, at: int, **facts: object) -> RecordedEvent:
    return RecordedEvent("session:s", 1, kind, at, 1, facts)


def test_what_begins_or_ends_a_second_after_a_halt_is_found() -> None:
    recorded_event, settled = (
        record_event("call_started", 0, call="c"),
        record_event("call_settled", SECOND // 2, call="c"),
    )
    ended = record_event("session_ended", SECOND // 2, state="HALTED", terminal_reason="external_halt")
    assert list(halt.find_late([recorded_event, settled, ended], 0)) == []
    assert list(halt.find_late([recorded_event], 0)) == [LateFinding("has no settlement of c.")]
    later = record_event("call_settled", SECOND, call="c")
    assert list(halt.find_late([recorded_event, later], 0)) == [
        LateFinding("had c in flight until 1.00 s after the halt.", 0, 1)
    ]
    assert len(list(halt.find_late([record_event("call_started", 2 * SECOND, call="c"), settled], 0))) == 1
    assert list(halt.find_unended([ended])) == []
    assert list(halt.find_unended([])) == ["did not end."]
    assert list(halt.find_unended([record_event("session_ended", 0, state="ERROR", terminal_reason="x")])) == [
        "ended ERROR, x."
    ]


def test_what_is_late_on_a_machine_that_was_too_busy_is_told_apart_from_a_violation() -> None:
    late = LateFinding("It was late.", since=0, by=SECOND // 10)
    assert split_lateness([late], []) == (["It was late."], [])
    assert split_lateness([late], [Stall(0, SECOND // 10)]) == ([], ["It was late."])
    assert split_lateness([late], [Stall(5 * SECOND, 6 * SECOND)]) == (["It was late."], [])
    assert split_lateness([LateFinding("Far too late.", 0, 3 * SECOND)], [Stall(0, SECOND // 10)])[1] == []
    assert split_lateness([LateFinding("It never ended.")], [Stall(0, SECOND)]) == (["It never ended."], [])


def test_an_act_that_is_marked_outside_a_second_after_a_halt_is_found() -> None:
    assert halt.find_acted_on([Mark("ran", "s", SECOND - 1), Mark("began", "s", 3 * SECOND)], {"s": 0}) == []
    assert len(halt.find_acted_on([Mark("ran", "s", SECOND), Mark("stopped", "s", SECOND)], {"s": 0})) == 2


def test_a_halt_without_the_name_of_who_did_it_is_found() -> None:
    planned = halt.rounds(1)[:1]
    scopes = planned[0].scopes()
    kinds = ("halt_requested", "halt_lifted")
    fleet = [record_event(kind, 0, scope=scope, by=PERSON) for kind in kinds for scope in scopes]
    assert halt.find_unnamed(planned, fleet) == []
    assert (
        len(halt.find_unnamed(planned, [record_event("halt_requested", 0, scope=scopes[0], by="nobody"), *fleet[1:]]))
        == 1
    )
    assert len(halt.find_unnamed(planned, fleet[1:])) == 1


def test_fifty_halts_are_planned_in_all_scopes_against_everything_that_can_be_stuck() -> None:
    planned = halt.rounds(halt.HALTS)
    assert sum(len(each.scopes()) for each in planned) >= 50
    assert {each.scope for each in planned} == {"session", "agent", "trigger", "fleet"}
    assert {case.kind for each in planned for case in each.round.cases} == {*KINDS}


def test_there_is_a_made_up_key_of_every_family_and_it_is_hidden() -> None:
    assert {family for family, _ in KEYS} == {family.name for family in SECRET_FAMILIES}
    redactor = Redactor({})
    for family, form in KEYS:
        canary = key(random.Random(7), family, form)
        assert canary.secrets
        assert (
            find_leaks([SearchedPlace("text", redactor.redact(f"it is {canary.text} indeed").encode())], [canary]) == []
        )


def test_a_secret_is_seen_in_every_spelling_and_also_a_part_of_it() -> None:
    for name, value in values(random.Random(3)).items():
        for spelling in SPELLINGS:
            canary = spell(name, value, spelling)
            assert len(find_leaks([SearchedPlace("text", f"it is {canary.text}!".encode())], [canary])) == 1
            assert len(find_leaks([SearchedPlace("text", f"it is {canary.text[5:25]}".encode())], [canary])) == 1
            assert find_leaks([SearchedPlace("text", b"it is hidden")], [canary]) == []


def test_secrets_are_let_out_by_every_way_in_every_spelling_and_first_of_all_not_plainly() -> None:
    chance = random.Random(0)
    planned = plan_leaks(values(chance), chance)
    assert len(planned) >= 900
    assert planned[0].canary.text not in values(random.Random(0)).values()
