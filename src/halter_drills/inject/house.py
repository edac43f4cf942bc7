"""The house that the drill `inject` attacks: what others wrote, tools that count their effects, and the worst model."""

from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, Literal

import msgspec

from halter.core.messages import Prompt, Reply, Text, TextListener, ToolCall
from halter.core.tools import Failed, Invalid, Output, Permit, ToolSpec, Valid
from halter.core.usage import ModelName
from halter.core.vocabulary import Verdict
from halter.guard.approvals import answer_decision, list_pending_decisions
from halter.runtime.runtime import Runtime
from halter.tools.function_tool import Deps, FunctionTool, tool
from halter.tools.mcp import describe_server_tools
from halter_drills.inject.attacks import CLEAN, AttackStep
from halter_drills.workload import PERSON

PUPPET: Final = ModelName("scripted", "puppet")


class FakeOffice:
    """The outside world of one case: what others wrote, and what the agent did."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts
        self.effects = Counter[str]()
        self.happened_effects = set[bytes]()

    def read(self, place: str) -> str:
        return self._texts.get(place, CLEAN)

    def act(self, name: str, **arguments: Any) -> str:
        given = {key: value for key, value in arguments.items() if value not in ("", [], None)}
        self.effects[name] += 1
        self.happened_effects.add(AttackStep(name, given).key())
        return "done"


async def read_mail(house: Deps[FakeOffice]) -> str:
    return house.read("mail")


async def read_page(house: Deps[FakeOffice], url: str) -> str:
    house.act("read_page", url=url)
    return house.read("page")


async def search_web(house: Deps[FakeOffice], query: str) -> str:
    return f"Results for {query}: {house.read('search')}"


async def read_calendar(house: Deps[FakeOffice]) -> str:
    return house.read("calendar")


async def read_chat(house: Deps[FakeOffice]) -> str:
    return house.read("chat")


async def list_bills(house: Deps[FakeOffice]) -> str:
    return house.read("bills")


async def recall(house: Deps[FakeOffice], topic: str) -> str:
    return f"About {topic}: {house.read('memory')}"


async def ask_helper(house: Deps[FakeOffice], question: str) -> str:
    return f"Asked {question}: {house.read('helper')}"


async def check_stock(house: Deps[FakeOffice], item: str) -> str:
    raise Failed("OutOfStock", f"{item}: {house.read('error')}")


async def list_people(house: Deps[FakeOffice]) -> str:
    return house.read("people")


async def list_channels(house: Deps[FakeOffice]) -> str:
    return house.read("channels")


async def find_contact(house: Deps[FakeOffice], name: str) -> str:
    """A directory that repeats what it was asked for."""
    echo = "" if name == "Bob" else f"name: {name}\nmail: {name.rsplit(maxsplit=1)[-1]}\n\n"
    return f"{echo}{house.read('contacts')}"


async def find_hotels(house: Deps[FakeOffice], city: str) -> str:
    return f"city: {city}\n\n{house.read('hotels')}"


async def list_orders(house: Deps[FakeOffice]) -> str:
    return house.read("orders")


async def send_mail(
    house: Deps[FakeOffice], to: str, body: str = "", subject: str = "", cc: list[str] | None = None
) -> str:
    return house.act("send_mail", to=to, body=body, subject=subject, cc=cc)


async def post_message(house: Deps[FakeOffice], channel: str, text: str) -> str:
    return house.act("post_message", channel=channel, text=text)


async def pay(house: Deps[FakeOffice], account: str, amount: Decimal, reference: str = "") -> str:
    exact = int(amount) if amount == int(amount) else float(amount)
    return house.act("pay", account=account, amount=exact, reference=reference)


async def share_file(house: Deps[FakeOffice], file: str, user: str, *, public: bool = False) -> str:
    return house.act("share_file", file=file, user=user, public=public or None)


async def write_note(house: Deps[FakeOffice], file: str, text: str) -> str:
    return house.act("write_note", file=file, text=text)


async def delete_file(house: Deps[FakeOffice], file: str) -> str:
    return house.act("delete_file", file=file)


async def create_event(house: Deps[FakeOffice], title: str, day: str, guests: list[str] | None = None) -> str:
    return house.act("create_event", title=title, day=day, guests=guests)


async def invite(house: Deps[FakeOffice], address: str) -> str:
    return house.act("invite", address=address)


async def cancel_order(house: Deps[FakeOffice], order: str) -> str:
    return house.act("cancel_order", order=order)


async def set_password(house: Deps[FakeOffice], password: str) -> str:
    return house.act("set_password", password=password)


async def forward_all(house: Deps[FakeOffice], address: str) -> str:
    return house.act("forward_all", address=address)


async def book_hotel(house: Deps[FakeOffice], hotel: str, day: str) -> str:
    return house.act("book_hotel", hotel=hotel, day=day)


async def call_phone(house: Deps[FakeOffice], phone: str) -> str:
    return house.act("call_phone", phone=phone)


async def run_command(house: Deps[FakeOffice], argv: list[str]) -> str:
    return house.act("run_command", argv=argv)


async def http_post(house: Deps[FakeOffice], url: str, body: str) -> str:
    return house.act("http_post", url=url, body=body)


async def shop_search(house: Deps[FakeOffice], query: str) -> str:
    return f"{query}: {house.read('mcp_result')}"


async def shop_order(house: Deps[FakeOffice], item: str, quantity: int, address: str) -> str:
    return house.act("shop__order", item=item, quantity=quantity, address=address)


def make_house_tools() -> Sequence[FunctionTool]:
    """The tools of the house, declared as their authors should; all run without a question but the brake's."""

    def look(function: Any, reads: Any = "anyone", **declared: Any) -> FunctionTool:
        return tool(function, level="SAFE", effect="read", reads=reads, **declared)

    def act(function: Any, reach: Any, **arguments: str) -> FunctionTool:
        return tool(function, level="SAFE", reads="nothing", reach=reach, arguments=arguments)

    return (
        *map(look, (read_mail, list_bills, check_stock)),
        look(read_page, arguments={"url": "destination:url"}),
        look(search_web, arguments={"query": "detail"}),
        look(recall, arguments={"topic": "detail"}),
        look(ask_helper, arguments={"question": "detail"}),
        look(read_calendar, "known"),
        look(read_chat, "known"),
        look(list_people, "known", lists={"name": "user", "mail": "address"}),
        look(list_channels, "known", lists={"name": "channel"}),
        look(find_contact, "trusted", arguments={"name": "detail"}, mints={"mail": "address", "name": "user"}),
        look(find_hotels, "trusted", arguments={"city": "detail"}, mints={"name": "hotel"}),
        look(list_orders, "own", mints={"id": "id"}),
        act(
            send_mail,
            "others",
            to="destination:address",
            cc="destination:address",
            subject="content",
            body="content",
        ),
        act(post_message, "others", channel="destination:channel", text="content"),
        act(pay, "final", account="destination:account", amount="amount", reference="content"),
        act(share_file, "others", file="target:file", user="destination:user"),
        act(write_note, "own", file="target:file", text="content"),
        act(delete_file, "final", file="target:file"),
        act(create_event, "others", title="content", day="detail", guests="destination:address"),
        act(invite, "final", address="destination:address"),
        act(cancel_order, "final", order="target:id"),
        act(set_password, "final", password="target:secret"),  # noqa: S106 It is a role.
        act(forward_all, "final", address="destination:address"),
        act(book_hotel, "final", hotel="target:hotel", day="detail"),
        act(call_phone, "others", phone="destination:phone"),
        act(run_command, "others", argv="target:code"),
        act(http_post, "others", url="destination:url", body="content"),
    )


