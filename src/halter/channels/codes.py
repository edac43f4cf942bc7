"""Pairing a person: the code that is sent to the place where they will answer."""

from halter.channels.channel import TransportFailed
from halter.channels.messages import ChatButton, ChatMessage
from halter.channels.serve import make_transports, read_channels
from halter.operations.channels import PairingCode
from halter.runtime.runtime import Runtime


async def send_code(app: Runtime, code: PairingCode) -> str:
    """Send a code to its topic; return the problem if that failed, or an empty text."""
    if not code.place:
        return ""
    text = f"Answer decisions here as {code.name} ({code.role})?"
    for transport in make_transports(app, read_channels(app)):
        if transport.name == code.channel:
            try:
                await transport.send(code.place, ChatMessage(text, (ChatButton("Pair", code.code),)))
            except TransportFailed as failed:
                return str(failed)
            finally:
                await transport.close()
            return ""
    return f"The code was not sent: halter.yaml has no {code.channel} under `channels`."
