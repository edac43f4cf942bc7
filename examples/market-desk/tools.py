"""The desk's own tools: a market and a book that are made up.

A price follows from the time alone, so that a day of them can be lived through again, in virtual time too. The book
begins anew with each process.
"""

import asyncio
import math
from typing import Any, Literal

from halter import tool

Symbol = Literal["ACME", "GLOBEX", "INITECH"]
BASE = {"ACME": 120.0, "GLOBEX": 48.0, "INITECH": 9.5}
SHOCKS = (("ACME", -0.08), ("INITECH", 0.07), ("GLOBEX", -0.09))
"""What is shocked, one after the other, and by how much."""
SHOCK_EVERY, SHOCK_LASTS, BEFORE, WAVE = 45.0, 12.0, 15.0, 600.0
"""Seconds: from one shock to the next, of one shock, to what a price is compared with, of a calm wave."""
MOST_SHARES = 1000

BOOK: dict[str, Any] = {"cash": 10_000.0, "positions": {"ACME": 0, "GLOBEX": 0, "INITECH": 0}}


def shock(symbol: str, at: float, every: float) -> float:
    """Tell by which part a price is off at a moment. The first shock comes when that time has passed once."""
    number = math.floor(at / every)
    shocked, by = SHOCKS[number % len(SHOCKS)]
    return by if symbol == shocked and number > 0 and at % every < SHOCK_LASTS else 0.0


def price(symbol: str, at: float, every: float) -> float:
    """Tell a price: a slow wave, and a shock now and then."""
    wave = 0.01 * math.sin(2 * math.pi * at / WAVE + len(symbol))
    return round(BASE[symbol] * (1 + wave + shock(symbol, at, every)), 2)


def moves(symbols: list[str], at: float, every: float) -> dict[str, float]:
    """Tell by how many percent each price is off from what it was a little earlier."""
    before = {symbol: price(symbol, max(0.0, at - BEFORE), every) for symbol in symbols}
    return {symbol: round(100 * (price(symbol, at, every) / before[symbol] - 1), 2) for symbol in symbols}


@tool(level="SAFE", effect="read")
async def get_market_data(symbols: list[Symbol], shock_every: float = SHOCK_EVERY) -> dict[str, Any]:
    """Tell the last prices, and what moved most."""
    at = asyncio.get_running_loop().time()
    moved = moves(list(symbols), at, shock_every)
    most = max(symbols, key=lambda symbol: abs(moved[symbol]))
    return {
        "last_prices": {symbol: price(symbol, at, shock_every) for symbol in symbols},
        "indicators": {
            "symbol": most,
            "move": abs(moved[most]),
            "direction": "down" if moved[most] < 0 else "up",
            "volume": round(1000 + 50 * math.sin(at) + 300 * abs(moved[most])),
        },
    }


@tool(level="SAFE", effect="read")
async def get_positions() -> dict[str, int]:
    """Tell what the desk holds."""
    return dict(BOOK["positions"])


@tool(level="SAFE", effect="read")
async def get_account_balance() -> float:
    """Tell the cash of the desk."""
    return float(BOOK["cash"])


@tool(level="RESTRICTED")
async def place_order(symbol: Symbol, side: Literal["buy", "sell"], quantity: int) -> str:
    """Buy or sell at the last price. A person decides on each order."""
    if not 0 < quantity <= MOST_SHARES:
        raise ValueError(f"an order is for 1 to {MOST_SHARES} shares")
    # By the time that a person has agreed, a shock is over.
    paid = price(symbol, asyncio.get_running_loop().time(), math.inf)
    sign = 1 if side == "buy" else -1
    BOOK["positions"][symbol] += sign * quantity
    BOOK["cash"] = round(BOOK["cash"] - sign * quantity * paid, 2)
    return f"{side} {quantity} {symbol} at {paid:.2f}"
