"""The MCP servers behind a client's session: connected for this client alone, their tools pinned and named apart.

A server's tools are `SERVER__TOOL`, as are its prompts; resources keep their addresses. What a server announces later
is looked at before the next call: a tool that is not what a person agreed to is held.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, TypeVar

import msgspec
from mcp_types import (
    CompleteRequest,
    CompleteRequestParams,
    CompleteResult,
    CreateMessageRequestParams,
    CreateMessageResult,
    ElicitRequestParams,
    ElicitResult,
    EmptyResult,
    ListPromptsRequest,
    ListPromptsResult,
    ListResourcesRequest,
    ListResourcesResult,
    ListResourceTemplatesRequest,
    ListResourceTemplatesResult,
    LoggingLevel,
    LoggingMessageNotification,
    PaginatedRequestParams,
    PromptListChangedNotification,
    ResourceListChangedNotification,
    ResourceUpdatedNotification,
    ServerNotification,
    SetLevelRequest,
    SetLevelRequestParams,
    ToolListChangedNotification,
)
from mcp_types import methods as wire
from mcp_types.version import LATEST_HANDSHAKE_VERSION

from halter.config.agent_files import AgentFile
from halter.config.resolve import check_named_tools, list_named_tools
from halter.core.money import Cap
from halter.core.spec import GatewaySpec
from halter.core.text import clean
from halter.core.tools import SERVER_SEPARATOR, Failed, Tool, ToolServer, ToolSpec
from halter.gateway.calls import CANCELLED, PROMPT, RESOURCE, ClientCall, GatedTool, ReadingTool
from halter.guard.prepare import SessionContext
from halter.runtime.assemble import AssembledAgent, settle_pins
from halter.runtime.runtime import Runtime
from halter.tools.mcp import McpServer, McpTerms, McpTool
from halter.tools.mcp_session import NO_SAMPLING

ListKind = Literal["tools", "prompts", "resources"]


class ResourceNews(msgspec.Struct, frozen=True):
    """A resource that the client follows has changed."""

    uri: str


class LogNews(msgspec.Struct, frozen=True):
    """A line of a server's log; `data` is what the server wrote, of any kind."""

    server: str
    level: LoggingLevel
    logger: str
    data: Any


News = ListKind | ResourceNews | LogNews
MOST_PAGES: Final = 50
_NEWS: Final[Mapping[type[Any], ListKind]] = {
    ToolListChangedNotification: "tools",
    PromptListChangedNotification: "prompts",
    ResourceListChangedNotification: "resources",
}
T = TypeVar("T")
AskModel = Callable[[str, CreateMessageRequestParams], Awaitable[CreateMessageResult]]


class GatewayAgent(msgspec.Struct, frozen=True):
    """An agent whose calls pass the gateway; `file` is what its rules are checked against."""

    agent: AssembledAgent
    file: AgentFile
    spec: GatewaySpec
    servers: tuple[ToolServer, ...]

    def narrow(self, caps: Iterable[Cap]) -> "GatewayAgent":
        """The same agent for a client with caps of its own; where both cap the same, the lower one holds."""
        policy, own = self.agent.policy, {cap.per: cap for cap in caps if cap.max_cost_usd is not None}
        if not own:
            return self
        agent = {cap.per: cap for cap in policy.caps.agent}
        agent |= {per: _lower(agent.get(per), cap) for per, cap in own.items() if per}
        session = _lower(policy.caps.session, own[""]) if "" in own else policy.caps.session
        narrowed = msgspec.structs.replace(policy.caps, session=session, agent=tuple(agent.values()))
        changed = msgspec.structs.replace(self.agent, policy=msgspec.structs.replace(policy, caps=narrowed))
        return msgspec.structs.replace(self, agent=changed)


def _lower(first: Cap | None, second: Cap) -> Cap:
    if first is None or first.max_cost_usd is None or second.max_cost_usd is None:
        return second
    return min(first, second, key=lambda cap: cap.max_cost_usd or 0)


