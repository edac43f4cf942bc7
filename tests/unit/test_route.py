"""Where messages go: exact sentences are answered at once, exact times are planned, all else goes to the model."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from halter.core.clock import SECOND
from halter.core.schedules import explain_timing, find_timing_flaw, next_tick_after
from halter.front_door.fast_paths import (
    HELP_ANSWER,
    ClockQuestion,
    Decided,
    HotStateQuestion,
    RoutingContext,
    ScheduleName,
    Scope,
    SpendingQuestion,
    SumResult,
    describe_time,
)
from halter.front_door.route import Delegated, RoutingDecision, Scheduled, Script, Strategy, route_message
from halter.front_door.schedule_parser import Unclear
from halter.front_door.sentences import FastPath

# A Sunday, 15:00 in Berlin.
NOW = int(datetime(2026, 11, 15, 14, 0, tzinfo=UTC).timestamp()) * SECOND
HERE = RoutingContext(
    agent="scout",
    now=NOW,
    timezone="Europe/Berlin",
    has_tools=True,
    agents=("scout", "writer", "data-miner"),
    playbooks=("daily-digest", "backup", "close_books"),
    schedules=("morning-news", "weekly report"),
    fields=("cpu_load", "price", "open_tickets"),
    decisions=("01hq8zc4ka", "01hq9aaaaa"),
)


def decide_route(text: str, surroundings: RoutingContext = HERE) -> RoutingDecision:
    return route_message(text, surroundings)


FAST: dict[FastPath, str] = {
    "help": """
        help
        Help!
        HELP
        ?
        /help
        help me
        Help please
        please help
        what can you do?
        What can you do for me?
        what can I say
        what can i ask you?
        how does this work?
        show commands
        commands
        hey halter, help
        @scout help
        What commands are there?
        how can you help me?
        i need help
    """,
    "time": """
        what time is it?
        What time is it
        whats the time
        what's the time?
        what is the time, please?
        time
        the time
        date
        what is the date?
        what's today's date?
        what day is it?
        what day is it today?
        what day is today
        what date is it today?
        tell me the time
        Can you tell me the time?
        could you tell me what time it is?
        do you know what time it is?
        current time
        what is the current date
        what year is it?
        what time is it in UTC?
        what time is it in Tokyo?
        what time is it in New York?
        What time is it now in Europe/London?
        what is the date today?
        what's the date and time?
        hey scout, what time is it?
        pls tell me the date
        Good morning, what time is it?
        which day is it today?
    """,
    "arithmetic": """
        2+2
        2 + 2 = ?
        what is 2+2?
        What's 15% of 80?
        15% of 80
        what is 3 times 7
        1,234.50 + 2
        calculate (3 + 4) * 2.5
        how much is 10 divided by 4?
        9**9**9
        1/0
        2^10
        what is seven times six?
        please calculate 12 x 12
        can you calculate 5 squared
        10 mod 3
        -5 + 3
        hey halter what is 7*6
    """,
    "status": """
        status
        Status?
        STATUS!
        /status
        what's your status?
        what are you doing?
        what are you doing right now?
        what are you working on
        are you running?
        are you halted?
        show status
        show me your status
        status report
        status update please
        give me a status update
        scout: status
        what are you up to?
        what's running?
        what's happening right now?
    """,
    "spending": """
        how much have you spent?
        how much have you spent today?
        How much did you spend this week?
        how much money have you used this month
        spending
        spending this month
        show spending
        costs today
        what have you spent so far today?
        how much have you spent so far?
        budget
        how much is left of the budget?
        what did you cost this week?
        How much of your budget is left?
        how much did you cost me today?
        Spent today?
        how much have we spent so far this month?
        how much did we spend today?
    """,
    "halt": """
        stop
        STOP!!!
        Stop.
        stop now
        please stop
        stop, please
        halt
        halt now!
        stop it
        stop immediately
        stop working
        stop what you're doing
        abort
        stop everything
        halt everything now
        halt all
        stop all agents
        halt the fleet
        emergency stop
        pause
        kill all agents
        pause everything
        hey scout, stop!
        @scout halt
        stop writer
        halt agent data-miner
        halt the writer agent
        halt session 01hq8zc4ka
        stop the session 01hq8zc4ka
        can you stop
        stop right now please
    """,
    "resume": """
        resume
        Resume.
        resume now
        please resume
        resume work
        lift the halt
        unhalt
        resume everything
        resume all agents
        resume writer
        resume session 01hq8zc4ka
        you can resume
    """,
    "needs_me": """
        what needs me?
        What needs me
        needs me
        what needs my attention?
        what needs my approval?
        what is waiting for me?
        what's waiting for me
        is anything waiting for me?
        anything waiting for me?
        do you need anything from me?
        do you need me?
        what do you need from me?
        pending approvals
        show pending decisions
        show me the approvals
        what's pending?
        does anything need my attention?
        what's waiting for my approval?
        which decisions are waiting?
        anything pending?
    """,
    "decide": """
        approve
        Approve!
        approve it
        approve this
        approved
        yes, approve
        yes approve it
        deny
        deny it
        reject
        reject this one
        approve 01hq8zc4ka
        approve 01HQ8ZC4KA
        approve 01hq8
        deny 01hq9aaaaa
        please deny decision 01hq9
        I approve
        decline
        approve 99zz88yy77
    """,
    "schedules": """
        schedules
        list schedules
        show schedules
        show me all my schedules
        what schedules do you have?
        what's scheduled?
        what have you scheduled?
        list your scheduled tasks
        are there any schedules?
        /schedules
    """,
    "cancel_schedule": """
        cancel schedule morning-news
        cancel the schedule morning-news
        cancel the morning-news schedule
        cancel morning news
        Cancel morning-news please
        delete schedule morning-news
        remove the weekly report schedule
        cancel the weekly report
        unschedule morning-news
        cancel schedule nobody-knows-it
        cancel all schedules
        cancel the schedule
        stop schedule morning-news
    """,
    "hot_state": """
        hot state
        show hot state
        show me the hot state
        state
        show facts
        price
        what is the price?
        what's the current price
        what is cpu_load?
        how high is the cpu load?
        open tickets
        show open_tickets
        what is the price right now?
    """,
    "last_receipt": """
        last receipt
        show the last receipt
        show me your latest receipt
        receipt
        what did you do last?
        what did your last session cost?
        show me the receipt of the last session
    """,
}

SCHEDULED = """
    every 2 days at 9 water the plants
    check the mail every 15 minutes
    every hour check the mail
    hourly, check the mail
    check the site every 2 hours please
    every day at 9 summarise my mail
    daily at 9am send me the news
    Every morning, tell me what's new
    check the logs every evening
    back up the database every night
    every other day at 9 water the plants
    every monday at 17:30 send the report
    Every weekday at 8: post the standup
    weekdays at 8 post the standup
    every monday and thursday at 9 check the queue
    on mondays at 9 check the queue
    every week on friday send a summary
    every 2 weeks on monday at 9 send payroll
    every month on the 1st at 9 send the invoice
    monthly on the 15th, send the invoice
    check the site every quarter hour
    at noon every day check the feed
    rotate the logs at midnight every day
    every first of the month send the invoice
    at 5pm send the report
    send the report at 5pm
    tomorrow at 9 send the report
    in 2 hours check the oven
    check the oven in 20 minutes
    remind me in 20 minutes to check the oven
    remind me to call mom tomorrow at 9
    remind me every monday at 9 to send the report
    on friday at 17:30 send the report
    on 24 december at 9 send greetings
    on 2026-12-24 at 09:00 send greetings
    send greetings tonight at 10
    can you check the mail every day at 9?
    Could you please check the mail every day at 9?
    pls check the mail every day at 9
    I want you to check the mail every day at 9
    hey scout, check the mail every day at 9
    @scout every day at 9 check the mail
    check if the site is up every 5 minutes
    @writer check the mail every day at 9
    every day at 9 have a separate agent check the mail
    run daily-digest every monday at 9
    every now and then check the mail
    check the mail every now and then
    every 2 fortnights send the report
    every 30 february send the report
    check the mail every day at 25:00
    twice a day check the mail
    Email every employee at 9
    send it every monday at 9
    EVERY DAY AT 9 CHECK THE MAIL
    every last friday of the month at 16:00 send the numbers
    every monday morning send the report
    next friday at 9 send the report
    Every Friday at 5 pm, remind the team to submit timesheets.
    Please send me a weather report each morning at 7.
    At 6 every evening, turn off the lights
    Check BTC price every 10 mins and alert me if it drops below 50k
    check the site every 5 minutes to see if it is up
    send the list every day at 9 to Bob
    make sure the site is up every 5 minutes
    email me about pending orders every day at 9
    Mon to Fri at 8 post the news
    every day 9am check the mail
    every day @ 9 check the mail
    schedule a backup every night at 1
    Please remind me every other week on Thursday at 4pm to submit expenses
