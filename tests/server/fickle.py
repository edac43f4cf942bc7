"""A store that can be away."""

from collections.abc import Awaitable, Callable
from typing import Any, cast

from halter.testing.fakes import StoreProxy


class Fickle(StoreProxy):
    """A store that can be away."""

    trouble: Exception | None = None

    async def _pass_through(self, use: Callable[[], Awaitable[Any]]) -> Any:
        if self.trouble is not None:
            raise self.trouble
        return await use()

    async def study(self, look: Callable[[Any], Any]) -> Any:
        """Read as an export does, beside the port."""
        return await self._pass_through(lambda: cast("Any", self._store).study(look))
