"""Measurements beside peers, in one run, as ratios: `make bench`. Never part of the tests."""
