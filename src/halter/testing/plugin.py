"""The pytest plugin that hands tests a world in virtual time."""
