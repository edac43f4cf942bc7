"""Sessions that a newer program has taken up: they may hold what this one would misread, so it leaves them alone."""

from halter.core.events import FORMAT
from halter.core.rows import SessionRow


def left_to_newer(row: SessionRow) -> str:
    """Say why a session is left alone, if a newer program has taken it up."""
    if row.format <= FORMAT:
        return ""
    return (
        f"Session {row.session} was taken up by a newer Halter (it has format {row.format}, and this program knows "
        f"only {FORMAT}), so it is left alone: use the newer Halter for it."
    )
