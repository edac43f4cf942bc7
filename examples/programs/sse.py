"""A chat over HTTP that streams its answers as server-sent events.

    uvicorn sse:app
    curl -N -X POST "localhost:8000/chat?message=Hello"

The last event has the session. Send it along with the next message.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.sse import EventSourceResponse, ServerSentEvent

from halter import Agent, CallBegan, Result, StreamChunk

guide = Agent(
    "guide",
    model="anthropic:claude-sonnet-5-5",
    store="runs.db",
    instructions="You show visitors around a small town.",
)


@guide.tool(level="SAFE", effect="read", reads="trusted")
async def opening_hours(place: str) -> str:
    """Tell when a place is open."""
    return f"The {place} is open from 10 to 18."


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
    async with guide:
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/chat", response_class=EventSourceResponse)
async def chat(message: str, session: str = "") -> AsyncGenerator[ServerSentEvent]:
    async for event in guide.stream_events(message, session=session):
        match event:
            case StreamChunk(discard=True):
                yield ServerSentEvent(event="discard")
            case StreamChunk(text=text) if text:
                yield ServerSentEvent(event="text", data=text)
            case CallBegan(tool=tool):
                yield ServerSentEvent(event="tool", data=tool)
            case Result():
                yield ServerSentEvent(event="end", data={"session": event.session, "sentence": event.sentence})
            case _:
                pass
