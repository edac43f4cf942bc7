"""Examples for the help of every command. They speak of one agent, `clerk`, and of its first session."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from typer.core import TyperGroup

if TYPE_CHECKING:
    from typer._click.core import Command

EXAMPLES: Final[Mapping[str, tuple[str, ...]]] = {
    "init": ("halter init night-watch", "halter init writer --model openai:gpt-5-mini"),
    "run": ('halter run clerk "What is 17 * 23?"', 'halter run clerk "hello" --json'),
    "chat": ("halter chat clerk",),
    "play": ("halter play clerk/welcome.yaml --input who=Ada",),
    "demo": ("halter demo", "halter demo --night-only --json"),
    "up": ("halter up clerk", "halter up clerk --json"),
    "worker": ("halter worker", "halter worker clerk --concurrency 20 --json"),
    "serve": ("halter serve", "halter serve clerk --json"),
    "on": ("halter on clerk", 'halter on ./clerk --reason "back from holiday"'),
    "off": ('halter off clerk --reason "too many letters"',),
    "sessions": ("halter sessions", "halter sessions --limit 5 --json"),
    "show": ("halter show clerk-1", "halter show clerk-1 --json"),
    "tail": ("halter tail", "halter tail clerk-1 --after 2"),
    "receipt": ("halter receipt clerk-2", "halter receipt clerk-2 --html receipt.html"),
    "report": ("halter report", "halter report --since 7d --html week.html"),
    "export": ("halter export clerk-2 --output clerk-2.jsonl",),
    "findings": ("halter findings", "halter findings clerk-1 --json"),
    "findings list": ("halter findings", "halter findings list clerk-1"),
    "findings keep": ('halter findings keep clerk-1.f1 --reason "seen on the wall, too"',),
    "findings dismiss": ("halter findings dismiss clerk-1.f1",),
    "proposals": ("halter proposals",),
    "proposals list": ("halter proposals --json",),
    "proposals keep": ("halter proposals keep clerk-1.m1",),
    "proposals dismiss": ('halter proposals dismiss clerk-1.m1 --reason "not so any more"',),
    "proposals promote": ("halter proposals promote clerk-1.m1 clerk --yes",),
    "inbox": ("halter inbox", "halter inbox --json"),
    "approve": (
        "halter approve clerk-1.1/approval",
        "halter approve clerk-1.1/approval --edit letter.json",
        "halter approve clerk-1.1/approval --always --match same --for 1h",
    ),
    "deny": ('halter deny clerk-1.1/approval --reason "not today"',),
    "halt": ("halter halt fleet", 'halter halt agent:clerk --reason "looks odd"'),
    "resume": ("halter resume fleet", "halter resume fleet --over 5m"),
    "cancel": ("halter cancel clerk-1",),
    "budget": ("halter budget", "halter budget raise fleet 30"),
    "budget show": ("halter budget show --everything",),
    "budget raise": ('halter budget raise fleet 30 --reason "launch day"',),
    "budget lower": ("halter budget lower agent:clerk 2",),
    "policy": ("halter policy", "halter policy apply fleet/halter.yaml --yes"),
    "policy show": ("halter policy show --json",),
    "policy apply": ('halter policy apply fleet/halter.yaml --yes --reason "agreed on Monday"',),
    "rules": ("halter rules",),
    "rules end": ("halter rules end r1",),
    "rules offer": ("halter rules offer clerk-1.1/approval",),
    "schedules": ("halter schedules", "halter schedules run clerk/nightly"),
    "schedules list": ("halter schedules list clerk",),
    "schedules run": ("halter schedules run clerk/nightly",),
    "schedules cancel": ("halter schedules cancel clerk/weekly",),
    "schedules retry": ("halter schedules retry clerk/letters 0123456789abcdef",),
    "route": ('halter route clerk "What is 17 * 23?"',),
    "audit": ("halter audit --since 24h", "halter audit --export audit.jsonl --cursor siem"),
    "verify": ("halter verify", "halter verify --rebuild"),
    "store": ("halter store", 'halter store accept --reason "restored the backup of Monday"'),
    "store accept": ("halter store accept", 'halter store accept --reason "restored the backup of Monday" --yes'),
    "erase": ("halter erase --session clerk-2 --yes", "halter erase --older-than 90d --yes"),
    "drill": ("halter drill race --seeds 5", "halter drill tamper --json"),
    "doctor": ("halter doctor", "halter doctor clerk --json"),
    "schema": ("halter schema agent > agent.schema.json",),
    "tokens": ("halter tokens", "halter tokens add bob --role approver --agent clerk"),
    "tokens list": ("halter tokens --json",),
    "tokens add": ("halter tokens add ada --role admin", "halter tokens add bob --role approver --agent clerk"),
    "tokens remove": ("halter tokens remove carol",),
    "trust": ("halter trust clerk",),
}
"""What can be typed, by the name of its command. Each of them is run by a test."""


def shown_below(name: str, command: "Command") -> "Command":
    """Show a command's examples below its help, and those of the commands in it below theirs."""
    found = EXAMPLES.get(name, ())
    if found:
        command.epilog = "\n".join((f"Example{'s' * (len(found) > 1)}:", *(f"  {line}" for line in found)))
    if isinstance(command, TyperGroup):
        for each, inner in command.commands.items():
            shown_below(f"{name} {each}", inner)
    return command
