"""The pages about closed sets of words (levels, states, outcomes, …) and about the environment."""

import re
from pathlib import Path
from typing import Final, get_args

import halter
from halter.core import errors, vocabulary
from halter.core.tools import LEVELS
from halter.policy.defaults import DEFAULT_RATES, SIMULATED_LEVELS
from halter.policy.levels import LEVEL_TABLE
from halter.spec.models import KNOWN_PROVIDERS
from halter.spec.policy import MODES
from scripts.reference.sheet import NOTHING, code, head, table

AUDITED: Final = {"": "no, only its events", "arguments": "arguments, not the result", "full": "yes"}

SETS: Final = (
    ("Kinds of sessions", vocabulary.SessionKind),
    ("States of a session", vocabulary.State),
    ("Why a session ended", vocabulary.TerminalReason),
    ("Why a turn ended", vocabulary.TurnEnd),
    ("Outcomes of a call", vocabulary.Outcome),
    ("Risks", vocabulary.RiskLevel),
    ("What a decision is about", vocabulary.DecisionKind),
    ("What money was spent for", vocabulary.Purpose),
    ("Where something comes from", vocabulary.Origin),
    ("What wakes a session", vocabulary.WakeCause),
    ("Limits that stop or pause an agent", vocabulary.Guardrail),
)

VARIABLES: Final = {
    "HALTER_STORE": ("the store: a file, or `postgresql://…`", "`~/.local/state/halter/halter.db`"),
    "HALTER_CHECKPOINTS": ("the folder of signed checkpoints", "`~/.local/state/halter/checkpoints`"),
    "HALTER_SIGNING_KEY": ("the key that signs them", "`~/.config/halter/signing.key`"),
    "HALTER_FLEET": ("the fleet's file", "`halter.yaml` here, or `~/.config/halter/halter.yaml`"),
    "HALTER_TRUST": ("where it is kept whose code may run", "`~/.config/halter/trust.json`"),
    "HALTER_CURSORS": ("where cursors of exports are kept", "`~/.local/state/halter/cursors`"),
    "HALTER_HOOKS": (
        "the folder of hooks into other programs: their key, socket and policies",
        "`~/.config/halter/hooks`",
    ),
    "HALTER_TOKENS": ("the file of the tokens by which people reach the server", "`~/.config/halter/tokens.json`"),
    "HALTER_TOKEN": ("the token with which `halter status --live --server` looks and acts", "none: it is needed there"),
    "HALTER_KEY": (
        "the virtual key that `halter proxy env` prints and `halter proxy check` shows",
        "give it as `--key`",
    ),
    "HALTER_METRICS": ("where metrics go: `otlp`, `console` or `file:PATH`", "no metrics are sent"),
    "HALTER_TRACES": ("where traces go: `otlp`, `console` or `file:PATH`", "no traces are made"),
    "HALTER_TRACES_CONTENT": ("`1` adds what was said to traces, with secrets masked", "no content leaves the journal"),
    "HALTER_PERSON": ("the name that stands in the journal for what you do", "your login name"),
    "HALTER_SECRET_NAME": (
        "the value of `${secret:NAME}`",
        "the secret is missing, and calls that name it are refused",
    ),
    "HALTER_AGENT": ("set by Halter for what an agent starts: whoever has it can decide nothing", "you are a person"),
}
"""Variables with their meaning and default. The page lists those that the code reads."""

FAMILIES: Final = {"HALTER_SECRET_": "HALTER_SECRET_NAME"}
NOT_VARIABLES: Final = frozenset({"HALTER_SECRET_OPENAI"})


def page() -> str:
    """Render levels, and every closed set of words."""
    first = head(
        "Levels, states, outcomes",
        "`halter.core.vocabulary`, `halter.guard.judge` and `halter.core.errors`",
        "The closed sets of words in which events, policies and screens are written. No other word can stand there.",
    )
    sets = (f"## {title}\n\n{_listed(get_args(words))}\n" for title, words in SETS)
    return "\n".join((first, _levels(), *sets, _errors()))


def _listed(words: tuple[str, ...]) -> str:
    return ", ".join(code(word) for word in words) + "."


def _levels() -> str:
    rows = (
        (
            code(level),
            AUDITED[LEVEL_TABLE[level].audit],
            f"{DEFAULT_RATES[level]} an hour" if level in DEFAULT_RATES else NOTHING,
            "yes" if LEVEL_TABLE[level].assessed else "no",
            " / ".join("yes" if mode in LEVEL_TABLE[level].asks else NOTHING for mode in MODES),
            "if switched on" if level in SIMULATED_LEVELS else "no",
        )
        for level in LEVELS
    )
    titles = ("level", "audited", "rate", "risk assessed", f"asks in {' / '.join(MODES)}", "simulated")
    return f"## Levels of tools\n\n{table(titles, rows)}"


def _errors() -> str:
    tree, _, rest = (errors.__doc__ or "").partition("```\n")[2].partition("```")
    return f"## Errors\n\nWhat a program can catch:\n\n```text\n{tree}```\n{rest.rstrip()}\n"


def environment_page() -> str:
    """Render every environment variable that the code reads."""
    first = head(
        "The environment",
        "`halter.settings` and `halter.config.agent_files`",
        "Paths below `~/.local/state` and `~/.config` follow `XDG_STATE_HOME` and "
        "`XDG_CONFIG_HOME`. A store that is named "
        "by `--store` counts before `HALTER_STORE`.",
    )
    read_names = found()
    if unknown := read_names - set(VARIABLES):
        raise LookupError(f"{', '.join(sorted(unknown))}: read by the code, but missing in VARIABLES of {__file__}.")
    rows = ((code(name), *words) for name, words in VARIABLES.items() if name in read_names)
    keys = (
        (code(name), code(usual.keys[0]) if usual.keys else "none", code(usual.base_url) if usual.base_url else "")
        for name, usual in KNOWN_PROVIDERS.items()
    )
    return "\n".join(
        (
            first,
            table(("variable", "meaning", "without it"), rows),
            "## Keys of providers\n",
            table(("provider", "its key", "its address"), keys),
        )
    )


def found() -> set[str]:
    """Find the variables in the code that begin with HALTER_."""
    source = Path(next(iter(halter.__path__)))
    names: set[str] = {
        name for file in source.rglob("*.py") for name in re.findall(r"\bHALTER_[A-Z_]+", file.read_text("utf-8"))
    }
    return {FAMILIES.get(name, name) for name in names - NOT_VARIABLES}
