"""Secrets are taken out of text in one place. All keys here are put together from parts and open nothing."""

import base64
import html
import json
import quopri
import random
import shlex
import string
import struct
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halter.core.ids import SessionId, WorkerId
from halter.core.messages import Message, Prompt, Text, ToolCall, make_user_message
from halter.core.ports import Lease
from halter.core.tools import ToolSpec
from halter.redaction.key_patterns import SECRET_FAMILIES
from halter.redaction.prompt_masker import PromptMasker
from halter.redaction.redact import (
    MAX_CACHED_CHARACTERS,
    MAX_CACHED_TEXT_LENGTH,
    MAX_CACHED_TEXTS,
    CleanTexts,
    Redactor,
    SecretSpan,
    is_secret_name,
)

ANY_TEXT = st.text(st.characters() | st.characters(categories=["Cs"]) | st.just("\x00"))
PLAIN = Redactor({})


def letters(count: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    return "".join(random.Random(count).choices(alphabet, k=count))


def hexes(count: int) -> str:
    return letters(count, "0123456789abcdef")


UPPER = string.ascii_uppercase + string.digits
UUID = "-".join(hexes(count) for count in (8, 4, 4, 4, 12))
DASHES = "-" * 5
PEM = f"{DASHES}BEGIN RSA PRIVATE {'KEY'}{DASHES}\n{letters(64)}\n{letters(40)}==\n{DASHES}END RSA PRIVATE KEY{DASHES}"

EXAMPLES = [
    ("openai", "sk" + "-" + letters(48)),
    ("openai", "sk" + "-proj-" + letters(60) + "_" + letters(20)),
    ("anthropic", "sk" + "-ant-" + "api03-" + letters(80)),
    ("openrouter", "sk" + "-or-v1-" + hexes(64)),
    ("google", "AI" + "za" + letters(35)),
    ("google", "GOC" + "SPX-" + letters(28)),
    ("google", "ya" + "29." + letters(60)),
    ("aws", "AK" + "IA" + letters(16, UPPER)),
    ("aws", "AS" + "IA" + letters(16, UPPER)),
    ("stripe", "sk" + "_live_" + letters(24)),
    ("stripe", "rk" + "_test_" + letters(24)),
    ("stripe", "wh" + "sec_" + letters(32)),
    ("github", "gh" + "p_" + letters(36)),
    ("github", "gh" + "o_" + letters(36)),
    ("github", "github" + "_pat_" + letters(22) + "_" + letters(59)),
    ("gitlab", "gl" + "pat-" + letters(20)),
    ("slack", "xo" + "xb-" + letters(12, string.digits) + "-" + letters(24)),
    ("slack", "hooks.slack" + ".com/services/T" + letters(8, UPPER) + "/B" + letters(8, UPPER) + "/" + letters(24)),
    ("twilio", "S" + "K" + hexes(32)),
    ("sendgrid", "S" + "G." + letters(22) + "." + letters(43)),
    ("npm", "np" + "m_" + letters(36)),
    ("pypi", "py" + "pi-AgEIcHlwaS5vcmc" + letters(70)),
    ("azure", letters(3) + "8Q" + "~" + letters(34)),
    ("private-key", PEM),
    ("private-key", json.dumps({"type": "service_account", "private_id": "x", "pem": PEM})),
    ("jwt", "ey" + "JhbGciOiJIUzI1NiJ9" + ".ey" + "JzdWIiOiIxMjM0In0" + "." + letters(43)),
    ("huggingface", "h" + "f_" + letters(34)),
    ("digitalocean", "do" + "p_v1_" + hexes(64)),
    ("heroku", "HR" + "KU-" + UUID),
    ("mailgun", "ke" + "y-" + hexes(32)),
    ("shopify", "sh" + "pat_" + hexes(32)),
    ("square", "sq" + "0atp-" + letters(22)),
    ("telegram", "123456789" + ":A" + "A" + letters(33)),
    ("discord", "M" + letters(23) + "." + letters(6) + "." + letters(27)),
    ("discord", "discord" + ".com/api/webhooks/" + letters(18, string.digits) + "/" + letters(68)),
    ("datadog", "pu" + "b" + hexes(32)),
    ("newrelic", "NR" + "AK-" + letters(27, UPPER)),
    ("cloudflare", "v1" + ".0-" + hexes(24) + "-" + hexes(146)),
    ("linear", "lin" + "_api_" + letters(40)),
    ("notion", "nt" + "n_" + letters(46)),
    ("okta", "SS" + "WS 00" + letters(40)),
    ("vault", "hv" + "s." + letters(90)),
    ("databricks", "da" + "pi" + hexes(32)),
    ("grafana", "gl" + "sa_" + letters(32) + "_" + hexes(8)),
    ("postman", "PM" + "AK-" + hexes(24) + "-" + hexes(34)),
    ("terraform", letters(14) + ".at" + "lasv1." + letters(60)),
    ("doppler", "dp" + ".pt." + letters(43)),
    ("sentry", "snt" + "rys_" + letters(80)),
    ("supabase", "sb" + "p_" + hexes(40)),
    ("groq", "gs" + "k_" + letters(52)),
    ("replicate", "r" + "8_" + letters(37)),
    ("pulumi", "pu" + "l-" + hexes(40)),
    ("atlassian", "AT" + "ATT3" + letters(60)),
    ("figma", "fi" + "gd_" + letters(40)),
    ("airtable", "pa" + "t" + letters(14) + "." + hexes(64)),
    ("planetscale", "pscale" + "_tkn_" + letters(43)),
    ("dynatrace", "dt" + "0c01." + letters(24, UPPER) + "." + letters(64, UPPER)),
    ("rubygems", "ruby" + "gems_" + hexes(48)),
    ("age", "AGE-SECRET" + "-KEY-1" + letters(58, UPPER)),
    ("circleci", "CCI" + "PAT_" + letters(40)),
    ("tailscale", "ts" + "key-auth-" + letters(24)),
    ("langsmith", "lsv" + "2_pt_" + hexes(32) + "_" + hexes(10)),
    ("docker", "dckr" + "_pat_" + letters(27)),
    ("bearer", "Authorization Bearer " + letters(40)),
    ("basic-auth", "Proxy Basic " + base64.b64encode(b"ann:open sesame").decode()),
    ("url-password", "postgres://ann:" + letters(10) + "@db.example.com/x"),
    ("url-password", "https://ann:" + "pä$$wörd" + "@example.com"),
    ("azure", "https://x.blob.core.windows.net/c?sv=1&sig=" + letters(43) + "%3D"),
    ("password", "password=" + letters(12)),
    ("password", "DB_PASSWORD: " + letters(12)),
    ("password", '{"apiKey": "' + letters(20) + '"}'),
    ("password", r"{\"client_secret\": \"" + letters(20) + r"\"}"),
    ("password", "aws_secret_access_key = " + letters(40)),
    ("password", "Server=x;User=y;Pwd=" + letters(9) + ";Encrypt=1"),
    ("password", "AccountKey=" + letters(86) + "=="),
    ("password", "Authorization: token " + letters(40)),
    ("password", "x-api-key: " + letters(32)),
    ("password", "Mot de passe: password: 'ünïcode'"),
]

INNOCENT = [
    "",
    "Ordinary prose about passwords, tokens and secrets, none of which is here.",
    "The secret: there is none. Password: required. token = null",
    "commit 4a4989f0c7a1de0a0d0b5b4f9d3fca13cf1f5b52 by ann",
    "sha256:" + hexes(64),
    UUID,
    f"<img src='data:image/png;base64,{base64.b64encode(random.Random(7).randbytes(4000)).decode()}'>",
    base64.b64encode(b"\x00\x01\x02" * 2000).decode(),
    "task-management-of-a-rather-long-branch-name-for-risk-assessments",
    "max_tokens=4096 total_tokens: 15000 tokens=12",
    "https://example.com:8443/path?page=2#top and ann@example.com",
    "tests.golden.test_a_session_that_ends_is_never_started_again",
    "${secret:GITHUB_TOKEN} and password=${secret:DB_PASSWORD}",
    "npm_config_registry and npm_lifecycle_event",
    "The pattern is a patient path through the half_open door.",
    "password: str = Field(...)",
    "0x" + hexes(40) + " " + "00" + hexes(62),
    "2026-11-15T03:15:34Z INFO worker-3 GET /v1/items/77 status=200 took 12.5 ms",
    "a\x00b\ud800 Grüße 世界 🌍",
    "Basic understanding of bearer certificates",
]


@pytest.mark.parametrize(("family", "text"), EXAMPLES)
def test_a_key_of_each_usual_family_is_hidden_under_its_family_s_name(family: str, text: str) -> None:
    redacted = PLAIN.redact(f"before {text} after")
    assert f"[redacted:{family}]" in redacted
    assert len(redacted.replace(f"[redacted:{family}]", "")) < len(f"before {text} after") - 6
    assert redacted.startswith("before ")
    assert redacted.endswith(" after")


def test_the_table_covers_the_families_that_it_should() -> None:
    assert len(EXAMPLES) >= 45
    assert len({family for family, _ in EXAMPLES}) >= 45
    assert {family for family, _ in EXAMPLES} <= {family.name for family in SECRET_FAMILIES}


@pytest.mark.parametrize("text", INNOCENT)
def test_what_is_no_secret_stays_as_it_is(text: str) -> None:
    assert PLAIN.redact(text) == text


def test_only_the_secret_part_is_hidden() -> None:
    assert PLAIN.redact("postgres://ann:open-sesame@db/x") == "postgres://ann:[redacted:url-password]@db/x"
    assert PLAIN.redact('{"password": "open-sesame", "user": "ann"}') == (
        '{"password": "[redacted:password]", "user": "ann"}'
    )


def test_two_keys_without_anything_between_them_are_both_hidden() -> None:
    aws, stripe = "AK" + "IA" + letters(16, UPPER), "sk" + "-" + letters(30)
    assert PLAIN.redact(aws + stripe) == "[redacted:aws][redacted:openai]"


def test_a_key_in_the_user_part_of_an_url_is_hidden_too() -> None:
    key = "gh" + "p_" + letters(36)
    assert PLAIN.redact(f"https://{key}:x-oauth@github.com") == (
        "https://[redacted:github]:[redacted:url-password]@github.com"
    )


SECRET = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=8, max_size=40)
SPELLINGS = {
    "plain": lambda value: value,
    "json": json.dumps,
    "json unescaped": lambda value: json.dumps(value, ensure_ascii=False),
    "json in json": lambda value: json.dumps(json.dumps(value)),
    "url": lambda value: quote(value, safe=""),
    "url with slashes": quote,
    "form": quote_plus,
    "all percent": lambda value: "".join(f"%{byte:02x}" for byte in value.encode()),
    "hex": lambda value: value.encode().hex(),
    "upper hex": lambda value: value.encode().hex().upper(),
    "separated hex": lambda value: value.encode().hex(":"),
    "hex of a program": lambda value: ", ".join(f"0x{byte:02x}" for byte in value.encode()),
    "url twice": lambda value: quote(quote(value, safe=""), safe=""),
    "url three times": lambda value: quote(quote(quote(value, safe=""), safe=""), safe=""),
    "entities": html.escape,
    "entities of entities": lambda value: html.escape(html.escape(value)),
    "decimal entities": lambda value: "".join(f"&#{ord(letter)};" for letter in value),
    "hex entities": lambda value: "".join(f"&#x{ord(letter):04X};" for letter in value),
    "unicode escapes": lambda value: json.dumps("".join(chr(ord(letter)) for letter in value)),
    "escapes of all": lambda value: "".join(
        f"\\u{unit:04x}"
        for unit in struct.unpack(f"<{len(value.encode('utf-16-le')) // 2}H", value.encode("utf-16-le"))
    ),
    "long escapes": lambda value: "".join(f"\\U{ord(letter):08x}" for letter in value),
    "braced escapes": lambda value: "".join(f"\\u{{{ord(letter):x}}}" for letter in value),
    "escaped bytes": lambda value: "".join(f"\\x{byte:02x}" for byte in value.encode()),
    "octal": lambda value: "".join(f"\\{byte:03o}" for byte in value.encode()),
    "quoted-printable": lambda value: quopri.encodestring(value.encode()).decode(),
    "shell": shlex.quote,
    "escaped for a shell": lambda value: "".join(f"\\{letter}" if letter in "$!&*() " else letter for letter in value),
    "reversed": lambda value: value[::-1],
    "base32": lambda value: base64.b32encode(value.encode()).decode(),
    "small base32": lambda value: base64.b32encode(value.encode()).decode().lower().rstrip("="),
    "base64 of two bytes a letter": lambda value: base64.b64encode(value.encode("utf-16-le")).decode(),
    "base64 of two bytes in the other order": lambda value: base64.b64encode(value.encode("utf-16-be")).decode(),
    "base64 with the mark of its order": lambda value: base64.b64encode(value.encode("utf-16")).decode(),
    "base64 in a URL": lambda value: quote(base64.b64encode(value.encode()).decode(), safe=""),
    "wrapped base64": lambda value: base64.encodebytes(f"{'x' * 50}{value}".encode()).decode(),
    "escaped wrapped base64": lambda value: json.dumps(base64.encodebytes(f"{'x' * 40}{value}".encode()).decode()),
}
ONE_BYTE = {
    "capitals": str.upper,
    "small letters": str.lower,
    "a NUL after each": "\0".join,
    "an escaped NUL after each": lambda value: json.dumps("\0".join(value)),
    "wrapped": lambda value: "\n".join(value[at : at + 5] for at in range(0, len(value), 5)),
    "hex of two bytes a letter": lambda value: value.encode("utf-16-le").hex(),
}


