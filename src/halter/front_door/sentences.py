"""The sentences that are answered without a model, as grammars."""

import re
from typing import Final, Literal

_PIECE: Final = re.compile(r"\[([^\]]+)\]|\(([^)]+)\)|\{(\w+)\}|(\S+)")


def compile_grammar(lines: str) -> re.Pattern[str]:
    """Compile sentences to one pattern, which is matched with a space after each word."""
    line_patterns = [_compile_line(line) for line in lines.strip().splitlines()]
    names = [name for line in line_patterns for name in re.findall(r"\?P<(\w+)>", line)]
    for name in {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{{{name}}} is used in two sentences of one grammar. Give them two names.")
    return re.compile("|".join(line_patterns))


def _compile_line(line: str) -> str:
    return "".join(_compile_piece(*match.groups()) for match in _PIECE.finditer(line))


def _compile_piece(optional: str | None, one_of: str | None, name: str | None, word: str | None) -> str:
    if name:
        return rf"(?P<{name}>\S.{{0,80}}?) "
    if optional:
        return f"(?:(?:{_join_longest_first(optional)}) )?"
    return f"(?:{_join_longest_first(one_of or word or '')}) "


def _join_longest_first(alternatives: str) -> str:
    """Join alternatives, the longest first, so that `show me` is not read as `show` and a remainder."""
    return "|".join(re.escape(alternative) for alternative in sorted(alternatives.split("|"), key=len, reverse=True))


_SHOW: Final = "[show|show me|list|give me|tell me|see|view|what is|what are] [the|my|your|all|all the|all my|our]"
_AT_ONCE: Final = "[now|right now|immediately|at once]"
_NOW: Final = "[now|right now|immediately|at once|already|today|currently|at the moment]"

HELP_SENTENCES: Final = compile_grammar(f"""
{_SHOW} [available] (help|commands)
help me
i need help
what can (you do|i say|i ask|i do) [for me|here|you]
what (do|can) you understand
how (does this work|does it work|do i use this|do i use you)
how can you help [me]
what are you able to do
what commands (are there|do you know|do you have|do you understand)
""")
STATUS_SENTENCES: Final = compile_grammar(f"""
{_SHOW} [current] status [report|update] {_NOW}
status of [the|this] agent
what are you (doing|working on|up to|busy with) {_NOW}
what is (running|going on|happening) {_NOW}
how are (you|things) (going|doing) {_NOW}
are you (running|awake|asleep|alive|halted|busy|idle|working) {_NOW}
give me (a|an) (status|status update|status report)
a status update
""")
NEEDS_ME_SENTENCES: Final = compile_grammar(f"""
what needs (me|my attention|my approval|my decision|my input|my answer|my review|approval|a decision) {_NOW}
(does anything|does something) need (me|my attention|my approval|my decision|my input)
[is there] anything that needs (me|my attention|my approval|my decision|my input)
(needs me|need me|needs you)
anything for me
anything (pending|waiting)
is there anything (i need to approve|i have to approve|to approve|i need to decide|to decide)
show me what needs (me|my attention)
[what is|is anything|is there anything|anything] (waiting|pending) (for|on) (me|my approval|my decision|my answer)
what waits for me
what do you need [from me|me for] [now|right now]
do you need (me|anything) [from me]
{_SHOW} (pending|open|waiting) (decisions|approvals|questions)
{_SHOW} (approvals|decisions)
what is (pending|waiting)
(what|which) (decisions|approvals) are (pending|waiting|open)
what do i (need|have) to (approve|decide)
""")
SCHEDULE_SENTENCES: Final = compile_grammar(f"""
{_SHOW} [active|current] (schedules|scheduled tasks|scheduled jobs)
(what|which) schedules (do you have|are there|are active|exist|have you got)
what (is|have you|do you have) scheduled
what is on (the|your) schedule
(do you have|are there) any schedules
what is your schedule
""")
LAST_RECEIPT_SENTENCES: Final = compile_grammar(f"""
{_SHOW} [last|latest|most recent|newest] receipt
{_SHOW} (last|latest) receipt (of|for|from) (the|your) last (session|run)
{_SHOW} receipt (of|for|from) (the|your) last (session|run)
what did you do last [time]
what did (your|the) last (session|run) (do|cost)
""")
HOT_STATE_SENTENCES: Final = compile_grammar(f"""
{_SHOW} [current] (hot state|hotstate|hot-state|state|facts) {_NOW}
what is in [the|your] (hot state|hotstate|hot-state)
what do you (know|see) (now|right now|at the moment|currently)
""")
TIME_SENTENCES: Final = compile_grammar(f"""
[do you know|tell me] what time (is it|it is) {_NOW}
[what is|tell me|give me|show me] [the] [current|local] time {_NOW}
""")
TIME_IN_SENTENCES: Final = compile_grammar("""
[do you know|tell me] what time (is it|it is) [now|right now] (in|at) {zone} [now|right now]
[what is] [the] [current|local] time [now|right now] in {place} [now|right now]
""")
DATE_SENTENCES: Final = compile_grammar(f"""
[tell me] (what|which) (day|date|month|year) (is it|is today|is it today|it is) {_NOW}
[what is|tell me|give me|show me] (today's|the|the current|current) date {_NOW}
date [today]
[what is] the day today
what is today
[what is] [the] [current] (time and date|date and time)
what day of the week is (it|today)
""")
DATE_IN_SENTENCES: Final = compile_grammar("""
what (day|date) is it [now|today] in {zone}
what is the date [now|today] in {place}
""")
SPENDING_SENTENCES: Final = compile_grammar("""
[show|show me|tell me|what is|what are] [the|my|your|our] (spending|spend|costs|cost|expenses|budget)
how much [money] have (you|we|i) (spent|used|cost|cost me) [so far]
how much [money] did (you|we|i) (spend|cost|use|cost me)
spent
how much (has been|was) spent
how much are you spending
how much do you cost
how much have i spent on you
how much [of the|of your] (budget|money) is left
how much is left [of the budget|of your budget]
what (have you spent|have you cost|did you spend|did you cost|do you cost)
what is left of (the|your) budget
""")
HALT_SENTENCES: Final = compile_grammar(f"""
(stop|halt|freeze|emergency stop|abort|shut down|shutdown|pause) {_AT_ONCE}
(stop|halt|abort) (it|this|that|yourself|working|running|what you are doing|the agent|this agent|your work) {_AT_ONCE}
(stop stop|stop stop stop|stop, stop|stop, stop, stop)
""")
HALT_ALL_SENTENCES: Final = compile_grammar(f"""
(stop|halt|freeze|abort|shut down|kill|pause) (everything|all|all agents|all the agents|every agent|everyone) {_AT_ONCE}
(stop|halt|freeze|abort|shut down|kill|pause) everybody {_AT_ONCE}
(stop|halt|freeze|abort|shut down|kill|pause) [the] [whole|entire] fleet {_AT_ONCE}
(stop|halt) all of (them|you) {_AT_ONCE}
""")
RESUME_SENTENCES: Final = compile_grammar("""
(resume|unhalt|un-halt) [now|yourself|work|working|your work|the agent|this agent]
(lift|remove|clear|undo|end) the halt
you (can|may) resume [now|work|working]
""")
RESUME_ALL_SENTENCES: Final = compile_grammar("""
(resume|unhalt) (everything|all|all agents|every agent|the fleet|the whole fleet|the entire fleet|fleet)
lift all halts
""")
SESSION_SENTENCES: Final = compile_grammar("""
(stop|halt|abort|resume|unhalt) [the] session {id}
""")
ONE_AGENT_SENTENCES: Final = compile_grammar("""
(stop|halt|resume|unhalt) [the] {named} agent
(stop|halt|resume|unhalt) [the] [agent] {name}
""")
APPROVE_SENTENCES: Final = compile_grammar("""
[yes|yes,|i] (approve|accept) [it|this|that|this one|that one|the request|this request|the decision]
[yes|yes,] approved
[yes|yes,|i] (approve|accept) [the] [decision|request|call|number] {id}
""")
DENY_SENTENCES: Final = compile_grammar("""
[no|no,|i] (deny|reject|decline) [it|this|that|this one|that one|the request|this request|the decision]
[no|no,] (denied|rejected|declined)
[no|no,|i] (deny|reject|decline) [the] [decision|request|call|number] {id}
""")
CANCEL_UNNAMED_SENTENCES: Final = compile_grammar("""
(cancel|delete|remove|drop|disable|end|stop) [the|my|your|a|all|all the|all my|all your] (schedule|schedules)
""")
CANCEL_SENTENCES: Final = compile_grammar("""
(cancel|delete|remove|drop|disable|end|stop) [the|my|your] schedule [called|named] {after}
(cancel|delete|remove|drop|disable|end|stop) [the|my|your] {before} schedule
unschedule [the] {un}
cancel [the|my|your] {only}
""")
FIELD_SENTENCES: Final = compile_grammar(f"""
how (high|low|large|much|many|old|warm|cold|full) is [the] [current] {{much}} {_NOW}
[what is|show|show me|tell me|read|get] [the] [current] [value of] [the] {{name}} {_NOW}
""")

FastPath = Literal[
    "help",
    "time",
    "arithmetic",
    "status",
    "spending",
    "halt",
    "resume",
    "needs_me",
    "decide",
    "schedules",
    "cancel_schedule",
    "hot_state",
    "last_receipt",
]
Period = Literal["today", "week", "month"]
Verdict = Literal["approve", "deny"]
