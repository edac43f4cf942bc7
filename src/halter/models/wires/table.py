"""The protocols that a provider can have, by the name that `wire` has in agent.yaml."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from halter.models.wires.anthropic import ANTHROPIC
from halter.models.wires.google import GOOGLE
from halter.models.wires.openai_chat import OPENAI_CHAT
from halter.models.wires.openai_responses import OPENAI_RESPONSES
from halter.models.wires.wire import Wire
from halter.spec.models import WireFormat

WIRES: Final[Mapping[WireFormat, Wire]] = MappingProxyType(
    {wire.name: wire for wire in (OPENAI_CHAT, OPENAI_RESPONSES, ANTHROPIC, GOOGLE)}
)