class Upstreams:
    """The servers of one client's session, and what they offer by now."""

    def __init__(self, app: Runtime, owner: GatewayAgent, terms: McpTerms, report: Callable[[str], None]) -> None:
        self.tools: dict[str, Tool] = {}
        self.calls: dict[str, ClientCall] = {}
        """The calls under way, by their ids at the guard; the newest last."""
        self.on_news: Callable[[News], None] = _ignore_news
        self.ask_model: AskModel | None = None
        self._app = app
        self._owner = owner
        self._report = report
        self._reported: set[str] = set()
        self._servers = {each.name: McpServer(each, terms, self) for each in owner.servers}
        self._resources: dict[str, str] = {}
        self._subscriptions: Counter[str] = Counter()
        self.log_level: LoggingLevel | None = None
        self._hidden: frozenset[str] = frozenset()
        self._stale = True
        self._loading = asyncio.Lock()
        self._standing: SessionContext | None = None

    def make_context(self, session: str) -> SessionContext:
        """The policy's terms of the session, with what is held by now."""
        known = self._standing
        if known is None or known.quarantined != self._hidden:
            known = msgspec.structs.replace(self._owner.agent.make_context(session), quarantined=self._hidden)
            self._standing = known
        return known

    async def refresh(self) -> None:
        """Look at what the servers offer, again after they announced something, and while a person has to agree."""
        async with self._loading:
            if self._stale or self._hidden:
                await self._load()

    async def _load(self) -> None:
        self._stale = False
        found = await asyncio.gather(*(self._offer(server) for server in self._servers.values()))
        tools = {tool.spec.name: tool for offered in found for tool in offered}
        real = [tool.spec for tool in tools.values() if isinstance(tool, GatedTool)]
        policy = self._owner.agent.policy
        self._check_rules(tools.values())
        before, first = self._list_names(), not self.tools
        self._hidden = await settle_pins(self._app, policy.name, [*self._servers], real)
        self.tools.clear()
        self.tools.update(tools)
        if not first and self._list_names() != before:
            self.on_news("tools")

    def _list_names(self) -> list[str]:
        return [each["name"] for each in self.list_tools()]

    def _check_rules(self, tools: Iterable[Tool]) -> None:
        """Check the rules of the agent's file for tools of servers; its own tools are not served here."""
        file, specs = self._owner.file, [tool.spec for tool in tools]
        own = {name for _, name in list_named_tools(file) if SERVER_SEPARATOR not in name}
        specs += [ToolSpec(name=name, description="", schema=b"{}") for name in sorted(own)]
        check_named_tools(self._owner.agent.policy, file, specs)

    async def _offer(self, server: McpServer) -> list[GatedTool | ReadingTool]:
        try:
            offer = await server.offer()
            capable = await server.capabilities()
        except Failed as failure:
            self._report_once(f"The server {server.name} is left out. {failure}")
            return [
                tool for tool in self.tools.values() if isinstance(tool, GatedTool) and tool.spec.server == server.name
            ]
        for sentence in offer.left_out:
            self._report_once(sentence)
        timeout = self._owner.spec.timeout
        kinds = [kind for kind, has in ((RESOURCE, capable.resources), (PROMPT, capable.prompts)) if has is not None]
        readers = [ReadingTool(server, kind, self.calls, timeout) for kind in kinds]
        return [*readers, *(tool for tool in map(self._gate_tool, offer.tools) if tool is not None)]

    def _gate_tool(self, tool: McpTool) -> GatedTool | None:
        if not _can_be_listed(tool.entry):
            self._report_once(f"The tool {tool.spec.name} is left out: no client could read its entry.")
            return None
        return GatedTool(tool, self.calls, self._owner.spec.prices.get(tool.spec.name) or 0)

    def _report_once(self, sentence: str) -> None:
        if sentence not in self._reported:
            self._reported.add(sentence)
            self._report(sentence)

    def list_tools(self) -> list[dict[str, Any]]:
        """The tools that the policy grants, as their servers describe them, under their full names."""
        policy = self._owner.agent.policy
        return [
            {**tool.entry, "name": name, "description": tool.spec.description}
            for name, tool in sorted(self.tools.items())
            if isinstance(tool, GatedTool)
            and name not in policy.disabled
            and name not in self._hidden
            and policy.phases[0].grants_tool(name)
        ]

    async def elicit(self, server: str, params: ElicitRequestParams) -> ElicitResult:
        """Put what a server asks to the client, by the newest call that is under way there."""
        calls = [each for each in self.calls.values() if each.server == server]
        return await calls[-1].elicit_for_server(params) if calls else CANCELLED

    @property
    def samples(self) -> bool:
        return self._owner.spec.sampling

    async def sample(self, server: str, params: CreateMessageRequestParams) -> CreateMessageResult:
        """Ask the agent's model for a server, as part of the newest call that is under way there, and never without."""
        calls = [each for each in self.calls.values() if each.server == server]
        if self.ask_model is None or not self.samples or not calls:
            raise Failed("Sampling", NO_SAMPLING)
        calls[-1].count_asked()
        return await self.ask_model(server, params)

    def announce(self, server: str, news: ServerNotification) -> None:
        match news:
            case ResourceUpdatedNotification(params=changed) if self._subscriptions:
                self.on_news(ResourceNews(str(changed.uri)))
            case LoggingMessageNotification(params=said):
                self.on_news(LogNews(server, said.level, said.logger or "", said.data))
            case _:
                self._on_list_changed(news)

    def _on_list_changed(self, news: ServerNotification) -> None:
        kind = _NEWS.get(type(news))
        if kind == "tools":
            self._stale = True
        if kind is not None:
            self.on_news(kind)

    async def set_log_level(self, level: LoggingLevel) -> None:
        """Have servers of the elder protocol log from a level on; the newer ones are told with each call."""
        self.log_level = level
        request = SetLevelRequest(params=SetLevelRequestParams(level=level))
        for server in self._servers.values():
            with suppress(Failed):
                if (await server.capabilities()).logging is not None:
                    await server.list(request, EmptyResult)

    async def follow_resource(self, uri: str) -> None:
        """Have a resource's server say when it changes. Raises Failed where the client may not read it."""
        server = await self._find_follower(uri)
        self._subscriptions[uri] += 1
        if self._subscriptions[uri] == 1:
            await server.follow_resource(uri)

    async def unfollow_resource(self, uri: str) -> None:
        if uri not in self._subscriptions:
            return
        self._subscriptions[uri] -= 1
        if self._subscriptions[uri] <= 0:
            del self._subscriptions[uri]
            await (await self._find_follower(uri)).unfollow_resource(uri)

    async def _find_follower(self, uri: str) -> McpServer:
        name, policy = await self.find_resource(uri), self._owner.agent.policy
        tool = f"{name}{SERVER_SEPARATOR}{RESOURCE.suffix}"
        if name not in self._servers or tool in policy.disabled or not policy.phases[0].grants_tool(tool):
            raise Failed("Unknown", f"no server here has the resource {clean(uri)[:200]!r} for this client")
        return self._servers[name]

    async def list_resources(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for server in self._having("resources"):
            for page in await self._pages(server, ListResourcesRequest, ListResourcesResult):
                for each in page.resources:
                    self._resources.setdefault(each.uri, server.name)
                    found.append(_dump(each))
        return found

    async def list_templates(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for server in self._having("resources"):
            for page in await self._pages(server, ListResourceTemplatesRequest, ListResourceTemplatesResult):
                for each in page.resource_templates:
                    self._resources.setdefault(each.uri_template, server.name)
                    found.append(_dump(each))
        return found

    async def list_prompts(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for server in self._having("prompts"):
            for page in await self._pages(server, ListPromptsRequest, ListPromptsResult):
                found += [
                    {**_dump(each), "name": f"{server.name}{SERVER_SEPARATOR}{each.name}"} for each in page.prompts
                ]
        return found

    async def complete(self, params: CompleteRequestParams) -> CompleteResult:
        """Complete a word. Raises Failed where no server knows what it belongs to."""
        ref = params.ref
        if ref.type == "ref/prompt":
            server, _, name = ref.name.partition(SERVER_SEPARATOR)
            params = params.model_copy(update={"ref": ref.model_copy(update={"name": name})})
        else:
            server = await self.find_resource(str(ref.uri))
        if server not in self._servers:
            raise Failed("Unknown", f"no server here is called {clean(server)[:80]!r}")
        return await self._servers[server].list(CompleteRequest(params=params), CompleteResult)

    async def find_resource(self, uri: str) -> str:
        """The server that has a resource: the one that lists it, whose template fits, or the only one that has any."""
        having = [server.name for server in self._having("resources")]
        if uri not in self._resources and len(having) != 1:
            await self.list_resources()
            await self.list_templates()
        if uri in self._resources:
            return self._resources[uri]
        fitting = (name for known, name in self._resources.items() if _matches_template(known, uri))
        return next(fitting, having[0] if len(having) == 1 else "")

    def _having(self, what: Literal["resources", "prompts"]) -> Iterator[McpServer]:
        kind = RESOURCE if what == "resources" else PROMPT
        for name, server in self._servers.items():
            if f"{name}{SERVER_SEPARATOR}{kind.suffix}" in self.tools:
                yield server

    async def _pages(self, server: McpServer, request: Any, wanted: type[T]) -> Sequence[T]:
        """All pages of a list; of a server that does not say them, those that it said."""
        pages: list[T] = []
        cursor: str | None = None
        try:
            for _ in range(MOST_PAGES):
                params = PaginatedRequestParams(cursor=cursor) if cursor else None
                page: Any = await server.list(request(params=params), wanted)
                pages.append(page)
                cursor = page.next_cursor
                if not cursor:
                    break
        except Failed as failure:
            self._report_once(f"The server {server.name} does not say all that it has: {failure}")
        return pages

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self._servers.values()))


def _ignore_news(_: News) -> None: ...


def _can_be_listed(entry: Mapping[str, Any]) -> bool:
    try:
        wire.serialize_server_result("tools/list", LATEST_HANDSHAKE_VERSION, {"tools": [dict(entry)]})
    except (ValueError, RecursionError):
        return False
    return True


def _dump(item: Any) -> dict[str, Any]:
    return item.model_dump(by_alias=True, mode="json", exclude_none=True)


def _matches_template(template: str, uri: str) -> bool:
    """Whether an address could be one of a template's: it begins as the template does."""
    begin, brace, _ = template.partition("{")
    return bool(brace and begin) and uri.startswith(begin)
