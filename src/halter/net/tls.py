"""Which certificates are accepted: those of the machine, read once per process."""

import ssl
from functools import cache


@cache
def make_tls_context(*, uses_environment: bool = False) -> ssl.SSLContext:
    """Read the machine's certificates; with `uses_environment`, those that `SSL_CERT_FILE` or `SSL_CERT_DIR` names."""
    from httpx2 import create_ssl_context

    return create_ssl_context(trust_env=uses_environment)
