"""The API against its own description: whatever fits it, or does not, is answered, and as it says."""

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from halter.server.middleware import ServerLimits
from tests.server.conftest import House

ENDLESS = "/api/stream"
FRAMING = {"transfer-encoding", "content-length", "connection", "upgrade", "expect"}
"""A broken frame is refused on the wire, before there is a request that the API could answer."""


def run(base: str, secret: str, examples: int) -> int:
    # Imported here, for it takes long, and one worker of all needs it.
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    wanted = [not_a_server_error, checks.status_code_conformance, checks.content_type_conformance]
    wanted.append(checks.response_schema_conformance)
    headers = {"Authorization": f"Bearer {secret}"}
    schema = schemathesis.openapi.from_url(f"{base}/api/openapi.json", headers=headers)
    operations = [all_operation.ok() for all_operation in schema.get_all_operations()]
    count = 0
    tries = [(each, mode) for each in operations for mode in schemathesis.GenerationMode if each.path != ENDLESS]
    for operation, mode in tries:

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=examples, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        def try_it(case: Any) -> None:
            nonlocal count
            count += 1
            for name in FRAMING & {*(case.headers or ())}:
                del case.headers[name]
            case.call_and_validate(headers=headers, checks=wanted)

        try_it()
    return count


@pytest.mark.parametrize("limits", [ServerLimits(requests=1_000_000)])
@pytest.mark.parametrize("examples", [3, pytest.param(20, marks=pytest.mark.soak)])
async def test_nothing_that_fits_the_description_or_not_breaks_the_server(
    house: House, limits: ServerLimits, examples: int
) -> None:
    tried = await asyncio.to_thread(run, house.base, house.secrets["admin"], examples)
    assert tried > 40 * examples
