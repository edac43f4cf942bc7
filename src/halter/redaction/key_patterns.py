"""Patterns of common keys, tokens and passwords, as data."""

import base64
import binascii
import re
import string
from typing import Final

from halter.redaction import named_secrets, secret_values
from halter.redaction.secret_values import (
    NEAR_LENGTH,
    NO_MATCH,
    Candidate,
    SecretFamily,
    make_announced_family,
    make_prefixed_family,
    make_read_family,
)

_SHORTEST, _KEY = 4, 8

COOKIE_LEAD: Final = r"cookie\\{0,3}[\"']?\s{0,2}:\s{0,2}\\{0,3}[\"']?"
_COOKIE: Final = rb"[\w.%-]{1,64}=[^\s;,\"'\\]+(?:;\s?[\w.%-]{1,64}=[^\s;,\"'\\]*)*"
_SET_COOKIE: Final = rb"[\w.%-]{1,64}=[^\s;,\"'\\]+"
_SESSION: Final = re.compile(rb"(?i)sess|sid|auth|token|login|jwt|remember|csrf|xsrf|secret|key")


def read_cookie(candidate: Candidate) -> int:
    """Read the value of a cookie. It is secret if it looks random, or its name suggests a session."""
    pattern = _SET_COOKIE if candidate.before()[-4:].lower() == b"set-" else _COOKIE
    pairs = [pair.partition(b"=") for pair in candidate.peek(pattern).split(b";")]
    is_secret = any(
        not secret_values.is_harmless(value) and (secret_values.is_random(value) or _SESSION.search(name))
        for name, _, value in pairs
        if len(value) >= _KEY
    )
    return candidate.find_end(pattern) if is_secret else NO_MATCH


USER_LEAD: Final = (
    r"(?:(?:[\s\"']-[uUa]\s{0,2}|-user[ =]|-userpwd[ =]|-proxy-user[ =])[\"']?[^\s:,\"'@/$]{1,64}[:%,]"
    r"|sqlplus\s{1,2}[a-z0-9_$]{1,32}/|/token:)"
)
_REMOTE: Final = re.compile(rb"(?i)\b(?:curl|wget|lftp|https?|ab|siege|smbclient|rpcclient|sqlplus)\b")
_WORDS: Final = rb"[^\s\"']*"
_UP_TO_HOST: Final = rb"[^\s\"'@]*"


def read_user(candidate: Candidate) -> int:
    """Read the password after `curl -u NAME:`. In other programs, `-u` can take a user and a group."""
    pattern = _UP_TO_HOST if candidate.lead().startswith(b"sql") else _WORDS
    text = candidate.peek(pattern)
    if len(text) < _SHORTEST or text.isdigit() or secret_values.is_harmless(text):
        return NO_MATCH
    is_remote_program = _REMOTE.search(candidate.before() + candidate.lead())
    return candidate.find_end(pattern) if is_remote_program or secret_values.is_random(text) else NO_MATCH


FLAG_LEAD: Final = r" -(?:p|P|a|w|N|k)\s{0,2}[\"']?"
_SPACED: Final = {
    b"p": re.compile(
        rb"\b(?:sshpass|(?:docker|podman|helm registry|oras|az|cf|oc|buildah|nerdctl) login|twine|mongo\w*|cqlsh"
        rb"|influx|arangosh|cypher-shell|snowsql|beeline|psexec|winexe|xfreerdp)\b[^|;&]*\Z"
    ),
    b"P": re.compile(rb"\b(?:zip|unzip|sqlcmd|bcp|mosquitto_\w+|ipmitool)\b[^|;&]*\Z"),
    b"a": re.compile(rb"\b(?:redis-cli|redis-benchmark|valkey-cli)\b[^|;&]*\Z"),
    b"k": re.compile(rb"\bopenssl\b[^|;&]*\Z"),
    b"N": re.compile(rb"\bssh-keygen\b[^|;&]*\Z"),
    b"w": re.compile(rb"\bldap\w+\b[^|;&]*\Z"),
}
_JOINED: Final = re.compile(rb"\b(?:mysql\w*|mariadb\w*|7za?|rar|sshpass)\b[^|;&]*\Z")
"""Programs that take a password only directly after the flag."""


