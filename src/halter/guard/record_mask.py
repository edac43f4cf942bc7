"""The mask of everything about a call that is recorded or shown."""

from typing import Final

import msgspec

from halter.core.ports import Store, offload_body
from halter.core.text import decode_body, encode_body
from halter.core.tools import JournalEffect
from halter.guard.call_request import CallRequest, RequiredApproval
from halter.redaction.redact import Redact

HIDDEN_REASONS: Final = ("the arguments contain a secret, so the reasons are hidden",)


def mask_request(request: CallRequest, redact: Redact) -> CallRequest:
    """Mask secrets in everything that is recorded or shown. The digests cover the original."""
    text, tool = decode_body(request.arguments), redact(request.tool)
    masked_text = redact(text)
    if masked_text is text and tool == request.tool and request.flaw is None and request.approval is None:
        return request
    arguments = request.arguments if masked_text is text else encode_body(masked_text)
    flaw = request.flaw and (request.flaw[0], redact(request.flaw[1]))
    approval = request.approval and _mask_approval(
        request.approval, redact, has_masked_arguments=arguments != request.arguments
    )
    return msgspec.structs.replace(request, tool=tool, arguments=arguments, flaw=flaw, approval=approval)


async def offload_arguments(store: Store, request: CallRequest) -> CallRequest:
    """Store arguments that are too large for an event as a blob."""
    _, blob = await offload_body(store, request.arguments)
    return msgspec.structs.replace(request, blob=blob)


def _mask_approval(approval: RequiredApproval, redact: Redact, *, has_masked_arguments: bool) -> RequiredApproval:
    """Mask the text for a person. Reasons may quote arguments in a form in which secrets are not recognised."""
    reasons = HIDDEN_REASONS if has_masked_arguments and approval.reasons else tuple(map(redact, approval.reasons))
    keys = tuple(map(redact, approval.argument_keys))
    display_body = _mask_body(approval.display_body, redact)
    return msgspec.structs.replace(approval, display_body=display_body, reasons=reasons, argument_keys=keys)


def mask_effect(effect: JournalEffect, redact: Redact) -> JournalEffect:
    return effect if effect.body is None else msgspec.structs.replace(effect, body=_mask_body(effect.body, redact))


def _mask_body(body: bytes, redact: Redact) -> bytes:
    text = decode_body(body)
    masked_text = redact(text)
    return body if masked_text is text else encode_body(masked_text)
