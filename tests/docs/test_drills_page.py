"""The page about drills, and the table of promises, know every drill and what it tries."""

import re

from halter_drills import DRILLS
from halter_drills.approval import FORGED, HONEST
from halter_drills.flood import BEHAVIOURS
from halter_drills.inject.attacks import load_attacks
from halter_drills.secrets import WAYS
from halter_drills.tamper import TAMPERINGS
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "drills.md").read_text("utf-8")
FIRST = (ROOT / "README.md").read_text("utf-8")
NUMBERS = {7: "seven", 20: "20"}


def test_every_drill_is_on_the_page_and_proves_a_promise_of_the_first() -> None:
    assert tuple(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == DRILLS
    assert set(re.findall(r"\| `halter drill (\w+)`", FIRST)) == set(DRILLS)


def test_the_page_counts_what_the_drills_try() -> None:
    words = " ".join(PAGE.split())
    for sentence in (
        f"{len(TAMPERINGS)} kinds of tampering",
        f"{len(FORGED)} ways to misuse one",
        f"{len(HONEST)} honest uses",
        f"by {len(WAYS)} ways",
        f"each of {NUMBERS[len(BEHAVIOURS)]} models that do not listen",
        f"{len(load_attacks())} attacks of {len({attack.kind for attack in load_attacks()})} kinds",
    ):
        assert sentence in words, sentence
