"""Sort 200 reviews under one cap. Started once more, it pays only for what is not done yet.

    python batch.py reviews.txt

The file has one review in each line. No start, however often, spends more than two dollars a day.
"""

import asyncio
import sys
from collections import Counter
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from halter import Agent, CompletedResult


class Review(BaseModel):
    about: Literal["price", "quality", "service"]
    is_complaint: bool


sorter = Agent(
    "sorter",
    model="anthropic:claude-sonnet-5-5",
    store="runs.db",
    output_type=Review,
    limits={"max_cost_usd": 0.02, "max_cost_usd_per_day": 2.00},
    instructions="Say what a review is about.",
)


async def sort(number: int, text: str) -> Review | None:
    result = await sorter.run(text, id=f"review-{number}")
    if not result.ok:
        result = await sorter.resume(result.session)
    return result.output if isinstance(result, CompletedResult) else None


async def main(texts: list[str]) -> None:
    async with sorter:
        reviews = await asyncio.gather(*(sort(number, text) for number, text in enumerate(texts, 1)))
    complaints = Counter(review.about for review in reviews if review and review.is_complaint)
    print(f"{len(reviews) - reviews.count(None)} of {len(texts)} reviews. Complaints: {dict(complaints)}")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]).read_text("utf-8").splitlines()))