"""

SUB_AGENT = """
    have a separate agent check the mail
    Have a separate agent look into the logs, please
    have another agent write the report
    use a separate agent to check the mail
    please let a different agent check this
    spawn a sub-agent to read the logs
    @writer draft a letter
    @writer, draft a letter
    @Data-Miner find the outliers
    @writer what is the status of the draft?
    ask writer to draft a letter
    have writer draft a letter
    tell the writer to draft a letter
    delegate the letter to writer
    delegate the summary to another agent
    in a separate session, check the mail
    @agent check the mail
"""

SCRIPT = """
    run playbook daily-digest
    run the daily-digest playbook
    run daily-digest
    Run the daily digest.
    run backup
    please run backup
    can you run the backup playbook?
    run backup on the new server
    play close_books
    execute close books for march
    start the playbook backup with full=true
"""

MODEL = """
    stop writing so formally
    stop the music in the video description
    don't stop
    should I stop?
    stop words in English
    full stop
    halt and catch fire is a series
    what time is the meeting in the document?
    what time is it in the story?
    time flies
    date ideas for friday
    what is the date of the contract?
    approve of this plan in your answer
    approve the budget for Smith
    would you approve of this?
    approve?
    approve it?
    approved?
    will you approve it
    can you approve 01hq8zc4ka
    could you accept this?
    deny everything
    approve all
    help me write a letter
    help wanted
    can you help me with my homework
    status of the Smith contract?
    what is the status of order 66?
    how much did Acme pay us?
    how much have they spent?
    spending habits of students
    every employee must sign
    every day is a gift
    Every monday is terrible
    Check this link https://every.day/at/9
    Check this link https://example.com/schedule?every=2d
    cancel culture essay
    cancel my flight
    cancel the schedule for tomorrow's meeting
    resume writing tips
    resume.pdf
    resume the story where you left off
    continue
    what needs me to sign it?
    who needs me
    I run every day at 9
    I ran every day at 9
    the report is due every monday
    the backup runs every night
    She calls me every day at 9
    we meet on mondays at 9
    work starts every day at 9
    What runs every day at 9?
    Do you check the mail every day at 9?
    check the mail every day at 9?
    when do you check the mail every day
    write a script that checks the site every 5 minutes
    create a cron job that runs every day at 9
    explain why the backup runs every night
    tell me what happens every day at noon
    draft an email saying we meet every monday at 9
    tell Bob the meeting is at 5pm
    book a table for tomorrow at 9
    send the invoice by tomorrow at 9
    stop checking the mail every day at 9
    don't email me every day at 9
    never check the mail every day
    "every day at 9 check the mail"
    translate "check the mail every day at 9" into German
    say `stop`
    "stop"
    jeden Tag um 9 die Mail pr\u00fcfen
    Wie sp\u00e4t ist es?
    Hilfe
    stopp
    2026-11-15
    42
    5!
    200 + 10%
    7 % -3
    2+2!
    24/7
    3,5 + 2
    what is love?
    a - 1
    @nobody hello
    @everyone good morning
    have a nice day
    have a look at the logs
    ask the customer to pay
    run the numbers
    run a backup of the server
    run playbook nobody-knows
    backup
    what does the backup playbook do?
    the writer is late
    what is a separate agent?
    schedules are boring
    schedule a meeting with Bob
    show me the schedule of the Bundesliga
    last receipt from the supermarket
    price of gold
    the price of freedom is eternal vigilance
    state of the union
    hello
    thanks
    yes
    no
    ok
    NO - YESTERDAY
    The word "shutting down" in a sentence
    we are shutting down the plant
    0.2 on a scale of 0 to 1
    summarise the contract
    write an email to Bob about the meeting tomorrow at 9
    every time a file arrives, summarise it
    give me 2
    I approved it
    it is approved
    rejected it
    who approved this?
    approve 01hq8zc4ka and 01hq9aaaaa
    Write a haiku about waking up every day at 6
    make a list of shops that open on sundays at 9
    Translate: every day at 9 check the mail
    Here is my plan: every day at 9 check the mail
    in 2 hours the shop closes
    at 9 I have a meeting
    The cron runs every day at 9 and sends mail
    check every file in the folder
    check the mail every day at 9 in Berlin
    turn it off at 9 then on at 10
    ask writer whether it is done
    how much have you spent in total?
    every tuesday at 9
    tomorrow
    let's meet every day at 9
    do you check the mail every day at 9
    have you checked the mail every day at 9
    say "check it every hour and tell me"
    reply "see you every day at 9
    say \u201ccheck it every hour and tell me\u201d
