"""The price of a model: from the configuration, or else from the tables of listed prices. A model here is free.

A process looks in the bundled table and, in `price_tables`, in those that were fetched since. A lookup fetches nothing,
and the library's updater never runs.
"""

from collections.abc import Mapping
from decimal import Decimal
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

import msgspec

from halter.core.usage import (
    FREE_PRICE,
    ModelName,
    ModelPrices,
    Price,
    Unpriced,
    runs_locally,
)
from halter.models.sellers import find_listed_tariff, read_bundled_table
from halter.models.tariffs import MARGIN, Tariff, compile_stated_price


class ListedPrices(Protocol):
    """The tables of listed prices. The `edition` changes with them."""

    @property
    def edition(self) -> int: ...

    def find(self, model: ModelName, base_url: str | None, margin: Decimal) -> "Tariff | Unpriced": ...

    def guess(self, model: ModelName, base_url: str | None, margin: Decimal) -> "PriceGuess | None":
        """Guess the prices of a model that no table knows; None if its maker is unknown too."""
        ...


class PriceGuess(NamedTuple):
    maker: str
    tariff: Tariff


class BundledPrices:
    """The bundled table alone, without guesses."""

    edition = 0

    def find(self, model: ModelName, base_url: str | None, margin: Decimal) -> "Tariff | Unpriced":
        return find_listed_tariff(read_bundled_table(), model, base_url, margin)

    def guess(self, model: ModelName, base_url: str | None, margin: Decimal) -> PriceGuess | None:
        return None


class Prices:
    """The price table of a fleet. Each model is looked up once for each edition of the `listed` prices.

    `stated_prices` maps `provider:model`, or a provider's name for all its models, to the configured price. With
    `guesses`, a model that no table knows is held and charged at a guess.
    """

    def __init__(
        self,
        stated_prices: Mapping[str, Price] = MappingProxyType({}),
        margin: Decimal = MARGIN,
        listed: ListedPrices | None = None,
        *,
        guesses: bool = False,
    ) -> None:
        if not (margin.is_finite() and margin >= 0):
            raise ValueError(f"Invalid margin of holds: {margin}. It must be a finite number of at least 0.")
        self._own = {
            (str(ModelName.parse(name)) if ":" in name or "/" in name else name): price
            for name, price in stated_prices.items()
        }
        self._margin = margin
        self._listed = listed or BundledPrices()
        self._guesses = guesses
        self._tariffs: dict[tuple[int, ModelName, str | None], Tariff | Unpriced] = {}

    def find(self, model: ModelName, base_url: str | None = None) -> ModelPrices | Unpriced:
        """Find the prices of a model, by its address if that is not the provider's default.

        The first lookup imports the bundled table, which takes a quarter of a second: do it before sessions start.
        """
        key = (self._listed.edition, model, base_url)
        tariff = self._tariffs.get(key)
        if tariff is None:
            tariff = self._tariffs[key] = self._find_tariff(model, base_url)
        return tariff

    def _find_tariff(self, model: ModelName, base_url: str | None) -> Tariff | Unpriced:
        stated_price = self._own.get(str(model)) or self._own.get(model.provider)
        if stated_price is not None:
            return compile_stated_price(_with_cache_write(stated_price, model), self._margin)
        if runs_locally(model, base_url):
            return compile_stated_price(FREE_PRICE, self._margin)
        tariff = self._listed.find(model, base_url, self._margin)
        if isinstance(tariff, Unpriced) and (guess := self._listed.guess(model, base_url, self._margin)):
            return guess.tariff if self._guesses else tariff._replace(maker=guess.maker)
        return tariff


CLAUDE_CACHE_WRITE: Final = Decimal("1.25")
"""The price of writing into a cache that lives for minutes, as a multiple of plain input."""


def _with_cache_write(price: Price, model: ModelName) -> Price:
    """Add the surcharge for cache writes of a Claude model to a stated price without one."""
    claude = model.provider == "anthropic" or "claude" in model.model.lower()
    if price.cache_write is not None or not claude:
        return price
    return msgspec.structs.replace(price, cache_write=price.input * CLAUDE_CACHE_WRITE)