FEW_OR_MANY = pytest.mark.parametrize(
    "examples", [pytest.param(8, id=pytest.HIDDEN_PARAM), pytest.param(60, marks=pytest.mark.soak)]
)
PLAIN_LETTERS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=8, max_size=40)


def hides_every_value(values: st.SearchStrategy[str], spellings: Mapping[str, Callable[[str], str]], many: int) -> None:
    @given(value=values)
    @settings(max_examples=many, deadline=None)
    def hides(value: str) -> None:
        # A redactor takes longer to make than all spellings take to be found.
        redactor = Redactor({"MINE": value})
        for name, spell in spellings.items():
            spelled = spell(value)
            if spelled.strip('"\\') in "[redacted:MINE]":
                continue
            redacted = redactor.redact(f"<<{spelled}>>")
            assert "[redacted:MINE]" in redacted, name
            assert spelled.strip('"\\') not in redacted, name

    hides()


@FEW_OR_MANY
def test_a_known_value_is_hidden_in_every_spelling(examples: int) -> None:
    hides_every_value(SECRET, SPELLINGS, examples)


@FEW_OR_MANY
def test_a_known_value_of_plain_letters_is_hidden_however_it_is_cased_widened_or_wrapped(examples: int) -> None:
    hides_every_value(PLAIN_LETTERS, ONE_BYTE, examples)


