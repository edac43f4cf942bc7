"""The vocabulary of all other packages: values, events, ports, money, limits, text and errors."""
