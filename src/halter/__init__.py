"""Halter lets agents work while you sleep: they cannot overspend, overstep or lose what they did."""

__version__ = "0.1.0"
