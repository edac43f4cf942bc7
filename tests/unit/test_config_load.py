"""Whatever is written into a YAML file, the answer is plain values or a sentence with a line."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.config.yaml_reader import MAX_BYTES, MAX_DEPTH, load_bytes, load_file
from halter.core.errors import ConfigError

BOMB = b"a: &a [x, x]\n" + b"".join(b"%c: &%c [*%c, *%c]\n" % (i, i, i - 1, i - 1) for i in range(98, 110))


def test_values_keep_their_lines() -> None:
    document = load_bytes(b"a: 1\nb:\n  - x\n  - {c: true}\n", "f.yaml")
    assert document.value == {"a": 1, "b": ["x", {"c": True}]}
    assert document.source_map.lines == {(): 1, ("a",): 1, ("b",): 2, ("b", 0): 3, ("b", 1): 4, ("b", 1, "c"): 4}


def test_what_is_not_there_is_placed_at_what_is_around_it() -> None:
    places = load_bytes(b"a:\n  b: 1\n", "f.yaml").source_map
    assert places.at(("a", "b", "c", 3)) == "f.yaml line 2"
    assert places.at(("z",)) == "f.yaml line 1"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("1", 1),
        ("-3", -3),
        ("0.001", 0.001),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("010", 10),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("12:30", "12:30"),
        ("2026-11-15", "2026-11-15"),
        ("20/hour", "20/hour"),
        (".nan", ".nan"),
        (".inf", ".inf"),
        ("0x1f", "0x1f"),
        ("1_000", "1_000"),
        ("'1'", "1"),
        ('"true"', "true"),
        ("anthropic:claude", "anthropic:claude"),
    ],
)
def test_scalars_mean_what_their_writer_meant(written: str, meant: object) -> None:
    value = load_bytes(f"key: {written}\n".encode(), "f.yaml").value["key"]
    assert value == meant
    assert type(value) is type(meant)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "f.yaml line 1: the file is empty"),
        (b"# only a comment\n", "f.yaml line 1: the file is empty"),
        (BOMB, "f.yaml line 1: anchors (`&name`) are not supported; write each value out."),
        (b"a: 1\nb: *a\n", "f.yaml line 2: aliases (`*name`) are not supported; write the value out."),
        (b"a: 1\nb: 2\na: 3\n", "f.yaml line 3: `a` is already set in line 1; keep one of them."),
        (b"x:\n  a: 1\n  a: 2\n", "f.yaml line 3: `a` is already set in line 2; keep one of them."),
        (b"a:\n\tb: 1\n", "f.yaml line 2: this line starts with a tab; indent with spaces."),
        (
            b"a: 1\nb: !!python/object:os.system x\n",
            "f.yaml line 2: the tag `tag:yaml.org,2002:python/object:os.system`",
        ),
        (b"a: !secret x\n", "f.yaml line 1: the tag `!secret` is not supported; remove it."),
        (b"a: 1\n---\nb: 2\n", "f.yaml line 2: `---` starts a second document; keep one document per file."),
        (b"a: 1\nb: [1, 2\n", "f.yaml line 3: this is not valid YAML: did not find expected ',' or ']'."),
        (b"a: b: c\n", "f.yaml line 1: this is not valid YAML: mapping values are not allowed in this context."),
        (b"a: 1\nb: \x00\n", "f.yaml line 2: this line contains a character that YAML does not allow; remove it."),
        (b"a: 1\nb: \xff\n", "f.yaml line 2: this is not UTF-8 text; save the file as UTF-8."),
        (b"? [a]\n: 1\n", "f.yaml line 1: a key must be a plain name"),
        (b"'': 1\n", "f.yaml line 1: a key is empty"),
        (b"a: 1e999\n", "f.yaml line 1: the number 1e999 is too large."),
        (b"a: " + b"9" * 5000, "f.yaml line 1: the number 99999"),
        (
            b"a:\n  " + b"[" * 100_000,
            f"f.yaml line 2: values are nested more than {MAX_DEPTH} levels deep; reduce the nesting.",
        ),
        (b"a" * (MAX_BYTES + 1), "f.yaml is larger than 1,000,000 bytes"),
    ],
)
def test_what_cannot_be_read_is_a_sentence_with_a_line(data: bytes, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_bytes(data, "f.yaml")
    assert str(refused.value).startswith(sentence)


def test_a_missing_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"agent\.yaml does not exist\. Create it, or name another file\."):
        load_file(tmp_path / "agent.yaml", "agent.yaml")


def test_a_folder_in_place_of_a_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"agent\.yaml cannot be read: Is a directory"):
        load_file(tmp_path, "agent.yaml")


def test_a_giant_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    giant = tmp_path / "giant.yaml"
    with giant.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match="is larger than"):
        load_file(giant)


def test_a_byte_order_mark_is_no_part_of_a_key() -> None:
    assert load_bytes("\ufeffname: x\n".encode(), "f.yaml").value == {"name": "x"}


@given(st.binary(max_size=200) | st.text(alphabet="ab:-[]{}&*!|>'\"#%@`, \n\t?~0.", max_size=60).map(str.encode))
def test_any_bytes_are_values_or_a_sentence(data: bytes) -> None:
    refused = _refusal(data)
    assert refused is None or refused.startswith("f.yaml line ")


def _refusal(data: bytes) -> str | None:
    try:
        load_bytes(data, "f.yaml")
    except ConfigError as refused:
        return str(refused)
    return None
