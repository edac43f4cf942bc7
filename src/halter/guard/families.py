"""The shapes of the usual keys, tokens and passwords, as data."""

import string
from typing import Final

from halter.guard import announcements, literals, named
from halter.guard.family import NEAR, Family, announced, prefixed, told

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
"""What may stand between the lines of a key: line ends as they are or escaped, and how a text quotes or indents."""
_BODY: Final = (
    rf"(?:{_GAP}{{1,12}}[A-Za-z-]{{4,20}}: [^\n\\]{{1,80}})*"
    rf"(?:{_GAP}{{0,12}}{_BASE64}{{16,}})+(?:{_GAP}{{0,12}}{_BASE64}{{1,15}})?"
)

FAMILIES: Final[tuple[Family, ...]] = (
    Family(
        name="private-key",
        heads=(b"--",),
        near=r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY",
        whole=rf"-----BEGIN [A-Z0-9 ]{{0,40}}PRIVATE KEY(?: BLOCK)?-----{_BODY}"
        rf"(?:{_GAP}{{0,12}}-----END [A-Z0-9 ]{{0,40}}PRIVATE KEY(?: BLOCK)?-----)?",
    ),
    announced(
        "private-key",
        "pr",
        rf"private-lines: ?[0-9]{{1,3}}{_GAP}{{1,12}}",
        f"{_BASE64}{{{NEAR}}}",
        rf"{_BASE64}{{16,}}(?:{_GAP}{{1,12}}{_BASE64}{{16,}})*(?:{_GAP}{{1,12}}{_BASE64}{{1,15}}=)?",
    ),
    announced("private-key", "pr", r"private-(?:mac|hash): ?", f"{_HEX}{{{NEAR}}}", f"{_HEX}{{40,}}"),
    prefixed(
        "private-key",
        "LS0tLS1CRUdJTiBQUklWQVRF LS0tLS1CRUdJTiBSU0EgUFJJVkFUR LS0tLS1CRUdJTiBFQyBQUklWQVRF LS0tLS1CRUdJTiBPUEVOU1NI "
        "LS0tLS1CRUdJTiBFTkNSWVBURUQg LS0tLS1CRUdJTiBQR1AgUFJJVkFUR LS0tLS1CRUdJTiBEU0EgUFJJVkFUR",
        f"{_BASE64}{{40,}}",
    ),
    announced(
        "private-key", '"d "p "q "k', r'"(?:dp?|dq?|p|qi?|k)"\s{0,2}:\s{0,2}"', f"{_WORD}{{8}}", f"{_WORD}{{40,}}"
    ),
    prefixed("anthropic", "sk-ant-", f"{_WORD}{{20,}}"),
    prefixed("openrouter", "sk-or-v1-", f"{_WORD}{{20,}}"),
    prefixed("langfuse", "sk-lf-", f"{_WORD}{{20,}}", edge=True),
    prefixed("openai", "sk-proj- sk-svcacct- sk-admin- sk-None-", f"{_WORD}{{20,}}"),
    prefixed("openai", "sk-", f"{_ALNUM}{{20,}}", edge=True),
    prefixed("halter", "halter_", f"{_WORD}{{43}}", edge=True, check=literals.is_token),
    prefixed("google", "AIza", f"{_WORD}{{35,}}"),
    prefixed("google", "GOCSPX-", f"{_WORD}{{28,}}"),
    prefixed("google", "ya29.", f"{_WORD}{{20,}}"),
    prefixed("google", "1//0", f"{_WORD}{{30,}}", edge=True),
    prefixed("aws", "AKIA ASIA ABIA ACCA", "[A-Z0-9]{16}", edge=True),
    prefixed("aws", "ABSK", "[A-Za-z0-9+/=]{109,}", edge=True),
    prefixed("aws", "IQoJb3JpZ2lu FwoGZXIvYXdz FQoGZXIvYXdz", "[A-Za-z0-9+/=%]{60,}"),
    prefixed("stripe", "sk_live_ sk_test_ rk_live_ rk_test_ sk_prod_ rk_prod_", f"{_ALNUM}{{10,}}"),
    prefixed("stripe", "whsec_", "[A-Za-z0-9+/=]{24,}"),
    prefixed("github", "ghp_ gho_ ghu_ ghs_ ghr_", f"{_ALNUM}{{36,}}"),
    prefixed("github", "github_pat_", "[A-Za-z0-9_]{22,}"),
    prefixed(
        "gitlab",
        "glpat- gldt- glrt- glptt- glcbt- glsoat- glimt- glft- glffct- gloas- glagent- GR1348941",
        f"{_WORD}{{20,}}",
    ),
    prefixed("slack", "xoxa- xoxb- xoxe- xoxo- xoxp- xoxr- xoxs- xoxc- xoxd- xapp- xwfp- xoxe.xox", f"{_WORD}{{10,}}"),
    prefixed("slack", "hooks.slack.com/", "(?:services|workflows|triggers)/[A-Za-z0-9/_-]{20,}"),
    prefixed("webhook", "webhook.office.com/webhookb2/ outlook.office.com/webhook/", "[A-Za-z0-9@/_-]{40,}"),
    prefixed("webhook", "hooks.zapier.com/hooks/catch/ maker.ifttt.com/trigger/", "[A-Za-z0-9/_-]{12,}"),
    prefixed("aws", "amzn.mws.", _UUID),
    prefixed("twilio", "SK", "[0-9a-f]{32}", edge=True),
    prefixed("sendgrid", "SG.", f"{_WORD}{{16,32}}\\.{_WORD}{{30,}}", edge=True),
    prefixed("npm", "npm_", f"{_ALNUM}{{36,}}", edge=True),
    prefixed("pypi", "pypi-", f"{_WORD}{{50,}}"),
    prefixed("azure", " ".join(f"{digit}Q~" for digit in range(10)), "[A-Za-z0-9_.~-]{31,}", reach=_WORD_BYTES),
    announced("azure", "?s &s ;s", r"[?&;]sig=", "[A-Za-z0-9%]", r"[A-Za-z0-9%+/]{40,}=?"),
    prefixed("jwt", ".eyJ", f"{_WORD}{{8,}}(?:\\.{_WORD}+){{0,3}}", reach=_WORD_BYTES),
    prefixed("huggingface", "hf_ api_org_", f"{_ALNUM}{{30,}}", edge=True),
    prefixed("digitalocean", "dop_v1_ doo_v1_ dor_v1_", f"{_HEX}{{64}}"),
    prefixed("heroku", "HRKU-", f"(?:{_UUID}|{_WORD}{{40,}})"),
    prefixed("mailgun", "key- pubkey-", "[0-9a-f]{32}", edge=True),
    Family(
        name="mailchimp",
        heads=(b"-us",),
        near="-us[0-9]",
        whole="-us[0-9]{1,2}",
        behind=r"(?s).*[0-9a-f]{32}\z",
        reach=frozenset(b"0123456789abcdef"),
    ),
    prefixed("shopify", "shpat_ shpca_ shppa_ shpss_", f"{_HEX}{{32}}"),
    prefixed("square", "sq0atp- sq0csp- sq0idp-", f"{_WORD}{{22,}}"),
    prefixed("square", "EAAAE EAAAF EAAAl", f"{_WORD}{{55,}}", edge=True),
    prefixed("telegram", ":AA", f"{_WORD}{{33,}}", reach=_DIGITS),
    Family(
        name="discord",
        heads=tuple(f".{letter}".encode() for letter in "abcdefghijklmnopqrstuvwxyz0123456789_-"),
        near=rf"\.{_WORD}{{6}}\.{_WORD}{{{NEAR}}}",
        whole=rf"\.{_WORD}{{6}}\.{_WORD}{{27,38}}",
        behind=rf"(?s).*[MNO]{_WORD}{{23,25}}\z",
        reach=_WORD_BYTES,
    ),
    prefixed("discord", "discord.com/api/webhooks/ discordapp.com/api/webhooks/", f"[0-9]{{10,24}}/{_WORD}{{30,}}"),
    prefixed("datadog", "ddapi_ ddapp_ pub", "[0-9a-f]{32}", edge=True),
    prefixed("newrelic", "NRAK- NRJS- NRII- NRIQ- NRRA- NRSP-", f"{_WORD}{{19,}}"),
    prefixed("cloudflare", "v1.0-", f"{_HEX}{{24}}-{_HEX}{{146}}", edge=True),
    prefixed("cloudflare", "cfut_ cfat_ cfk_", f"{_WORD}{{37,}}", edge=True),
    prefixed("linear", "lin_api_ lin_oauth_", f"{_ALNUM}{{32,}}"),
    prefixed("notion", "secret_ ntn_", f"{_ALNUM}{{40,}}", edge=True),
    prefixed("okta", "SSWS", f"\\s{{1,3}}00{_WORD}{{38,}}"),
    prefixed("vault", "hvs. hvb. hvr.", f"{_WORD}{{24,}}"),
    prefixed("vault", "s.", f"{_ALNUM}{{24}}", edge=True, check=literals.is_token),
    prefixed("databricks", "dapi dose dkea", "[0-9a-f]{32}(?:-[0-9])?", edge=True),
    prefixed("grafana", "glc_ glsa_", "[A-Za-z0-9+/=_-]{32,}", edge=True),
    prefixed("grafana", "eyJrIjoi", "[A-Za-z0-9+/=_-]{40,}"),
    prefixed("postman", "PMAK-", f"{_HEX}{{24}}-{_HEX}{{34}}"),
    prefixed("terraform", ".atlasv1.", f"{_WORD}{{60,}}", reach=_WORD_BYTES),
    prefixed("doppler", "dp.pt. dp.st. dp.ct. dp.sa. dp.scim. dp.audit.", "[A-Za-z0-9._-]{40,}"),
    prefixed("sentry", "sntrys_ sntryu_", "[A-Za-z0-9+/=_-]{40,}"),
    prefixed("fly", "fo1_ fm1r_ fm1a_ fm2_", "[A-Za-z0-9+/=_-]{40,}", edge=True),
    prefixed("supabase", "sbp_ sb_secret_", "[A-Za-z0-9_]{30,}", edge=True),
    prefixed("groq", "gsk_", f"{_ALNUM}{{40,}}", edge=True),
    prefixed("replicate", "r8_", f"{_ALNUM}{{37,}}", edge=True),
    prefixed("xai", "xai-", f"{_ALNUM}{{60,}}", edge=True),
    prefixed("perplexity", "pplx-", f"{_ALNUM}{{40,}}", edge=True),
    prefixed("nvidia", "nvapi-", f"{_WORD}{{40,}}", edge=True),
    prefixed("cerebras", "csk-", f"{_ALNUM}{{40,}}", edge=True),
    prefixed("together", "tgp_v1_", f"{_WORD}{{40,}}", edge=True),
    prefixed("fireworks", "fw_", f"{_ALNUM}{{22,}}", edge=True, check=literals.is_token),
    prefixed("pinecone", "pcsk_", f"{_WORD}{{40,}}", edge=True),
    prefixed("tavily", "tvly-", f"{_WORD}{{28,}}", edge=True, check=literals.is_token),
    prefixed("firecrawl", "fc-", "[0-9a-f]{32}", edge=True),
    prefixed("jina", "jina_", f"{_WORD}{{50,}}", edge=True),
    prefixed("apify", "apify_api_ apify_proxy_", f"{_ALNUM}{{30,}}", edge=True),
    prefixed("elevenlabs", "sk_", "[0-9a-f]{48}", edge=True),
    prefixed("resend", "re_", f"{_ALNUM}{{6,12}}_{_ALNUM}{{20,}}", edge=True, check=literals.is_token),
    prefixed("posthog", "phx_ phs_", f"{_ALNUM}{{40,}}", edge=True),
    prefixed("wandb", "wandb_v1_", f"{_WORD}{{60,}}", edge=True),
    prefixed("neon", "napi_", f"{_ALNUM}{{40,}}", edge=True),
    prefixed(
        "vercel", "vercel_blob_rw_ vcp_ vci_ vca_ vcr_ vck_", f"{_WORD}{{24,}}", edge=True, check=literals.is_token
    ),
    prefixed("pulumi", "pul-", f"{_HEX}{{40}}", edge=True),
    prefixed("atlassian", "ATATT3 ATCTT3 ATBB", "[A-Za-z0-9_=-]{28,}", edge=True),
    prefixed("trello", "ATTA", "[0-9a-f]{64,}", edge=True),
    prefixed("figma", "figd_ figo_ figu_", f"{_WORD}{{38,}}", edge=True),
    prefixed("airtable", "pat", f"{_ALNUM}{{14}}\\.{_HEX}{{64}}", edge=True),
    prefixed("hubspot", "pat-", f"(?:na|eu|ap)[0-9]-{_UUID}", edge=True),
    prefixed("dropbox", "sl.", f"(?:u\\.)?{_WORD}{{130,}}", edge=True),
    prefixed("brevo", "xkeysib- xsmtpsib-", f"{_HEX}{{64}}(?:-{_ALNUM}{{16}})?"),
    prefixed("planetscale", "pscale_tkn_ pscale_pw_ pscale_oauth_", "[A-Za-z0-9_.=-]{32,}"),
    prefixed("contentful", "CFPAT-", f"{_WORD}{{40,}}"),
    prefixed("dynatrace", "dt0c01. dt0s01. dt0s02.", f"{_ALNUM}{{8,24}}\\.{_ALNUM}{{60,}}"),
    prefixed("easypost", "EZAK EZTK", f"{_ALNUM}{{54,}}", edge=True),
    prefixed("prefect", "pnu_ pnb_", f"{_ALNUM}{{36,}}", edge=True),
    prefixed("rubygems", "rubygems_", f"{_HEX}{{48}}"),
    prefixed("crates", "cio", f"{_ALNUM}{{32}}", edge=True, check=literals.is_token),
    prefixed("nuget", "oy2", f"{_LOWER}{{43}}", edge=True),
    prefixed("typeform", "tfp_", f"{_WORD}{{40,}}", edge=True),
    prefixed("age", "AGE-SECRET-KEY-1", "[A-Z0-9]{50,}"),
    prefixed("onepassword", "ops_eyJ", "[A-Za-z0-9+/=_-]{200,}"),
    prefixed("onepassword", "A3-", f"{_UPPER}{{6}}-{_UPPER}{{6}}(?:-{_UPPER}{{5}}){{3,4}}", edge=True),
    prefixed("artifactory", "AKCp", f"{_ALNUM}{{60,}}", edge=True),
    prefixed("buildkite", "bkua_ bkpt_ bkct_", f"{_ALNUM}{{40,}}", edge=True),
    prefixed("circleci", "CCIPAT_ CCIPRJ_", "[A-Za-z0-9_]{40,}"),
    prefixed("clojars", "CLOJARS_", f"{_ALNUM}{{60}}"),
    prefixed("netlify", "nfp_ nfc_ nfo_ nfu_", f"{_ALNUM}{{36,}}", edge=True),
    prefixed("tailscale", "tskey-", f"(?:api|auth|client|scim|webhook|reusable)-{_WORD}{{16,}}"),
    prefixed("langsmith", "lsv2_", "(?:pt|sk)_[0-9a-f]{32}(?:_[0-9a-f]{10})?"),
    prefixed("docker", "dckr_pat_ dckr_oat_", f"{_WORD}{{27,}}"),
    prefixed("docker", "SWMTKN-1-", f"{_LOWER}{{40,}}-{_LOWER}{{20,}}"),
    prefixed("openshift", "sha256~", f"{_WORD}{{43}}", edge=True),
    prefixed("shippo", "shippo_live_ shippo_test_", f"{_HEX}{{40}}"),
    prefixed("readme", "rdme_", f"{_ALNUM}{{70}}", edge=True),
    prefixed("sourcegraph", "sgp_", "(?:(?:local|[0-9a-f]{16})_)?[0-9a-f]{40}", edge=True),
    prefixed("sonarqube", "squ_ sqp_ sqa_", "[0-9a-f]{40}", edge=True),
    prefixed("razorpay", "rzp_live_ rzp_test_", f"{_ALNUM}{{14,}}", edge=True),
    prefixed("braintree", "access_token$production$ access_token$sandbox$", f"{_LOWER}{{16}}\\${_HEX}{{32}}"),
    prefixed("plaid", "access-", f"(?:sandbox|development|production)-{_UUID}", edge=True),
    prefixed("launchdarkly", "sdk- api- mob-", _UUID, edge=True),
    prefixed("flutterwave", "FLWSECK- FLWSECK_TEST-", f"{_ALNUM}{{12,}}", edge=True),
    prefixed("facebook", "EAA", f"{_ALNUM}{{80,}}", edge=True, check=literals.is_token),
    prefixed("twitter", "AAAAAAAAAAAAAAAAAAAAA", "[A-Za-z0-9%]{60,}", edge=True, check=literals.is_padded_token),
    prefixed("mapbox", "sk.eyJ", f"{_WORD}{{40,}}(?:\\.{_WORD}+)?", edge=True),
    prefixed("alibaba", "LTAI", f"{_ALNUM}{{16,26}}", edge=True),
    prefixed("tencent", "AKID", f"{_ALNUM}{{32}}", edge=True),
    prefixed("yandex", "AQVN y0_", f"{_WORD}{{35,}}", edge=True),
    prefixed("twitch", "oauth:", f"{_LOWER}{{30}}", edge=True),
    Family(
        name="password-hash",
        heads=tuple(f"${letter}".encode() for letter in "12567890ymsgapbPHSA"),
        near=r"\$(?:1|2[abxy]?|5|6|7|8|9|y|gy|md5|sha1|apr1|argon2(?:id|i|d)|scrypt|pbkdf2(?:-sha[0-9]{1,3})?"
        rf"|bcrypt-sha256|P|H|S|A)\${_CRYPT}{{8}}",
        whole=r"\$(?:1|2[abxy]?|5|6|7|8|9|y|gy|md5|sha1|apr1|argon2(?:id|i|d)|scrypt|pbkdf2(?:-sha[0-9]{1,3})?"
        r"|bcrypt-sha256|P|H|S|A)\$[A-Za-z0-9./+=,$*_-]{20,}",
        check=literals.is_token,
    ),
    prefixed(
        "password-hash",
        "pbkdf2_sha256$ pbkdf2_sha1$ pbkdf2_sha512$ bcrypt_sha256$ bcrypt$ argon2$ scrypt$ pbkdf2: scrypt: "
        "SCRAM-SHA-256$ SCRAM-SHA-1$ SCRAM-SHA-512$ {SSHA} {SSHA256} {SSHA512} {SHA} {SHA256} {SHA512} {SMD5} {MD5} "
        "{CRYPT} {BCRYPT} {ARGON2} {PBKDF2} {SHA512-CRYPT} {BLF-CRYPT}",
        f"{_CRYPT}{{20,}}",
        check=literals.is_token,
    ),
    announced(
        "password-hash",
        " ".join(f":{digit}" for digit in range(10)),
        ":[0-9]{1,6}:[0-9a-f]{32}:",
        "[0-9a-f]{8}",
        "[0-9a-f]{32}",
    ),
    announced(
        "kubernetes", "to", r"token[ =:]{1,2}[\"']?", "[a-z0-9]{6}\\.", "[a-z0-9]{6}\\.[a-z0-9]{16}", literals.has_digit
    ),
    announced("signature", "re", 'response="', "[0-9a-f]{8}", "[0-9a-f]{32,64}"),
    announced(
        "url-parameter",
        "?k &k ?a &a ?c &c ;j ?t &t ?p &p",
        r"[?&;](?:key|appid|code|jsessionid|phpsessid|auth|ticket)=",
        "[A-Za-z0-9_.~%+/-]{8}",
        "[A-Za-z0-9_.~%+/-]{20,}=*",
        literals.is_token,
    ),
    announced(
        "mnemonic",
        "mn se re",
        r"(?:mnemonic|(?:seed|recovery)[_ -]?(?:phrase|words))(?:[_ -]?phrase)?[\"']?\s{0,3}(?:[:=]|is)\s{0,3}[\"']?",
        "[a-z]{3}",
        "(?:[a-z]{3,8}(?:[ ,]| , |, )){11,23}[a-z]{3,8}",
    ),
    announced(
        "signature",
        "x- si",
        r"(?:x-amz-|x-goog-)?signature=",
        f"[A-Za-z0-9%+/_-]{{{NEAR}}}",
        r"[A-Za-z0-9%+/_-]{32,}={0,2}",
        literals.is_random,
    ),
    announced(
        "bearer", "be", r"bearer\s{1,3}", "[A-Za-z0-9._~+/-]{16}", "[A-Za-z0-9._~+/-]{16,}=*", literals.is_random
    ),
    announced(
        "basic-auth", "ba", r"basic\s{1,3}", "[A-Za-z0-9+/-]{12}", "[A-Za-z0-9+/-]{12,}={0,2}", announcements.is_basic
    ),
    told("url-password", (b"://",), announcements.URL, announcements.read_url, near=r"[^\s/@\"'<>]{3}", roomy=True),
    told("url-password", (b"://",), "://", announcements.read_token_url, near="[A-Za-z0-9_.~%-]{20}"),
    told("cookie", (b"co",), announcements.COOKIE, announcements.read_cookie),
    told(
        "password",
        (b" -", b"--", b"-u", b"-p", b'"-', b"'-", b"sq", b"/t"),
        announcements.USER,
        announcements.read_user,
        roomy=True,
    ),
    told("password", (b" -",), announcements.FLAGGED, announcements.read_flagged),
    told("password", (b"ds",), announcements.DSN, announcements.read_dsn),
    told(
        "password",
        tuple(f":{sign}".encode() for sign in "0123456789*"),
        announcements.PGPASS,
        announcements.read_pgpass,
    ),
    told("password", (b"au", b"lo", b"ba", b"cr"), announcements.PAIR, announcements.read_pair, roomy=True),
    told("token", (b"cl", b"lo", b"au", b"co", b"ap"), announcements.CALLED, announcements.read_called),
    told("password", named.PASSWORD_HEADS, named.PASSWORD, named.read_password),
    told("password", named.KEY_HEADS, named.KEY, named.read_key, near=named.NEAR_KEY),
    told(
        "token",
        tuple(f"{sign}{letter}".encode() for sign in "_-" for letter in string.ascii_letters + string.digits),
        "",
        announcements.read_token,
        reach=_WORD_BYTES,
        near=f"[_-]{_ALNUM}{{32}}",
    ),
)
