"""E-mail reaches its people, says whether it is worth trying again, and gives nothing away."""

import asyncio
import ssl
from email.message import EmailMessage, Message
from pathlib import Path
from typing import Any

import pytest
from letters import LETTER, PASSWORD, Postbox
from msgspec.structs import replace

from halter.core.notifications import DeliveryFailed, OutgoingNotification
from halter.notify import compose_mail, make_message_id, make_sender
from halter.spec.channels import EmailChannel

SECRETS = {"MAIL": PASSWORD}


def mail(port: int, **more: Any) -> EmailChannel:
    fields: dict[str, Any] = {"to": ("ada@example.com", "bob@example.com"), "security": "none", **more}
    return EmailChannel(name="ops", sender="halter@example.com", host="127.0.0.1", port=port, **fields)


async def sent(postbox: Postbox, letter: OutgoingNotification = LETTER, **more: Any) -> Message:
    await make_sender(mail(postbox.port, **more), SECRETS.__getitem__).send(letter)
    return postbox.got[-1]


def text_of(message: Message) -> str:
    assert isinstance(message, EmailMessage)
    text: str = message.get_content()
    return text.replace("\r\n", "\n")


async def undelivered(channel: EmailChannel, **more: Any) -> DeliveryFailed:
    with pytest.raises(DeliveryFailed) as why:
        await make_sender(channel, SECRETS.__getitem__, **more).send(LETTER)
    assert PASSWORD not in repr(why.value)
    assert why.value.__cause__ is None
    assert str(why.value).endswith(".")
    return why.value


async def test_a_letter_arrives_with_its_subject_its_text_and_who_it_is_from(postbox: Postbox) -> None:
    got = await sent(postbox)
    assert (got["From"], got["To"]) == ("halter@example.com", "ada@example.com, bob@example.com")
    assert got["Subject"] == "Three contracts lapse"
    text = text_of(got)
    assert text.startswith("Look at them.")
    assert all(line in text for line in ("From: night-watch", "Session: s1", "About: finding"))
    assert got["Auto-Submitted"] == "auto-generated"


async def test_every_copy_of_a_letter_is_the_same_to_the_last_byte(postbox: Postbox) -> None:
    first, second = await sent(postbox), await sent(postbox)
    assert first.as_bytes() == second.as_bytes()
    assert first["Message-ID"] == "<halter.n1@example.com>"
    assert (await sent(postbox, replace(LETTER, id="n2")))["Message-ID"] != first["Message-ID"]


async def test_a_subject_cannot_smuggle_in_a_header(postbox: Postbox) -> None:
    got = await sent(postbox, replace(LETTER, subject="Hello\r\nBcc: eve@example.com\r\n\r\nBody\u2028x\0"))
    assert got["Bcc"] is None
    assert got["Subject"].startswith("Hello Bcc: eve@example.com Body")


async def test_all_of_unicode_arrives(postbox: Postbox) -> None:
    words = "Grüße, 漢字 und 🦉\n.\nein Punkt allein" + "x" * 2000
    got = await sent(postbox, replace(LETTER, subject="Grüße 🦉", text=words))
    assert got["Subject"] == "Grüße 🦉"
    assert text_of(got).startswith(words)


async def test_what_no_wire_can_carry_is_shown_by_a_stand_in(postbox: Postbox) -> None:
    got = await sent(postbox, replace(LETTER, text="a\ud800b\0c"))
    assert text_of(got).startswith("a�b␀c")


@pytest.mark.parametrize(("answer", "may_retry"), [("451 try later", True), ("452 full", True), ("554 spam", False)])
async def test_a_letter_that_is_refused_for_now_may_be_sent_again_and_one_for_good_may_not(
    postbox: Postbox, answer: str, *, may_retry: bool
) -> None:
    postbox.answers = [answer]
    why = await undelivered(mail(postbox.port))
    assert str(why) == f"The mail server 127.0.0.1 rejects the message: {answer}."
    assert why.may_retry is may_retry


@pytest.mark.parametrize(("codes", "may_retry"), [("450", True), ("550", False), ("450 550", True)])
async def test_all_who_are_refused_are_named(postbox: Postbox, codes: str, *, may_retry: bool) -> None:
    texts = ("ada@example.com", "bob@example.com")[: len(codes.split())]
    postbox.refused = {name: f"{code} no" for name, code in zip(texts, codes.split(), strict=True)}
    why = await undelivered(mail(postbox.port, to=texts))
    assert "rejects mail for ada@example.com (4" in str(why) or "ada@example.com (550)" in str(why)
    assert why.may_retry is may_retry


