"""Secrets are referred to by name."""

import pytest

from halter.redaction.secrets import (
    GivenSecrets,
    describe_missing_secrets,
    find_missing_secrets,
    list_secret_references,
    read_environment_secrets,
)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (b"{}", set()),
        (b'{"header":"Bearer ${secret:ACME_TOKEN}"}', {"ACME_TOKEN"}),
        (b'{"a":["${secret:ONE}","${secret:TWO}${secret:ONE}"]}', {"ONE", "TWO"}),
        (b'{"a":"$secret:ONE} ${secret:} ${SECRET:ONE} ${secret:A B}"}', set()),
    ],
)
def test_references_are_found_wherever_they_stand(arguments: bytes, names: set[str]) -> None:
    assert list_secret_references(arguments) == names


def test_only_variables_with_the_prefix_are_secrets() -> None:
    secrets = read_environment_secrets(
        {"HALTER_SECRET_ACME": "open-sesame", "HALTER_SECRET_": "x", "HALTER_SECRET_NO": "", "PATH": "/bin"}
    )
    assert secrets.names() == {"ACME"}
    assert secrets.value("ACME") == "open-sesame"


def test_what_is_not_there_or_not_granted_is_missing() -> None:
    secrets = GivenSecrets({"ONE": "1" * 8, "TWO": "2" * 8})
    arguments = b'{"a":"${secret:TWO}${secret:ONE}${secret:NINE}"}'
    assert find_missing_secrets(arguments, secrets) == ("NINE",)
    assert find_missing_secrets(arguments, secrets, granted=["ONE"]) == ("NINE", "TWO")
    assert "HALTER_SECRET_NINE" in describe_missing_secrets(find_missing_secrets(arguments, secrets))