def read_flag_password(candidate: Candidate) -> int:
    text, lead = candidate.peek(_WORDS), candidate.lead()
    if len(text) < _SHORTEST or text[:1] == b"-" or secret_values.is_harmless(text):
        return NO_MATCH
    flag = lead[2:3]
    is_joined_flag = flag == b"p" and lead[3:4] != b" " and _JOINED.search(candidate.before())
    is_spaced_flag = flag in _SPACED and _SPACED[flag].search(candidate.before())
    return candidate.find_end(_WORDS) if is_joined_flag or is_spaced_flag else NO_MATCH


PGPASS_LEAD: Final = r":(?:[0-9]{4,5}|\*):[^\s:]{1,63}:[^\s:]{1,63}:"
_HOST: Final = re.compile(rb"(?:^|[\s\"'`])(?:[\w-]*[g-zG-Z_.-][\w.-]*|\*)\Z")


def read_pgpass(candidate: Candidate) -> int:
    """Read the password of a line HOST:PORT:DATABASE:USER:PASSWORD. IPv6 addresses contain colons, too."""
    text = candidate.peek(_WORDS)
    is_secret = secret_values.is_random(text) or (secret_values.has_digit(text) and len(text) >= _KEY)
    return candidate.find_end(_WORDS) if is_secret and _HOST.search(candidate.before()) else NO_MATCH


PAIR_LEAD: Final = (
    r"(?:auth\s{0,2}[=:]\s{0,2}[(\[]|login\(|authenticate\(|basic_?auth\(|credentials\()"
    r"\s{0,3}[\"'][^\"'\n]{0,64}[\"']\s{0,2},\s{0,3}[\"']"
)
_QUOTED: Final = {quote: b"(?:[^\\\\\n" + quote + rb"]|\\[^\n])*" for quote in (b'"', b"'")}


def read_pair(candidate: Candidate) -> int:
    """Read the second of two quoted values, as in `auth=("ann", "…")`."""
    pattern = _QUOTED[candidate.lead()[-1:]]
    text = candidate.peek(pattern)
    if len(text) < _SHORTEST or secret_values.is_harmless(text):
        return NO_MATCH
    return candidate.find_end(pattern) if secret_values.is_random(text) or secret_values.has_digit(text) else NO_MATCH


DSN_LEAD: Final = r"dsn[\"']?\s{0,2}[=:]\s{0,2}[\"']?[a-z0-9_.-]{1,32}:"


def read_dsn(candidate: Candidate) -> int:
    """Read the password of a data source name, as in `app:…@tcp(db:3306)/shop`."""
    text = candidate.peek(_UP_TO_HOST)
    is_secret = len(text) >= _SHORTEST and not secret_values.is_harmless(text)
    return (
        candidate.find_end(_UP_TO_HOST)
        if is_secret and candidate.data.startswith(b"@", candidate.start + len(text))
        else NO_MATCH
    )


URL_LEAD: Final = r"://[^\s/:@\"'<>]{0,64}:"
_URL: Final = rb"[^\s/@\"'<>]{3,}@"
_STANDS_FOR: Final = re.compile(rb"(?i)[a-z_-]*(?:pass|pwd|secret|token)[a-z_-]*\Z|.?\{")
_PORT: Final = re.compile(rb"[0-9]+(?:[?#,]|\Z)")


def read_url(candidate: Candidate) -> int:
    end = candidate.find_end(_URL) - 1
    text = candidate.data[candidate.start : max(end, candidate.start)]
    if not text or _PORT.match(text) or secret_values.is_harmless(text) or text.isupper() or _STANDS_FOR.match(text):
        return NO_MATCH
    return end


_TOKEN_URL: Final = rb"[A-Za-z0-9_.~%-]{20,200}@"


def read_token_url(candidate: Candidate) -> int:
    text = candidate.peek(_TOKEN_URL)
    return candidate.start + len(text) - 1 if secret_values.is_random(text) else NO_MATCH


def is_basic_credential(value: bytes) -> bool:
    """Return True if the value after `Basic` is a name and a password in base64, or looks random."""
    try:
        return b":" in base64.b64decode(value + b"=" * (-len(value) % 4), validate=True) or secret_values.is_random(
            value
        )
    except (binascii.Error, ValueError):
        return secret_values.is_random(value)


_PREFIX: Final = re.compile(rb"(?:^|[^A-Za-z0-9_-])[a-z][a-z0-9]{1,14}(?:[_-][a-z0-9]{1,10}){0,2}\Z")
_DIGESTS: Final = re.compile(rb"(?:sha\d*|md5|blake\w*|integrity|digest|cs_test|cs_live|chunk|img|image|file)\Z")
_TOKEN: Final = rb"[_-][A-Za-z0-9]{32,}"


