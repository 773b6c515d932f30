"""What a model's files may not ask for: code, downloads, and files outside their folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

import openmed_nb as nb

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


REFUSED = {
    "a kernel": config(attn_implementation="org/kernel"),
    "a kernel, privately": config(_attn_implementation="org/kernel"),
    "a kernel for a part": config(text_config={"attn_implementation": {"": "sdpa", "text_config": "org/kernel"}}),
    "a kernel for a layer": config(per_layer_config={"0": {"_attn_implementation": "org/kernel"}}),
    "a kernel in a list": config(parts=[[{"_attn_implementation": "org/kernel"}]]),
    "a kernel under another name": config(attribute_map={"manner": "_attn_implementation"}, manner="org/kernel"),
    "flash attention 2": config(attn_implementation="flash_attention_2"),
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
    "a file elsewhere": tokenizer(vocab_file="{outside}/vocab.txt"),
    "a file above": tokenizer(tokenizer_file="../outside/tokenizer.json"),
    "tokenizers by version": tokenizer(fast_tokenizer_files=["../outside/tokenizer.4.0.0.json"]),
    "arguments in order": tokenizer(init_inputs=["{outside}/vocab.txt"]),
    "SentencePiece": tokenizer(sp_model_kwargs={"model_file": "{outside}/spiece.model"}),
    "MeCab": tokenizer(mecab_kwargs={"mecab_option": "-r {outside}/mecabrc"}),
    "a file of tokens elsewhere": tokens(tokenizer_file="{outside}/tokenizer.json"),
    "the network, by tokens": tokens(is_local=False, local_files_only=False, name_or_path="org/model"),
    "an adapter": ("adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "org/model"}),
}
"""Settings that make transformers, or what it calls, import, fetch or open something outside a model's folder."""

