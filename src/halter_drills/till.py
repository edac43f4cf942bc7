"""Money held and settled as the two doors do it, with no tool and no model behind them."""

from functools import partial

import msgspec

from halter.core.ids import session_stream
from halter.core.ports import Committed, Lease, Write
from halter.core.usage import Usage
from halter.guard import chokepoint, judge, request, weigh
from halter.guard.chokepoint import Answer, NeedsPerson
from halter.guard.flight import StillHeld
from halter.guard.judge import Asked
from halter.guard.purse import Purse
from halter.guard.request import RefusedRequest
from halter.guard.weigh import Asking
from halter.state.session import InFlight

Refusal = Answer | NeedsPerson | RefusedRequest


class Till(Purse):
    """The ledger as the doors use it: the product's own decision about each call and each request."""

    async def admit(self, lease: Lease, asked: Asked | Asking) -> InFlight | Refusal | StillHeld:
        """Commit an intent with its hold or its refusal; ask again while other holds are in the way.

        A repeated attempt answers as it did before.
        """
        committed = await self.commit_intent(lambda now: self.intent(lease, asked.at(now)), self.patience)
        answer = None if committed is None else _admission(committed, asked)
        return answer or StillHeld(asked.call if isinstance(asked, Asked) else asked.request)

    def intent(self, lease: Lease, asked: Asked | Asking) -> Write:
        """Put the decision as a write, under the key that the door would give it."""
        stream = session_stream(lease.session)
        if isinstance(asked, Asked):
            return Write(stream, f"{asked.call}/asked/0", partial(judge.judge, asked), judge.rows_of(asked), lease)
        return Write(stream, f"{asked.request}/asked", partial(weigh.weigh, asked), weigh.rows_of(asked), lease)


def _admission(committed: Committed, asked: Asked | Asking) -> InFlight | Refusal | None:
    """Read the decision off what was written; None where a rate is waited for."""
    if isinstance(asked, Asked):
        return chokepoint.admission(committed)
    match request.admission(committed):
        case request.Admitted(flight):
            return flight
        case RefusedRequest() as refused:
            return refused
        case _:
            return None


class FlatRate(msgspec.Struct, frozen=True):
    """A price that every request has, whatever it sends."""

    usd: int

    def cost(self, usage: Usage, at: int) -> int:
        """Charge the same for each."""
        return self.usd

    def bound(self, input_tokens: int, max_output_tokens: int, at: int) -> int:
        """Hold the same for each."""
        return self.usd

    def max_output_that_fits(self, input_tokens: int, budget_micros: int, at: int, at_most: int = 0) -> int:
        """Allow the whole answer, or none."""
        return at_most if self.usd <= budget_micros else 0
