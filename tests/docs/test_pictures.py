"""The moving pictures: small, well formed, and drawn as a terminal shows it."""

from xml.etree import ElementTree as ET

import pytest

from halter.core.tools import LEVELS
from halter.policy.levels import LEVEL_TABLE
from halter.spec.policy import MODES
from scripts.pictures import DARK, FOLDER, LIGHT, animated, chosen, draw_levels, picture, screens

SVG = "{http://www.w3.org/2000/svg}"


def test_every_picture_is_small() -> None:
    assert {file.name for file in FOLDER.iterdir() if file.stat().st_size > 500_000} == set()


def test_the_terminal_is_drawn_as_it_was_seen() -> None:
    texts = ["one\r\ntwo", "\r\x1b[2K\x1b[1A\x1b[2K", "\x1b[1;31mred\x1b[0m & plain\r\n"]
    seen = list(screens(iter(texts)))
    assert ["".join(character for character, _ in line) for line in seen[-1]] == ["red & plain", ""]
    assert seen[-1][0][0] == ("r", "b r")
    drawn = ET.fromstring(picture(chosen(seen), "halter demo"))  # noqa: S314  It was made a line above.
    assert {"one", "two", "red", "& plain"} <= {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert ET.parse(FOLDER / "terminal.svg")  # noqa: S314  It is a file of the project.


def test_frames_follow_one_another() -> None:
    picture_bytes = (FOLDER / "phone.png").read_bytes()
    moving = animated([(picture_bytes, 1.0), (picture_bytes, 2.0)])
    assert moving.count(b"fcTL") == 2
    assert b"fdAT" in moving
    assert (FOLDER / "dashboard.png").read_bytes().count(b"fcTL") == 3


def test_the_levels_are_drawn_as_the_guard_has_them() -> None:
    assert (FOLDER / "levels.svg").read_text("utf-8") == draw_levels(), "Run: python -m scripts.pictures levels"
    drawing = ET.fromstring(draw_levels())  # noqa: S314  It was made a line above.
    texts = [str(text.text) for text in drawing.iter(f"{SVG}text")]
    assert {*LEVELS, *MODES, "LOW", "MEDIUM", "HIGH", "CRITICAL"} <= {*texts}
    assert texts.count("asks you") == sum(len(row.asks) for row in LEVEL_TABLE.values())
    assert texts.count("runs") == len(LEVELS) * len(MODES) - texts.count("asks you")


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_every_text_of_the_levels_can_be_read_on_its_ground(scheme: dict[str, str]) -> None:
    for ground in ("ground", "runs", "asks", "always"):
        assert contrast(scheme["text"], scheme[ground]) >= 7, ground
    assert contrast(scheme["dim"], scheme["ground"]) >= 4.5


def contrast(colour: str, other: str) -> float:
    """Compute the contrast of two colours as WCAG defines it."""
    lighter, darker = sorted((luminance(colour), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
