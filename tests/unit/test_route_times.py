"""Nothing is planned from a guess: a time counts where an exact grammar reads it, and nowhere else."""

from datetime import UTC, datetime
from itertools import product

import pytest

from halter.core.clock import SECOND
from halter.core.schedules import next_tick_after
from halter.front_door.fast_paths import RoutingContext
from halter.front_door.route import Scheduled, route_message

# A Sunday, 15:00 in Berlin.
NOW = int(datetime(2026, 11, 15, 14, 0, tzinfo=UTC).timestamp()) * SECOND
HERE = RoutingContext(agent="scout", now=NOW, timezone="Europe/Berlin", has_tools=True, agents=("scout", "writer"))

RECURRENCES = {
    "every 2 days at 9": "2026-11-17T08:00",
    "every 15 minutes": "2026-11-15T14:15",
    "every hour": "2026-11-15T15:00",
    "hourly": "2026-11-15T15:00",
    "daily at 9am": "2026-11-16T08:00",
    "every day at 17:30": "2026-11-15T16:30",
    "every morning at 7": "2026-11-16T06:00",
    "every weekday at 8": "2026-11-16T07:00",
    "every monday at 9": "2026-11-16T08:00",
    "on mondays at 9": "2026-11-16T08:00",
    "every monday and thursday at 9": "2026-11-16T08:00",
    "every month on the 1st at 9": "2026-12-01T08:00",
    "every friday at 5pm": "2026-11-20T16:00",
}
MOMENTS = {
    "at 5pm": "2026-11-15T16:00",
    "tomorrow at 9": "2026-11-16T08:00",
    "in 20 minutes": "2026-11-15T14:20",
    "on friday at 17:30": "2026-11-20T16:30",
    "on 24 december at 9": "2026-12-24T08:00",
}
TASKS = [
    "check the mail",
    "send the report",
    "water the plants",
    "tell me what's new",
    "post the news",
    "email Bob",
    "clean the cache",
    "count the open orders and tell me",
]


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


NEGATIONS = lines(
    """
    do not check the mail
    please do not check the mail
    don't check the mail
    please don't send the report
    dont check the mail
    never check the mail
    do never check the mail
    you should not check the mail
    you must not send the report
    I want you to not check the mail
    make sure not to check the mail
    be sure not to send the report
    remember not to check the mail
    stop checking the mail
    can you not check the mail
    just do not check the mail
    go ahead and do not check the mail
    check the mail, but not
    tell me not to check the mail
    """
)
DESCRIPTIONS = [
    f"{verb} {thing}"
    for verb, thing in product(
        ("summarise", "explain", "describe", "investigate", "analyse", "find", "review", "list"),
        ("the outage", "the incident", "my call with Bob", "the deploy", "the errors", "what I wrote"),
    )
]
EVENTS = [
    f"{verb} {thing}"
    for verb, thing in product(
        ("check", "report", "prepare", "write about", "send me", "note"),
        ("the outage", "the incident", "the meeting", "the call", "the error", "the deploy", "the logs", "the alert"),
    )
]
OTHERS = lines(
    """
    repeat after me: hourly
    repeat after me: every day at 9
    repeat after me hourly
    say: every day at 9
    say hourly
    say "hourly"
    say 'check the mail every day at 9'
    spell hourly
    define weekly
    pronounce daily
    translate daily
    type hourly
    write the word hourly
    write the word daily
    print the text every day at 9
    read the sentence: check the mail every day at 9
    translate this: send the report every monday at 9
    translate "send the report every monday at 9"
    translate \u201csend the report every monday at 9\u201d
    translate \u00absend the report every monday at 9\u00bb
    explain the phrase every other day
    say (every day at 9)
    check the mail every day at 9?
    check the mail every day at 9? thanks
    check the mail every day at 9?!
    do you check the mail every day at 9
    did you check the mail every day at 9
    do we check the mail every day at 9
    why check the mail every day at 9
    how do I check the mail every day at 9
    should you check the mail every day at 9
    is it good to check the mail every day at 9
    who checks the mail every day at 9
    when it rains, check the roof every hour
    if the site is down, check it every hour
    unless I say so, check the mail every day at 9
    whenever Bob writes, answer at 9
    in case it fails, send the report at 9
    suppose you check the mail every day at 9
    I check the mail every day at 9
    we checked the mail every day at 9
    he checks the mail every day at 9
    the agent checks the mail every day at 9
    checking the mail every day at 9 is tiresome
    to check the mail every day at 9 would be good
    it would be nice to check the mail every day at 9
    somebody has to check the mail every day at 9
    Bob used to check the mail every day at 9
    send what was written yesterday at 9
    check what failed yesterday at 14:00
    send what happened last monday at 9
    tell me what happened at 9
    check the mail from yesterday at 9
    send the mail that came at 9
    tell Bob that the train leaves at 9
    tell me who called at 14:00
    write that we meet at 9
    write a letter that says every day at 9
    make a note: the meeting is every monday at 9
    note: every monday at 9
    title: every day at 9 check the mail
    TODO: check the mail every day at 9
    > check the mail every day at 9
    "check the mail every day at 9"
    'check the mail every day at 9'
    `check the mail every day at 9`
    jeden Tag um 9 die Mail pr\u00fcfen
    pr\u00fcfe jeden Tag um 9 Uhr die Mail
    bitte nicht jeden Morgen um 7 die Mail lesen
    v\u00e9rifie le courrier chaque jour \u00e0 9 heures
    tous les jours \u00e0 9h v\u00e9rifie le courrier
    revisa el correo cada d\u00eda a las 9
    controlla la posta ogni giorno alle 9
    verifique o e-mail todos os dias \u00e0s 9
    controleer de mail elke dag om 9 uur
    kolla mejlen varje dag klockan 9
    sprawdzaj poczt\u0119 codziennie o 9
    \u043f\u0440\u043e\u0432\u0435\u0440\u044f\u0439 \u043f\u043e\u0447\u0442\u0443 \u0432 9
    \u6bcf\u5929\u4e5d\u70b9\u68c0\u67e5\u90ae\u4ef6
    """
)
NOT_PLANNED = [
    *(f"{text} {when}" for text in NEGATIONS for when in ("every morning at 7", "every hour", "at 5pm")),
    *(f"every day at 9 {text}" for text in NEGATIONS[:7]),
    *(f"{text} at 14:00" for text in (*DESCRIPTIONS, *EVENTS)),
    *(f"{text} yesterday at 9" for text in EVENTS),
    *OTHERS,
    "would you remind me every day at 9 if i asked?",
    "Would you check the mail every hour if we paid you for it?",
]