@pytest.mark.parametrize("size", [8, 9, 10, 41, 255, 700])
def test_nothing_of_a_known_value_is_left_in_any_spelling(size: int) -> None:
    value = letters(size, string.ascii_letters + string.digits + "+/ $&'")
    redactor = Redactor({"MINE": value})
    for name, spell in {**SPELLINGS, **ONE_BYTE}.items():
        for padding in ("", "ab", "abcd"):
            clean = spell(f"{padding}{'|' * len(padding)}{' ' * size}")
            spelled = spell(f"{padding}{value}")
            redacted = redactor.redact(spelled).replace("[redacted:MINE]", "")
            texts = {redacted[at : at + 12] for at in range(len(redacted) - 11)}
            parts = {spelled[at : at + 12] for at in range(len(spelled) - 11)}
            known = {clean[at : at + 12] for at in range(len(clean) - 11)}
            assert not (texts & parts) - known or len(redacted) <= 80, (name, redacted)


@given(before=st.binary(max_size=5), value=SECRET, after=st.binary(max_size=5))
def test_a_known_value_inside_base64_is_hidden_at_each_alignment(before: bytes, value: str, after: bytes) -> None:
    redactor = Redactor({"MINE": value})
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        encoded = encode(before + value.encode() + after).decode()
        for text in (encoded, encoded.rstrip("=")):
            redacted = redactor.redact(text)
            assert "[redacted:MINE]" in redacted
            assert len(redacted) - len("[redacted:MINE]") <= 4 * (len(before) + len(after) + 4) / 3


