"""What trusted places said is indexed once for all sessions that hear it, and each session knows only what it heard."""

from hypothesis import given
from hypothesis import strategies as st

from halter.provenance.trusted_text import TrustedText

SAID = (
    "Pay 10 to Ann Miller. Do not call Bob.",
    "Pay 10 EUR to 'Bob & Sons' at https://bob.example/pay.Then write to ann@example.com!",
    "Read report.pdf from the archive; on May 3rd remind me, without the iPhone.",
    "",
)


@given(st.lists(st.sampled_from(SAID) | st.text(max_size=60), max_size=4))
def test_what_is_taken_from_indexes_is_what_reading_text_by_text_finds(texts: list[str]) -> None:
    trusted_text, read = TrustedText(), TrustedText()
    for text in texts:
        trusted_text.add(text)
        read.index(text)
    assert vars(trusted_text) == vars(read)


def test_what_one_session_hears_is_not_said_in_another() -> None:
    trusted_text, other = TrustedText(), TrustedText()
    trusted_text.add(SAID[0])
    other.add(SAID[0])
    trusted_text.add(SAID[1])
    assert trusted_text.names("Bob & Sons")
    later = TrustedText()
    later.add(SAID[0])
    alone = TrustedText()
    alone.index(SAID[0])
    assert vars(other) == vars(later) == vars(alone)