@pytest.mark.parametrize("recurring", [True, False])
def test_a_plain_imperative_with_a_time_before_or_behind_it_is_read_exactly(recurring: bool) -> None:  # noqa: FBT001
    wrong: list[tuple[str, object]] = []
    for (when, first), task in product((RECURRENCES if recurring else MOMENTS).items(), TASKS):
        for text in (f"{when} {task}", f"{when}, please {task}", f"Please {task} {when}.\n"):
            details = route_message(text, HERE).details
            after = next_tick_after(details.timing, NOW) if isinstance(details, Scheduled) else None
            output = datetime.fromtimestamp(after / SECOND, UTC).strftime("%Y-%m-%dT%H:%M") if after else ""
            if not isinstance(details, Scheduled) or (output, details.prompt, details.recurring) != (
                first,
                task,
                recurring,
            ):
                wrong.append((text, details))
    assert wrong == []


def test_what_is_denied_asked_quoted_described_or_past_is_never_planned() -> None:
    assert len(set(NOT_PLANNED)) >= 250
    assert [text for text in NOT_PLANNED if route_message(text, HERE).strategy == "SCHEDULED_TASK"] == []


@pytest.mark.parametrize(
    "word", ["halt", "stop", "resume", "help", "status", "what needs me", "approve", "2+2", "schedules"]
)
def test_what_stands_around_a_message_unseen_changes_nothing(word: str) -> None:
    plain = route_message(word, HERE)
    assert plain.route != "strategy"
    for text in (
        "{}\n",
        "{}\r\n",
        " {} ",
        "\t{}\n\n",
        "\u200b{}\u200b",
        "\ufeff{}",
        "{}\u00a0",
        "{}\x00",
        "\u2060{}\u3000",
        "{}.\n",
    ):
        assert route_message(text.format(word), HERE).route == plain.route


@pytest.mark.parametrize(
    "text", ["\uff28\uff21\uff2c\uff34", "HALT\u203c", "**Halt!**", "halt\uff01", "halt\u3002", "stop\u2026"]
)
def test_halting_does_not_depend_on_the_width_of_letters_and_signs(text: str) -> None:
    assert route_message(text, HERE).route == "halt"