def test_long_values_and_values_of_several_lines_are_hidden_piece_by_piece() -> None:
    long = letters(5000)
    assert Redactor({"LONG": long}).redact(f"a {long} b") == "a [redacted:LONG] b"
    lines = f"{letters(30)}\n{letters(31)}\n{letters(32)}"
    redactor = Redactor({"LINES": lines})
    assert redactor.redact(lines) == "[redacted:LINES]"
    assert redactor.redact(f"1: {letters(31)}") == "1: [redacted:LINES]"
    assert redactor.redact(json.dumps(lines)) == '"[redacted:LINES]"'


def test_of_the_environment_only_secret_like_names_count_and_short_values_never() -> None:
    environment = {
        "HOME": "/home/ann",
        "ACME_TOKEN": "open-sesame",
        "PIN_KEY": "1234567",
        "SSH_AUTH_SOCK": "/run/agent",
    }
    redacted = Redactor({}, environment).redact("/home/ann open-sesame 1234567 /run/agent")
    assert redacted == "/home/ann [redacted:ACME_TOKEN] 1234567 /run/agent"
    assert Redactor({"ANY": "open-sesame"}).redact("open-sesame") == "[redacted:ANY]"


@pytest.mark.parametrize("name", ["OPENAI_API_KEY", "db-password", "GH_PAT", "client.secret", "SENTRY_DSN"])
def test_names_of_secrets_are_known(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["HOME", "PWD", "KEYBOARD", "AWS_ACCESS_KEY_ID", "TOKENIZERS_PARALLELISM"])
def test_names_of_other_things_are_known(name: str) -> None:
    assert not is_secret_name(name)


