r"""The shapes of the usual keys and tokens, as data.

Every pattern is for RE2, over bytes, and keeps three rules, from which linear time and idempotence follow:
it accepts as soon as it may and then only grows, so that no search looks far beyond its match; it never asks for
what comes after the match; and it asks for what comes before only by `edge` and `behind`. The first one or two
characters are known (`heads`), so that a match is assigned to its family without trying them all.
"""

from typing import Final

import msgspec

_WORD: Final = "[A-Za-z0-9_-]"
_ALNUM: Final = "[A-Za-z0-9]"
_HEX: Final = "[0-9a-fA-F]"
_UUID: Final = "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"

_NAMES: Final = (
    r"pass(?:word|wd|phrase)|pwd|secret|token|credentials?|authorization"
    r"|(?:api|access|account|private|auth|signing|encryption|license|master|shared|sas)[_ -]?key"
)
_LAST: Final = r"(?:[_-]?(?:key|token|value|hash))?"
_SAID: Final = r"\\{0,3}[\"']?\s{0,3}(?:=>|:=|==?|:)\s{0,3}"
_OPEN: Final = r"(?:[bru]?\\{0,3}[\"'])?(?:(?:basic|bearer|token)\s{1,3})?"
_FIRST: Final = r"[^\s\"'<>,;&\\`|(){}$*\[]"
_NEXT: Final = r"[^\s\"'<>,;&\\`|(){}]"

