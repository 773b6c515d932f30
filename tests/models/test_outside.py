"""Code, downloads, pickles, and files outside the folder of a model: rejected unless the user trusts the model by name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers import tiny_models as tiny
from openmed_nb.errors import InvalidModelError, UntrustedModelError

WORDS = ["diabetes mellitus", "hypertension", "asthma"]

KERNELS = """
__version__ = "{version}"
FETCHED = []
def get_kernel(name, *arguments, **options):
    FETCHED.append(name)
    raise RuntimeError("this would be native code from the hub")
def use_kernel_forward_from_hub(*names):
    return lambda layer: layer
use_kernelized_func = use_kernel_forward_from_hub
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {{}})
"""
"""A stand-in for the package ``kernels``."""


def config(**changes):
    """Return a change of a model's ``config.json``."""
    return "config.json", changes


def tokenizer(**changes):
    """Return a change of the settings of a tokenizer."""
    return "tokenizer_config.json", changes


def tokens(**changes):
    """Return a change of the map of special tokens."""
    return "special_tokens_map.json", changes


REJECTED = {
    "a kernel": config(attn_implementation="org/kernel"),
    "a kernel, privately": config(_attn_implementation="org/kernel"),
    "a kernel for a part": config(text_config={"attn_implementation": {"": "sdpa", "text_config": "org/kernel"}}),
    "a kernel in a list": config(parts=[[{"_attn_implementation": "org/kernel"}]]),
    "a kernel under another name": config(attribute_map={"manner": "_attn_implementation"}, manner="org/kernel"),
    "attention that is not a name": config(attn_implementation=["org/kernel"]),
    "experts": config(experts_implementation="sonicmoe"),
    "quantization": config(quantization_config={"quant_method": "mxfp4"}),
    "another model": config(vision_config={"backbone": "org/model", "use_timm_backbone": False}),
    "other weights": config(transformers_weights="other.safetensors"),
    "other settings": config(configuration_files=["config.4.0.0.json"]),
    "a model for a tokenizer": config(tokenizer_class="AutoModelForCausalLM"),
    "a processor for a tokenizer": tokenizer(tokenizer_class="AutoProcessor"),
    "GGUF": tokenizer(gguf_file="{outside}/model.gguf"),
    "a vocabulary elsewhere": tokenizer(vocab="{outside}/vocab.txt"),
    "a file above": tokenizer(tokenizer_file="../outside/tokenizer.json"),
    "arguments in order": tokenizer(init_inputs=["{outside}/vocab.txt"]),
    "SentencePiece": tokenizer(sp_model_kwargs={"model_file": "{outside}/spiece.model"}),
    "MeCab": tokenizer(mecab_kwargs={"mecab_option": "-r {outside}/mecabrc"}),
    "a file of tokens elsewhere": tokens(tokenizer_file="{outside}/tokenizer.json"),
    "the network, by tokens": tokens(is_local=False, local_files_only=False, name_or_path="org/model"),
    "an adapter": ("adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "org/model"}),
}
"""Settings that make transformers, or what it calls, import, fetch or open something outside a model's folder."""

ACCEPTED = {
    "attention of torch": config(attn_implementation="eager", _attn_implementation={"": None, "text_config": "sdpa"}),
    "nothing": config(quantization_config=None, attn_implementation=None, backbone=None),
    "code that is not needed": config(auto_map={"AutoConfig": "own.Config"}),
    "where its maker had it": tokenizer(tokenizer_file="/root/.cache/gone/tokenizer.json", sp_model_kwargs={}),
    "tokens": ("special_tokens_map.json", {"unk_token": "[UNK]", "additional_special_tokens": ["[MASK]"]}),
    "a processor": ("preprocessor_config.json", {"auto_map": {"AutoProcessor": "own.Processor"}}),
    "generation": ("generation_config.json", {"custom_generate": "org/model", "cache_implementation": "org/kernel"}),
}
"""Settings of real models, which must not be followed."""


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """A directory next to the models with files of a tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "outside"
    folder.mkdir()
    for name in ("vocab.txt", "merges.txt", "tokenizer.json", "tokenizer.4.0.0.json", "model.gguf", "spiece.model"):
        (folder / name).write_text("{}")
    return folder


@pytest.fixture(scope="module")
def load_watched(tmp_path_factory):
    """A function that loads a folder in a process that is watched; it has a stand-in for the package ``kernels``."""
    utils = pytest.importorskip("transformers.utils.import_utils")
    package = tmp_path_factory.mktemp("path") / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text(KERNELS.format(version=getattr(utils, "KERNELS_MIN_VERSION", "0.9.0")))
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    # Other tests store measurements of the same tiny model, and loading reads those of its data folder.
    environment["OPENMED_NB_DATA"] = str(tmp_path_factory.mktemp("data"))
    path = os.pathsep.join(filter(None, (str(package.parent), environment.get("PYTHONPATH"))))
    command = [sys.executable, "-X", "frozen_modules=off", Path(__file__).parent / "watched_loads.py"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, **pipes, text=True, env={**environment, "PYTHONPATH": path})

    def load(folder, **settings):
        print(json.dumps({"folder": str(folder), "settings": settings}), file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())

    yield load
    process.communicate(timeout=60)


@pytest.fixture(scope="module")
def changed(outside):
    """A function that makes a keyword model with a change in one of its files."""

    def changed(name, change):
        file, changes = change
        folder = tiny.save(outside.parent / name, tiny.keyword_bert())
        settings = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
        (folder / file).write_text(json.dumps({**settings, **changes}).replace("{outside}", str(outside)))
        return folder

    return changed


def test_unsafe_settings_are_rejected(load_watched, changed):
    """Nothing is imported, downloaded or opened outside the folder."""
    for name, change in REJECTED.items():
        answer = load_watched(changed(f"rejected {name}", change))
        assert answer["error"] == "UntrustedModelError", (name, answer)
        assert change[0] in answer["text"], (name, answer)
        assert "\n" not in answer["text"], (name, answer)
        assert (answer["opened"], answer["imported"], answer["fetched"]) == ([], [], []), (name, answer)


def test_settings_of_real_models_load_nothing_outside(load_watched, changed):
    for name, change in ACCEPTED.items():
        answer = load_watched(changed(f"accepted {name}", change))
        assert answer["error"] == "", (name, answer)
        assert (answer["opened"], answer["imported"], answer["fetched"]) == ([], [], []), (name, answer)


def test_unsafe_settings_apply_to_trusted_models(load_watched, changed, outside):
    """This also shows that the process notices downloads and opened files."""
    folder = changed("allowed kernel", config(attn_implementation="kernels-community/kernel"))
    answer = load_watched(folder, remote_code_allowed=[str(folder)])
    assert answer["fetched"] == ["kernels-community/kernel"], answer
    folder = changed("allowed file", tokenizer(tokenizer_class="BertTokenizer"))
    (folder / "special_tokens_map.json").write_text(json.dumps({"tokenizer_file": str(outside / "tokenizer.json")}))
    answer = load_watched(folder, remote_code_allowed=[str(folder)])
    assert f"open {outside / 'tokenizer.json'}" in answer["opened"], answer


def test_model_type_that_requests_kernels_loads_without_them(load_watched, outside):
    from transformers import GPTNeoConfig, GPTNeoForTokenClassification

    size = {"hidden_size": 32, "num_layers": 1, "attention_types": [[["global"], 1]], "num_heads": 2}
    model = GPTNeoForTokenClassification(GPTNeoConfig(vocab_size=64, max_position_embeddings=64, **size))
    answer = load_watched(tiny.save(outside.parent / "gpt_neo", model))
    assert (answer["error"], answer["fetched"], answer["opened"]) == ("", [], []), answer


def write_index(folder, part):
    """Write an index that names one file for all weights."""
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(folder / "model.safetensors"), part)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("part", ["../elsewhere/model.safetensors", "{elsewhere}/model.safetensors"])
def test_index_outside_the_folder_is_rejected(folder, tmp_path, load_folder, part):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    write_index(folder, part.format(elsewhere=elsewhere))
    (folder / "model.safetensors").rename(elsewhere / "model.safetensors")
    with pytest.raises(UntrustedModelError, match=r"index of the weights of .* refers to a file outside its folder"):
        load_folder(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "README.md", "additional_chat_templates"])
def test_link_outside_the_folder_is_rejected(folder, tmp_path, load_folder, name):
    target = tmp_path / "elsewhere"
    if (folder / name).is_file():
        (folder / name).rename(target)
    elif name == "additional_chat_templates":
        target.mkdir()
    else:
        target.write_text("secret")
    (folder / name).symlink_to(target)
    with pytest.raises(UntrustedModelError, match=f"file '{name}' of .* is a link to a file outside"):
        load_folder(folder)


def cached(folder, cache):
    """Move the files of a model into a cache of huggingface_hub, and return the folder of its snapshot."""
    snapshot = cache / "models--org--name" / "snapshots" / "0123abcd"
    blobs = snapshot.parent.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(folder.iterdir()):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", str(number)))
    return snapshot


def test_links_of_the_hub_cache_load_unless_a_blob_is_a_link(folder, tmp_path, load_folder):
    snapshot = cached(folder, tmp_path)
    (tmp_path / "latest").symlink_to(snapshot)
    assert load_folder(tmp_path / "latest").folder == tmp_path / "latest"
    blob = Path(os.path.realpath(snapshot / "config.json"))
    blob.rename(tmp_path / "elsewhere")
    blob.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UntrustedModelError, match="is a link to a file outside"):
        load_folder(snapshot)


@pytest.mark.parametrize("has_index", [False, True])
def test_pickle_needs_allow_pickle(folder, load_folder, find, has_index):
    """Also behind an index with the name of one for safetensors."""
    if has_index:
        write_index(folder, "pytorch_model.bin")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UntrustedModelError, match=r"pickle file.*allow_pickle=True"):
        load_folder(folder)
    assert find(folder, allow_pickle=True) == WORDS


CONFIG_CODE = """
import pathlib
from transformers import BertConfig
pathlib.Path({marker!r}).touch()
class OwnConfig(BertConfig):
    model_type = "own_bert"
"""
MODEL_CODE = """
from transformers import BertForTokenClassification
from .configuration_own import OwnConfig
class OwnForTokenClassification(BertForTokenClassification):
    config_class = OwnConfig
"""


class TestRemoteCode:
    """Models with Python code of their own."""

    @pytest.fixture
    def marker(self, tmp_path):
        """The file that the model's code creates when it runs."""
        return tmp_path / "the code ran"

    @pytest.fixture
    def own_code(self, folder, marker, monkeypatch, tmp_path):
        """A model whose type is defined in its own code."""
        import transformers.dynamic_module_utils

        monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
        monkeypatch.syspath_prepend(str(tmp_path / "modules"))
        (folder / "configuration_own.py").write_text(CONFIG_CODE.format(marker=str(marker)))
        (folder / "modeling_own.py").write_text(MODEL_CODE)
        own = {
            "AutoConfig": "configuration_own.OwnConfig",
            "AutoModelForTokenClassification": "modeling_own.OwnForTokenClassification",
        }
        tiny.change_json(folder / "config.json", model_type="own_bert", auto_map=own)
        return folder

    @pytest.mark.parametrize(("requested", "allowed"), [(False, ()), (True, ()), (True, ("openai/privacy-filter",))])
    def test_remote_code_is_rejected_by_default(self, own_code, marker, requested, allowed, load_folder):
        with pytest.raises(UntrustedModelError, match="remote_code_allowed=") as caught:
            load_folder(own_code, remote_code=requested, remote_code_allowed=allowed)
        assert repr(str(own_code)) in caught.value.remedy
        assert not marker.exists()

    def test_remote_code_runs_if_trusted_by_name(self, own_code, marker, find):
        assert find(own_code, remote_code_allowed=(str(own_code),)) == WORDS
        assert marker.exists()

    def test_other_files_of_a_trusted_model_are_rejected(self, own_code, marker, load_folder):
        tiny.change_json(own_code / "config.json", transformers_weights="other.safetensors")
        with pytest.raises(UntrustedModelError, match="transformers_weights"):
            load_folder(own_code, remote_code_allowed=(str(own_code),))
        assert not marker.exists()

    def test_remote_code_is_ignored_for_known_model_type(self, own_code, marker, find):
        tiny.change_json(own_code / "config.json", model_type="bert")
        assert find(own_code) == WORDS
        assert not marker.exists()

    def test_remote_code_of_tokenizer_is_rejected(self, folder, marker, load_folder):
        (folder / "tokenization_own.py").write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n")
        own = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
        tiny.change_json(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=own)
        (folder / "tokenizer.json").unlink()
        with pytest.raises(InvalidModelError, match="tokenizer"):
            load_folder(folder)
        assert not marker.exists()
