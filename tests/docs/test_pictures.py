"""The moving pictures: small, well formed, and drawn as a terminal shows it."""

from xml.etree import ElementTree as ET

from scripts.pictures import FOLDER, animated, chosen, picture, screens


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
