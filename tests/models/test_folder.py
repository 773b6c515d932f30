"""What a model folder must hold, and one clear error for each thing that can be wrong with it."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from openmed_nb.errors import InvalidModelError, UntrustedModelError

WORDS = ["diabetes mellitus", "hypertension", "asthma"]


def without(name):
    """Return a damage: a file is missing."""
    return lambda folder: (folder / name).unlink()


def holding(name, content):
    """Return a damage: a file holds something else."""
    return lambda folder: (folder / name).write_bytes(content)


def config(**changes):
    """Return a damage: the settings say something else."""

    def change(folder):
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**settings, **changes}))

    return change


def cut_weights(folder):
    """Truncate the weights."""
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])


def without_head(folder):
    """Take the classifier out of the weights."""
    weights = load_file(folder / "model.safetensors")
    kept = {key: value for key, value in weights.items() if "classifier" not in key}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def without_any_tokenizer(folder):
    """Remove the tokenizer and its settings."""
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()


def index_of(shards):
    """Return a damage: instead of the weights there is an index of several files."""

    def change(folder):
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(shards)

    return change


LABELS = r"id2label|lack|cannot be loaded"
DAMAGE = {
    "no config": (without("config.json"), "config.json is missing"),
    "config no JSON": (holding("config.json", b"{"), "config.json of .* cannot be read"),
    "config a list": (holding("config.json", b"[1]"), "not a JSON object"),
    "config empty": (holding("config.json", b"{}"), "config.json of .* cannot be loaded"),
    "another task": (
        config(architectures=["BertForMaskedLM"]),
        "a BertForMaskedLM, which is not a token-classification model",
    ),
    "family unknown": (config(model_type="nonsense"), "config.json of .* cannot be loaded: .*nonsense"),
    "family of other weights": (config(model_type="gpt2"), "lack 16 tensors"),
    "size a word": (config(hidden_size="wide"), "hidden_size"),
    "more layers": (config(num_hidden_layers=3), "lack 32 tensors"),
    "fewer labels": (config(id2label={"0": "O"}, label2id={"O": 0}), "lack 2 tensors .* such as classifier.bias"),
    "labels with a gap": (config(id2label={"0": "O", "1": "B-DISEASE", "5": "I-DISEASE"}), LABELS),
    "labels of nothing": (config(id2label={"0": "O", "1": None, "2": None}), LABELS),
    "labels that are not text": (config(id2label={"0": "O", "1": "B-\ud800", "2": "I-X"}), LABELS),
    "no weights": (without("model.safetensors"), "does not have weights in safetensors"),
    "weights cut off": (cut_weights, "weights file of .* cannot be loaded"),
    "weights without head": (without_head, "lack 2 tensors .* such as classifier.bias"),
    "index a list": (index_of("[]"), "weights file of .* cannot be loaded"),
    "index of nothing": (index_of('{"metadata": {}, "weight_map": {"a": "gone.safetensors"}}'), "gone.safetensors"),
    "tokenizer no JSON": (holding("tokenizer.json", b"{"), "tokenizer of .* cannot be loaded"),
    "tokenizer gone": (without("tokenizer.json"), "tokenizer of .* cannot be loaded"),
    "no tokenizer at all": (without_any_tokenizer, "does not have a tokenizer"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_load_rejects_damaged_folder(folder, case, load_folder):
    """Every damage is a InvalidModelError that names the model, says what is wrong in one line, and what to do."""
    damage, expected = DAMAGE[case]
    damage(folder)
    with pytest.raises(InvalidModelError, match=expected) as caught:
        load_folder(folder)
    assert repr(str(folder)) in caught.value.message
    assert "\n" not in str(caught.value)
    assert caught.value.remedy


def test_load_rejects_tokenizer_without_offsets(folder, load_folder):
    """A tokenizer written in Python does not return offset mappings, so the model is unusable, and the error says so."""
    from transformers import CanineTokenizer

    without_any_tokenizer(folder)
    CanineTokenizer(model_max_length=64).save_pretrained(folder)
    with pytest.raises(InvalidModelError, match="does not return offset mappings"):
        load_folder(folder)


class TestPickles:
    """Weights in pickle files, which can execute arbitrary code."""

    @pytest.fixture
    def pickled(self, folder):
        """A model whose only weights are in a pickle file."""
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        return folder

    def test_pickle_needs_allow_pickle(self, pickled, load_folder, find):
        with pytest.raises(UntrustedModelError, match="allow_pickle=True"):
            load_folder(pickled)
        assert find(pickled, allow_pickle=True) == WORDS

    def test_pickle_behind_safetensors_index_needs_allow_pickle(self, pickled, load_folder, find):
        """An index with the name of one for safetensors that points to a pickle file does not get it loaded."""
        weight_map = dict.fromkeys(torch.load(pickled / "pytorch_model.bin"), "pytorch_model.bin")
        index = {"metadata": {}, "weight_map": weight_map}
        (pickled / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(UntrustedModelError, match="pickle file"):
            load_folder(pickled)
        assert find(pickled, allow_pickle=True) == WORDS


class TestRemoteCode:
    """Models that bring Python code of their own."""

    CONFIG = """
