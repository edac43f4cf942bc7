"""What a person says of a store that lacks what its checkpoints know."""

from halter.app.desk.desk import Desk, refused
from halter.app.opened import continuity_of
from halter.core.events import StoreAccepted
from halter.core.ids import FLEET
from halter.core.ports import Draft, Write
from halter.core.text import clean
from halter.journal.continuity import Doubt


async def accept(desk: Desk, reason: str = "") -> Doubt:
    """Go on with a store as it is. The journal says who did that and what is missing; so do the checkpoints."""
    app, doubt = desk.app, desk.app.doubt
    desk.demand("admin", "go on with a store that lacks something")
    desk.demand_all("go on with a store that lacks something")
    if doubt is None:
        refused("The store has all that its checkpoints know: there is nothing to accept.")
    event = StoreAccepted(
        by=desk.who.name, lacks=doubt.lacks(), events=doubt.events, known_at=doubt.at, reason=clean(reason)
    )
    done = await app.store.commit(Write(FLEET, app.ids.new(), lambda _: [Draft(event)]))
    # A store in doubt is opened without an observer, so that no checkpoint is written that it fits: it begins here.
    app.checkpointer.accept(doubt.given_up)
    app.checkpointer.saw(done.events)
    continuity = continuity_of(app.settings)
    if continuity is not None:
        continuity.remember(app.checkpointer.store_id)
    return doubt
