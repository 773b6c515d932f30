"""Tests of weights and settings that do not match, which must be rejected before the model is built or used."""

import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

import openmed_nb as nb
from openmed_nb.errors import InvalidModelError, OpenMedWarning

WORDS = ["diabetes mellitus", "hypertension", "asthma"]


def load(folder, **settings):
    """Load the model of a folder on the CPU."""
    return nb.load_model(str(folder), device="cpu", **settings)["model"]


def with_tensors(folder, **tensors):
    """Add tensors to the weights of a folder; dots in their names are written as ``__``."""
    weights = load_file(folder / "model.safetensors")
    added = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({**weights, **added}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def two_layers(tiny, tmp_path):
    """A folder with a BERT of two layers."""
    return tiny.save(tmp_path / "two layers", tiny.random_bert(size={"num_hidden_layers": 2}))


class TestUnused:
    """Tensors that the model of the settings has no place for."""

    def test_load_rejects_weights_of_more_layers(self, two_layers, tiny):
        """Weights of more layers than the settings have are refused, where transformers answers with half a model."""
        tiny.change_json(two_layers / "config.json", num_hidden_layers=1)
        with pytest.raises(
            InvalidModelError, match=r"have 16 tensors that the model in its config.json does not have.*layer\.1\."
        ):
            load(two_layers)

    def test_load_rejects_weights_of_another_attention(self, tiny, tmp_path):
        """Weights for attention to relative positions are refused for settings without it, which have the same shapes."""
        from transformers import DebertaV2Config, DebertaV2ForTokenClassification

        relative = {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]}
        model = DebertaV2ForTokenClassification(DebertaV2Config(**tiny.SMALL, **relative))
        folder = tiny.save(tmp_path, model)
        tiny.change_json(folder / "config.json", relative_attention=False)
        with pytest.raises(
            InvalidModelError, match=r"have 5 tensors that the model in its config.json does not have.*pos_key_proj"
        ):
            load(folder)

    def test_load_warns_about_unused_head(self, folder, find):
        """A head that the architecture does not have, such as a CRF, is a warning, and the model loads."""
        with_tensors(folder, crf__transitions=torch.ones(3, 3), crf__start_transitions=torch.ones(3))
        with pytest.warns(OpenMedWarning, match=r"have 2 tensors that its architecture does not use.*crf\."):
            assert find(folder) == WORDS

    @pytest.mark.parametrize(
        "part", ["pooler__dense__weight", "embeddings__position_ids", "embeddings__token_type_ids"]
    )
    def test_unused_tensors_of_real_checkpoints_do_not_warn(self, folder, find, part):
        """Real checkpoints have poolers, computed tables and pretraining heads."""
        heads = {name: torch.arange(8) for name in ("cls__predictions__bias", "lm_head__weight")}
        with_tensors(folder, **{f"bert__{part}": torch.arange(8)}, **heads)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert find(folder) == WORDS

    def test_saved_architectures_load_without_warning(self, tiny, tmp_path):
        """Also with the additional tensors that older releases of transformers saved."""
        for number, model in enumerate(architectures(tiny)):
            folder = tiny.save(tmp_path / str(number), model)
            with warnings.catch_warnings():
                warnings.simplefilter("error", OpenMedWarning)
                load(folder)
                buffers = {name.replace(".", "__"): tensor.clone() for name, tensor in model.named_buffers()}
                load(with_tensors(folder, **buffers))


def architectures(tiny):
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


