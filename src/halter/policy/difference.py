"""Where two policies differ: which of them is looser, and the words for it."""

from typing import Any, NamedTuple

from msgspec import UNSET

from halter.policy.order import NOT_SET, DifferenceKind, Forbidden, Order

KeyPath = tuple[str | int, ...]


class Difference(NamedTuple):
    """One key in which a second policy differs from a first one. The defaults apply where a value is not set."""

    path: KeyPath
    how: DifferenceKind
    order: Order
    first: Any
    second: Any
    first_default: Any = UNSET
    second_default: Any = UNSET

    @property
    def first_text(self) -> str:
        return _format_value(self.order, self.first, self.first_default)

    @property
    def second_text(self) -> str:
        if isinstance(self.order, Forbidden) and self.how == "looser":
            return f"without {self.order.format([name for name in self.first if name not in self.second])}"
        return _format_value(self.order, self.second, self.second_default)

    def explain(self) -> tuple[KeyPath, str, str]:
        """Say where the second policy is looser: the path, its value, and what the first one allows."""
        bound = self.first_default if self.first is UNSET else self.first
        steps, value_text, bound_text = self.order.explain(self.second, bound)
        return (*self.path, *steps), value_text, bound_text


def _format_value(order: Order, value: Any, default: Any) -> str:
    if value is not UNSET or default is UNSET:
        return order.format(value)
    return NOT_SET if order.is_within(UNSET, default) else f"{order.format(default)} by default"