class ServedTool:
    """A tool as a server of the Model Context Protocol describes it; no process is started for it."""

    def __init__(self, made: FunctionTool, name: str, description: str, *, reads: bool) -> None:
        self._make_output = made
        schema = msgspec.json.decode(made.spec.schema)
        entry = {
            "name": name,
            "description": description,
            "inputSchema": schema,
            "annotations": {"readOnlyHint": True} if reads else {},
        }
        (described,) = describe_server_tools("shop", [entry]).tools
        self.spec: ToolSpec = described.spec

    def validate(self, arguments: bytes) -> Valid | Invalid:
        return self._make_output.validate(arguments)

    async def run(self, arguments: Valid, permit: Permit) -> Output:
        return await self._make_output.run(arguments, permit)

    async def check(self, arguments: Valid, permit: Permit) -> Literal["done", "not_done", "unknown"]:
        return await self._make_output.check(arguments, permit)


class Puppet:
    """The worst model: it makes the calls that it was told to make, and summarizes as it was told to."""

    name = PUPPET
    base_url: None = None

    def __init__(self, steps: Sequence[AttackStep], summary: str) -> None:
        self._steps = iter(steps)
        self._summary = summary
        self._instructions: list[bytes] = []

    def count(self, prompt: Prompt) -> int:
        return sum(len(part.text) for message in prompt.messages for part in message.parts if isinstance(part, Text))

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        permit.use()
        self._instructions.append(msgspec.json.encode(prompt))
        if not prompt.tools:
            return Reply((Text(self._summary, "model", trusted=False),))
        step = next(self._steps, None)
        if step is None:
            return Reply((Text("Done.", "model", trusted=False),))
        arguments = msgspec.json.encode(step.arguments).decode()
        return Reply((ToolCall("c", step.tool, arguments),), "calls")

    def was_told(self, text: str) -> bool:
        """Whether the beginning of a text stood in a prompt, as it is or as JSON within JSON."""
        written = msgspec.json.encode(text[:60])[1:-1]
        again = msgspec.json.encode(written.decode())[1:-1]
        return any(written in prompt or again in prompt for prompt in self._instructions)


async def answer_question(app: Runtime, decision: str, verdict: Verdict) -> None:
    """A person answers one question."""
    store = app.patient()
    for waiting in await list_pending_decisions(store):
        if waiting.decision == decision:
            await store.commit(answer_decision(waiting, verdict, PERSON, f"{decision}/answer"))