def test_a_mark_that_somebody_else_wrote_hides_nothing() -> None:
    assert Redactor({"MINE": "open-sesame"}).redact("[redacted:open-sesame]") == "[redacted:[redacted:MINE]]"


PARTS = st.sampled_from(
    [head.decode("utf-8", "ignore") for family in SECRET_FAMILIES for head in family.heads]
    + [text for _, text in EXAMPLES]
    + ["password=", "secret: bearer ", "open-sesame", "[redacted:", "[redacted:github]", "]", "://", "@", "=", " ", "."]
)
KNOWN = Redactor({"MINE": "open-sesame", "OTHER": "sk-sesame-open"})


@given(st.lists(PARTS | ANY_TEXT | st.text("abcAB01_-", max_size=40), max_size=12).map("".join))
@settings(max_examples=5 * settings.default.max_examples)
def test_redacting_twice_changes_nothing_more(text: str) -> None:
    once = KNOWN.redact(text)
    assert KNOWN.redact(once) == once
    assert "open-sesame" not in once


@given(ANY_TEXT)
def test_any_text_can_be_redacted(text: str) -> None:
    assert isinstance(KNOWN.redact(text), str)


def test_each_request_of_a_session_is_masked_whatever_of_it_is_new() -> None:
    masker, lease = PromptMasker(KNOWN.redact), Lease(SessionId("s"), WorkerId("w"), 1)
    tools = tuple(ToolSpec(name=name, description=f"{name} open-sesame", schema=b"{}") for name in ("look", "act"))
    said = [make_user_message(f"{number} open-sesame") for number in range(6)]
    asked = (
        Prompt(system="one", messages=tuple(said[:2]), tools=tools[:1]),
        Prompt(system="one", messages=tuple(said[:4]), tools=tools),
        Prompt(system="two open-sesame", messages=tuple(said[:5]), tools=tools),
        Prompt(system="two open-sesame", messages=tuple(said[3:]), tools=(), facts={"door": "open-sesame"}),
    )
    for prompt in asked:
        for masked in (masker.prompt(lease, prompt), masker.prompt(lease, prompt)):
            assert masked == PromptMasker(KNOWN.redact).prompt(Lease(SessionId("t"), WorkerId("w"), 1), prompt)
            assert "open-sesame" not in repr(masked)
            assert len(masked.messages) == len(prompt.messages)
            assert [tool.name for tool in masked.tools] == [tool.name for tool in prompt.tools]


