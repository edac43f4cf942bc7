"""A person signs on by a provider in a real browser, from the link on the login page to the logout."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Visit, Visitor
from tests.browser.house import House

ADA = {"sub": "ada-1", "email": "ada@example.com", "groups": ["leads"]}


@pytest.fixture
def visitor(house: House, chromium: Any) -> Iterator[Visitor]:
    """Somebody who was never here."""
    context = chromium.new_context()
    yield Visitor(house, context)
    context.close()


def sign_on(visitor: Visitor, path: str = "/fleet") -> Any:
    """Open a page, and take the way to the provider that the login page offers."""
    page, name = visitor.page, visitor.house.provider.issuer.removeprefix("http://")
    page.goto(f"{visitor.house.url}{path}")
    page.get_by_role("link", name=f"Log in with {name}").click()
    return page


def is_logged_out(visitor: Visitor) -> None:
    visitor.page.goto(f"{visitor.house.url}/fleet")
    expect(visitor.page.get_by_label("token")).to_be_visible()


def test_a_person_logs_in_by_the_provider_sees_their_role_and_logs_out(house: House, visitor: Visitor) -> None:
    house.provider.person = dict(ADA)
    page = sign_on(visitor)
    expect(page.get_by_role("heading", name="Home")).to_be_visible()
    expect(page.get_by_text(re.compile(r"ada@example\.com~\w+ \(approver\)")).first).to_be_visible()
    assert page.url == f"{house.url}/"
    assert visitor.hosts == {house.url.removeprefix("http://"), house.provider.issuer.removeprefix("http://")}
    assert house.provider.authorization["code_challenge_method"] == "S256"
    cookies = page.context.cookies(house.url)
    assert {(each["httpOnly"], each["sameSite"]) for each in cookies} == {(True, "Strict")}
    page.goto(f"{house.url}/agent/desk")
    expect(page.get_by_role("heading", name="desk").first).to_be_visible()
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("token")).to_be_visible()
    is_logged_out(visitor)
    assert visitor.complaints == []


def test_a_person_without_a_group_sees_it_and_stays_outside(house: House, visitor: Visitor, visit: Visit) -> None:
    house.provider.person = {"sub": "eve-<b>1</b>", "email": "eve@example.com", "groups": ["guests"]}
    page = sign_on(visitor)
    expect(page.get_by_text("None of your groups has a role")).to_be_visible()
    expect(page.get_by_text("#eve-<b>1</b>")).to_be_visible()
    is_logged_out(visitor)
    assert page.context.cookies(house.url) == []
    audit = visit("admin").open("/audit")
    row = audit.get_by_role("row").filter(has_text="#eve-<b>1</b>")
    expect(row).to_contain_text(f"sign_on {house.provider.issuer.removeprefix('http://')}")
    expect(row).to_contain_text("No role")


def test_a_login_that_another_browser_began_is_not_finished_here(house: House, visitor: Visitor, chromium: Any) -> None:
    house.provider.person = dict(ADA)
    result = chromium.new_context()
    other_visitor = Visitor(house, result)
    other_visitor.page.goto(f"{house.url}/login")
    with other_visitor.page.expect_request("**/login/oidc/callback*") as back:
        other_visitor.page.get_by_role("link", name="Log in with").click()
    visitor.page.goto(back.value.url)
    expect(visitor.page.get_by_text("This login was not started in this browser")).to_be_visible()
    is_logged_out(visitor)
    result.close()