class TestAbsurd:
    """Numbers in the settings that no weights can be for."""

    @pytest.mark.parametrize(
        "changes",
        [
            {"num_hidden_layers": 10**9},
            {"num_labels": 10**9, "id2label": None, "label2id": None},
            # Some families loop over them while they read their settings.
            {"model_type": "funnel", "block_sizes": [10**9]},
            {"model_type": "gpt_neo", "num_layers": 10**9, "attention_types": [[["global"], 10**9]]},
        ],
    )
    def test_load_rejects_absurd_counts(self, folder, tiny, changes):
        """Counts of layers and labels are compared with what the weights hold; nothing hangs."""
        tiny.change_json(folder / "config.json", architectures=None, **changes)
        with pytest.raises(InvalidModelError, match=r"specifies \w+ = 1,000,000,000"):
            load(folder)

    @pytest.mark.parametrize("size", ["vocab_size", "intermediate_size", "max_position_embeddings"])
    @pytest.mark.parametrize("family", ["bert", "roberta"])  # The weights have nothing for the other family.
    def test_load_rejects_absurd_sizes(self, folder, tiny, size, family):
        """They are compared with what the weights hold; nothing fills the memory."""
        tiny.change_json(folder / "config.json", model_type=family, architectures=None, **{size: 10**10})
        with pytest.raises(
            InvalidModelError, match=r"describes a model of [\d,]+ elements, but its weights have [\d,]+"
        ):
            load(folder)

    def test_load_accepts_large_unrelated_numbers(self, folder, tiny, find):
        """Numbers that no module is built for may be of any size, as the base of rotary positions or a seed are."""
        tiny.change_json(folder / "config.json", rope_theta=10**9, seed=2**31, trained_on={"tokens": 10**12})
        assert find(folder) == WORDS

    def test_load_accepts_many_labels(self, tiny, tmp_path):
        """Thousands of labels are valid if the weights have a row for each."""
        labels = tuple(f"B-KIND{number}" for number in range(3000))
        folder = tiny.save(tmp_path, tiny.random_bert(labels))
        tiny.change_json(folder / "config.json", num_labels=3000)
        assert load(folder).config.num_labels == 3000


class TestWholeNumbers:
    """Weights that were saved as integers, without the scales to dequantize them."""

    @pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
    @pytest.mark.parametrize(
        ("name", "stored"),
        [
            ("bert.encoder.layer.0.attention.self.query.weight",) * 2,
            # Names of old checkpoints, which transformers translates, are no way round it.
            ("bert.embeddings.LayerNorm.weight", "bert.embeddings.LayerNorm.gamma"),
            ("bert.embeddings.LayerNorm.bias", "bert.embeddings.LayerNorm.beta"),
        ],
    )
    def test_load_rejects_integer_weights(self, folder, dtype, name, stored):
        """A model would load, and find nothing, or anything."""
        weights = load_file(folder / "model.safetensors")
        weights[stored] = (weights.pop(name) * 10).to(dtype)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(InvalidModelError, match=rf"are integers, such as {stored}"):
            load(folder)

    def test_load_rejects_integer_weights_in_pickle(self, folder):
        """Neither is a pickle file, where that is allowed."""
        weights = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        torch.save({name: tensor.to(torch.int8) for name, tensor in weights.items()}, folder / "pytorch_model.bin")
        with pytest.raises(InvalidModelError, match="are integers"):
            load(folder, allow_pickle=True)


def test_load_rejects_distributed_checkpoint(folder):
    """Files that several processes saved are refused: transformers would take them in the place of all other weights."""
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "shard-00001-model-00001-of-00001.safetensors").write_bytes(weights)
    with pytest.raises(InvalidModelError, match="are a distributed checkpoint"):
        load(folder)


class TestLabels:
    """Heads and labels that do not belong together."""

    def test_load_rejects_model_without_labels(self, tiny, tmp_path):
        """A model without labels is rejected when it is loaded."""
        model = tiny.random_bert()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a layer without outputs.
            model.classifier = torch.nn.Linear(32, 0)
        model.config.id2label, model.config.label2id = {}, {}
        folder = tiny.save(tmp_path, model)
        with pytest.raises(InvalidModelError, match="does not have labels"):
            load(folder)

    def test_load_rejects_other_number_of_labels(self, folder, tiny):
        """Names for another number of labels than the settings state are refused; transformers would forget the names."""
        tiny.change_json(folder / "config.json", id2label={"0": "O", "1": "B-DRUG"}, num_labels=3)
        with pytest.raises(InvalidModelError, match="has 2 labels, but its num_labels is 3"):
            load(folder)

    def test_load_completes_numbered_labels(self, folder, tiny):
        """Numbers in the place of names, as old configurations have them, may be fewer than the labels."""
        names = {"0": "LABEL_0", "1": "LABEL_1"}
        tiny.change_json(folder / "config.json", id2label=names, label2id=None, num_labels=3)
        assert load(folder).config.id2label == {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}

    @pytest.mark.parametrize("strategy", ["none", "first", "average"])
    def test_pipeline_rejects_missing_labels(self, folder, strategy):
        """A pipeline whose model names fewer labels than it gives says so, instead of failing where one occurs."""
        pipe = nb.load_pipeline(str(folder), device="cpu", aggregation_strategy=strategy)
        pipe.model.config.id2label = {0: "O", 1: "B-DISEASE"}
        with pytest.raises(InvalidModelError, match="3 labels"):
            pipe("no asthma .")
