"""`halter receipt`: what a session did and spent, what stopped it, who decided, why it ended; and checking that."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halter.app import App
from halter.app.desk import looking
from halter.app.words.receipt import sheet_of
from halter.cli.answer import answer_json, say
from halter.cli.command import NOT_FINE, WRONG_USE, JsonOption, StoreOption, desk_of, fail, saying_errors, with_app
from halter.cli.export import write_private
from halter.cli.named import session_meant
from halter.cli.page import page
from halter.cli.patience import patience
from halter.cli.sheet import show
from halter.core.errors import ConfigError
from halter.core.text import counted
from halter.state.receipt import Receipt

if TYPE_CHECKING:
    from halter.app.proof import Proof
    from halter.journal.offline import Checked

HtmlOption = Annotated[str, typer.Option("--html", metavar="FILE", help="Write it as a page, into one file.")]


def receipt(
    session: Annotated[
        str, typer.Argument(metavar="[SESSION]", help="A session's id from halter sessions; its beginning will do.")
    ] = "",
    *,
    html: HtmlOption = "",
    verify: Annotated[
        str, typer.Option("--verify", metavar="FILE", help="Check a receipt that was kept as JSON, or an export's own.")
    ] = "",
    journal: Annotated[
        str, typer.Option("--journal", metavar="FILE", help="Against this file of halter export. No store is needed.")
    ] = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the receipt of a session: what it did and spent, what stopped it, who decided, and why it ended.

    With --verify a receipt is checked offline, against an exported journal: every hash is worked out anew, and the
    receipt is made again from the events. An export carries its own receipt. Leaves with 1 if anything does not fit.
    """
    if verify or journal:
        if session or html or not verify:
            fail("A receipt is checked with --verify RECEIPT --journal EXPORT, and nothing else.", WRONG_USE)
        _verify(verify, journal or verify, as_json=as_json)
        return
    if not session:
        fail("Name a session: look at `halter sessions`.", WRONG_USE)

    async def job(app: App) -> Receipt:
        return await looking.receipt(desk_of(app), (await session_meant(app, session)).session)

    with patience("Working the receipt out", quiet=as_json):
        made = with_app(store, job, despite_doubt=True)
    if html:
        saying_errors(lambda: write_private(html, page(f"Receipt of {made.session}", sheet_of(made))))
    if as_json:
        answer_json(made)
    elif html:
        say(f"Wrote the receipt of {made.session} to {html}.")
    else:
        show(sheet_of(made))


def _verify(receipt_file: str, journal_file: str, *, as_json: bool) -> None:
    with patience("Checking", quiet=as_json):
        proof = saying_errors(lambda: _proof(receipt_file, journal_file))
    if as_json:
        answer_json(proof)
    else:
        for finding in proof.findings:
            say(finding)
        for note in proof.notes:
            say(note)
        verdict = "fits its journal" if proof.ok else f"does not fit its journal: {_findings(len(proof.findings))}"
        say(f"The receipt of {proof.session} {verdict}. {counted(proof.events, 'event')} checked.")
    if not proof.ok:
        raise typer.Exit(NOT_FINE)


def _findings(number: int) -> str:
    return counted(number, "finding")


def _proof(receipt_file: str, journal_file: str) -> "Proof":
    from halter.app.proof import prove
    from halter.journal.offline import check

    checked = check(_lines(journal_file))
    return prove(_said(receipt_file, journal_file, checked), checked)


def _said(receipt_file: str, journal_file: str, checked: "Checked") -> dict[str, Any]:
    """Read the receipt; named twice, an export is checked against the one that it brings along."""
    from halter.app.proof import said_of

    if Path(receipt_file) == Path(journal_file):
        own = checked.receipts.get(next(iter(checked.sessions), ""))
        if own is None:
            raise ConfigError(
                f"{journal_file} is no export that brings its receipt along: name a journal too, with --journal EXPORT."
            )
    else:
        own = b"".join(_lines(receipt_file))
    try:
        return said_of(own)
    except ValueError as error:
        raise ConfigError(f"{receipt_file} is not what `halter receipt SESSION --json` wrote: {error}.") from error


def _lines(path: str) -> Iterator[bytes]:
    try:
        with Path(path).open("rb") as file:
            yield from file
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path} cannot be read: {why}.") from error