TAKEN = {
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
def changed(tiny, outside):
    """A function that makes a keyword model with a change in one of its files."""

    def changed(name, change):
        file, changes = change
        folder = tiny.save(outside.parent / name, tiny.keyword_bert())
        settings = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
        text = json.dumps({**settings, **changes}).replace("{outside}", str(outside))
        (folder / file).write_text(text)
        return folder

    return changed


class TestSettings:
    """Settings that send transformers elsewhere, in a process that notices where it goes."""

    def test_unsafe_settings_are_rejected(self, load_watched, changed):
        """Each is refused in one sentence that names file and setting; nothing is imported, fetched or opened outside."""
        for name, change in REFUSED.items():
            answer = load_watched(changed(f"refused {name}", change))
            assert answer["error"] == "UntrustedModelError", (name, answer)
            assert change[0] in answer["text"], (name, answer)
            assert "\n" not in answer["text"], (name, answer)
            assert any(key in answer["text"] for key in keys_of(change[1])) or "adapter" in name, (name, answer)
            assert (answer["opened"], answer["imported"], answer["fetched"]) == ([], [], []), (name, answer)

    def test_settings_of_real_models_load_nothing_outside(self, load_watched, changed):
        """Settings that real models have, and that nothing follows, do not keep a model from loading."""
        for name, change in TAKEN.items():
            answer = load_watched(changed(f"taken {name}", change))
            assert answer["error"] == "", (name, answer)
            assert (answer["opened"], answer["imported"], answer["fetched"]) == ([], [], []), (name, answer)

    def test_unsafe_settings_apply_to_trusted_models(self, load_watched, changed, outside):
        """A model that is allowed by name gets the kernel that it asks for, and the file; so the process notices both."""
        folder = changed("allowed kernel", config(attn_implementation="kernels-community/kernel"))
        answer = load_watched(folder, remote_code_allowed=[str(folder)])
        assert answer["fetched"] == ["kernels-community/kernel"], answer
        folder = changed("allowed file", tokenizer(tokenizer_class="BertTokenizer"))
        (folder / "special_tokens_map.json").write_text(json.dumps({"tokenizer_file": str(outside / "tokenizer.json")}))
        answer = load_watched(folder, remote_code_allowed=[str(folder)])
        assert f"open {outside / 'tokenizer.json'}" in answer["opened"], answer

    def test_missing_settings_load_nothing_outside(self, load_watched, tiny, outside):
        """A family that asks the hub for kernels whenever it is imported does without, unless it is allowed by name."""
        from transformers import GPTNeoConfig, GPTNeoForTokenClassification

        size = {"hidden_size": 32, "num_layers": 1, "attention_types": [[["global"], 1]], "num_heads": 2}
        model = GPTNeoForTokenClassification(GPTNeoConfig(vocab_size=64, max_position_embeddings=64, **size))
        folder = tiny.save(outside.parent / "gpt_neo", model)
        answer = load_watched(folder)
        assert (answer["error"], answer["fetched"], answer["opened"]) == ("", [], []), answer


def keys_of(value):
    """Return all keys in nested mappings and lists."""
    if isinstance(value, dict):
        return [*value, *(key for child in value.values() for key in keys_of(child))]
    return [key for child in value for key in keys_of(child)] if isinstance(value, list) else []


def index_of(folder, part):
    """Replace the weights of a folder by an index that names another file for all of them."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, part)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


class TestPaths:
    """Indexes and links that lead out of a model's folder."""

    @pytest.mark.parametrize("part", ["../elsewhere/model.safetensors", "{elsewhere}/model.safetensors"])
    def test_index_outside_the_folder_is_rejected(self, folder, keyword_model, tmp_path, part):
        """Weights of another folder are not loaded, whether the index goes up to them or names them in full."""
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "model.safetensors").write_bytes((keyword_model / "model.safetensors").read_bytes())
        index_of(folder, part.format(elsewhere=elsewhere))
        with pytest.raises(
            nb.errors.UntrustedModelError, match=r"index of the weights of .* refers to a file outside its folder"
        ):
            nb.load_model(str(folder), device="cpu")

    @pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "README.md"])
    def test_link_outside_the_folder_is_rejected(self, folder, keyword_model, tmp_path, name):
        """A file of a model that is a link to one outside its folder is refused, whatever it is, and so is its folder."""
        target = tmp_path / f"elsewhere {name}"
        target.write_bytes((keyword_model / name).read_bytes() if (keyword_model / name).is_file() else b"secret")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)
        with pytest.raises(nb.errors.UntrustedModelError, match=f"file '{name}' of .* is a link to a file outside"):
            nb.load_model(str(folder), device="cpu")

    def test_link_to_templates_outside_is_rejected(self, folder, tmp_path):
        """The folder of chat templates, which a tokenizer reads too, is no way out."""
        (tmp_path / "notes").mkdir()
        (tmp_path / "notes" / "note.jinja").write_text("private")
        (folder / "additional_chat_templates").symlink_to(tmp_path / "notes")
        with pytest.raises(nb.errors.UntrustedModelError, match="additional_chat_templates"):
            nb.load_model(str(folder), device="cpu")

    def test_links_of_the_cache_of_the_hub_load(self, folder, tmp_path):
        """A model in the cache of huggingface_hub, whose files are links to blobs, loads by its path."""
        snapshot = cached(folder, tmp_path)
        (tmp_path / "latest").symlink_to(snapshot)
        for name in (snapshot, tmp_path / "latest"):
            assert nb.load_pipeline(str(name), device="cpu")("asthma")

    def test_blob_outside_the_cache_is_rejected(self, folder, tmp_path):
        """A blob in the cache that links to another location is not a file of the model."""
        snapshot = cached(folder, tmp_path)
        blob = Path(os.path.realpath(snapshot / "config.json"))
        blob.rename(tmp_path / "elsewhere")
        blob.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(nb.errors.UntrustedModelError, match="is a link to a file outside"):
            nb.load_model(str(snapshot), device="cpu")


def cached(folder, cache):
    """Put the files of a model where the cache of huggingface_hub has them, and return the folder of its snapshot."""
    snapshot = cache / "models--org--name" / "snapshots" / "0123abcd"
    blobs = snapshot.parent.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(folder.iterdir()):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", str(number)))
    return snapshot