def test_a_message_that_takes_another_one_s_place_is_masked_wherever_it_stands() -> None:
    masker, lease = PromptMasker(KNOWN.redact), Lease(SessionId("s"), WorkerId("w"), 1)
    said = [make_user_message(f"message {number}") for number in range(6)]
    for place in range(6):
        assert masker.prompt(lease, Prompt(messages=tuple(said))).messages == tuple(said)
        replaced = [*said[:place], make_user_message("open-sesame"), *said[place + 1 :], make_user_message("Now.")]
        masked = masker.prompt(lease, Prompt(messages=tuple(replaced))).messages
        assert "open-sesame" not in repr(masked)
        assert [*masked[:place], *masked[place + 1 :]] == [*replaced[:place], *replaced[place + 1 :]]


def test_a_part_that_is_known_to_be_clean_hides_no_other() -> None:
    masker, lease = PromptMasker(KNOWN.redact), Lease(SessionId("s"), WorkerId("w"), 1)
    for tool, arguments in (("look", "{}"), ("open-sesame", "{}"), ("look", '{"at": "open-sesame"}')):
        asked = make_user_message("go"), Message("assistant", (Text("Well.", "model"), ToolCall("c", tool, arguments)))
        assert "open-sesame" not in repr(masker.prompt(lease, Prompt(system="one", messages=asked)))


@pytest.mark.parametrize("where", ["system", "tools", "facts"])
def test_what_stands_beside_messages_without_a_secret_is_masked(where: str) -> None:
    masker, lease = PromptMasker(KNOWN.redact), Lease(SessionId("s"), WorkerId("w"), 1)
    said = [make_user_message(f"message {number}") for number in range(4)]
    for count, word in enumerate(("shut", "open-sesame", "open-sesame"), start=2):
        fields: dict[str, Any] = {
            "system": word,
            "tools": (ToolSpec(name="look", description=word, schema=b"{}"),),
            "facts": {"door": word},
        }
        prompt = Prompt(messages=tuple(said[:count]), **{where: fields[where]})
        masked = masker.prompt(lease, prompt)
        assert "open-sesame" not in repr(masked)
        assert masked.messages == prompt.messages


class Scanned(Redactor):
    """Counts how often it looks through a text."""

    scans = 0

    def spans(self, data: bytes) -> list[SecretSpan]:
        self.scans += 1
        return super().spans(data)


def test_a_long_text_without_a_secret_is_looked_through_once() -> None:
    redactor = Scanned({"door": "open-sesame"})
    masker, lease = PromptMasker(redactor.redact), Lease(SessionId("s"), WorkerId("w"), 1)
    text = redactor.redact("word " * 2000)
    for now in ("noon", "one"):
        ending = make_user_message(now)
        assert masker.prompt(lease, Prompt(messages=(make_user_message(text), ending))).messages[-1] == ending
    assert redactor.scans == 1 + len(("noon", "one"))


