"""The MCP servers behind a client's session: connected for this client only, with pinned tools and prefixed names.

A server's tools and prompts are named `SERVER__TOOL`; resources keep their addresses. After a server announces a
change, its tools are checked before the next call: a tool that differs from the approved version is quarantined.
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
    methods,
)
from mcp_types.version import LATEST_HANDSHAKE_VERSION

from halter.config.agent_files import AgentFile
from halter.config.tool_names import check_named_tools, list_named_tools
from halter.core.money import Cap
from halter.core.text import clean
from halter.core.tools import SERVER_SEPARATOR, Failed, Tool, ToolServer, ToolSpec
from halter.gateway.calls import CANCELLED, PROMPT, RESOURCE, ClientCall, GatedTool, ReadingTool
from halter.guard.prepare import SessionContext
from halter.runtime.agent_runtime import AgentRuntime
from halter.runtime.assembly.server_pins import settle_pins
from halter.runtime.runtime import Runtime
from halter.spec.agent import GatewaySpec
from halter.tools.mcp import McpServer, McpTerms, McpTool
from halter.tools.mcp_session import NO_SAMPLING

ListKind = Literal["tools", "prompts", "resources"]


class ResourceNews(msgspec.Struct, frozen=True):
    """A resource that the client follows has changed."""

    uri: str


class LogNews(msgspec.Struct, frozen=True):
    """A line of a server's log; `data` is any JSON value."""

    server: str
    level: LoggingLevel
    logger: str
    data: Any


Announcement = ListKind | ResourceNews | LogNews
MAX_PAGES: Final = 50
_LIST_KIND_BY_NOTIFICATION: Final[Mapping[type[Any], ListKind]] = {
    ToolListChangedNotification: "tools",
    PromptListChangedNotification: "prompts",
    ResourceListChangedNotification: "resources",
}
T = TypeVar("T")
AskModel = Callable[[str, CreateMessageRequestParams], Awaitable[CreateMessageResult]]


class GatewayAgent(msgspec.Struct, frozen=True):
    """An agent whose calls pass the gateway; `file` has the rules that are checked against the servers' tools."""

    agent: AgentRuntime
    file: AgentFile
    spec: GatewaySpec
    servers: tuple[ToolServer, ...]

    def narrow(self, caps: Iterable[Cap]) -> "GatewayAgent":
        """Return the agent with a client's own caps added; for the same window the lower cap applies."""
        policy, own_caps = self.agent.policy, {cap.per: cap for cap in caps if cap.max_cost_usd is not None}
        if not own_caps:
            return self
        agent_caps = {cap.per: cap for cap in policy.caps.agent}
        agent_caps |= {per: _lower(agent_caps.get(per), cap) for per, cap in own_caps.items() if per}
        session_cap = _lower(policy.caps.session, own_caps[""]) if "" in own_caps else policy.caps.session
        narrowed_caps = msgspec.structs.replace(policy.caps, session=session_cap, agent=tuple(agent_caps.values()))
        narrowed_agent = self.agent.with_policy(msgspec.structs.replace(policy, caps=narrowed_caps))
        return msgspec.structs.replace(self, agent=narrowed_agent)


def _lower(policy_cap: Cap | None, own_cap: Cap) -> Cap:
    if policy_cap is None or policy_cap.max_cost_usd is None or own_cap.max_cost_usd is None:
        return own_cap
    return min(policy_cap, own_cap, key=lambda cap: cap.max_cost_usd or 0)


