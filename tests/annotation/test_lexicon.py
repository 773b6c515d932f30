import functools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from transformers import PreTrainedTokenizerFast

from openmed_nb.annotation import lexicon as lexicon_module
from openmed_nb.annotation.lexicon import (
    MAX_WORD_LENGTH,
    MIN_CHARACTERS,
    WordTokenCache,
    supports_tokenizer,
)
from openmed_nb.annotation.tokens import tokenize

# Characters of Western Europe's code page, which mostly stay one character, and those that BERT leaves out, changes to several
# or takes for white space.
CHARACTERS = (
    "aAzZ019.,-'# \t\n\réÉçÇñßÿŠŒœ\u2019“”\u2013…€™°µ½\xa0\xad\x00\x01\x0b\x0c\x7f\x80\x85\u0301\u200b\ufeffİﬁ가漢[M"
)
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,-'#éÉçñßÿšŠœŒ\u2019“”\u2013…€™°µ½[]"
ENOUGH = "a " * MIN_CHARACTERS


@functools.cache
def tokenizer_of(lowercase=True, strip_accents=None, clean_text=True):
    """Return a tokenizer with tokens of one and two letters and two added tokens, one with white space."""
    pieces = [*LETTERS, *(2 * letter for letter in LETTERS), "as"]
    names = ["[PAD]", "[UNK]", "[MASK]", "Zz", *pieces, *(f"##{piece}" for piece in pieces)]
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys(names))}
    backend = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = BertNormalizer(
        lowercase=lowercase, strip_accents=strip_accents, clean_text=clean_text, handle_chinese_chars=True
    )
    backend.pre_tokenizer = BertPreTokenizer()
    backend.add_special_tokens([AddedToken("[MASK]", lstrip=True)])
    backend.add_tokens([AddedToken("Zz", rstrip=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]")


def values(tokens):
    """Return all values of tokens."""
    return [column.tolist() for column in vars(tokens).values() if isinstance(column, np.ndarray)]


def check(lexicon, texts):
    """Assert that a word cache has the tokens of the tokenizers library."""
    assert values(lexicon.tokens(texts)) == values(tokenize(lexicon.tokenizer, texts))


@given(
    *(some.booleans(), some.sampled_from([None, True, False]), some.booleans()),
    some.lists(
        some.lists(
            some.lists(
                some.sampled_from([*CHARACTERS, "[MASK]", "Zz", "aa", " as", "z" * MAX_WORD_LENGTH]), max_size=9
            ).map("".join),
            max_size=5,
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_word_cache_has_tokens_of_library_for_any_text(lowercase, strip_accents, clean_text, calls):
    """The tokens of any texts are those of the tokenizers library, also with the words of earlier texts."""
    lexicon = WordTokenCache(tokenizer_of(lowercase, strip_accents, clean_text))
    for texts in calls:
        check(lexicon, [*texts, ENOUGH])
        check(lexicon, [ENOUGH, *reversed(texts)])


@pytest.mark.parametrize(
    "texts",
    [
        ["", " ", ENOUGH, "", "as"],
        ["漢" * MIN_CHARACTERS],
        ["漢" * MIN_CHARACTERS, "", "가"],
        [ENOUGH + "漢", "as"],
        [ENOUGH, "a " + "z" * MAX_WORD_LENGTH, "z" * (MAX_WORD_LENGTH + 1)],
        ["as Zzz", ENOUGH, "a [MASK]as"],
        [ENOUGH, "\x00"],
        ["as" + " " * 300 + "é.", ENOUGH],
        [ENOUGH + " ".join(length * "a" + end for length in range(1, MAX_WORD_LENGTH) for end in ("", "s", "é", "és"))],
    ],
    ids=[
        "empty",
        "other letters",
        "and nothing",
        "one other letter",
        "long words",
        "added",
        "a control",
        "much space",
        "words alike",
    ],
)
def test_word_cache_has_tokens_of_library_for_special_cases(texts):
    """Special cases have the same tokens as with the tokenizers library."""
    check(WordTokenCache(tokenizer_of()), texts)


def test_word_cache_supports_trained_vocabulary(architectures):
    """Words of a trained vocabulary have the tokens of the tokenizers library, even if they are unknown."""
    check(
        WordTokenCache(architectures.tokenizer_of("bert")),
        ["No asthma—HYPO-thyroidism; ° 糖尿病", "µ naïve façade ¶¶ " * 300],
    )


def test_word_cache_tokenizes_each_word_once():
    """A word is cached once, regardless of case. Each punctuation character is a word."""
    lexicon = WordTokenCache(tokenizer_of())
    lexicon.tokens(["As as, AS", ENOUGH])
    counts = [len(lexicon._words.keys)]
    for text in ("as, a É", "e as", "E, an"):
        lexicon.tokens([text, ENOUGH])
        counts.append(len(lexicon._words.keys))
    assert np.diff(counts).tolist() == [1, 0, 1]  # e, nothing, an


def test_word_cache_is_thread_safe(monkeypatch):
    """Threads that meet the same new words at once, and clear the cache of one another, get the tokens of one thread."""
    monkeypatch.setattr(lexicon_module, "MAX_CACHED_WORDS", 1000)
    lexicon = WordTokenCache(tokenizer_of())
    texts = [[f"as{number % 50} {number} z" for number in range(begin, begin + 2000)] for begin in range(0, 8000, 500)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lexicon.tokens, texts))
    assert [values(tokens) for tokens in found] == [values(tokenize(lexicon.tokenizer, some)) for some in texts]
    assert len(lexicon._words.keys) < 3500  # The words of the last cleared cache and of one chunk.


def with_added(*tokens):
    """Return a tokenizer with added tokens."""
    backend = Tokenizer.from_str(tokenizer_of().backend_tokenizer.to_str())
    backend.add_tokens(list(tokens))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize(
    ("tokens", "served"),
    [
        ([], True),
        ([AddedToken("type 2", normalized=False)], False),
        ([AddedToken(" x", normalized=False)], False),
        ([AddedToken("asthma", normalized=True)], False),
        ([AddedToken(f"q{number}", normalized=False) for number in range(40)], False),
    ],
    ids=["none", "white space", "a space before", "normalized", "many"],
)
def test_supports_tokenizer_checks_added_tokens(tokens, served):
    """A tokenizer is supported if its added tokens are few, have no white space and are not normalized."""
    assert supports_tokenizer(with_added(*tokens)) == served


@pytest.mark.parametrize(
    ("name", "served"), [("bert", True), ("roberta", False), ("modernbert", False), ("xlm-roberta", False)]
)
def test_supports_tokenizer_accepts_only_bert(architectures, name, served):
    """Only tokenizers that cut like BERT's are served."""
    assert supports_tokenizer(architectures.tokenizer_of(name)) == served