def read_token(candidate: Candidate) -> int:
    """Read a token of an unknown family: a word, a separator, and a long random text."""
    text, before = candidate.peek(_TOKEN)[1:], candidate.before()
    is_mixed = not (text.islower() or text.isupper()) and secret_values.is_token(text)
    return (
        candidate.find_end(_TOKEN) if is_mixed and _PREFIX.search(before) and not _DIGESTS.search(before) else NO_MATCH
    )


CALL_LEAD: Final = r"(?:client|login|authenticate|configure|connect|api)\(\s{0,2}[\"']"
_LITERAL: Final = rb"[A-Za-z0-9_.=+-]{24,}"


def read_call_argument(candidate: Candidate) -> int:
    """Read a key that is passed to a function without a name."""
    return candidate.find_end(_LITERAL) if secret_values.is_token(candidate.peek(_LITERAL)) else NO_MATCH


_WORD: Final = "[A-Za-z0-9_-]"
_ALNUM: Final = "[A-Za-z0-9]"
_LOWER: Final = "[a-z0-9]"
_UPPER: Final = "[A-Z0-9]"
_HEX: Final = "[0-9a-fA-F]"
_UUID: Final = "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
_BASE64: Final = "[A-Za-z0-9+/=]"
_CRYPT: Final = "[A-Za-z0-9./+=,$*_:-]"
_WORD_BYTES: Final = frozenset((string.ascii_letters + string.digits + "_-").encode())
_DIGITS: Final = frozenset(b"0123456789")

_GAP: Final = r"(?:[\s\"'>|#*,;]|\\{1,4}(?:[nrt\"']|u000[adAD]))"
"""Allowed between the lines of a key: line ends, plain or escaped, quotes and indentation."""
_BODY: Final = (
    rf"(?:{_GAP}{{1,12}}[A-Za-z-]{{4,20}}: [^\n\\]{{1,80}})*"
    rf"(?:{_GAP}{{0,12}}{_BASE64}{{16,}})+(?:{_GAP}{{0,12}}{_BASE64}{{1,15}})?"
)

