"""The expressions of an agent's gate and of its signals, compiled: to find mistakes when files are read, and to run."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from msgspec import UNSET

from halter.config.load import KeyPath, showable
from halter.core.errors import ConfigError
from halter.core.expressions import Expression, compiled
from halter.core.pacing import Pacing, Sensor

GATE_KNOWS: Final[Mapping[str, Any]] = MappingProxyType({"hot": {}, "before": {}, "changed": [], "skips": 0})
"""What an expression of the gate may ask for."""

Known = tuple[Mapping[str, Any], ...]

_READINGS: Final[tuple[Any, ...]] = ({}, "", [], 0, 0.0, False, "1970-01-01T00:00:00Z", "1s")
_SIGNAL_KNOWS: Final[Known] = tuple({"value": value, "hot": _READINGS[0]} for value in _READINGS)
"""What an expression of a signal may ask for, with each thing that a reading may be; most are mappings."""


def compiled_gate(pacing: Pacing, place: str = "`autonomy.gate.expression`") -> Expression | None:
    """Compile the expression of the gate, if it has one; `place` is for the sentence of a ConfigError."""
    gate = pacing.autonomy.gate
    if gate is UNSET or not gate.expression:
        return None
    return _told(gate.expression, (GATE_KNOWS,), place, "the gate")


def compiled_signals(sensor: Sensor, where: Callable[[KeyPath], str] | None = None) -> Mapping[str, Expression]:
    """Compile the expressions of a sensor's signals, by their names; `where` names the place of a value of it."""
    return {
        signal.name: _told(
            signal.expression,
            _SIGNAL_KNOWS,
            where(("signals", index, "expression")) if where else f"The sensor {sensor.name}",
            "a signal",
        )
        for index, signal in enumerate(sensor.signals)
        if signal.expression is not UNSET
    }


def _told(text: str, known: Known, place: str, who: str) -> Expression:
    """Compile an expression that must make sense for one of several values; nobody knows beforehand what is read."""
    sentence = ""
    for knows in known:
        try:
            return compiled(text, knows, place, "expression", who)
        except ConfigError as error:
            sentence = sentence or showable(str(error))
    raise ConfigError(sentence)
