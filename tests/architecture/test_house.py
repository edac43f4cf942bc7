"""The shape of the package stays within limits, which are lowered as it gets better and never raised."""

from scripts.house import text, travel

LIMITS = {
    "files": 342,
    "files in the fullest folder": 25,
    "frames from Agent.run to the commit of a call": 14,
    "files on that way": 8,
    "calls of one act": 227,
}
"""No figure may pass its limit. The aims: 200, 25, 14, 8, 100."""


def test_the_files_stay_few() -> None:
    figures = text()
    assert figures.files <= LIMITS["files"]
    assert figures.fullest_folder[1] <= LIMITS["files in the fullest folder"], figures.fullest_folder


def test_a_guarded_call_takes_few_hops_to_its_commit() -> None:
    figures = travel()
    assert 0 < figures.frames <= LIMITS["frames from Agent.run to the commit of a call"], figures.path
    assert figures.files <= LIMITS["files on that way"], figures.path
    assert 0 < figures.calls.total() <= LIMITS["calls of one act"], figures.calls.most_common(20)
