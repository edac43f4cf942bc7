"""What is printed in the context of a call is masked, and nothing else is."""

import asyncio
import io
import logging
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import partial

import pytest

from halter.redaction.redact import Redactor
from halter.redaction.stream_redactor import StreamRedactor
from halter.system.prints import MaskedPrints, install_print_masks, print_masked_output

SECRET = "correct-horse-battery-staple-41"
MASK = partial(StreamRedactor, Redactor({"TOKEN": SECRET}))


def test_what_is_printed_outside_of_a_call_passes_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Commands print tokens on purpose."""
    with install_print_masks():
        sys.stdout.write(f"log in with {SECRET}\n")
        with MaskedPrints(MASK):
            sys.stdout.write(f"the tool has {SECRET}\n")
        sys.stdout.writelines([f"again {SECRET}\n"])
    output = capsys.readouterr().out
    assert output == f"log in with {SECRET}\nthe tool has [redacted:TOKEN]\nagain {SECRET}\n"


async def test_only_the_task_of_a_call_is_masked_and_what_it_leaves_behind(capsys: pytest.CaptureFixture[str]) -> None:
    event, left = asyncio.Event(), asyncio.Event()

    async def lingers() -> None:
        await left.wait()
        sys.stdout.write(f"left {SECRET}\n")

    async def call() -> "asyncio.Task[None]":
        with MaskedPrints(MASK):
            lingering = asyncio.create_task(lingers())
            event.set()
            await asyncio.sleep(0)
            sys.stdout.writelines(["called ", SECRET[:9], SECRET[9:], "\n"])
        return lingering

    with install_print_masks():
        calling = asyncio.create_task(call())
        await event.wait()
        sys.stdout.write(f"beside {SECRET}\n")
        lingering = await calling
        left.set()
        await lingering
    output = capsys.readouterr().out.splitlines()
    assert sorted(output) == [f"beside {SECRET}", "called [redacted:TOKEN]", "left [redacted:TOKEN]"]


def test_what_a_thread_prints_just_as_the_call_ends_is_masked_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    ends: list[MaskedPrints] = []

    def make() -> StreamRedactor:
        for call in ends:
            call.__exit__(None, None, None)
        return MASK()

    with install_print_masks():
        call = MaskedPrints(make)
        call.__enter__()
        ends.append(call)
        sys.stdout.write(f"the thread has {SECRET}")
    assert capsys.readouterr().out == "the thread has [redacted:TOKEN]"


def test_a_call_that_asks_for_what_it_printed_to_be_shown_has_it_shown_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with install_print_masks(), MaskedPrints(MASK):
        sys.stdout.write(f"half way, with {SECRET}\n")
        assert capsys.readouterr().out == ""
        sys.stdout.flush()
        assert capsys.readouterr().out == "half way, with [redacted:TOKEN]\n"


def test_the_streams_and_the_logs_are_as_before_in_the_end() -> None:
    before = (sys.stdout, sys.stderr, logging.getLogRecordFactory())
    with install_print_masks():
        with install_print_masks():
            assert sys.stdout is not before[0]
            assert sys.stdout.encoding == before[0].encoding
        assert sys.stdout is not before[0]
    assert (sys.stdout, sys.stderr, logging.getLogRecordFactory()) == before


def test_a_stream_that_somebody_else_exchanged_is_left_to_them() -> None:
    theirs = io.StringIO()
    with redirect_stderr(sys.stderr):
        with install_print_masks():
            sys.stderr = theirs
        assert sys.stderr is theirs


def test_a_log_record_has_no_secrets_for_any_handler(caplog: pytest.LogCaptureFixture) -> None:
    with install_print_masks(), MaskedPrints(MASK):
        try:
            int(SECRET)
        except ValueError:
            logging.getLogger("halter.test_prints").exception("it was %s", SECRET, stack_info=True)
    (record,) = caplog.records
    assert record.getMessage() == "it was [redacted:TOKEN]"
    assert "with base 10: '[redacted:TOKEN]'" in caplog.text
    assert SECRET not in caplog.text
    assert SECRET not in str(vars(record))


def test_a_closed_stream_is_no_failure_of_the_call() -> None:
    with redirect_stdout(io.StringIO()), install_print_masks(), MaskedPrints(MASK):
        sys.stdout.write("something")
        sys.stdout.close()


def test_what_a_process_printed_is_shown_for_a_call_only(capsys: pytest.CaptureFixture[str]) -> None:
    with install_print_masks():
        print_masked_output("of nobody's call")
        with MaskedPrints(MASK):
            print_masked_output(f"it is {SECRET}")
            print_masked_output("")
    assert capsys.readouterr() == ("", "it is [redacted:TOKEN]\n")