def test_what_is_known_of_clean_texts_has_an_end() -> None:
    clean_texts = CleanTexts()
    for number in range(3 * MAX_CACHED_TEXTS):
        clean_texts.remember(str(number))
        assert str(number) in clean_texts
        assert len(clean_texts) <= MAX_CACHED_TEXTS
    for number in range(3 * MAX_CACHED_CHARACTERS // MAX_CACHED_TEXT_LENGTH):
        clean_texts.remember(str(number).ljust(MAX_CACHED_TEXT_LENGTH))
        assert sum(map(len, clean_texts)) <= MAX_CACHED_CHARACTERS
    clean_texts.remember("x" * (MAX_CACHED_TEXT_LENGTH + 1))
    assert max(map(len, clean_texts)) == MAX_CACHED_TEXT_LENGTH


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "db:\n  password: swordfish # old\n  user: ada\n",
            "db:\n  password: [redacted:password] # old\n  user: ada\n",
        ),
        ("password: letmein\n", "password: [redacted:password]\n"),
        ("db:\n  password: Sommerregen\n", "db:\n  password: [redacted:password]\n"),
        (
            "otpauth://totp/ACME:ada@example.com?secret=JBSWY3DPEHPK3PXP&issuer=ACME",
            "otpauth://totp/ACME:ada@example.com?secret=[redacted:password]&issuer=ACME",
        ),
        ("otpauth://hotp/x?digits=6&secret=jbswy3dp", "otpauth://hotp/x?digits=6&secret=[redacted:password]"),
        ("| DB_PASSWORD | S3cretPw!9x |", "| DB_PASSWORD | [redacted:password] |"),
        ("|`password`|`S3cretPw!9x`|", "|`password`|`[redacted:password]`|"),
        ("| **API key** | aG93IG5pY2UgdG8gc2VlIHlvdTEy |", "| **API key** | [redacted:password] |"),
        (
            "| NPM_TOKEN | 3f2b8c1e-9a4d-4c7e-8b1a-2d3e4f5a6b7c |",
            "| NPM_TOKEN | [redacted:password] |",
        ),
        ("password: hunter two\n", "password: [redacted:password]\n"),
        ('db:\n  password: "correct horse battery staple"\n', 'db:\n  password: "[redacted:password]"\n'),
        ("db_password: blue summer rain # old\n", "db_password: [redacted:password] # old\n"),
        ("password: tiger\n", "password: [redacted:password]\n"),
        (
            "npm token revoke 5f2b7c1e-9a4d-4c3b-8f6e-2d1a0b9c8e7f",
            "npm token revoke [redacted:npm]",
        ),
        (
            "$ npm token rm --otp=123456 5f2b7c1e-9a4d-4c3b-8f6e-2d1a0b9c8e7f",
            "$ npm token rm --otp=123456 [redacted:npm]",
        ),
        (
            "| user | Password |\n|------|:--------:|\n| ada | hunter two |\n| bob | `sunshine` |\n\n| a | b |\n",
            (
                "| user | Password |\n|------|:--------:|\n| ada | [redacted:password] |\n"
                "| bob | `[redacted:password]` |\n\n| a | b |\n"
            ),
        ),
        (
            "host | API token | note\n--- | --- | ---\nci | abcDEF123 | fine\ncd | - | none\n",
            "host | API token | note\n--- | --- | ---\nci | [redacted:password] | fine\ncd | - | none\n",
        ),
        (
            "> | **passwd** |\n> |---|\n> | a\\|b4!x |\n",
            "> | **passwd** |\n> |---|\n> | [redacted:password] |\n",
        ),
        (
            "| id | secret |\r\n|-|-|\r\n| 1 | 5f2b7c1e-9a4d-4c3b-8f6e-2d1a0b9c8e7f |\r\n",
            "| id | secret |\r\n|-|-|\r\n| 1 | [redacted:password] |\r\n",
        ),
    ],
)
def test_secrets_of_settings_one_time_passwords_and_tables_are_hidden(text: str, shown: str) -> None:
    assert Redactor({}).redact(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "  password: required\n",
        "password: at least eight characters\n",
        "password: minimum length reached\n",
        "password: uuid\n",
        "password: the one of the mail server\n",
        "password: see the vault\n",
        "  password: Neues Kennwort\n",
        'password: "Enter your password"\n',
        "pass: two more rounds\n",
        "order 5f2b7c1e-9a4d-4c3b-8f6e-2d1a0b9c8e7f",
        "npm token list",
        "npm run revoke 5f2b7c1e-9a4d-4c3b-8f6e-2d1a0b9c8e7f",
        "| field | password |\n|---|---|\n| type | required |\n| length | at least 12 characters |\n| set | yes |\n",
        "| token | meaning |\n|---|---|\n| `yield` | ends the turn |\n| identifier | a name |\n",
        "| key | value |\n|---|---|\n| `password` | the password of the mail server |\n",
        "| name | Api key |\n|---|---|\n| a | n/a |\n| b | ${secret:B} |\n",
        "cat a | password | b\nnext line\n| sunshine | x |\n",
        "  password: nullable # see below\n",
        "Password: Sommerregen\n",
        "  password: Optional\n",
        "| password | string | required |",
        "| api_key | the number of the key |",
        "cat list | password | abc123def!x |",
        "https://example.com/search?secret=JBSWYABCDEFG",
    ],
)
def test_words_about_passwords_in_settings_and_tables_are_left_alone(text: str) -> None:
    assert Redactor({}).redact(text) == text