SECRET_FAMILIES: Final[tuple[SecretFamily, ...]] = (
    SecretFamily(
        name="private-key",
        heads=(b"--",),
        near=r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY",
        whole=rf"-----BEGIN [A-Z0-9 ]{{0,40}}PRIVATE KEY(?: BLOCK)?-----{_BODY}"
        rf"(?:{_GAP}{{0,12}}-----END [A-Z0-9 ]{{0,40}}PRIVATE KEY(?: BLOCK)?-----)?",
    ),
    make_announced_family(
        "private-key",
        "pr",
        rf"private-lines: ?[0-9]{{1,3}}{_GAP}{{1,12}}",
        f"{_BASE64}{{{NEAR_LENGTH}}}",
        rf"{_BASE64}{{16,}}(?:{_GAP}{{1,12}}{_BASE64}{{16,}})*(?:{_GAP}{{1,12}}{_BASE64}{{1,15}}=)?",
    ),
    make_announced_family(
        "private-key", "pr", r"private-(?:mac|hash): ?", f"{_HEX}{{{NEAR_LENGTH}}}", f"{_HEX}{{40,}}"
    ),
    make_prefixed_family(
        "private-key",
        "LS0tLS1CRUdJTiBQUklWQVRF LS0tLS1CRUdJTiBSU0EgUFJJVkFUR LS0tLS1CRUdJTiBFQyBQUklWQVRF LS0tLS1CRUdJTiBPUEVOU1NI "
        "LS0tLS1CRUdJTiBFTkNSWVBURUQg LS0tLS1CRUdJTiBQR1AgUFJJVkFUR LS0tLS1CRUdJTiBEU0EgUFJJVkFUR",
        f"{_BASE64}{{40,}}",
    ),
    make_announced_family(
        "private-key", '"d "p "q "k', r'"(?:dp?|dq?|p|qi?|k)"\s{0,2}:\s{0,2}"', f"{_WORD}{{8}}", f"{_WORD}{{40,}}"
    ),
    make_prefixed_family("anthropic", "sk-ant-", f"{_WORD}{{20,}}"),
    make_prefixed_family("openrouter", "sk-or-v1-", f"{_WORD}{{20,}}"),
    make_prefixed_family("langfuse", "sk-lf-", f"{_WORD}{{20,}}", edge=True),
    make_prefixed_family("openai", "sk-proj- sk-svcacct- sk-admin- sk-None-", f"{_WORD}{{20,}}"),
    make_prefixed_family("openai", "sk-", f"{_ALNUM}{{20,}}", edge=True),
    make_prefixed_family("halter", "halter_", f"{_WORD}{{43}}", edge=True, check=secret_values.is_token),
    make_prefixed_family("google", "AIza", f"{_WORD}{{35,}}"),
    make_prefixed_family("google", "GOCSPX-", f"{_WORD}{{28,}}"),
    make_prefixed_family("google", "ya29.", f"{_WORD}{{20,}}"),
    make_prefixed_family("google", "1//0", f"{_WORD}{{30,}}", edge=True),
    make_prefixed_family("aws", "AKIA ASIA ABIA ACCA", "[A-Z0-9]{16}", edge=True),
    make_prefixed_family("aws", "ABSK", "[A-Za-z0-9+/=]{109,}", edge=True),
    make_prefixed_family("aws", "IQoJb3JpZ2lu FwoGZXIvYXdz FQoGZXIvYXdz", "[A-Za-z0-9+/=%]{60,}"),
    make_prefixed_family("stripe", "sk_live_ sk_test_ rk_live_ rk_test_ sk_prod_ rk_prod_", f"{_ALNUM}{{10,}}"),
    make_prefixed_family("stripe", "whsec_", "[A-Za-z0-9+/=]{24,}"),
    make_prefixed_family("github", "ghp_ gho_ ghu_ ghs_ ghr_", f"{_ALNUM}{{36,}}"),
    make_prefixed_family("github", "github_pat_", "[A-Za-z0-9_]{22,}"),
    make_prefixed_family(
        "gitlab",
        "glpat- gldt- glrt- glptt- glcbt- glsoat- glimt- glft- glffct- gloas- glagent- GR1348941",
        f"{_WORD}{{20,}}",
    ),
    make_prefixed_family(
        "slack", "xoxa- xoxb- xoxe- xoxo- xoxp- xoxr- xoxs- xoxc- xoxd- xapp- xwfp- xoxe.xox", f"{_WORD}{{10,}}"
    ),
    make_prefixed_family("slack", "hooks.slack.com/", "(?:services|workflows|triggers)/[A-Za-z0-9/_-]{20,}"),
    make_prefixed_family(
        "webhook", "webhook.office.com/webhookb2/ outlook.office.com/webhook/", "[A-Za-z0-9@/_-]{40,}"
    ),
    make_prefixed_family("webhook", "hooks.zapier.com/hooks/catch/ maker.ifttt.com/trigger/", "[A-Za-z0-9/_-]{12,}"),
    make_prefixed_family("aws", "amzn.mws.", _UUID),
    make_prefixed_family("twilio", "SK", "[0-9a-f]{32}", edge=True),
    make_prefixed_family("sendgrid", "SG.", f"{_WORD}{{16,32}}\\.{_WORD}{{30,}}", edge=True),
    make_prefixed_family("npm", "npm_", f"{_ALNUM}{{36,}}", edge=True),
    SecretFamily(
        name="npm",
        heads=(b"npm token ",),
        lead=r"npm token (?:revoke|rm|remove|delete) (?:--[a-z0-9=-]+ ){0,3}",
        near="[0-9a-f]{8}-",
        whole=_UUID,
        edge=True,
    ),
    make_prefixed_family("pypi", "pypi-", f"{_WORD}{{50,}}"),
    make_prefixed_family(
        "azure", " ".join(f"{digit}Q~" for digit in range(10)), "[A-Za-z0-9_.~-]{31,}", reach=_WORD_BYTES
    ),
    make_announced_family("azure", "?s &s ;s", r"[?&;]sig=", "[A-Za-z0-9%]", r"[A-Za-z0-9%+/]{40,}=?"),
    make_prefixed_family("jwt", ".eyJ", f"{_WORD}{{8,}}(?:\\.{_WORD}+){{0,3}}", reach=_WORD_BYTES),
    make_prefixed_family("huggingface", "hf_ api_org_", f"{_ALNUM}{{30,}}", edge=True),
    make_prefixed_family("digitalocean", "dop_v1_ doo_v1_ dor_v1_", f"{_HEX}{{64}}"),
    make_prefixed_family("heroku", "HRKU-", f"(?:{_UUID}|{_WORD}{{40,}})"),
    make_prefixed_family("mailgun", "key- pubkey-", "[0-9a-f]{32}", edge=True),
    SecretFamily(
        name="mailchimp",
        heads=(b"-us",),
        near="-us[0-9]",
        whole="-us[0-9]{1,2}",
        behind=r"(?s).*[0-9a-f]{32}\z",
        reach=frozenset(b"0123456789abcdef"),
    ),
    make_prefixed_family("shopify", "shpat_ shpca_ shppa_ shpss_", f"{_HEX}{{32}}"),
    make_prefixed_family("square", "sq0atp- sq0csp- sq0idp-", f"{_WORD}{{22,}}"),
    make_prefixed_family("square", "EAAAE EAAAF EAAAl", f"{_WORD}{{55,}}", edge=True),
    make_prefixed_family("telegram", ":AA", f"{_WORD}{{33,}}", reach=_DIGITS),
    SecretFamily(
        name="discord",
        heads=tuple(f".{letter}".encode() for letter in "abcdefghijklmnopqrstuvwxyz0123456789_-"),
        near=rf"\.{_WORD}{{6}}\.{_WORD}{{{NEAR_LENGTH}}}",
        whole=rf"\.{_WORD}{{6}}\.{_WORD}{{27,38}}",
        behind=rf"(?s).*[MNO]{_WORD}{{23,25}}\z",
        reach=_WORD_BYTES,
    ),
    make_prefixed_family(
        "discord", "discord.com/api/webhooks/ discordapp.com/api/webhooks/", f"[0-9]{{10,24}}/{_WORD}{{30,}}"
    ),
    make_prefixed_family("datadog", "ddapi_ ddapp_ pub", "[0-9a-f]{32}", edge=True),
    make_prefixed_family("newrelic", "NRAK- NRJS- NRII- NRIQ- NRRA- NRSP-", f"{_WORD}{{19,}}"),
    make_prefixed_family("cloudflare", "v1.0-", f"{_HEX}{{24}}-{_HEX}{{146}}", edge=True),
    make_prefixed_family("cloudflare", "cfut_ cfat_ cfk_", f"{_WORD}{{37,}}", edge=True),
    make_prefixed_family("linear", "lin_api_ lin_oauth_", f"{_ALNUM}{{32,}}"),
    make_prefixed_family("notion", "secret_ ntn_", f"{_ALNUM}{{40,}}", edge=True),
    make_prefixed_family("okta", "SSWS", f"\\s{{1,3}}00{_WORD}{{38,}}"),
    make_prefixed_family("vault", "hvs. hvb. hvr.", f"{_WORD}{{24,}}"),
    make_prefixed_family("vault", "s.", f"{_ALNUM}{{24}}", edge=True, check=secret_values.is_token),
    make_prefixed_family("databricks", "dapi dose dkea", "[0-9a-f]{32}(?:-[0-9])?", edge=True),
    make_prefixed_family("grafana", "glc_ glsa_", "[A-Za-z0-9+/=_-]{32,}", edge=True),
    make_prefixed_family("grafana", "eyJrIjoi", "[A-Za-z0-9+/=_-]{40,}"),
    make_prefixed_family("postman", "PMAK-", f"{_HEX}{{24}}-{_HEX}{{34}}"),
    make_prefixed_family("terraform", ".atlasv1.", f"{_WORD}{{60,}}", reach=_WORD_BYTES),
    make_prefixed_family("doppler", "dp.pt. dp.st. dp.ct. dp.sa. dp.scim. dp.audit.", "[A-Za-z0-9._-]{40,}"),
    make_prefixed_family("sentry", "sntrys_ sntryu_", "[A-Za-z0-9+/=_-]{40,}"),
    make_prefixed_family("fly", "fo1_ fm1r_ fm1a_ fm2_", "[A-Za-z0-9+/=_-]{40,}", edge=True),
    make_prefixed_family("supabase", "sbp_ sb_secret_", "[A-Za-z0-9_]{30,}", edge=True),
    make_prefixed_family("groq", "gsk_", f"{_ALNUM}{{40,}}", edge=True),
    make_prefixed_family("replicate", "r8_", f"{_ALNUM}{{37,}}", edge=True),
    make_prefixed_family("xai", "xai-", f"{_ALNUM}{{60,}}", edge=True),
    make_prefixed_family("perplexity", "pplx-", f"{_ALNUM}{{40,}}", edge=True),
    make_prefixed_family("nvidia", "nvapi-", f"{_WORD}{{40,}}", edge=True),
    make_prefixed_family("cerebras", "csk-", f"{_ALNUM}{{40,}}", edge=True),
    make_prefixed_family("together", "tgp_v1_", f"{_WORD}{{40,}}", edge=True),
    make_prefixed_family("fireworks", "fw_", f"{_ALNUM}{{22,}}", edge=True, check=secret_values.is_token),
    make_prefixed_family("pinecone", "pcsk_", f"{_WORD}{{40,}}", edge=True),
    make_prefixed_family("tavily", "tvly-", f"{_WORD}{{28,}}", edge=True, check=secret_values.is_token),
    make_prefixed_family("firecrawl", "fc-", "[0-9a-f]{32}", edge=True),
    make_prefixed_family("jina", "jina_", f"{_WORD}{{50,}}", edge=True),
    make_prefixed_family("apify", "apify_api_ apify_proxy_", f"{_ALNUM}{{30,}}", edge=True),
    make_prefixed_family("elevenlabs", "sk_", "[0-9a-f]{48}", edge=True),
    make_prefixed_family("resend", "re_", f"{_ALNUM}{{6,12}}_{_ALNUM}{{20,}}", edge=True, check=secret_values.is_token),
    make_prefixed_family("posthog", "phx_ phs_", f"{_ALNUM}{{40,}}", edge=True),
    make_prefixed_family("wandb", "wandb_v1_", f"{_WORD}{{60,}}", edge=True),
    make_prefixed_family("neon", "napi_", f"{_ALNUM}{{40,}}", edge=True),
    make_prefixed_family(
        "vercel", "vercel_blob_rw_ vcp_ vci_ vca_ vcr_ vck_", f"{_WORD}{{24,}}", edge=True, check=secret_values.is_token
    ),
    make_prefixed_family("pulumi", "pul-", f"{_HEX}{{40}}", edge=True),
    make_prefixed_family("atlassian", "ATATT3 ATCTT3 ATBB", "[A-Za-z0-9_=-]{28,}", edge=True),
    make_prefixed_family("trello", "ATTA", "[0-9a-f]{64,}", edge=True),
    make_prefixed_family("figma", "figd_ figo_ figu_", f"{_WORD}{{38,}}", edge=True),
    make_prefixed_family("airtable", "pat", f"{_ALNUM}{{14}}\\.{_HEX}{{64}}", edge=True),
    make_prefixed_family("hubspot", "pat-", f"(?:na|eu|ap)[0-9]-{_UUID}", edge=True),
    make_prefixed_family("dropbox", "sl.", f"(?:u\\.)?{_WORD}{{130,}}", edge=True),
    make_prefixed_family("brevo", "xkeysib- xsmtpsib-", f"{_HEX}{{64}}(?:-{_ALNUM}{{16}})?"),
    make_prefixed_family("planetscale", "pscale_tkn_ pscale_pw_ pscale_oauth_", "[A-Za-z0-9_.=-]{32,}"),
    make_prefixed_family("contentful", "CFPAT-", f"{_WORD}{{40,}}"),
    make_prefixed_family("dynatrace", "dt0c01. dt0s01. dt0s02.", f"{_ALNUM}{{8,24}}\\.{_ALNUM}{{60,}}"),
    make_prefixed_family("easypost", "EZAK EZTK", f"{_ALNUM}{{54,}}", edge=True),
    make_prefixed_family("prefect", "pnu_ pnb_", f"{_ALNUM}{{36,}}", edge=True),
    make_prefixed_family("rubygems", "rubygems_", f"{_HEX}{{48}}"),
    make_prefixed_family("crates", "cio", f"{_ALNUM}{{32}}", edge=True, check=secret_values.is_token),
    make_prefixed_family("nuget", "oy2", f"{_LOWER}{{43}}", edge=True),
    make_prefixed_family("typeform", "tfp_", f"{_WORD}{{40,}}", edge=True),
    make_prefixed_family("age", "AGE-SECRET-KEY-1", "[A-Z0-9]{50,}"),
    make_prefixed_family("onepassword", "ops_eyJ", "[A-Za-z0-9+/=_-]{200,}"),
    make_prefixed_family("onepassword", "A3-", f"{_UPPER}{{6}}-{_UPPER}{{6}}(?:-{_UPPER}{{5}}){{3,4}}", edge=True),
    make_prefixed_family("artifactory", "AKCp", f"{_ALNUM}{{60,}}", edge=True),
    make_prefixed_family("buildkite", "bkua_ bkpt_ bkct_", f"{_ALNUM}{{40,}}", edge=True),
    make_prefixed_family("circleci", "CCIPAT_ CCIPRJ_", "[A-Za-z0-9_]{40,}"),
    make_prefixed_family("clojars", "CLOJARS_", f"{_ALNUM}{{60}}"),
    make_prefixed_family("netlify", "nfp_ nfc_ nfo_ nfu_", f"{_ALNUM}{{36,}}", edge=True),
    make_prefixed_family("tailscale", "tskey-", f"(?:api|auth|client|scim|webhook|reusable)-{_WORD}{{16,}}"),
    make_prefixed_family("langsmith", "lsv2_", "(?:pt|sk)_[0-9a-f]{32}(?:_[0-9a-f]{10})?"),
    make_prefixed_family("docker", "dckr_pat_ dckr_oat_", f"{_WORD}{{27,}}"),
    make_prefixed_family("docker", "SWMTKN-1-", f"{_LOWER}{{40,}}-{_LOWER}{{20,}}"),
    make_prefixed_family("openshift", "sha256~", f"{_WORD}{{43}}", edge=True),
    make_prefixed_family("shippo", "shippo_live_ shippo_test_", f"{_HEX}{{40}}"),
    make_prefixed_family("readme", "rdme_", f"{_ALNUM}{{70}}", edge=True),
    make_prefixed_family("sourcegraph", "sgp_", "(?:(?:local|[0-9a-f]{16})_)?[0-9a-f]{40}", edge=True),
    make_prefixed_family("sonarqube", "squ_ sqp_ sqa_", "[0-9a-f]{40}", edge=True),
    make_prefixed_family("razorpay", "rzp_live_ rzp_test_", f"{_ALNUM}{{14,}}", edge=True),
    make_prefixed_family(
        "braintree", "access_token$production$ access_token$sandbox$", f"{_LOWER}{{16}}\\${_HEX}{{32}}"
    ),
    make_prefixed_family("plaid", "access-", f"(?:sandbox|development|production)-{_UUID}", edge=True),
    make_prefixed_family("launchdarkly", "sdk- api- mob-", _UUID, edge=True),
    make_prefixed_family("flutterwave", "FLWSECK- FLWSECK_TEST-", f"{_ALNUM}{{12,}}", edge=True),
    make_prefixed_family("facebook", "EAA", f"{_ALNUM}{{80,}}", edge=True, check=secret_values.is_token),
    make_prefixed_family(
        "twitter", "AAAAAAAAAAAAAAAAAAAAA", "[A-Za-z0-9%]{60,}", edge=True, check=secret_values.is_padded_token
    ),
    make_prefixed_family("mapbox", "sk.eyJ", f"{_WORD}{{40,}}(?:\\.{_WORD}+)?", edge=True),
    make_prefixed_family("alibaba", "LTAI", f"{_ALNUM}{{16,26}}", edge=True),
    make_prefixed_family("tencent", "AKID", f"{_ALNUM}{{32}}", edge=True),
    make_prefixed_family("yandex", "AQVN y0_", f"{_WORD}{{35,}}", edge=True),
    make_prefixed_family("twitch", "oauth:", f"{_LOWER}{{30}}", edge=True),
    SecretFamily(
        name="password-hash",
        heads=tuple(f"${letter}".encode() for letter in "12567890ymsgapbPHSA"),
        near=r"\$(?:1|2[abxy]?|5|6|7|8|9|y|gy|md5|sha1|apr1|argon2(?:id|i|d)|scrypt|pbkdf2(?:-sha[0-9]{1,3})?"
        rf"|bcrypt-sha256|P|H|S|A)\${_CRYPT}{{8}}",
        whole=r"\$(?:1|2[abxy]?|5|6|7|8|9|y|gy|md5|sha1|apr1|argon2(?:id|i|d)|scrypt|pbkdf2(?:-sha[0-9]{1,3})?"
        r"|bcrypt-sha256|P|H|S|A)\$[A-Za-z0-9./+=,$*_-]{20,}",
        check=secret_values.is_token,
    ),
    make_prefixed_family(
        "password-hash",
        "pbkdf2_sha256$ pbkdf2_sha1$ pbkdf2_sha512$ bcrypt_sha256$ bcrypt$ argon2$ scrypt$ pbkdf2: scrypt: "
        "SCRAM-SHA-256$ SCRAM-SHA-1$ SCRAM-SHA-512$ {SSHA} {SSHA256} {SSHA512} {SHA} {SHA256} {SHA512} {SMD5} {MD5} "
        "{CRYPT} {BCRYPT} {ARGON2} {PBKDF2} {SHA512-CRYPT} {BLF-CRYPT}",
        f"{_CRYPT}{{20,}}",
        check=secret_values.is_token,
    ),
    make_announced_family(
        "password-hash",
        " ".join(f":{digit}" for digit in range(10)),
        ":[0-9]{1,6}:[0-9a-f]{32}:",
        "[0-9a-f]{8}",
        "[0-9a-f]{32}",
    ),
    make_announced_family(
        "kubernetes",
        "to",
        r"token[ =:]{1,2}[\"']?",
        "[a-z0-9]{6}\\.",
        "[a-z0-9]{6}\\.[a-z0-9]{16}",
        secret_values.has_digit,
    ),
    make_announced_family("signature", "re", 'response="', "[0-9a-f]{8}", "[0-9a-f]{32,64}"),
    make_announced_family(
        "url-parameter",
        "?k &k ?a &a ?c &c ;j ?t &t ?p &p",
        r"[?&;](?:key|appid|code|jsessionid|phpsessid|auth|ticket)=",
        "[A-Za-z0-9_.~%+/-]{8}",
        "[A-Za-z0-9_.~%+/-]{20,}=*",
        secret_values.is_token,
    ),
    make_announced_family(
        "mnemonic",
        "mn se re",
        r"(?:mnemonic|(?:seed|recovery)[_ -]?(?:phrase|words))(?:[_ -]?phrase)?[\"']?\s{0,3}(?:[:=]|is)\s{0,3}[\"']?",
        "[a-z]{3}",
        "(?:[a-z]{3,8}(?:[ ,]| , |, )){11,23}[a-z]{3,8}",
    ),
    make_announced_family(
        "signature",
        "x- si",
        r"(?:x-amz-|x-goog-)?signature=",
        f"[A-Za-z0-9%+/_-]{{{NEAR_LENGTH}}}",
        r"[A-Za-z0-9%+/_-]{32,}={0,2}",
        secret_values.is_random,
    ),
    make_announced_family(
        "bearer", "be", r"bearer\s{1,3}", "[A-Za-z0-9._~+/-]{16}", "[A-Za-z0-9._~+/-]{16,}=*", secret_values.is_random
    ),
    make_announced_family(
        "basic-auth", "ba", r"basic\s{1,3}", "[A-Za-z0-9+/-]{12}", "[A-Za-z0-9+/-]{12,}={0,2}", is_basic_credential
    ),
    make_read_family("url-password", (b"://",), URL_LEAD, read_url, near=r"[^\s/@\"'<>]{3}", roomy=True),
    make_read_family("url-password", (b"://",), "://", read_token_url, near="[A-Za-z0-9_.~%-]{20}"),
    make_read_family("cookie", (b"co",), COOKIE_LEAD, read_cookie),
    make_read_family(
        "password", (b" -", b"--", b"-u", b"-p", b'"-', b"'-", b"sq", b"/t"), USER_LEAD, read_user, roomy=True
    ),
    make_read_family("password", (b" -",), FLAG_LEAD, read_flag_password),
    make_read_family("password", (b"ds",), DSN_LEAD, read_dsn),
    make_read_family("password", tuple(f":{sign}".encode() for sign in "0123456789*"), PGPASS_LEAD, read_pgpass),
    make_read_family("password", (b"au", b"lo", b"ba", b"cr"), PAIR_LEAD, read_pair, roomy=True),
    make_read_family("token", (b"cl", b"lo", b"au", b"co", b"ap"), CALL_LEAD, read_call_argument),
    make_read_family(
        "password", named_secrets.PASSWORD_HEADS, named_secrets.PASSWORD_LEAD, named_secrets.read_password
    ),
    make_read_family(
        "password", named_secrets.KEY_HEADS, named_secrets.KEY_LEAD, named_secrets.read_key, near=named_secrets.NEAR_KEY
    ),
    make_read_family(
        "token",
        tuple(f"{sign}{letter}".encode() for sign in "_-" for letter in string.ascii_letters + string.digits),
        "",
        read_token,
        reach=_WORD_BYTES,
        near=f"[_-]{_ALNUM}{{32}}",
    ),
)

SEVERAL_WORDS: Final = (
    "(?i)"
    + "|".join(
        (*named_secrets.ANNOUNCEMENTS, "cookie", "mnemonic", "phrase", "words", "credentials", "private", "SSWS")
    )
).encode()
"""Words that announce a secret which can contain spaces. Without one of them, a secret has no spaces."""
