"""The models and prices of sellers, in the table that is bundled with genai-prices.

At a seller's own address a model has that seller's price, behind a gateway that of the sellers of the model.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from functools import cache, cached_property, lru_cache
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

from halter.core.usage import (
    ModelName,
    Price,
    Unpriced,
    is_local_address,
)
from halter.models.tariffs import END_OF_TIME, Tariff, compile_listed_price

if TYPE_CHECKING:
    from genai_prices import types
    from genai_prices.types import ModelInfo, TieredPrices

    Figure = Decimal | TieredPrices | None

TABLE_NAMES: Final = MappingProxyType(
    {
        "gemini": "google",
        "vertex": "google",
        "vertex_ai": "google",
        "bedrock": "aws",
        "azure_ai": "azure",
        "xai": "x-ai",
        "moonshot": "moonshotai",
        "together_ai": "together",
        "fireworks_ai": "fireworks",
    }
)
"""Names in the table of sellers that have another name in configurations."""
_COMPARED: Final = 10_000
"""Prices are compared for requests with this number of input and output tokens."""


class Seller:
    """A seller of a price table, which finds its models as the library does: the first whose clause matches counts.

    The library compares a name with every model. Most clauses say what a name equals, begins or ends with, so here
    these texts lead to the few models that can match.
    """

    def __init__(self, listed: "types.Provider") -> None:
        self.id, self.name = listed.id, listed.name
        self.api_pattern, self.model_match = listed.api_pattern, listed.model_match
        self.models = listed.models
        self._fallbacks = listed.fallback_model_providers or ()
        self._tariffs: dict[tuple[int, Decimal], Tariff | None] = {}

    def find_model(self, spelling: str, all_sellers: "Sequence[Seller]") -> "tuple[Seller, ModelInfo] | None":
        """Find a model here, or at the sellers whose models this one sells, with the seller that lists it."""
        name = spelling.lower()
        # The library tries a date as `-2026-08-07`, too; a rule of our own would differ from it.
        dated_name = import_module("genai_prices.types")._normalize_compact_dated_ref(name)  # noqa: SLF001
        return self._find_named(name, all_sellers) or (
            None if dated_name == name else self._find_named(dated_name, all_sellers)
        )

    def _find_named(self, name: str, all_sellers: "Sequence[Seller]") -> "tuple[Seller, ModelInfo] | None":
        fallbacks = (next((each for each in all_sellers if each.id == seller), None) for seller in self._fallbacks)
        for seller in (self, *filter(None, fallbacks)):
            if (model := seller.find_own(name)) is not None:
                return seller, model
        return None

    def find_own(self, name: str) -> "ModelInfo | None":
        """Find the first of this seller's own models that a name in lower case matches."""
        index = self._index
        lowered_name = name.lower()  # As the clauses lower it: lowering twice is not always lowering once.
        texts = (
            ("equals", lowered_name),
            *(("starts_with", lowered_name[:size]) for size in index.start_sizes),
            *(("ends_with", lowered_name[-size:]) for size in index.end_sizes),
        )
        positions = sorted({*index.unbounded, *(each for text in texts for each in index.positions.get(text, ()))})
        return next((self.models[each] for each in positions if self.models[each].is_match(name)), None)

    @cached_property
    def _index(self) -> "_ModelIndex":
        positions: dict[tuple[str, str], list[int]] = {}
        unbounded: list[int] = []
        for position, model in enumerate(self.models):
            bounds = find_bounds(model.match)
            if bounds is None:
                unbounded.append(position)
            for bound in bounds or ():
                positions.setdefault(bound, []).append(position)
        start_sizes, end_sizes = (
            frozenset(len(text) for kind, text in positions if kind == wanted_kind and text)
            for wanted_kind in ("starts_with", "ends_with")
        )
        return _ModelIndex(positions, start_sizes, end_sizes, tuple(unbounded))

    @property
    def max_comparisons(self) -> int:
        """Count the models with which a name is compared at most."""
        counts: dict[tuple[str, int], int] = {}
        for (kind, text), positions in self._index.positions.items():
            key = (kind, 0 if kind == "equals" else len(text))
            counts[key] = max(counts.get(key, 0), len(positions))
        return len(self._index.unbounded) + sum(counts.values())

    def get_tariff(self, model: "ModelInfo", margin: Decimal) -> Tariff | None:
        """Compile the prices of a model of this seller once; None if it lacks a rate for input or output."""
        key = (id(model), margin)
        if key not in self._tariffs:
            # All of Google's own models take audio, and code that they run is billed as tokens.
            self._tariffs[key] = compile_listed_price(model, margin, of_google=self.id == "google")
        return self._tariffs[key]


class _ModelIndex(NamedTuple):
    """Positions of models by a kind of clause and its text, and of those that must be compared with every name."""

    positions: Mapping[tuple[str, str], Sequence[int]]
    start_sizes: frozenset[int]
    end_sizes: frozenset[int]
    unbounded: tuple[int, ...]


