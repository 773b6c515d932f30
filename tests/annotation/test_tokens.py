"""Texts as tokens: what stands around them, where they are in the text, which go on with a word, and pieces of a limit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from openmed_nb.annotation.tokens import (
    PART,
    Frame,
    Joined,
    Truncation,
    encode,
    in_parts,
    tokenise,
    tokenise_words,
    without_space,
)

KINDS = ("bert", "roberta", "modernbert", "xlm-roberta")
"""One architecture for each kind of tokenizer."""


def names(tokenizer, numbers):
    """Return tokens by their names."""
    return tokenizer.convert_ids_to_tokens(list(numbers))


def spans(tokens, texts):
    """Return what each token covers in its text."""
    owners = tokens.owners[tokens.sequences(np.arange(len(tokens)))]
    places = zip(owners.tolist(), tokens.starts.tolist(), tokens.ends.tolist(), strict=True)
    return [texts[owner][start:end] for owner, start, end in places]


class TestFrame:
    """What a tokenizer puts around a text."""

    @pytest.mark.parametrize(
        ("name", "before", "after"),
        [
            ("bert", ["[CLS]"], ["[SEP]"]),
            ("roberta", ["<s>"], ["</s>"]),
            ("modernbert", ["[CLS]"], ["[SEP]"]),
            ("xlm-roberta", ["<s>"], ["</s>"]),
            ("deberta-v2", ["<s>"], ["</s>"]),
            ("xlnet", [], ["</s>", "<s>"]),
            ("gpt2", [], []),
        ],
    )
    def test_special_tokens(self, architectures, name, before, after):
        """The special tokens of every kind of tokenizer are found on the side where they stand."""
        tokenizer = architectures.tokenizer_of(name)
        frame = Frame.of(tokenizer)
        assert (names(tokenizer, frame.before), names(tokenizer, frame.after)) == (before, after)
        assert frame.size == len(before) + len(after) == tokenizer.num_special_tokens_to_add()

    def test_types(self, architectures):
        """Special tokens have the token types that the tokenizer gives them."""
        frame = Frame.of(architectures.tokenizer_of("xlnet"))
        assert (frame.before_types, frame.after_types, frame.token_type) == ((), (0, 2), 0)

    @pytest.mark.parametrize(("name", "padding"), [("bert", "[PAD]"), ("roberta", "<pad>")])
    def test_padding(self, architectures, name, padding):
        """Rows are filled up with the tokenizer's own padding."""
        tokenizer = architectures.tokenizer_of(name)
        assert names(tokenizer, [Frame.of(tokenizer).padding]) == [padding]

    def test_no_padding(self, architectures):
        """A tokenizer without a token for padding fills rows up with token 0, which the mask hides."""
        assert Frame.of(architectures.tokenizer_of("gpt2")).padding == 0

    @pytest.mark.parametrize("name", KINDS)
    def test_whole_input(self, architectures, name):
        """Tokens between the special tokens are exactly what the tokenizer makes of a text."""
        tokenizer = architectures.tokenizer_of(name)
        frame = Frame.of(tokenizer)
        text = architectures.CORPUS[0][:40]
        assert [*frame.before, *tokenise(tokenizer, [text]).ids, *frame.after] == tokenizer(text).input_ids


