"""Secrets in what a channel's file says."""

from collections.abc import Callable
from typing import Any

from halter.core.telling import Undelivered
from halter.core.tools import with_secrets


def revealed(value: Any, reveal: Callable[[str], str], channel: str) -> Any:
    """Put secrets in their places. One that is missing may be there when it is tried again."""
    try:
        return with_secrets(value, reveal)
    except KeyError as missing:
        name = str(missing.args[0])
        sentence = f"The channel {channel} needs the secret {name}, which is not set: set HALTER_SECRET_{name}."
        raise Undelivered(sentence, may_retry=True) from None