async def test_one_who_is_refused_does_not_keep_the_letter_from_the_others(postbox: Postbox) -> None:
    postbox.refused = {"bob@example.com": "550 unknown"}
    why = await undelivered(mail(postbox.port))
    assert str(why) == "The mail server 127.0.0.1 rejects mail for bob@example.com (550)."
    assert len(postbox.got) == 1


async def test_a_server_that_is_down_is_worth_another_try(postbox: Postbox) -> None:
    postbox.close()
    why = await undelivered(mail(postbox.port))
    assert str(why) == "The mail server 127.0.0.1 cannot be reached: SMTPConnectError."
    assert why.may_retry


async def test_a_server_that_dies_before_it_answers_is_asked_again_with_the_same_name(postbox: Postbox) -> None:
    postbox.answers = [""]
    assert (await undelivered(mail(postbox.port))).may_retry
    await sent(postbox)
    first, second = postbox.got
    assert first["Message-ID"] == second["Message-ID"]


async def test_a_stopped_sender_does_not_wait_for_a_silent_server() -> None:
    reached, event = asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.set()
        assert await reader.read() == b""
        writer.close()
        event.set()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    sending = asyncio.create_task(make_sender(mail(port), SECRETS.__getitem__).send(LETTER))
    await reached.wait()
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    await event.wait()
    server.close()


def trusting(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate))


def presenting(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


async def test_a_password_goes_over_tls_only(certificate: Path) -> None:
    postbox = Postbox()
    await postbox.open(tls_context=presenting(certificate), require_starttls=True, authenticator=postbox.authenticate)
    channel = mail(postbox.port, security="starttls", username="ada", password="${secret:MAIL}")
    await make_sender(channel, SECRETS.__getitem__, trusting(certificate)).send(LETTER)
    assert postbox.logins == [PASSWORD.encode()]
    assert len(postbox.got) == 1
    postbox.close()


async def test_tls_from_the_first_byte_on_works_too(certificate: Path) -> None:
    postbox = Postbox()
    await postbox.open(tls=presenting(certificate))
    channel = mail(postbox.port, security="tls")
    await make_sender(channel, SECRETS.__getitem__, trusting(certificate)).send(LETTER)
    assert len(postbox.got) == 1
    postbox.close()


async def test_a_server_that_nobody_vouches_for_gets_no_letter(certificate: Path) -> None:
    postbox = Postbox()
    await postbox.open(tls_context=presenting(certificate), authenticator=postbox.authenticate)
    for security in ("starttls", "tls"):
        channel = mail(postbox.port, security=security, username="ada", password="${secret:MAIL}")
        await undelivered(channel)
    assert (postbox.got, postbox.logins) == ([], [])
    postbox.close()


async def test_a_server_without_starttls_gets_no_password() -> None:
    postbox = Postbox()
    await postbox.open(authenticator=postbox.authenticate, auth_require_tls=False)
    channel = mail(postbox.port, security="starttls", username="ada", password="${secret:MAIL}")
    why = await undelivered(channel)
    assert "does not support `security: starttls` or the login" in str(why)
    assert (postbox.got, postbox.logins, why.may_retry) == ([], [], False)
    postbox.close()


async def test_a_wrong_password_is_not_retried_and_not_shown(certificate: Path) -> None:
    postbox = Postbox()
    await postbox.open(tls_context=presenting(certificate), authenticator=postbox.authenticate)
    channel = mail(postbox.port, security="starttls", username="ada", password="${secret:OTHER}")
    sender = make_sender(channel, {"OTHER": "another-Made-up-0ne"}.__getitem__, trusting(certificate))
    with pytest.raises(DeliveryFailed, match=r"rejects the login of ada \(535\): check its name and password") as why:
        await sender.send(LETTER)
    assert "another-Made-up-0ne" not in repr(why.value)
    assert not why.value.may_retry
    postbox.close()


async def test_a_missing_secret_is_named_and_may_be_there_later(postbox: Postbox) -> None:
    channel = mail(postbox.port, username="ada", password="${secret:NOWHERE}")
    why = await undelivered(channel)
    assert "needs the secret NOWHERE, which is not set. Set HALTER_SECRET_NOWHERE." in str(why)
    assert why.may_retry


def test_a_name_that_is_no_word_still_names_a_letter() -> None:
    odd = make_message_id("s1/told <x>\r\n", "a@bücher.example")
    assert odd == make_message_id("s1/told <x>\r\n", "a@bücher.example")
    assert odd.startswith("<halter.")
    assert odd.endswith("@halter.invalid>")
    assert odd.isascii()
    assert odd.isprintable()
    assert compose_mail(replace(LETTER, id="s1/told"), mail(25))["Message-ID"].count("@") == 1
