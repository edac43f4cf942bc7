"""Where people look at a fleet and speak to it. Every face sits at a desk, so all of them allow and say the same."""

from halter.app.desk.desk import ROLES, Desk, Role, Who

__all__ = ["ROLES", "Desk", "Role", "Who"]