import pathlib
from transformers import BertConfig
pathlib.Path({marker!r}).touch()
class OwnConfig(BertConfig):
    model_type = "own_bert"
"""
    MODEL = """
from transformers import BertForTokenClassification
from .configuration_own import OwnConfig
class OwnForTokenClassification(BertForTokenClassification):
    config_class = OwnConfig
"""

    @pytest.fixture
    def marker(self, tmp_path):
        """The file that the model's code makes when it runs."""
        return tmp_path / "the code ran"

    @pytest.fixture
    def own_code(self, folder, marker, tiny, monkeypatch, tmp_path):
        """A model of a family that only its own code knows."""
        import transformers.dynamic_module_utils

        monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
        monkeypatch.syspath_prepend(str(tmp_path / "modules"))
        (folder / "configuration_own.py").write_text(self.CONFIG.format(marker=str(marker)))
        (folder / "modeling_own.py").write_text(self.MODEL)
        own = {
            "AutoConfig": "configuration_own.OwnConfig",
            "AutoModelForTokenClassification": "modeling_own.OwnForTokenClassification",
        }
        tiny.change_json(folder / "config.json", model_type="own_bert", auto_map=own)
        return folder

    @pytest.mark.parametrize(("asked", "allowed"), [(False, ()), (True, ()), (True, ("openai/privacy-filter",))])
    def test_remote_code_is_rejected_by_default(self, own_code, marker, asked, allowed, load_folder):
        """Code that is needed does not run, whether asked for or not, and the error says how to allow it by name."""
        with pytest.raises(UntrustedModelError, match="remote_code_allowed=") as caught:
            load_folder(own_code, remote_code=asked, remote_code_allowed=allowed)
        assert repr(str(own_code)) in caught.value.remedy
        assert not marker.exists()

    def test_remote_code_runs_if_trusted_by_name(self, own_code, marker, find):
        """Code of a model that is allowed by name runs, and the model finds its entities."""
        assert find(own_code, remote_code_allowed=(str(own_code),)) == WORDS
        assert marker.exists()

    def test_remote_code_is_ignored_for_known_model_type(self, own_code, marker, tiny, find):
        """A model that brings code for a family that transformers knows loads with transformers' own code."""
        tiny.change_json(own_code / "config.json", model_type="bert")
        assert find(own_code) == WORDS
        assert not marker.exists()

    def test_remote_code_of_tokenizer_is_rejected(self, folder, marker, tiny, load_folder):
        """Code of a tokenizer does not run either."""
        (folder / "tokenization_own.py").write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n")
        own = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
        tiny.change_json(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=own)
        (folder / "tokenizer.json").unlink()
        with pytest.raises(InvalidModelError, match="tokenizer"):
            load_folder(folder)
        assert not marker.exists()


def test_load_rejects_token_without_embedding(folder, load_folder):
    """A tokenizer with more tokens than the model has embeddings is refused when the model is loaded."""
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text("utf-8"))
    tokenizer["model"]["vocab"]["extraordinary"] = len(tokenizer["model"]["vocab"])
    file.write_text(json.dumps(tokenizer), "utf-8")
    with pytest.raises(InvalidModelError, match=r"has token .* but the model has embeddings for"):
        load_folder(folder)
