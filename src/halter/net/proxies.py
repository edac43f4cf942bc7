"""The proxies that the environment names. An address on this machine is reached without one."""

from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from halter.core.usage import is_local_address


def find_proxy(url: str) -> str | None:
    """Find the HTTP proxy that the environment names for an address on another machine."""
    host = urlsplit(url).hostname or ""
    if is_local_address(url) or proxy_bypass(host):
        return None
    proxies = getproxies()
    return proxies.get(urlsplit(url).scheme) or proxies.get("all")