class TestTokens:
    """Tokens of several texts, end to end."""

    @pytest.mark.parametrize("name", KINDS)
    def test_bounds(self, architectures, name):
        """Each text is a sequence of its own, also an empty one."""
        tokenizer = architectures.tokenizer_of(name)
        texts = ["asthma", "", "no asthma", ""]
        tokens = tokenise(tokenizer, texts)
        lengths = [len(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
        assert np.diff(tokens.bounds).tolist() == lengths
        assert tokens.owners.tolist() == [0, 1, 2, 3]
        assert tokens.sequences(np.array([0, lengths[0], len(tokens) - 1])).tolist() == [0, 2, 2]

    def test_nothing(self, architectures):
        """No texts, and texts without tokens, have no tokens."""
        for texts in ([], [""], ["", " "]):
            assert len(tokenise(architectures.tokenizer_of("bert"), texts)) == 0

    def test_spans(self, architectures):
        """Offsets count characters of the text, not of what the tokenizer makes of it."""
        texts = ["Él 🙂 e\u0301 has", "患者"]
        found = spans(tokenise(architectures.tokenizer_of("bert"), texts), texts)
        assert found == ["Él", "🙂", "e", "has", "患", "者"]  # Accents are stripped, so that one alone is in no token.

    def test_piece(self, architectures):
        """The piece of a token is what its text has in its place."""
        texts = ["no", "No asthma"]
        tokens = tokenise(architectures.tokenizer_of("bert"), texts)
        assert tokens.piece(texts, 0) == "no"
        assert tokens.piece(texts, 1) == "No"

    @given(some.sampled_from(KINDS), some.lists(some.text(max_size=40), max_size=5))
    def test_any_text(self, architectures, name, texts):
        """Tokens and offsets of any texts are those that transformers has for each."""
        tokenizer = architectures.tokenizer_of(name)
        tokens = tokenise(tokenizer, texts)
        expected = [tokenizer(text, add_special_tokens=False, return_offsets_mapping=True) for text in texts]
        assert tokens.ids.tolist() == [number for encoding in expected for number in encoding.input_ids]
        pairs = zip(tokens.starts.tolist(), tokens.ends.tolist(), strict=True)
        assert list(pairs) == [pair for encoding in expected for pair in encoding.offset_mapping]


class TestParts:
    """Long texts, which are read in parts."""

    NOTE = "No asthma — naïve façade; type 2 diabetes mellitus, 糖尿病 and hypothyroidism.\n"

    @staticmethod
    def whole(tokenizer, text):
        """Return the tokens of a text that is read at once."""
        (encoding,) = encode(tokenizer, [text])
        return list(encoding.ids), [list(pair) for pair in encoding.offsets]

    WORDS = some.lists(some.one_of(some.text(max_size=9), some.sampled_from(["asthma", " ", "糖尿病", "é" * 70])))

    @given(some.sampled_from(KINDS), WORDS)
    def test_any_text(self, architectures, name, words):
        """The tokens of a text that is read in parts are those of the whole text."""
        text, tokenizer = " ".join(words) * 9, architectures.tokenizer_of(name)
        found = in_parts(tokenizer, text, length=100, context=80)

        assert (list(found.ids), [list(pair) for pair in found.offsets]) == self.whole(tokenizer, text)

    @pytest.mark.parametrize(
        "name", ["roberta", *(pytest.param(name, marks=pytest.mark.slow) for name in KINDS if name != "roberta")]
    )
    def test_long_text(self, architectures, name):
        """A text that is longer than a part is really read in parts, and is no other text for that."""
        text, tokenizer = self.NOTE * (PART // len(self.NOTE) + 9), architectures.tokenizer_of(name)
        tokens = tokenise(tokenizer, [text, "asthma"])

        assert isinstance(in_parts(tokenizer, text), Joined)
        ids, offsets = self.whole(tokenizer, text)
        assert tokens.ids[: tokens.bounds[1]].tolist() == ids
        assert np.stack([tokens.starts, tokens.ends], 1)[: tokens.bounds[1]].tolist() == offsets

    def test_word_over_a_seam(self, architectures):
        """A word that is longer than what two parts both read is read at once with its text."""
        text, tokenizer = "asthma " + "hypo" * 200, architectures.tokenizer_of("roberta")
        found = in_parts(tokenizer, text, length=100, context=80)

        assert (list(found.ids), [list(pair) for pair in found.offsets]) == self.whole(tokenizer, text)


class TestSubwords:
    """Which tokens go on with the word of the one before."""

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("asthma", [False]),
            ("no asthmad", [False, False, True]),
            ("asthma,", [False, False]),
            ("a ᚠ", [False, False]),
        ],
    )
    def test_marked(self, architectures, text, expected):
        """A tokenizer that marks pieces inside words says which they are; punctuation and unknown words begin one."""
        assert tokenise(architectures.tokenizer_of("bert"), [text]).subwords.tolist() == expected

    @pytest.mark.parametrize(
        ("text", "inside"),
        [
            ("asthma", "011111"),
            ("no asthma", "010011111"),
            (" a", "00"),
            ("a,b", "011"),
            ("a  b", "0000"),
            ("a\tb\nc\u00a0d", "0111111"),
            ("患者 有", "0100"),
        ],
    )
    def test_by_space(self, text, inside):
        """Elsewhere a character is inside a word unless it or the one before it is a space; only U+0020 counts as one."""
        starts = np.arange(len(text))
        found = without_space([text], starts, np.zeros(len(text), np.int64))
        assert "".join(str(int(one)) for one in found) == inside

    @given(some.lists(some.text(some.sampled_from(" a中\u00a0\0🙂"), min_size=1, max_size=12), min_size=1, max_size=4))
    def test_as_transformers(self, texts):
        """The rule is transformers': ``start > 0 and " " not in sentence[start - 1 : start + 1]``, in every text."""
        places = [(owner, start) for owner, text in enumerate(texts) for start in range(len(text) + 1)]
        owners, starts = np.array(places).T
        expected = [start > 0 and " " not in texts[owner][start - 1 : start + 1] for owner, start in places]
        assert without_space(texts, starts, owners).tolist() == expected


class TestWords:
    """Texts that come as lists of words."""

    @pytest.mark.parametrize(
        ("words", "delimiter", "expected"),
        [
            (["He", "has"], " ", [(0, 2), (3, 6)]),
            (["He", "has"], "", [(0, 2), (2, 5)]),
            (["He", "has"], "::", [(0, 2), (4, 7)]),
            (["", "He", "", "has"], " ", [(1, 3), (5, 8)]),
            (["He has", "no"], "\n", [(0, 2), (3, 6), (7, 9)]),
            ([], " ", []),
            (["", " "], " ", []),
        ],
    )
    def test_offsets(self, architectures, words, delimiter, expected):
        """Offsets count in the words joined by the delimiter, also with empty words and words with spaces."""
        tokens = tokenise_words(architectures.tokenizer_of("bert"), [words], delimiter)
        assert list(zip(tokens.starts.tolist(), tokens.ends.tolist(), strict=True)) == expected

    @pytest.mark.parametrize("name", KINDS)
    def test_spans(self, architectures, name):
        """With every kind of tokenizer each word's tokens lie within the word."""
        words = ["Él", "tomó", "[SEP]", "paracetamol", "患者"]
        text = "::".join(words)
        tokens = tokenise_words(architectures.tokenizer_of(name), [[], words], "::")
        inside = {place for word in words for place in range(text.index(word), text.index(word) + len(word))}
        covered = {
            place
            for start, end in zip(tokens.starts.tolist(), tokens.ends.tolist(), strict=True)
            for place in range(start, end)
        }
        assert covered == inside


class TestTruncation:
    """Pieces of long texts, as the tokenizers library cuts them."""

    @pytest.mark.parametrize(
        ("limit", "stride", "side", "expected"),
        [
            (10, 1, "right", [(0, 10)]),
            (4, 1, "right", [(0, 4), (3, 7), (6, 10)]),
            (4, 0, "right", [(0, 4), (4, 8), (8, 10)]),
            (4, 1, "left", [(6, 10), (3, 7), (0, 4)]),
            (4, 0, "left", [(6, 10), (2, 6), (0, 2)]),
            (4, 3, "right", [(first, first + 4) for first in range(7)]),
            (4, None, "right", [(0, 4)]),
            (4, None, "left", [(6, 10)]),
        ],
    )
    def test_pieces(self, tiny, limit, stride, side, expected):
        """A text of ten tokens has these pieces; texts before and after it keep their own numbers."""
        texts = ["", "the " * 10, "no", ""]
        tokenizer = tiny.tokenizer()
        tokens = tokenise(tokenizer, texts, Truncation(Frame.of(tokenizer), limit, stride, side))
        pieces = [(first * 4, last * 4 - 1) for first, last in expected]
        bounds = list(zip(tokens.bounds[1:-3].tolist(), tokens.bounds[2:-2].tolist(), strict=True))
        assert [(int(tokens.starts[first]), int(tokens.ends[last - 1])) for first, last in bounds] == pieces
        assert tokens.owners.tolist() == [0, *[1] * len(expected), 2, 3]

    def test_nothing_stays_set(self, architectures):
        """A tokenizer that has cut a text reads the next one whole."""
        tokenizer = architectures.tokenizer_of("bert")
        tokenise(tokenizer, ["no asthma " * 9], Truncation(Frame.of(tokenizer), 4, 1, "right"))
        assert len(encode(tokenizer, ["no asthma " * 9])[0]) == 18

    def test_words(self, architectures):
        """Pieces of texts that are split into words keep the offsets of the whole text."""
        words = ["no", "asthma"] * 3
        tokenizer = architectures.tokenizer_of("bert")
        tokens = tokenise_words(tokenizer, [["no"], words], "::", Truncation(Frame.of(tokenizer), 4, 1, "right"))
        assert spans(tokens, ["no", "::".join(words)])[1:] == [*words[:4], *words[3:]]
        assert tokens.owners.tolist() == [0, 1, 1]


def test_types_of_numbers(architectures):
    """All numbers of tokens are whole ones of 64 bits, and what goes on with a word is yes or no, also of no tokens."""
    for kind in KINDS:
        tokenizer = architectures.tokenizer_of(kind)
        for texts in (["no asthma", "", "患者"], [""], []):
            for tokens in (tokenise(tokenizer, texts), tokenise_words(tokenizer, [[text] for text in texts], " ")):
                types = {name: array.dtype.name for name, array in vars(tokens).items()}
                assert types == {**dict.fromkeys(types, "int64"), "subwords": "bool"}, (kind, texts)
