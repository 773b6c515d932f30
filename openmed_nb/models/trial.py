"""Test a tokenizer in a separate process, which may crash: ``trial.py FILE PACKAGES CODEPOINTS``.

:mod:`openmed_nb.models.limits` runs this file by its path. It does not import this package, and no other package except
``tokenizers``. The last line of its output is ``ok``, ``amplifies`` or ``fails``.
"""

import sys

RUN_LENGTH = 2000

# Far more than the bytes of a character and the special tokens around a text.
MAX_TOKENS_PER_CHARACTER = 64
MAX_SPECIAL_TOKENS = 512


def _make_texts(characters: str) -> list[str]:
    """Return texts that trigger backtracking: long runs of one character, alone and before another character."""
    printable = "".join(map(chr, range(32, 127)))
    texts = [
        "",
        printable,
        "Patient: Anna M\u00fcller,\r\n\t4.5 mg \u4e2d\u6587 \ufb01 \ufdfa \U0001f9ff",
        printable * 20,
    ]
    for character in characters:
        run = character * RUN_LENGTH
        texts += [character, run, f"{run}\x01"]
    return texts


def _try_tokenizer(file: str, characters: str) -> str:
    """Encode the texts with a tokenizer and return the outcome, ``ok`` or ``amplifies``."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(file)
    for text in _make_texts(characters):
        if len(tokenizer.encode(text).ids) > MAX_TOKENS_PER_CHARACTER * len(text) + MAX_SPECIAL_TOKENS:
            return "amplifies"
    return "ok"


if __name__ == "__main__":
    sys.path.append(sys.argv[2])  # The directory of tokenizers, because an isolated Python ignores some paths.
    try:
        outcome = _try_tokenizer(sys.argv[1], "".join(chr(int(code)) for code in sys.argv[3].split(",")))
    except BaseException:  # noqa: BLE001 - a panic of the tokenizers library is not an Exception
        outcome = "fails"
    sys.stdout.write(f"{outcome}\n")
