"""The language that every other part speaks: values, events, ports, money, limits, text and errors."""