class Upstreams:
    """The servers of one client's session, and their current tools, prompts and resources."""

    def __init__(self, app: Runtime, owner: GatewayAgent, terms: McpTerms, report: Callable[[str], None]) -> None:
        self.tools: dict[str, Tool] = {}
        self.calls: dict[str, ClientCall] = {}
        """The calls in progress by their ids at the guard; the newest is last."""
        self.on_announcement: Callable[[Announcement], None] = _ignore_announcement
        self.ask_model: AskModel | None = None
        self._app = app
        self._owner = owner
        self._report = report
        self._reported: set[str] = set()
        self._servers = {each.name: McpServer(each, terms, self) for each in owner.servers if not each.omission}
        self._resources: dict[str, str] = {}
        self._subscriptions: Counter[str] = Counter()
        self.log_level: LoggingLevel | None = None
        self._hidden: frozenset[str] = frozenset()
        self._stale = True
        self._loading = asyncio.Lock()
        self._context: SessionContext | None = None
        for server in owner.servers:
            for note in server.problems:
                self._report_once(note)

    def make_context(self, session: str) -> SessionContext:
        """Make the context of the session, with the tools that are quarantined now."""
        context = self._context
        if context is None or context.quarantined_tools != self._hidden:
            context = msgspec.structs.replace(self._owner.agent.make_context(session), quarantined_tools=self._hidden)
            self._context = context
        return context

    async def refresh(self) -> None:
        """Load the servers' tools if they changed, or if a person still has to approve some of them."""
        async with self._loading:
            if self._stale or self._hidden:
                await self._load()

    async def _load(self) -> None:
        self._stale = False
        tools_by_server = await asyncio.gather(*(self._offer(server) for server in self._servers.values()))
        tools = {tool.spec.name: tool for server_tools in tools_by_server for tool in server_tools}
        tool_specs = [tool.spec for tool in tools.values() if isinstance(tool, GatedTool)]
        policy = self._owner.agent.policy
        self._check_rules(tools.values())
        old_names, is_first_load = self._list_names(), not self.tools
        self._hidden = await settle_pins(self._app, policy, [*self._servers], tool_specs)
        self.tools.clear()
        self.tools.update(tools)
        if not is_first_load and self._list_names() != old_names:
            self.on_announcement("tools")

    def _list_names(self) -> list[str]:
        return [each["name"] for each in self.list_tools()]

    def _check_rules(self, tools: Iterable[Tool]) -> None:
        """Check the rules of the agent's file for tools of servers. The gateway does not serve its other tools."""
        file, specs = self._owner.file, [tool.spec for tool in tools]
        local_names = {name for _, name in list_named_tools(file) if SERVER_SEPARATOR not in name}
        specs += [ToolSpec(name=name, description="", schema=b"{}") for name in sorted(local_names)]
        check_named_tools(self._owner.agent.policy, file, specs)

    async def _offer(self, server: McpServer) -> list[GatedTool | ReadingTool]:
        try:
            offer = await server.offer()
            capabilities = await server.capabilities()
        except Failed as failure:
            self._report_once(f"The server {server.name} is unavailable: {failure}")
            return [
                tool for tool in self.tools.values() if isinstance(tool, GatedTool) and tool.spec.server == server.name
            ]
        for sentence in offer.omissions:
            self._report_once(sentence)
        timeout = self._owner.spec.timeout
        kinds = [
            kind
            for kind, has in ((RESOURCE, capabilities.resources), (PROMPT, capabilities.prompts))
            if has is not None
        ]
        readers = [ReadingTool(server, kind, self.calls, timeout) for kind in kinds]
        return [*readers, *(tool for tool in map(self._gate_tool, offer.tools) if tool is not None)]

    def _gate_tool(self, tool: McpTool) -> GatedTool | None:
        if not _can_be_listed(tool.entry):
            self._report_once(f"The tool {tool.spec.name} is omitted: its definition is not valid.")
            return None
        return GatedTool(tool, self.calls, self._owner.spec.prices.get(tool.spec.name) or 0)

    def _report_once(self, sentence: str) -> None:
        if sentence not in self._reported:
            self._reported.add(sentence)
            self._report(sentence)

    def list_tools(self) -> list[dict[str, Any]]:
        """List the tools that the policy grants, as their servers describe them, under their full names."""
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
        """Send a server's question to the client, through the newest call in progress at that server."""
        calls = [each for each in self.calls.values() if each.server == server]
        return await calls[-1].elicit_for_server(params) if calls else CANCELLED

    @property
    def samples(self) -> bool:
        return self._owner.spec.sampling

    async def sample(self, server: str, params: CreateMessageRequestParams) -> CreateMessageResult:
        """Make a model request for a server, as part of the newest call in progress there. Without a call it fails."""
        calls = [each for each in self.calls.values() if each.server == server]
        if self.ask_model is None or not self.samples or not calls:
            raise Failed("Sampling", NO_SAMPLING)
        calls[-1].count_model_request()
        return await self.ask_model(server, params)

    def announce(self, server: str, notification: ServerNotification) -> None:
        match notification:
            case ResourceUpdatedNotification(params=update) if self._subscriptions:
                self.on_announcement(ResourceNews(str(update.uri)))
            case LoggingMessageNotification(params=log):
                self.on_announcement(LogNews(server, log.level, log.logger or "", log.data))
            case _:
                self._on_list_changed(notification)

    def _on_list_changed(self, notification: ServerNotification) -> None:
        kind = _LIST_KIND_BY_NOTIFICATION.get(type(notification))
        if kind == "tools":
            self._stale = True
        if kind is not None:
            self.on_announcement(kind)

    async def set_log_level(self, level: LoggingLevel) -> None:
        """Set the log level of servers of the older protocol; newer servers get it with each call."""
        self.log_level = level
        request = SetLevelRequest(params=SetLevelRequestParams(level=level))
        for server in self._servers.values():
            with suppress(Failed):
                if (await server.capabilities()).logging is not None:
                    await server.list(request, EmptyResult)

    async def follow_resource(self, uri: str) -> None:
        """Subscribe to a resource at its server. Raises Failed if the client may not read it."""
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
            raise Failed("Unknown", f"this client has no resource {clean(uri)[:200]!r}")
        return self._servers[name]

    async def list_resources(self) -> list[dict[str, Any]]:
        resources: list[dict[str, Any]] = []
        for server in self._having("resources"):
            for page in await self._pages(server, ListResourcesRequest, ListResourcesResult):
                for resource in page.resources:
                    self._resources.setdefault(resource.uri, server.name)
                    resources.append(_dump(resource))
        return resources

    async def list_templates(self) -> list[dict[str, Any]]:
        templates: list[dict[str, Any]] = []
        for server in self._having("resources"):
            for page in await self._pages(server, ListResourceTemplatesRequest, ListResourceTemplatesResult):
                for template in page.resource_templates:
                    self._resources.setdefault(template.uri_template, server.name)
                    templates.append(_dump(template))
        return templates

    async def list_prompts(self) -> list[dict[str, Any]]:
        prompts: list[dict[str, Any]] = []
        for server in self._having("prompts"):
            for page in await self._pages(server, ListPromptsRequest, ListPromptsResult):
                prompts += [
                    {**_dump(prompt), "name": f"{server.name}{SERVER_SEPARATOR}{prompt.name}"}
                    for prompt in page.prompts
                ]
        return prompts

    async def complete(self, params: CompleteRequestParams) -> CompleteResult:
        """Complete an argument. Raises Failed if no server has its prompt or resource."""
        ref = params.ref
        if ref.type == "ref/prompt":
            server, _, name = ref.name.partition(SERVER_SEPARATOR)
            params = params.model_copy(update={"ref": ref.model_copy(update={"name": name})})
        else:
            server = await self.find_resource(str(ref.uri))
        if server not in self._servers:
            raise Failed("Unknown", f"there is no server {clean(server)[:80]!r}")
        return await self._servers[server].list(CompleteRequest(params=params), CompleteResult)

    async def find_resource(self, uri: str) -> str:
        """Find the server of a resource: it lists it, its template matches, or it is the only server with resources."""
        server_names = [server.name for server in self._having("resources")]
        if uri not in self._resources and len(server_names) != 1:
            await self.list_resources()
            await self.list_templates()
        if uri in self._resources:
            return self._resources[uri]
        fitting = (name for template, name in self._resources.items() if _matches_template(template, uri))
        return next(fitting, server_names[0] if len(server_names) == 1 else "")

    def _having(self, list_kind: Literal["resources", "prompts"]) -> Iterator[McpServer]:
        kind = RESOURCE if list_kind == "resources" else PROMPT
        for name, server in self._servers.items():
            if f"{name}{SERVER_SEPARATOR}{kind.suffix}" in self.tools:
                yield server

    async def _pages(self, server: McpServer, request: Any, result_type: type[T]) -> Sequence[T]:
        """List all pages; if the server fails, those that it returned until then."""
        pages: list[T] = []
        cursor: str | None = None
        try:
            for _ in range(MAX_PAGES):
                params = PaginatedRequestParams(cursor=cursor) if cursor else None
                page: Any = await server.list(request(params=params), result_type)
                pages.append(page)
                cursor = page.next_cursor
                if not cursor:
                    break
        except Failed as failure:
            self._report_once(f"The server {server.name} returned an incomplete list: {failure}")
        return pages

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self._servers.values()))


def _ignore_announcement(_: Announcement) -> None: ...


def _can_be_listed(entry: Mapping[str, Any]) -> bool:
    try:
        methods.serialize_server_result("tools/list", LATEST_HANDSHAKE_VERSION, {"tools": [dict(entry)]})
    except (ValueError, RecursionError):
        return False
    return True


def _dump(item: Any) -> dict[str, Any]:
    return item.model_dump(by_alias=True, mode="json", exclude_none=True)


def _matches_template(template: str, uri: str) -> bool:
    """Return True if an address starts with the fixed part of a template."""
    prefix, brace, _ = template.partition("{")
    return bool(brace and prefix) and uri.startswith(prefix)
