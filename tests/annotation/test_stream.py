"""Chunks of a stream: no text is lost or read long before it is needed, and invalid texts are reported."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb.annotation.references import effective_length
from openmed_nb.annotation.stream import chunk_characters, iter_chunks, text_error
from openmed_nb.errors import InvalidTextError


@given(st.lists(st.text(max_size=40) | st.none()), st.integers(1, 200))
def test_iter_chunks_preserves_stream(texts, characters):
    """No chunk is empty or longer than needed, and each has the index of its first text."""
    chunks = list(iter_chunks(iter(texts), characters))
    assert [text for chunk in chunks for text in chunk.texts] == texts
    sizes = [len(chunk.texts) for chunk in chunks]
    assert all(sizes)
    assert all(sum(map(effective_length, chunk.texts[:-1])) < characters for chunk in chunks)
    assert [chunk.first_index for chunk in chunks] == [*itertools.accumulate([0, *sizes])][:-1]


@pytest.mark.parametrize(
    ("texts", "characters", "expected"),
    [
        ([], 8, []),
        ([""], 8, [[""]]),
        (["aaaa", "b", "c", "d"], 8, [["aaaa"], ["b"], ["c", "d"]]),
        ([""] * 7, 4, [[""], ["", ""], ["", "", "", ""]]),
        (["a" * 99, "b"], 8, [["a" * 99], ["b"]]),
    ],
)
def test_chunks(texts, characters, expected):
    """The first chunk is an eighth of a full one, and each after it twice as long as the one before."""
    assert [chunk.texts for chunk in iter_chunks(texts, characters)] == expected


def test_short_texts_count_more():
    """If each text counts for a minimum of characters, the number of short texts per chunk is limited."""
    chunks = list(iter_chunks(["a"] * 100, max_size=80, min_text_length=8))

    assert [len(chunk.texts) for chunk in chunks[:4]] == [2, 3, 5, 10]
    assert max(len(chunk.texts) for chunk in chunks) == 10
    assert sum(len(chunk.texts) for chunk in chunks) == 100


def test_iter_chunks_balances_the_end():
    """Chunks become smaller as far as is asked, but no smaller than an eighth of a full one."""
    left = [100]

    def most():
        return left[0] / 4

    sizes = []
    for chunk in iter_chunks(["a"] * 100, max_size=64, max_texts=most):
        sizes.append(len(chunk.texts))
        left[0] -= sizes[-1]
    assert sizes == [4, 8, 16, 18, 14, 10, 8, 6, 4, 4, 4, 4]


def test_chunk_repr_has_no_text():
    """What shows a chunk shows none of its texts."""
    assert "asthma" not in repr(next(iter_chunks(["asthma"], 10)))


WHOLE = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


class UsersString(str):
    """An instance of a subclass of str, as some libraries return."""

    __slots__ = ()


@given(WHOLE)
def test_text_error_accepts_encodable_texts(text):
    assert text_error(text, 0) is None


@pytest.mark.parametrize("text", ["", " ", "\0", "\n", UsersString("asthma"), np.str_("asthma")], ids=repr)
def test_text_error_accepts_unusual_strings(text):
    """Empty strings, control characters and strings of other classes can be read."""
    assert text_error(text, 0) is None


def test_text_error_explains_paths():
    """The error of a path in a stream explains how to pass paths."""
    said = str(text_error(Path("notes/smith.txt"), 3))

    assert said.startswith("Text 3 must be a string, not ")
    assert said.endswith("Path. Pass paths in a list, such as sorted(folder.glob('*.txt')).")


@given(before=WHOLE, half=st.integers(0xD800, 0xDFFF), after=WHOLE)
def test_text_error_locates_unpaired_surrogate(before, half, after):
    """A text with half of a surrogate pair is refused by number and place, and its words are not repeated."""
    error = text_error(f"secret{before}{chr(half)}{after}", 3)

    assert error.message == f"Text 3 contains an unpaired surrogate at character {len('secret' + before)}."
    assert "secret" not in str(error)


def test_text_error_keeps_read_error():
    """In the place of a text that could not be read stands why, and that is the answer."""
    failure = InvalidTextError("Text 3: its file cannot be read.", "Make it readable.")

    assert text_error(failure, 3) is failure


def test_slow_stream_does_not_delay_results(new_pipe):
    """The first answers to a stream come when the two chunks after them have not both been read; a list's answers are the same."""
    texts, read = ["patient has hypertension ." * 40] * 200, []
    annotator = new_pipe().default_annotator()
    stream = annotator.annotate(read.append(number) or text for number, text in enumerate(texts))
    first = list(next(stream))
    sizes = [len(chunk.texts) for chunk in iter_chunks(texts, chunk_characters(annotator.budget))]
    assert len(first) == sizes[0]
    assert len(read) == sum(sizes[:2]) < len(texts)
    rest = [answer for answers in stream for answer in answers]
    assert first + rest == [answer for answers in annotator.annotate(texts, in_memory=True) for answer in answers]
