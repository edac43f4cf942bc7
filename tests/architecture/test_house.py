"""The shape of the package stays within limits, which are lowered as it gets better and never raised."""

from scripts.house import text, travel

LIMITS = {
    "files": 339,
    "files in the fullest folder": 25,
    "modules named by a gerund": 0,
    "public class names used twice or more": 0,
    "frames from Agent.run to the commit of a call": 14,
    "files on that way": 8,
    "calls of one act": 227,
}
"""No figure may pass its limit. The aims: 200, 25, 0, 0, 14, 8, 100."""


def test_the_files_stay_few_and_are_named_once() -> None:
    found = text()
    assert found.files <= LIMITS["files"]
    assert found.fullest_folder[1] <= LIMITS["files in the fullest folder"], found.fullest_folder
    assert len(found.gerunds) <= LIMITS["modules named by a gerund"], found.gerunds
    assert len(found.duplicates) <= LIMITS["public class names used twice or more"], found.duplicates


def test_a_guarded_call_takes_few_hops_to_its_commit() -> None:
    found = travel()
    assert 0 < found.frames <= LIMITS["frames from Agent.run to the commit of a call"], found.path
    assert found.files <= LIMITS["files on that way"], found.path
    assert 0 < found.calls.total() <= LIMITS["calls of one act"], found.calls.most_common(20)