_NEAR: Final = 4


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One shape of secret.

    `lead` announces it and stays visible. `whole` is the secret, and `near` its beginning: as much of it as one
    automaton for all families can look for without growing large. With `edge`, no word may touch it before; `behind`
    says what must stand there. A `roomy` lead has room for a secret of its own, and the whole ends with a sign that
    stays.
    """

    name: str
    heads: tuple[str, ...]
    lead: str = ""
    near: str
    whole: str
    edge: bool = False
    fold: bool = False
    roomy: bool = False
    behind: str = ""


def _after(name: str, heads: str, rest: str, *, edge: bool = False) -> Family:
    """Describe tokens that begin with one of several words, as most do."""
    words = tuple(heads.split(" "))
    quoted = "|".join(word.replace(".", r"\.") for word in words)
    near = f"{rest[: rest.index(']') + 1]}{{{_NEAR}}}" if rest.startswith("[") else ""
    return Family(name=name, heads=words, near=f"(?:{quoted}){near}", whole=f"(?:{quoted}){rest}", edge=edge)


def _announced(name: str, heads: str, lead: str, near: str, whole: str) -> Family:
    """Describe values that look like nothing much, but are announced as what they are."""
    return Family(name=name, heads=tuple(heads.split(" ")), lead=lead, near=near, whole=whole, fold=True)


FAMILIES: Final[tuple[Family, ...]] = (
    Family(
        name="private-key",
        heads=("--",),
        near=r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY",
        whole=r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?:[A-Za-z0-9+/=,:\s]|\\[nrt\\]"
        r"|-[A-Za-z0-9])*(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----)?",
    ),
    _after("anthropic", "sk-ant-", f"{_WORD}{{20,}}"),
    _after("openrouter", "sk-or-v1-", f"{_WORD}{{20,}}"),
    _after("langfuse", "sk-lf-", f"{_WORD}{{20,}}", edge=True),
    _after("openai", "sk-proj- sk-svcacct- sk-admin- sk-None-", f"{_WORD}{{20,}}"),
    _after("openai", "sk-", f"{_ALNUM}{{20,}}", edge=True),
    _after("google", "AIza", f"{_WORD}{{35,}}"),
    _after("google", "GOCSPX-", f"{_WORD}{{28,}}"),
    _after("google", "ya29.", f"{_WORD}{{20,}}"),
    _after("aws", "AKIA ASIA ABIA ACCA", "[A-Z0-9]{16}", edge=True),
    _after("aws", "ABSK", "[A-Za-z0-9+/=]{109,}", edge=True),
    _after("stripe", "sk_live_ sk_test_ rk_live_ rk_test_ sk_prod_ rk_prod_", f"{_ALNUM}{{10,}}"),
    _after("stripe", "whsec_", "[A-Za-z0-9+/=]{24,}"),
    _after("github", "ghp_ gho_ ghu_ ghs_ ghr_", f"{_ALNUM}{{36,}}"),
    _after("github", "github_pat_", "[A-Za-z0-9_]{22,}"),
    _after(
        "gitlab",
        "glpat- gldt- glrt- glptt- glcbt- glsoat- glimt- glft- glffct- gloas- glagent- GR1348941",
        f"{_WORD}{{20,}}",
    ),
    _after("slack", "xoxa- xoxb- xoxe- xoxo- xoxp- xoxr- xoxs- xoxc- xoxd- xapp- xwfp-", f"{_WORD}{{10,}}"),
    _after("slack", "hooks.slack.com/", "(?:services|workflows|triggers)/[A-Za-z0-9/_-]{20,}"),
    _after("twilio", "SK", "[0-9a-f]{32}", edge=True),
    _after("sendgrid", "SG.", f"{_WORD}{{16,32}}\\.{_WORD}{{30,}}", edge=True),
    _after("npm", "npm_", f"{_ALNUM}{{36,}}", edge=True),
    _after("pypi", "pypi-", f"{_WORD}{{50,}}"),
    _after("azure", " ".join(f"{digit}Q~" for digit in range(10)), "[A-Za-z0-9_.~-]{31,}"),
    _announced("azure", "?s &s", r"[?&]sig=", "[A-Za-z0-9%]", r"[A-Za-z0-9%+/]{40,}=?"),
    _after("jwt", ".eyJ", f"{_WORD}{{8,}}(?:\\.{_WORD}+)?"),
    _after("huggingface", "hf_ api_org_", f"{_ALNUM}{{30,}}", edge=True),
    _after("digitalocean", "dop_v1_ doo_v1_ dor_v1_", f"{_HEX}{{64}}"),
    _after("heroku", "HRKU-", f"(?:{_UUID}|{_WORD}{{40,}})"),
    _after("mailgun", "key- pubkey-", "[0-9a-f]{32}", edge=True),
    _after("shopify", "shpat_ shpca_ shppa_ shpss_", f"{_HEX}{{32}}"),
    _after("square", "sq0atp- sq0csp- sq0idp-", f"{_WORD}{{22,}}"),
    _after("square", "EAAAE", f"{_WORD}{{55,}}", edge=True),
    _after("telegram", ":AA", f"{_WORD}{{33,}}"),
    Family(
        name="discord",
        heads=tuple(f".{letter}" for letter in "abcdefghijklmnopqrstuvwxyz0123456789_-"),
        near=rf"\.{_WORD}{{6}}\.{_WORD}{{{_NEAR}}}",
        whole=rf"\.{_WORD}{{6}}\.{_WORD}{{27,38}}",
        behind=rf"(?s).*[MNO]{_WORD}{{23,25}}\z",
    ),
    _after("discord", "discord.com/api/webhooks/ discordapp.com/api/webhooks/", f"[0-9]{{10,24}}/{_WORD}{{30,}}"),
    _after("datadog", "ddapi_ ddapp_ pub", "[0-9a-f]{32}", edge=True),
    _after("newrelic", "NRAK- NRJS- NRII- NRIQ- NRRA- NRSP-", f"{_WORD}{{19,}}"),
    _after("cloudflare", "v1.0-", f"{_HEX}{{24}}-{_HEX}{{146}}", edge=True),
    _after("cloudflare", "cfut_ cfat_ cfk_", f"{_WORD}{{37,}}", edge=True),
    _after("linear", "lin_api_ lin_oauth_", f"{_ALNUM}{{32,}}"),
    _after("notion", "secret_ ntn_", f"{_ALNUM}{{40,}}", edge=True),
    _after("okta", "SSWS", f"\\s{{1,3}}00{_WORD}{{38,}}"),
    _after("vault", "hvs. hvb. hvr.", f"{_WORD}{{24,}}"),
    _after("databricks", "dapi dose dkea", "[0-9a-f]{32}(?:-[0-9])?", edge=True),
    _after("grafana", "glc_ glsa_", "[A-Za-z0-9+/=_-]{32,}", edge=True),
    _after("grafana", "eyJrIjoi", "[A-Za-z0-9+/=_-]{40,}"),
    _after("postman", "PMAK-", f"{_HEX}{{24}}-{_HEX}{{34}}"),
    _after("terraform", ".atlasv1.", f"{_WORD}{{60,}}"),
    _after("doppler", "dp.pt. dp.st. dp.ct. dp.sa. dp.scim. dp.audit.", "[A-Za-z0-9._-]{40,}"),
    _after("sentry", "sntrys_ sntryu_", "[A-Za-z0-9+/=_]{40,}"),
    _after("fly", "fo1_ fm1r_ fm1a_ fm2_", "[A-Za-z0-9+/=_-]{40,}", edge=True),
    _after("supabase", "sbp_ sb_secret_", "[A-Za-z0-9_]{30,}", edge=True),
    _after("groq", "gsk_", f"{_ALNUM}{{40,}}", edge=True),
    _after("replicate", "r8_", f"{_ALNUM}{{37,}}", edge=True),
    _after("xai", "xai-", f"{_ALNUM}{{60,}}", edge=True),
    _after("perplexity", "pplx-", f"{_ALNUM}{{40,}}", edge=True),
    _after("pulumi", "pul-", f"{_HEX}{{40}}", edge=True),
    _after("atlassian", "ATATT3 ATCTT3 ATBB", "[A-Za-z0-9_=-]{28,}", edge=True),
    _after("figma", "figd_ figo_ figu_", f"{_WORD}{{38,}}", edge=True),
    _after("airtable", "pat", f"{_ALNUM}{{14}}\\.{_HEX}{{64}}", edge=True),
    _after("dropbox", "sl.", f"(?:u\\.)?{_WORD}{{130,}}", edge=True),
    _after("brevo", "xkeysib- xsmtpsib-", f"{_HEX}{{64}}(?:-{_ALNUM}{{16}})?"),
    _after("planetscale", "pscale_tkn_ pscale_pw_ pscale_oauth_", "[A-Za-z0-9_.=-]{32,}"),
    _after("contentful", "CFPAT-", f"{_WORD}{{40,}}"),
    _after("dynatrace", "dt0c01. dt0s01. dt0s02.", f"{_ALNUM}{{8,24}}\\.{_ALNUM}{{60,}}"),
    _after("easypost", "EZAK EZTK", f"{_ALNUM}{{54,}}", edge=True),
    _after("prefect", "pnu_ pnb_", f"{_ALNUM}{{36,}}", edge=True),
    _after("rubygems", "rubygems_", f"{_HEX}{{48}}"),
    _after("typeform", "tfp_", f"{_WORD}{{40,}}", edge=True),
    _after("age", "AGE-SECRET-KEY-1", "[A-Z0-9]{50,}"),
    _after("onepassword", "ops_eyJ", "[A-Za-z0-9+/=_-]{200,}"),
    _after("artifactory", "AKCp", f"{_ALNUM}{{60,}}", edge=True),
    _after("buildkite", "bkua_ bkpt_ bkct_", f"{_ALNUM}{{40,}}", edge=True),
    _after("circleci", "CCIPAT_ CCIPRJ_", "[A-Za-z0-9_]{40,}"),
    _after("clojars", "CLOJARS_", f"{_ALNUM}{{60}}"),
    _after("netlify", "nfp_ nfc_ nfo_ nfu_", f"{_ALNUM}{{36,}}", edge=True),
    _after("tailscale", "tskey-", f"(?:api|auth|client|scim|webhook|reusable)-{_WORD}{{16,}}"),
    _after("langsmith", "lsv2_", "(?:pt|sk)_[0-9a-f]{32}(?:_[0-9a-f]{10})?"),
    _after("docker", "dckr_pat_ dckr_oat_", f"{_WORD}{{27,}}"),
    _after("shippo", "shippo_live_ shippo_test_", f"{_HEX}{{40}}"),
    _after("readme", "rdme_", f"{_ALNUM}{{70}}", edge=True),
    _announced("bearer", "be", r"bearer\s{1,3}", "[A-Za-z0-9._~+/-]{16}", "[A-Za-z0-9._~+/-]{16,}=*"),
    _announced("basic-auth", "ba", r"basic\s{1,3}", "[A-Za-z0-9+/-]{16}", "[A-Za-z0-9+/-]{16,}={0,2}"),
    Family(
        name="url-password",
        heads=("://",),
        lead=r"://[^\s/:@\"'<>]{0,64}:",
        near=r"[^\s/@\"'<>]{3}",
        whole=r"[^\s/@\"'<>]{3,}@",
        roomy=True,
    ),
    _announced(
        "password",
        "pa pw se to cr au ap ac pr si en li ma sh sa",
        f"(?:{_NAMES}){_LAST}{_SAID}{_OPEN}",
        f"{_FIRST}{_NEXT}{{3}}",
        f"{_FIRST}{_NEXT}{{3,}}",
    ),
)

HARMLESS: Final = frozenset(
    b"bearer basic token true false null none undefined required optional string str bytes bool integer number text "
    b"empty unset missing invalid expired redacted hidden masked changeme here there this that must should will cannot "
    b"with from and".split()
)
"""What follows such a name in code, schemas and prose without being one."""
