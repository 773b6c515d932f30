"""The import of transformers without work that no load needs."""

from pathlib import Path

from openmed_nb.models.loading import _reuse_import_structure


def test_reused_import_structure_is_that_of_transformers():
    """transformers.models lists the same classes as if it had read its files."""
    import transformers
    from transformers.utils import import_utils

    file = str(Path(transformers.__file__).parent / "models" / "__init__.py")
    read = import_utils.define_import_structure.__wrapped__(file)
    with _reuse_import_structure(transformers):
        reused = import_utils.define_import_structure(file)
        other = import_utils.define_import_structure(str(Path(file).parent / "bert"), prefix="bert")
    assert reused == read
    assert other == import_utils.define_import_structure(str(Path(file).parent / "bert"), prefix="bert")