def find_bounds(clause: Any) -> set[tuple[str, str]] | None:
    """Find texts of which every name that a clause matches equals, begins or ends with one; None if it has none."""
    for kind in ("equals", "starts_with", "ends_with"):
        if text := getattr(clause, kind, ""):
            return {(kind, text.lower())}
    alternatives = getattr(clause, "or_", None)
    if alternatives is not None:
        parts = [find_bounds(each) for each in alternatives]
        return None if None in parts else {bound for part in parts if part is not None for bound in part}
    conditions = (find_bounds(each) for each in getattr(clause, "and_", ()))
    return next((bounds for bounds in conditions if bounds is not None), None)


@cache
def read_bundled_table() -> list[Seller]:
    """Import the bundled table by name: a type checker would infer its 1.5 MB for minutes."""
    return [Seller(listed) for listed in import_module("genai_prices.data").providers]


def find_listed_tariff(
    providers: Sequence[Seller], model: ModelName, base_url: str | None, margin: Decimal
) -> Tariff | Unpriced:
    """Find the prices of a model in one table."""
    seller = find_seller(providers, model.provider, base_url)
    entries = _entries(providers, seller, model)
    if not entries:
        return Unpriced(model, _explain_unlisted(model, base_url, None if seller is None else seller.name))
    tariffs = (owner.get_tariff(entry, margin) for owner, entry in entries)
    priced_tariffs = [tariff for tariff in tariffs if tariff is not None]
    if not priced_tariffs:
        return Unpriced(model, f"the bundled price table lists {entries[0][1].id} without token prices")
    return max(priced_tariffs, key=lambda tariff: tariff.bound(_COMPARED, _COMPARED, END_OF_TIME))


def _explain_unlisted(model: ModelName, base_url: str | None, seller: str | None) -> str:
    if seller is not None:
        return f"the bundled price table has no such model of {seller}"
    if is_local_address(base_url):
        return "a local address may forward to a paid model, and the bundled price table has no model of that name"
    origin = f"provider {model.provider!r}" if base_url is None else f"provider at {_host(base_url)}"
    return f"the bundled price table has no {origin}, and no model of that name"


@lru_cache(maxsize=256)
def find_listed_window(model: ModelName, base_url: str | None = None) -> int | None:
    providers = read_bundled_table()
    entries = _entries(providers, find_seller(providers, model.provider, base_url), model)
    return min((entry.context_window for _, entry in entries if entry.context_window), default=None)


def list_model_names(provider: str, stated_prices: Mapping[str, Price] = MappingProxyType({})) -> list[str]:
    """List the models of a provider that have a price: those of the configuration, then those of the table."""
    stated_names = [str(name).partition(":")[2] for name in stated_prices if str(name).startswith(f"{provider}:")]
    sellers = [seller for seller in read_bundled_table() if seller.id == TABLE_NAMES.get(provider, provider)]
    listed_names = [
        model.id for seller in sellers for model in seller.models if compile_listed_price(model) is not None
    ]
    return list(dict.fromkeys((*stated_names, *listed_names)))


def find_seller(providers: Sequence[Seller], name: str, base_url: str | None) -> Seller | None:
    """Find the seller that bills a request: by the address, or without one by the name.

    Names must match exactly. The library's own lookup takes `my-openai-proxy` for OpenAI.
    """
    matching = [provider for provider in providers if provider.id == TABLE_NAMES.get(name, name)]
    if base_url is None:
        return next(iter(matching), None)
    return next((seller for seller in (*matching, *providers) if re.match(seller.api_pattern, base_url)), None)


def _entries(providers: Sequence[Seller], seller: Seller | None, model: ModelName) -> "list[tuple[Seller, ModelInfo]]":
    """Find a model in the table: at its seller, or else at every seller that its name can refer to."""
    if seller is not None:
        return _find_models(providers, [seller], model.model)
    for name, spelling in list_spellings(model):
        sellers = [each for each in providers if not name or each.id == name]
        if entries := _find_models(providers, sellers, spelling):
            return entries
    return []


def _find_models(
    providers: Sequence[Seller], sellers: Sequence[Seller], spelling: str
) -> "list[tuple[Seller, ModelInfo]]":
    entries = (seller.find_model(spelling, providers) for seller in sellers)
    return [entry for entry in entries if entry is not None]


def list_spellings(model: ModelName) -> Iterator[tuple[str, str]]:
    """List the spellings of a model at gateways, each with its seller, if any.

    Gateways put the seller before the model, and sometimes a tag after it, as in `openai/gpt-6-sol:latest`.
    """
    segments = [model.provider, *model.model.split("/")]
    splits = [
        (TABLE_NAMES.get(segments[index - 1], segments[index - 1]), "/".join(segments[index:]))
        for index in range(1, len(segments))
    ]
    spellings = [*splits, *(("", model_name) for _, model_name in splits)]
    yield from spellings
    yield from ((name, model_name.rpartition(":")[0]) for name, model_name in spellings if ":" in model_name)


def _host(base_url: str) -> str:
    # The full address might contain a password.
    try:
        return urlsplit(base_url).hostname or "an address without a host"
    except ValueError:
        return "an invalid address"
