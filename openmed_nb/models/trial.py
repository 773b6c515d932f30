"""Try a tokenizer in a process of its own, which may end in any way: ``trial.py FILE PACKAGES CODEPOINTS``.

:mod:`openmed_nb.models.limits` runs this file by its path; it imports nothing of this package, and only ``tokenizers``
of others. The last line of what it prints is ``ok``, or ``amplifies``, or ``fails``.
"""

import sys

LENGTH = 2000

# Far more than the bytes of a character, and than the special tokens around a text.
TOKENS_PER_CHARACTER = 64
MORE_TOKENS = 512


def trial_texts(characters: str) -> list[str]:
    """Return texts that make patterns repeat: long runs of one character, alone and before another one."""
    printable = "".join(map(chr, range(32, 127)))
    texts = [
        "",
        printable,
        "Patient: Anna M\u00fcller,\r\n\t4.5 mg \u4e2d\u6587 \ufb01 \ufdfa \U0001f9ff",
        printable * 20,
    ]
    for character in characters:
        run = character * LENGTH
        texts += [character, run, f"{run}\x01"]
    return texts


def try_tokenizer(file: str, characters: str) -> str:
    """Return what becomes of a tokenizer that reads the texts of a trial."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(file)
    for text in trial_texts(characters):
        if len(tokenizer.encode(text).ids) > TOKENS_PER_CHARACTER * len(text) + MORE_TOKENS:
            return "amplifies"
    return "ok"


if __name__ == "__main__":
    sys.path.append(sys.argv[2])  # Where tokenizers is: an isolated Python does not look everywhere.
    try:
        answer = try_tokenizer(sys.argv[1], "".join(chr(int(code)) for code in sys.argv[3].split(",")))
    except BaseException:  # noqa: BLE001 - a panic of the tokenizers library is no Exception
        answer = "fails"
    sys.stdout.write(f"{answer}\n")
