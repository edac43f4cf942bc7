"""What the store keeps of a trigger: its newest version, and its row."""

import msgspec

from halter.core.ids import trigger_stream
from halter.core.ports import Query, Store, read_body
from halter.core.rows import TriggerRow
from halter.core.schedules import Timing
from halter.spec.triggers import AnyTrigger, Schedule, TriggerType, Watch, Webhook


class TriggerRecord(msgspec.Struct, frozen=True):
    """A trigger as stored in the journal. `timing` says when a schedule fires."""

    type: TriggerType
    spec: msgspec.Raw
    timing: Timing | None = None

    def trigger(self) -> AnyTrigger:
        kinds: dict[TriggerType, type[AnyTrigger]] = {"schedule": Schedule, "watch": Watch, "webhook": Webhook}
        return msgspec.json.decode(self.spec, type=kinds[self.type])


def classify_trigger(trigger: AnyTrigger) -> TriggerType:
    if isinstance(trigger, Schedule):
        return "schedule"
    return "watch" if isinstance(trigger, Watch) else "webhook"


def encode_trigger_record(trigger: AnyTrigger, timing: Timing | None = None) -> bytes:
    spec = msgspec.Raw(msgspec.json.encode(trigger))
    return msgspec.json.encode(TriggerRecord(classify_trigger(trigger), spec, timing))


async def read_trigger_record(store: Store, row: TriggerRow) -> TriggerRecord | None:
    """Return the newest version of a trigger; None if it was erased."""
    (stored,) = await store.read(trigger_stream(row.trigger), row.made_seq - 1, 1)
    body = await read_body(store, stored)
    return msgspec.json.decode(body, type=TriggerRecord) if body else None


async def find_trigger_row(store: Store, trigger: str) -> TriggerRow | None:
    return next(iter(await store.ask(Query("trigger", TriggerRow, {"trigger": trigger}))), None)
