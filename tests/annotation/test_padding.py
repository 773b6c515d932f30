"""What fills a row up never changes an answer: a model that reads the filling gets none."""

from __future__ import annotations

import pytest

TEXTS = ["She has asthma; no history of type 2 diabetes mellitus, hypertension.", "fever", "a b c d e f"]
LONG = "no asthma , hypertension , " * 12

slow = pytest.mark.slow
NAMES = ["bert", "convbert", *(pytest.param(name, marks=slow) for name in ("funnel", "nystromformer", "yoso", "fnet"))]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"stride": 8}], ids=["windows", "stride"])
def test_answers_do_not_depend_on_neighbours(architectures, name, options):
    """A text has the same answer alone, among others, and in transformers' own pipeline, which reads one at a time."""
    theirs, ours = architectures.both(name)
    texts = [*TEXTS, LONG] if options else TEXTS
    expected = [theirs(text, **options) for text in texts]

    architectures.assert_same([ours(text, **options) for text in texts], expected)
    architectures.assert_same(ours(texts, **options), expected)


def test_only_models_that_read_the_filling_get_none(architectures, on_forward):
    """BERT runs texts of different lengths together, ConvBERT does not; hooks see the rows of the texts alone."""
    rows = {}
    for name in ("bert", "convbert"):
        shapes = rows[name] = []
        _theirs, ours = architectures.both(name, "first")
        on_forward(ours.model, lambda ids, shapes=shapes: shapes.append(len(ids)))
        ours(["a b c d e f", "a b c d e", "a b c d"])

    assert rows == {"bert": [3], "convbert": [1, 1, 1]}
