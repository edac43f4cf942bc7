"""An agent behind FastAPI that pays bills. People approve each payment over HTTP.

    uvicorn approvals:app

A run that waits for a person survives a restart: when the app starts, it resumes what is open.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated
from uuid import uuid4

from fastapi import FastAPI, Header, HTTPException

from halter import Agent, NotDone, Store

store = Store("runs.db")
accountant = Agent("accountant", model="anthropic:claude-sonnet-5-5", store="runs.db", instructions="You pay bills.")


@accountant.tool(level="PRIVILEGED", effect="write")
async def pay(to: str, amount_usd: float) -> str:
    """Pay a bill."""
    return f"paid ${amount_usd:.2f} to {to}"


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
    async with store, accountant:
        await accountant.resume_open_sessions()
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/bills")
async def hand_in(bill: str) -> str:
    session = str(uuid4())
    accountant.start(bill, id=session)
    return session


@app.get("/inbox")
async def inbox() -> list[dict[str, str]]:
    needs = [need for need in await store.inbox() if need.decision]
    return [{"decision": need.decision, "digest": need.digest, "call": need.sentence} for need in needs]


@app.post("/decisions")
async def decide(decision: str, digest: str, approved: bool, x_user: Annotated[str, Header()]) -> None:
    """Approve or deny exactly what was shown. `X-User` comes from your sign-on."""
    try:
        await (store.approve(decision, digest, by=x_user) if approved else store.deny(decision, by=x_user))
    except NotDone as error:
        raise HTTPException(409, str(error)) from error
