"""Loads models in a process of its own, because huggingface_hub reads its endpoint when it is imported.

Reads one request a line, ``{"name": ..., "config": {...}, "environment": {...}}``, and answers in one line with the
entities of a sentence, or with the error.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

from openmed_nb.compat import ModelLoader, OpenMedConfig

TEXT = "the patient has diabetes mellitus and hypertension ."


def answer(name: str, config: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """Load a model, annotate the sentence, and forget the model again."""
    before = dict(os.environ)
    os.environ.update(environment)
    loader = ModelLoader(OpenMedConfig(**config))
    try:
        entities = loader.create_pipeline(name)(TEXT)
        return {"words": [TEXT[entity["start"] : entity["end"]] for entity in entities]}
    except Exception as error:  # noqa: BLE001  (a test asks which error it was)
        return {"error": type(error).__name__, "text": str(error)}
    finally:
        loader.unload()
        os.environ.clear()
        os.environ.update(before)


def main() -> None:
    """Answer requests until there are no more."""
    import transformers.models.bert.modeling_bert  # noqa: F401

    gc.freeze()  # unloading a model collects garbage, which is quick once all that was imported is left out
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
