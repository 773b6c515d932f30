"""Loading: from a folder to a model in memory, in the right type, that reads texts of any length."""

import contextlib
import json
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging

import openmed_nb as nb
from helpers import model_families
from helpers import tiny_models as tiny
from helpers.annotations import NOTE
from openmed_nb.annotation.pipeline import build_pipeline
from openmed_nb.errors import InvalidModelError, OpenMedWarning
from openmed_nb.models.files import max_input_length
from openmed_nb.models.loading import move_model

WORDS = ["diabetes mellitus", "hypertension", "asthma"]


def test_model_is_in_evaluation_mode_on_its_device(keyword_model, load_folder, home):
    """A loaded model is in evaluation mode, whole on the device asked for, with its tokenizer and settings."""
    parts = load_folder(keyword_model).to_dict()
    assert set(parts) == {"model", "tokenizer", "config"}
    assert not parts["model"].training
    assert {tensor.device.type for tensor in parts["model"].parameters()} == {home}


@pytest.mark.parametrize("stored", [torch.float16, torch.float64])
def test_weights_are_float32_unless_asked_otherwise(folder, stored, load_folder, find):
    """Weights that are stored in any other type, and a config.json that says so, are loaded in float32."""
    weights = load_file(folder / "model.safetensors")
    save_file({key: value.to(stored) for key, value in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    tiny.change_json(folder / "config.json", dtype=str(stored).removeprefix("torch."))
    assert {tensor.dtype for tensor in load_folder(folder).model.parameters()} == {torch.float32}
    assert find(folder) == WORDS


@pytest.mark.parametrize("fails", [False, True])
def test_load_is_silent_and_restores_transformers_settings(folder, capfd, load_folder, fails):
    """A load, and one that fails, prints nothing, and transformers' progress bars and verbosity are as before."""
    if fails:
        tiny.change_json(folder / "config.json", num_hidden_layers=2)
    before = logging.get_verbosity()
    try:
        for set_bar, verbosity in ((logging.enable_progress_bar, logging.INFO), (logging.disable_progress_bar, before)):
            set_bar()
            logging.set_verbosity(verbosity)
            was_enabled = logging.is_progress_bar_enabled()
            with pytest.raises(InvalidModelError) if fails else contextlib.nullcontext():
                load_folder(folder)
            assert (logging.is_progress_bar_enabled(), logging.get_verbosity()) == (was_enabled, verbosity)
        assert capfd.readouterr() == ("", "")
    finally:
        logging.disable_progress_bar()
        logging.set_verbosity(before)


@pytest.mark.parametrize("number", [1, 2])
def test_interrupt_restores_transformers_settings(keyword_model, load_folder, number):
    """Also one that comes while transformers is silenced, or no longer is."""
    before, calls = (logging.is_progress_bar_enabled(), logging.get_verbosity()), []

    def watch(frame, event, _argument):
        if event == "call" and frame.f_code is logging.set_verbosity.__code__:
            calls.append(frame)
            if len(calls) == number:
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(watch)
    try:
        with pytest.raises(KeyboardInterrupt):
            load_folder(keyword_model)
    finally:
        sys.setprofile(None)
    assert (logging.is_progress_bar_enabled(), logging.get_verbosity()) == before


@pytest.mark.real_computer  # A simulated device belongs to one thread.
def test_concurrent_loads_keep_their_dtypes(keyword_model, load_folder):
    """Transformers sets the default dtype of torch during a load."""

    def types(dtype):
        return {parameter.dtype for parameter in load_folder(keyword_model, dtype=dtype).model.parameters()}

    wanted = ["float32", "bfloat16", "float16", "float32"] * 3
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(types, wanted))
    assert found == [{getattr(torch, dtype)} for dtype in wanted]
    assert (torch.get_default_dtype(), logging.is_progress_bar_enabled()) == (torch.float32, False)


@pytest.mark.real_computer  # It begins its own simulation.
def test_float64_becomes_float32_for_mps(keyword_model, load_folder):
    """A move to mps converts float64, which mps does not support, to float32."""
    model = load_folder(keyword_model, dtype="bfloat16").model
    model.classifier.double()
    model.register_buffer("angles", torch.zeros(2, dtype=torch.complex128))
    with nb.simulated_mps():
        move_model(model, "mps", "mine")
        assert {model.classifier.weight.dtype, model.classifier.bias.dtype} == {torch.float32}
        assert (model.angles.dtype, model.angles.device.type) == (torch.complex64, "mps")
        assert model.bert.embeddings.word_embeddings.weight.dtype == torch.bfloat16


def test_load_ignores_meta_as_default_device(keyword_model, load_folder, home):
    """Regression: the remedy was to download the files again."""
    with torch.device("meta"):
        loaded = load_folder(keyword_model)

    assert {parameter.device.type for parameter in loaded.model.parameters()} == {home}


@pytest.mark.parametrize("changes", [{}, {"pad_token": None}])
def test_long_text_is_processed_in_full(folder, find, changes):
    """For a model with 64 positions, even if the tokenizer does not have a padding token."""
    tiny.change_json(folder / "tokenizer_config.json", **changes)
    text = "the patient was seen . " * 600 + "history of diabetes mellitus and asthma ."
    assert find(folder, text) == ["diabetes mellitus", "asthma"]


@pytest.mark.parametrize(
    ("length", "positions", "expected"),
    [
        (10**30, 512, 512),
        (256, 512, 256),
        (1024, 512, 512),
        (10**30, None, 512),
        *((length, 128, 128) for length in (0, -1, "many")),
        (64.0, 128, 64),
    ],
)
def test_max_input_length_is_that_of_tokenizer_or_model(length, positions, expected):
    tokenizer = tiny.tokenizer()
    tokenizer.model_max_length = length
    assert max_input_length(tokenizer, positions) == expected
    assert isinstance(max_input_length(tokenizer, positions), int)


def test_load_supports_sharded_weights(folder, find):
    """Weights split over several files in safetensors load, also from a folder inside."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "parts").mkdir()
    parts = ("model-00001-of-00002.safetensors", "parts/model-00002-of-00002.safetensors")
    shards = {key: parts[number % 2] for number, key in enumerate(weights)}
    for shard in set(shards.values()):
        save_file({key: weights[key] for key in weights if shards[key] == shard}, folder / shard, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    assert find(folder) == WORDS


def test_privacy_filter_loads_with_code_of_transformers(tmp_path, load_folder):
    """The architecture of openai/privacy-filter."""
    loaded = load_folder(tiny.save(tmp_path, tiny.random_privacy_filter()))
    found = build_pipeline(loaded, "first", {})(NOTE)
    labels = {label.partition("-")[2] or label for label in loaded.config.id2label.values()}

    assert loaded.config.model_type == "openai_privacy_filter"
    assert found
    assert {entity["entity_group"] for entity in found} <= labels


def add_tensors(folder, **tensors):
    """Add tensors to the weights of a folder; dots in their names are written as ``__``."""
    weights = load_file(folder / "model.safetensors")
    added = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({**weights, **added}, folder / "model.safetensors", {"format": "pt"})


def test_load_rejects_weights_of_another_attention(tmp_path, load_folder):
    """A model without relative positions has the same shapes otherwise."""
    from transformers import DebertaV2Config, DebertaV2ForTokenClassification

    relative = {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]}
    folder = tiny.save(tmp_path, DebertaV2ForTokenClassification(DebertaV2Config(**tiny.SMALL, **relative)))
    tiny.change_json(folder / "config.json", relative_attention=False)
    with pytest.raises(InvalidModelError, match=r"have 5 tensors .* does not have.*pos_key_proj"):
        load_folder(folder)


def test_load_warns_about_unused_head(folder, find):
    """Such as a CRF."""
    add_tensors(folder, crf__transitions=torch.ones(3, 3), crf__start_transitions=torch.ones(3))
    with pytest.warns(OpenMedWarning, match=r"have 2 tensors that its architecture does not use.*crf\."):
        assert find(folder) == WORDS


@pytest.mark.parametrize("part", ["pooler__dense__weight", "embeddings__position_ids"])
def test_unused_tensors_of_real_checkpoints_do_not_warn(folder, find, part):
    """Real checkpoints have poolers, computed tables and pretraining heads."""
    heads = {name: torch.arange(8) for name in ("cls__predictions__bias", "lm_head__weight")}
    add_tensors(folder, **{f"bert__{part}": torch.arange(8)}, **heads)
    assert find(folder) == WORDS


def test_saved_architectures_load_without_warning(tmp_path, load_folder):
    """Also with the additional tensors that older releases of transformers saved."""
    for number, model in enumerate(architectures()):
        folder = tiny.save(tmp_path / str(number), model)
        load_folder(folder)
        add_tensors(folder, **{name.replace(".", "__"): tensor.clone() for name, tensor in model.named_buffers()})
        load_folder(folder)


def architectures():
    """Return small models of several families, for the buffers that each has."""
    import transformers

    size = {**tiny.SMALL, "pad_token_id": 0}
    gpt = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 32}
    neo = {**size, "num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]]}
    families = {
        "Bert": size,
        "Roberta": size,
        "DistilBert": {"dim": 32, "hidden_dim": 37, "n_heads": 2, "n_layers": 1, "vocab_size": 32},
        "Electra": {**size, "embedding_size": 16},
        "GPT2": gpt,
        "GPTNeo": neo,
        "Longformer": {**size, "attention_window": 8},
        "XLNet": {"d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 37, "vocab_size": 32},
        "LayoutLM": {**size, "max_2d_position_embeddings": 64},
        "ModernBert": {**size, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3},
        "Mistral": {**size, "num_key_value_heads": 2},
    }
    for name, settings in families.items():
        config = getattr(transformers, f"{name}Config")(**settings)
        yield getattr(transformers, f"{name}ForTokenClassification")(config)


def test_load_accepts_large_unrelated_numbers(folder, find):
    tiny.change_json(folder / "config.json", rope_theta=10**9, seed=2**31, trained_on={"tokens": 10**12})
    assert find(folder) == WORDS


def test_load_accepts_many_labels(tmp_path, load_folder):
    folder = tiny.save(tmp_path, tiny.random_bert(tuple(f"B-KIND{number}" for number in range(3000))))
    tiny.change_json(folder / "config.json", num_labels=3000)
    assert load_folder(folder).config.num_labels == 3000


def test_load_completes_numbered_labels(folder, load_folder):
    """Old configurations have fewer of them than the model has labels."""
    tiny.change_json(folder / "config.json", id2label={"0": "LABEL_0", "1": "LABEL_1"}, label2id=None, num_labels=3)
    assert load_folder(folder).config.id2label == {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}


@pytest.mark.parametrize("strategy", ["none", "average"])
def test_pipeline_rejects_missing_labels(keyword_model, load_folder, strategy):
    pipe = build_pipeline(load_folder(keyword_model), strategy, {})
    pipe.model.config.id2label = {0: "O", 1: "B-DISEASE"}
    with pytest.raises(InvalidModelError, match="3 labels"):
        pipe("no asthma .")


@pytest.mark.parametrize(
    "family",
    [*model_families.FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in model_families.MORE)],
)
def test_longest_window_of_every_family(tmp_path, load_folder, family):
    """A text with as many tokens as the model has positions is one window, and a longer one is several."""
    expected, _settings = model_families.ALL[family]
    model = model_families.model_of(family, len(tiny.VOCABULARY), tiny.LABELS)
    pipe = build_pipeline(load_folder(tiny.save(tmp_path, model)), "first", {"ignore_labels": []})
    assert pipe.tokenizer.model_max_length == expected
    own = expected - pipe.tokenizer.num_special_tokens_to_add()
    for words in (own, own + 1, 3 * own):
        text = " ".join(["patient"] * words)
        found = pipe(text)
        assert (found[0]["start"], found[-1]["end"]) == (0, len(text))
