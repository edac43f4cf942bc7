"""`halter fork`: a session from any point of another one."""

from halter.cli.command import (
    command,
)
from halter.operations import forks

fork = command(
    forks.fork,
    """Create a session from the messages of another one, up to one of its events.

    `halter show SESSION --events` numbers the events. The new session has its own budget. Spending, approvals and
    grants are not inherited; untrusted content stays marked. The new session does not run yet.
    """,
)
