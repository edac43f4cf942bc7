"""Extract invoices from files. An invoice whose lines do not add up is read again.

python extract.py invoice-17.pdf photo.jpg
"""

import sys
from decimal import Decimal

from pydantic import BaseModel

from halter import Agent, Retry


class Line(BaseModel):
    text: str
    amount: Decimal


class Invoice(BaseModel):
    number: str
    lines: list[Line]
    total: Decimal


clerk = Agent(
    "clerk",
    model="anthropic:claude-sonnet-5-5",
    store="runs.db",
    output_type=Invoice,
    instructions="Copy what the invoice says. Never compute an amount.",
)


@clerk.output_validator
def check_sum(invoice: Invoice) -> Invoice:
    added = sum(line.amount for line in invoice.lines)
    if added != invoice.total:
        raise Retry(f"The lines add up to {added}, but the total is {invoice.total}. Read the invoice once more.")
    return invoice


def main(*files: str) -> None:
    for file in files:
        invoice = clerk.run_sync("Extract this invoice.", files=[file]).require_output()
        print(f"{file}: {invoice.number}, {len(invoice.lines)} lines, {invoice.total}")


if __name__ == "__main__":
    main(*sys.argv[1:])
