"""Tests of `orders.py`: the model is made up and costs nothing; the guard, the journal and the tools are real.

python -m pytest test_orders.py
"""

import asyncio

from orders import Shop, desk

from halter import DecisionRequested
from halter.testing.models import FunctionModel, TestModel, make_call


def test_the_desk_looks_orders_up() -> None:
    with desk.override(model=TestModel(calls=["look_up"]), store="memory:"):
        result = desk.run_sync("Where is my order?", deps=Shop("Ada", {0: "shipped"}))
    assert result.require_output() == '{"look_up": "shipped"}'


def test_the_model_sees_whose_desk_it_is() -> None:
    model = FunctionModel(lambda _: "Hello.")
    with desk.override(model=model, store="memory:"):
        desk.run_sync("Hello.", deps=Shop("Ada", {}))
    assert "questions of customers" in model.requests[0].system


def test_no_order_is_cancelled_before_a_person_agrees() -> None:
    shop = Shop("Ada", {7: "packed"})

    async def run_until_asked() -> DecisionRequested | None:
        async for event in desk.stream_events("Cancel order 7.", deps=shop):
            if isinstance(event, DecisionRequested):
                return event
        return None

    with desk.override(model=FunctionModel(lambda _: make_call("cancel", order=7)), store="memory:"):
        question = asyncio.run(run_until_asked())
    assert question is not None
    assert shop.orders == {7: "packed"}