"""


def lines(block: str) -> list[str]:
    return [line.strip() for line in block.strip().splitlines()]


@pytest.mark.parametrize(("text", "path"), [(text, path) for path, block in FAST.items() for text in lines(block)])
def test_an_exact_sentence_is_a_fast_path(text: str, path: FastPath) -> None:
    routed = decide_route(text)
    assert (routed.route, routed.strategy) == (path, None)
    assert path in routed.why


@pytest.mark.parametrize(
    ("text", "strategy"),
    [(text, "SCHEDULED_TASK") for text in lines(SCHEDULED)]
    + [(text, "SUB_AGENT") for text in lines(SUB_AGENT)]
    + [(text, "SCRIPT") for text in lines(SCRIPT)]
    + [(text, "GOAL") for text in lines(MODEL)],
)
def test_all_else_takes_one_of_the_strategies(text: str, strategy: Strategy) -> None:
    routed = decide_route(text)
    assert (routed.route, routed.strategy) == ("strategy", strategy)
    assert routed.why.endswith(".")


@pytest.mark.parametrize("text", lines(MODEL))
def test_without_tools_what_no_grammar_reads_is_one_answer(text: str) -> None:
    assert decide_route(text, RoutingContext(agent="scout", now=NOW)).strategy == "DIRECT_RESPONSE"


def test_there_are_thirteen_fast_paths_and_each_is_tried() -> None:
    assert set(FAST) == set(get_args(FastPath))
    assert len(FAST) == 13
    assert sum(map(len, map(lines, (*FAST.values(), SCHEDULED, SUB_AGENT, SCRIPT, MODEL)))) >= 400


@pytest.mark.parametrize(
    ("text", "details"),
    [
        ("stop", Scope("agent:scout")),
        ("stop everything", Scope("fleet")),
        ("halt all", Scope("fleet")),
        ("halt the writer agent", Scope("agent:writer")),
        ("halt session 01HQ8ZC4KA", Scope("session:01hq8zc4ka")),
        ("resume", Scope("agent:scout")),
        ("resume everything", Scope("fleet")),
        ("what time is it?", ClockQuestion("time", "Europe/Berlin")),
        ("what day is it?", ClockQuestion("date", "Europe/Berlin")),
        ("what time is it in New York?", ClockQuestion("time", "America/New_York")),
        ("what time is it in UTC?", ClockQuestion("time", "UTC")),
        ("what is 15% of 80?", SumResult("12")),
        ("1,234.50 + 2", SumResult("1236.5")),
        ("10/3", SumResult("10/3, about 3.33333333333333")),
        ("0.1 + 0.2", SumResult("0.3")),
        ("-2^2", SumResult("-4")),
        ("2^3^2", SumResult("512")),
        ("9**9**9", SumResult("The result is too large.")),
        ("1/0", SumResult("Cannot divide by zero.")),
        ("7 mod 0", SumResult("Cannot divide by zero.")),
        ("how much have you spent?", SpendingQuestion("today")),
        ("how much have you spent so far this week?", SpendingQuestion("week")),
        ("costs for this month", SpendingQuestion("month")),
        ("approve", Decided("approve", "", ambiguous=True)),
        ("approve 01hq8", Decided("approve", "01hq8zc4ka")),
        ("deny 01HQ9AAAAA", Decided("deny", "01hq9aaaaa")),
        ("approve 01hq", Decided("approve", "", ambiguous=True)),
        ("approve 99zz88yy77", Decided("approve", "99zz88yy77")),
        ("cancel Morning-News", ScheduleName("morning-news", is_known=True)),
        ("cancel schedule nope", ScheduleName("nope", is_known=False)),
        ("cancel all schedules", ScheduleName("", is_known=False)),
        ("what is the cpu load?", HotStateQuestion("cpu_load")),
        ("hot state", HotStateQuestion("")),
        ("@writer, draft a letter to Bob.", Delegated("writer", "draft a letter to Bob.")),
        ("have a separate agent check the mail, please", Delegated("", "check the mail")),
        ("delegate the letter to Bob to writer", Delegated("writer", "the letter to Bob")),
        ("ask writer to draft a letter", Delegated("writer", "draft a letter")),
        ("run the daily digest", Script("daily-digest", "")),
        ("run backup on the new server", Script("backup", "on the new server")),
        ("start the playbook backup with full=true", Script("backup", "with full=true")),
    ],
)
def test_the_details_say_all_that_is_needed(text: str, details: object) -> None:
    assert decide_route(text).details == details


def test_a_name_that_sounds_like_a_time_is_no_time() -> None:
    routing_context = RoutingContext(
        agent="scout", now=NOW, has_tools=True, playbooks=("nightly",), schedules=("daily",)
    )
    assert decide_route("run nightly", routing_context).details == Script("nightly", "")
    assert decide_route("delete daily", routing_context).strategy == "GOAL"
    assert decide_route("check the mail nightly", routing_context).strategy == "SCHEDULED_TASK"


def test_the_one_decision_that_waits_needs_no_id() -> None:
    routing_context = RoutingContext(agent="scout", now=NOW, decisions=("01hq8zc4ka",))
    assert decide_route("approve", routing_context).details == Decided("approve", "01hq8zc4ka", implied=True)
    assert decide_route("approve", RoutingContext(agent="scout", now=NOW)).details == Decided("approve", "")


@pytest.mark.parametrize(
    ("text", "first", "prompt", "recurring"),
    [
        ("every 2 days at 9 water the plants", "2026-11-17T08:00", "water the plants", True),
        ("Every 2 days at 4pm, please water the plants.", "2026-11-15T15:00", "water the plants", True),
        ("check the mail every 15 minutes", "2026-11-15T14:15", "check the mail", True),
        ("check the mail every 1.5 hours", "2026-11-15T15:30", "check the mail", True),
        ("every morning tell me what's new", "2026-11-16T07:00", "tell me what's new", True),
        ("every evening check the mail", "2026-11-15T17:00", "check the mail", True),
        ("every night check the mail", "2026-11-15T21:00", "check the mail", True),
        ("every evening at 7 check the mail", "2026-11-15T18:00", "check the mail", True),
        ("every weekday at 5:30pm check the mail", "2026-11-16T16:30", "check the mail", True),
        ("every monday and thursday at 9 check it", "2026-11-16T08:00", "check it", True),
        ("every week on friday send a summary", "2026-11-20T08:00", "send a summary", True),
        ("every 2 weeks on sunday at 9 send it", "2026-11-22T08:00", "send it", True),
        ("every 2 weeks on sunday at 16:00 send it", "2026-11-15T15:00", "send it", True),
        ("every month on the 1st at 9 send it", "2026-12-01T08:00", "send it", True),
        ("monthly on the 15th send it", "2026-12-15T08:00", "send it", True),
        ("on the last day of every month send it", "2026-11-30T08:00", "send it", True),
        ("every quarter on the 1st send it", "2027-01-01T08:00", "send it", True),
        ("every first monday of the month at 9 send it", "2026-12-07T08:00", "send it", True),
        ("at midnight every day rotate the logs", "2026-11-15T23:00", "rotate the logs", True),
        ("every day at 9 and 17 check it", "2026-11-15T16:00", "check it", True),
        ("every day at 9 UTC check it", "2026-11-16T09:00", "check it", True),
        ("every day at 0930 check it", "2026-11-16T08:30", "check it", True),
        ("every day at half past nine check it", "2026-11-16T08:30", "check it", True),
        ("every day at quarter to 9 check it", "2026-11-16T07:45", "check it", True),
        ("every day at 17h30 check it", "2026-11-15T16:30", "check it", True),
        ("every day at 17.30 check it", "2026-11-15T16:30", "check it", True),
        ("every day at 12am check it", "2026-11-15T23:00", "check it", True),
        ("every day at 12 pm check it", "2026-11-16T11:00", "check it", True),
        ("every day at 9 p.m. check it", "2026-11-15T20:00", "check it", True),
        ("every day at 9 in the evening check it", "2026-11-15T20:00", "check it", True),
        ("every day at 9 Europe/London time check it", "2026-11-16T09:00", "check it", True),
        ("give me a joke every hour, on the hour", "2026-11-15T15:00", "give me a joke", True),
        ("on the 1st and 15th of each month send it", "2026-12-01T08:00", "send it", True),
        ("send the list every day at 9 to Bob", "2026-11-16T08:00", "send the list to Bob", True),
        ("check it every hour and tell me", "2026-11-15T15:00", "check it and tell me", True),
        ("send the report at 5pm", "2026-11-15T16:00", "send the report", False),
        ("send the report at 9", "2026-11-16T08:00", "send the report", False),
        ("tomorrow at 9 send it", "2026-11-16T08:00", "send it", False),
        ("in 2 hours check it", "2026-11-15T16:00", "check it", False),
        ("in half an hour check it", "2026-11-15T14:30", "check it", False),
        ("remind me in 20 minutes to check it", "2026-11-15T14:20", "remind me to check it", False),
        ("on friday at 17:30 send it", "2026-11-20T16:30", "send it", False),
        ("on sunday at 9 send it", "2026-11-22T08:00", "send it", False),
        ("on december 24th at 9 send it", "2026-12-24T08:00", "send it", False),
        ("on 1 january at 9 send it", "2027-01-01T08:00", "send it", False),
        ("on 2026-12-24 at 09:00 send it", "2026-12-24T08:00", "send it", False),
        ("tonight at 10 send it", "2026-11-15T21:00", "send it", False),
        ("tonight at midnight send it", "2026-11-15T23:00", "send it", False),
        ("remind me tomorrow to call mom", "2026-11-16T08:00", "remind me to call mom", False),
        ("Every day at 9: check the mail, then the logs.", "2026-11-16T08:00", "check the mail, then the logs", True),
    ],
)
def test_a_time_is_read_exactly_and_the_rest_is_the_prompt(text: str, first: str, prompt: str, recurring: bool) -> None:  # noqa: FBT001
    details = decide_route(text).details
    assert isinstance(details, Scheduled)
    assert find_timing_flaw(details.timing) == ""
    after = next_tick_after(details.timing, NOW)
    assert after is not None
    assert datetime.fromtimestamp(after / SECOND, UTC).strftime("%Y-%m-%dT%H:%M") == first
    assert (details.prompt, details.recurring) == (prompt, recurring)
    assert details.words in text


@pytest.mark.parametrize(
    "text",
    [
        "every now and then check the mail",
        "check the mail every so often",
        "every few hours check the mail",
        "every 2 fortnights send the report",
        "every 30 february send the report",
        "every 31st of april at 9 send the report",
        "on 30 february at 9 send the report",
        "every day at 25:00 check the mail",
        "every day at 9:75 check the mail",
        "every 0 minutes check the mail",
        "every -5 minutes check the mail",
        "every 999999999 days check the mail",
        "every 5 months on the 1st send it",
        "every week check the mail",
        "check the mail monthly",
        "every second monday at 9 check the mail",
        "every day at 9 and 17:30 check the mail",
        "every hour at 9 check the mail",
        "every morning at 17:00 check the mail",
        "every day at 13pm check the mail",
        "every day at 2460 check the mail",
        "every day around 9 check the mail",
        "every day before lunch check the mail",
        "schedule a backup every night at 1",
        "check the mail every hour between 9 and 17",
        "every hour between 9 and 17 check the mail",
        "check the mail every day at 9 until friday",
        "check the mail every day at 9 and every friday at 10",
        "on monday and thursday at 9 check the mail",
        "send me a daily summary at 9",
        "biweekly on monday check the mail",
        "three times a day check the mail",
        "next friday at 9 send it",
        "today at 9 send it",
        "on 2020-01-01 at 9 send it",
    ],
)
def test_a_time_that_cannot_be_read_exactly_is_answered_with_a_sentence(text: str) -> None:
    routed = decide_route(text)
    assert routed.strategy == "SCHEDULED_TASK"
    assert isinstance(routed.details, Unclear)
    assert routed.details.sentence.endswith(".")


def describe_route(text: str) -> str:
    """Return what a message means: a time and a task, the clock, a sum, an unclear time, or a task for the model."""
    match decide_route(text).details:
        case Scheduled(timing=timing, prompt=prompt):
            return f"{explain_timing(timing)}: {prompt}"
        case ClockQuestion(what=what, zone=zone):
            return f"the {what}, {zone}"
        case SumResult(text=result):
            return f"= {result}"
        case Unclear():
            return "unclear"
        case _:
            return "for the model"


HELD_OUT = (Path(__file__).parents[1] / "corpus" / "messages.jsonl").read_text(encoding="utf-8").splitlines()
"""Schedules, moments, sums and what only looks like them, written by someone who had not read the grammar."""


@pytest.mark.parametrize(("text", "meaning"), [json.loads(line) for line in HELD_OUT])
def test_a_message_that_was_not_written_for_the_grammar_means_what_it_meant(text: str, meaning: str) -> None:
    assert describe_route(text) == meaning


@pytest.mark.parametrize("word", ["stop", "approve", "help", "2+2", "status"])
def test_what_is_quoted_fenced_long_or_of_several_lines_is_no_fast_path(word: str) -> None:
    for text in (f'"{word}"', f"`{word}`", f"```\n{word}\n```", f"{word}\n{word}", word + " " * 600 + word):
        assert decide_route(text).route == "strategy"


@pytest.mark.parametrize("text", ["(" * 300, "(" * 140 + "1" + ")" * 140, "-" * 299 + "5", "2^-" * 99 + "2"])
def test_a_sum_that_is_nested_too_deep_is_left_to_the_model(text: str) -> None:
    assert decide_route(text).strategy == "GOAL"


def test_a_long_prompt_may_follow_its_time() -> None:
    prompt = "check the mail:\n" + "- and this\n" * 200
    details = decide_route(f"Every weekday at 9, {prompt}").details
    assert isinstance(details, Scheduled)
    assert details.prompt == prompt.strip()


def test_the_clock_is_told_for_its_zone() -> None:
    assert describe_time(NOW, "Europe/Berlin") == "It is 15:00 on Sunday, 15 November 2026 (Europe/Berlin)."


def test_help_names_each_fast_path() -> None:
    for word in ("time", "sums", "status", "spent", "halt", "resume", "needs me", "approve", "schedules", "cancel"):
        assert word in HELP_ANSWER
    assert "hot state" in HELP_ANSWER
    assert "last receipt" in HELP_ANSWER


WORDS = lines(
    """
    every day at 9
    each
    monday
    stop
    approve
    cancel
    schedule
    what is the time
    2 +
    %
    (
    )
    / ^
    run backup
    @writer
    have a separate agent
    remind me to
    check
    in
    on
    tomorrow
    noon
    and 25:00
    first of
    month
    weeks
    0 -
    utc
    between
    ?
    !
    "
    `
    .
    """
)


@given(st.lists(st.sampled_from(WORDS), max_size=25).map(" ".join))
def test_any_mixture_of_its_own_words_is_routed(text: str) -> None:
    routed = decide_route(text)
    assert (routed.route == "strategy") == (routed.strategy is not None)


@given(st.text())
@example("\ud800")
@example("\0")
@example("@")
@example("(" * 300)
@example("9" * 500)
@example("\u0661+\u0662")
def test_any_text_is_routed(text: str) -> None:
    routed = decide_route(text)
    assert (routed.route == "strategy") == (routed.strategy is not None)


@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyz 0123456789:", max_size=60))
def test_nothing_recurring_comes_of_text_that_names_no_recurrence(text: str) -> None:
    details = decide_route(f"check {text}").details
    named = ("every", "each", "ly", "days", "weekends", "s ", " a ", " per ")
    assert not (isinstance(details, Scheduled) and details.recurring) or any(word in f"{text} " for word in named)


@pytest.mark.parametrize("text", lines(SCHEDULED + SUB_AGENT + SCRIPT) + [t for b in FAST.values() for t in lines(b)])
def test_what_was_decided_is_kept_in_an_event_unchanged(text: str) -> None:
    routed = decide_route(text)
    assert msgspec.json.decode(msgspec.json.encode(routed), type=RoutingDecision) == routed


@pytest.mark.parametrize(
    "text",
    [
        "every day at 9 check " + "a" * 1_000_000,
        "every " * 170_000,
        " " * 1_000_000 + "stop",
        "have a separate agent " + " " * 1_000_000 + "x",
        "(" * 1_000_000,
        "@writer " + "\n" * 1_000_000 + "x",
        "run backup " + "and " * 250_000,
        "please " * 150_000,
        "?" * 1_000_000,
    ],
)
def test_a_very_long_message_is_routed_with_bounded_work(text: str) -> None:
    assert decide_route(text).route == "strategy"
