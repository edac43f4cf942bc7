"""A person's name is written in one form where it enters, so that one person is not two."""

import pytest

from halter.core.ids import can_decide, normalize_person, person_of
from halter.settings import name_person


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"HALTER_PERSON": " ada"}, "ada"),
        ({"HALTER_PERSON": "ada\u200b\n"}, "ada"),
        ({"HALTER_PERSON": "  ", "USER": "bea "}, "bea"),
        ({"HALTER_PERSON": "\u3164", "LOGNAME": "\tbea"}, "bea"),
        ({"HALTER_PERSON": "Ada  Lovelace"}, "Ada Lovelace"),
        ({"HALTER_PERSON": "Jose\u0301"}, "Jos\u00e9"),
        ({"HALTER_PERSON": "\uff41gent:clerk"}, "agent:clerk"),
    ],
)
def test_the_name_of_the_environment_enters_in_its_one_form(environ: dict[str, str], name: str) -> None:
    assert name_person(environ) == name
    assert normalize_person(name) == name


@pytest.mark.parametrize("name", ["ada", "ada.phone", "ada@example.com", "Łukasz", "张伟", "مريم", "नेहा", "o'neil"])
def test_a_name_that_people_have_stays_as_it_is(name: str) -> None:
    assert normalize_person(name) == name


def test_names_that_were_recorded_with_blanks_before_count_as_the_same_person() -> None:
    assert person_of(" Ada.phone") == person_of("ada")
    assert not can_decide(" agent:clerk")
