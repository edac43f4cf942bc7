"""Tools of a server stay what a person agreed to, or wait for a decision."""

from halter.core.tools import ToolServer, ToolSpec, check_pins


def spec(name: str, digest: str, server: str = "files") -> ToolSpec:
    return ToolSpec(name=name, description="", schema=b"{}", server=server, digest=digest)


READ, WRITE = spec("files__read", "r1"), spec("files__write", "w1")


def test_all_tools_of_a_server_seen_for_the_first_time_are_usable() -> None:
    assert check_pins([READ, WRITE], {}) == ((READ, WRITE), (), ())
    assert check_pins([READ], {"other__read": "x"}) == ((READ,), (), ())


def test_a_tool_that_is_as_agreed_is_usable() -> None:
    assert check_pins([READ, WRITE], {"files__read": "r1", "files__write": "w1"}) == ((READ, WRITE), (), ())


def test_a_changed_tool_is_quarantined() -> None:
    tool_spec = spec("files__read", "r2")
    assert check_pins([tool_spec, WRITE], {"files__read": "r1", "files__write": "w1"}) == ((WRITE,), (tool_spec,), ())


def test_a_new_tool_of_a_known_server_is_quarantined() -> None:
    assert check_pins([READ, WRITE], {"files__read": "r1"}) == ((READ,), (), (WRITE,))


def test_a_tool_of_no_server_is_nobodys_secret_change() -> None:
    tool_spec = spec("read", "x", server="")
    assert check_pins([tool_spec], {"read": "y", "read__x": "z"}) == ((tool_spec,), (), ())


def test_a_server_whose_name_begins_like_another_is_another() -> None:
    assert check_pins([spec("files2__read", "x", "files2")], {"files__read": "r1"}).usable


def test_a_printed_server_shows_no_keys() -> None:
    key = "sk-hush"
    server = ToolServer("x", args=(key,), env={"K": key}, url=f"https://example.com/?k={key}", headers={"a": key})
    assert key not in repr(server)
