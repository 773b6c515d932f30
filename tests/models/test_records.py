"""Records of models: certificates stored and found again, expired in words, and unharmed by what else is in their folder."""

import json
from dataclasses import replace

import pytest
import transformers

from openmed_nb.errors import ConfigurationError
from openmed_nb.models.config import OpenMedConfig
from openmed_nb.models.files import hash_model_files
from openmed_nb.models.loading import LoadSpec
from openmed_nb.models.records import (
    ModelIdentity,
    RecordStore,
    TunedBatchSize,
    ValidationMetrics,
    ValidationRecord,
    identify_model,
    record_store,
)
from openmed_nb.models.registry import ModelReference

HERE = ModelIdentity("mine", "w1", "s1", "t1", "bfloat16", "mps", "Apple M2 Pro", "2.13.0", "5.17.0", simulated=False)
EVIDENCE = ValidationMetrics(50, "09b4", 900, 0, 60, 0, 0, 0, 0, 12, None, 0.85, 1.4)
CERTIFICATE = ValidationRecord(HERE, EVIDENCE, "2026-03-01", {"span_agreement": 0.99})
NONE = "there is no certificate"


@pytest.fixture
def store(tmp_path):
    """A store whose folder is not there yet."""
    return RecordStore(tmp_path / "data" / "certificates")


def certified(**changes):
    """Return the certificate with another identity."""
    return replace(CERTIFICATE, identity=replace(HERE, **changes))


def test_stored_is_found(store):
    """A certificate is found for its identity, the same in every part; the name of the model does not count."""
    file = store.store(CERTIFICATE)

    for identity in (HERE, replace(HERE, model="other name")):
        assert (store.find(identity), store.explain(identity)) == (CERTIFICATE, "")
    assert [path.name for path in store.folder.iterdir()] == [file.name] == ["ba1a376e6a051f7998af8665.json"]


def test_batch_does_not_disturb_a_certificate(store):
    """What was learned of an identity stands beside its certificate; each is removed alone."""
    learned = TunedBatchSize(HERE, 96, "nb.sweep()", "2026-03-01")
    store.store(CERTIFICATE)
    store.store(learned)
    assert list(store.learned()) == [learned]

    store.remove(HERE)
    assert (store.find(HERE), list(store.learned())) == (None, [learned])
    store.remove(HERE, TunedBatchSize)
    assert list(store.folder.iterdir()) == []
    store.remove(HERE)


EXPLAINED = {
    "weights": ([{}], {"weights": "w2"}, "its certificate expired: the weights changed"),
    "settings": ([{}], {"settings": "s2"}, "its certificate expired: its config.json changed"),
    "tokenizer": ([{}], {"tokenizer": "t2"}, "its certificate expired: the tokenizer changed"),
    "torch": ([{}], {"torch": "2.14.0"}, "its certificate expired: torch was 2.13.0 and is 2.14.0"),
    "several": (
        [{}],
        {"transformers": "5.18.0", "tokenizer": "t2", "settings": "s2"},
        (
            "its certificate expired: its config.json changed, the tokenizer changed, "
            "and transformers was 5.17.0 and is 5.18.0"
        ),
    ),
    "the nearest": (
        [{"torch": "2.6.0", "weights": "w0"}, {"torch": "2.12.0"}],
        {},
        "its certificate expired: torch was 2.12.0 and is 2.13.0",
    ),
    "another name": ([{"model": "yours", "torch": "1"}], {}, "its certificate expired: torch was 1 and is 2.13.0"),
    "device": ([{}], {"device": "cpu"}, "it was validated on mps only"),
    "device of a newer torch": ([{}], {"device": "cpu", "torch": "3.0"}, "it was validated on mps only"),
    "name of the device": ([{}], {"device_name": "Apple M4"}, "it was validated on Apple M2 Pro only"),
    "simulated device": ([{}], {"simulated": True}, "it was validated on mps only"),
    "several devices": (
        [{}, {"transformers": "5.16.0"}, {"device": "cuda", "device_name": "NVIDIA T4"}],
        {"device": "cpu", "device_name": "AMD EPYC"},
        "it was validated on cuda and mps only",
    ),
    "expired before others": (
        [{}, {"device": "cuda", "device_name": "NVIDIA T4"}],
        {"device": "cuda", "device_name": "NVIDIA T4", "torch": "3.0"},
        "its certificate expired: torch was 2.13.0 and is 3.0",
    ),
    "other files on another device": ([{}], {"device": "cpu", "weights": "w2"}, NONE),
    "another type": ([{}], {"dtype": "float16"}, NONE),
    "another model": ([{}], {"model": "yours", "weights": "w9"}, NONE),
    "only simulated": ([{"simulated": True}], {"torch": "2.14.0"}, NONE),
    "only simulated, for the CPU": ([{"simulated": True}], {"device": "cpu"}, NONE),
    "nothing": ([], {}, NONE),
}


@pytest.mark.parametrize(("stored", "asked", "words"), EXPLAINED.values(), ids=EXPLAINED)
def test_reason_why_none_counts(store, stored, asked, words):
    """What changed is told in words, each once and in order; a simulated device is never told for a real one."""
    for changes in stored:
        store.store(certified(**changes))
    identity = replace(HERE, **asked)

    assert (store.find(identity), store.explain(identity)) == (None, words)


def test_every_part_of_an_identity_counts():
    """All but the name of the model decide the file of an identity."""
    keys = {replace(HERE, **{name: "x"}).key for name in vars(HERE)}

    assert len({*keys, HERE.key}) == len(vars(HERE))


def damaged(**changes):
    """Return the file of a certificate in which some fields, or some of its evidence, hold something else."""
    content = CERTIFICATE.to_dict()
    evidence = {**content["evidence"], **changes.pop("evidence", {})}
    return json.dumps({**content, "evidence": evidence, **changes})


DAMAGED = {
    "nothing": ("", "Expecting value"),
    "half of it": ('{"format": "openmed_nb certif', "Unterminated string"),
    "no mapping": ("[]", "it cannot be list"),
    "another format": (damaged(format="openmed_nb certificate, 1"), "its format is none of openmed_nb certificate, 2"),
    "no identity": (damaged(identity=None), "its identity cannot be NoneType"),
    "a field less": (damaged().replace('"missing": 0, ', ""), "its evidence has no missing"),
    "a field more": (damaged(evidence={"x": 1}), "its evidence has fields of another kind"),
    "a text for a number": (damaged(evidence={"speedup": "fast"}), "its evidence.speedup cannot be str"),
    "fewer than none": (damaged(evidence={"extra": -5}), "its evidence.extra does not look as it must"),
    "no number": (damaged(evidence={"recall": float("nan")}), "its evidence.recall is no finite number"),
    "no date": (damaged(date=5), "its date cannot be int"),
    "deep": ("[" * 100_000, ""),
}


@pytest.mark.parametrize(("content", "words"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_file_counts_for_nothing(store, content, words):
    """A damaged file does not count; the reason says what is wrong with it, and the next certificate takes its place."""
    store.store(CERTIFICATE).write_text(content, "utf-8")
    assert store.find(HERE) is None
    assert store.explain(HERE).startswith(f"its certificate is damaged ({words}")
    store.store(CERTIFICATE)
    assert store.find(HERE) == CERTIFICATE


def test_foreign_files_are_left_alone(store):
    """Other files in the folder are left as they are, and only counted where nothing else explains."""
    store.folder.mkdir(parents=True)
    (store.folder / "notes.json").write_bytes(b"\xff\xfe\x00")
    (store.folder / "folder.json").mkdir()
    (store.folder / "notes.txt").write_text("no certificate")

    assert store.explain(HERE) == f"{NONE}, and 2 files in its folder cannot be read"
    store.store(CERTIFICATE)
    assert store.explain(replace(HERE, torch="2.14.0")).startswith("its certificate expired: torch")
    assert {path.name for path in store.folder.iterdir()} > {"notes.json", "folder.json", "notes.txt"}


def test_renamed_certificate(store):
    """A certificate under another name counts for nothing: neither for that name nor as one that expired."""
    file = store.store(CERTIFICATE)
    other = replace(HERE, weights="w2")
    file.rename(store.file(other))
    assert (store.find(other), store.explain(other)) == (None, "its certificate expired: the weights changed")

    store.file(other).rename(file.with_name("copy.json"))
    assert (store.find(HERE), store.explain(HERE)) == (None, NONE)


def test_certificate_whose_type_was_changed(store):
    """A certificate whose type was changed in its file counts for neither type."""
    other = certified(dtype="float16")
    store.store(CERTIFICATE).write_text(json.dumps(other.to_dict()), "utf-8")

    assert (store.find(HERE), store.find(other.identity), store.explain(HERE)) == (None, None, NONE)


def test_home_of_an_unknown_user():
    """A folder in the home of an unknown user is an error with the variable that names another."""
    with pytest.raises(ConfigurationError, match="OPENMED_NB_DATA is '~nobody at all/data'"):
        record_store({"OPENMED_NB_DATA": "~nobody at all/data"})


def test_folder_that_cannot_be_written(tmp_path):
    """A folder that cannot be written is an error with the variable that names another; reading it finds nothing."""
    (tmp_path / "file").write_text("no folder")
    store = record_store({"OPENMED_NB_DATA": str(tmp_path / "file")})

    assert store.explain(HERE) == NONE
    with pytest.raises(ConfigurationError, match="OPENMED_NB_DATA") as caught:
        store.store(CERTIFICATE)
    assert str(store.folder) in caught.value.message
    assert caught.value.__cause__.strerror in caught.value.message


def test_folder_of_the_person(tmp_path, monkeypatch):
    """Without the variable, or with an empty one, records are in the system's place for data of a program."""
    for name in ("XDG_DATA_HOME", "HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(name, str(tmp_path))
    for environ in ({}, {"OPENMED_NB_DATA": ""}):
        folder = record_store(environ).folder
        assert folder.name == "certificates"
        assert "openmed_nb" in folder.parts
        assert tmp_path in folder.parents
    assert list(tmp_path.iterdir()) == []


def test_report():
    """The text has the model, its type, the device and the counts; all that is known stands among the figures of the HTML."""
    assert str(CERTIFICATE).splitlines() == [
        "Certificate: mine in bfloat16 on mps",
        "  On 50 texts it kept 60 of 60 entities.",
    ]
    measured, rest = CERTIFICATE.to_report().metrics
    known = {**vars(HERE), **vars(EVIDENCE), "date": "2026-03-01", **CERTIFICATE.criteria}
    shown = [value for _, value in (*measured.rows, *rest.rows)]
    assert sorted(shown) == sorted(str(value) for value in known.values() if value is not None)
    assert (measured.rows[3], rest.collapsed) == (("entities that are the same", "60"), True)
    assert "mine is validated in bfloat16 on mps since 2026-03-01" in CERTIFICATE._repr_html_()


def test_certificate_of_a_simulated_device_says_so():
    """A certificate of a simulated device says that it is none of MPS."""
    simulated = certified(simulated=True)

    assert str(simulated).splitlines()[0] == "Certificate: mine in bfloat16 on mps (SIMULATED)"
    assert ("device", "mps (SIMULATED)") in simulated.report().figures[1].rows
    assert "SIMULATED MPS: no figure here is one of MPS." in str(simulated)


def test_number_of_a_device_does_not_count(computers, keyword_model):
    """A certificate is of a kind of device and its name: which number a GPU has does not count."""
    spec = LoadSpec.from_name(str(keyword_model), OpenMedConfig())
    for computer, device, identified in (
        (computers.box(), "cuda", ("cuda", "NVIDIA A100")),
        (computers.box(), "cuda:0", ("cuda", "NVIDIA A100")),
        (computers.box(), "cuda:1", ("cuda", "NVIDIA T4")),
        (computers.mac(), "mps:0", ("mps", "Apple M2")),
    ):
        here = computer.session.computer
        here.load_torch()
        identity = identify_model(spec, "bfloat16", device, here)
        assert (identity.device, identity.device_name, identity.simulated) == (*identified, False), device


def test_path_whose_bytes_are_not_text(store, computers, keyword_model):
    """A model in a folder whose name cannot be decoded has a certificate that is found again."""
    spec = LoadSpec.from_name(str(keyword_model), OpenMedConfig())
    spec = replace(spec, reference=ModelReference("mine \udcff", str(keyword_model)))
    identity = identify_model(spec, "bfloat16", "mps", computers.mac().session.computer)
    store.store(replace(CERTIFICATE, identity=identity))

    assert store.find(identity).identity == identity


def test_identity_of_a_model_on_this_device(computers, keyword_model):
    """An identity has the fingerprints of the model's files, the versions, and whether the device is simulated."""
    spec = LoadSpec.from_name(str(keyword_model), OpenMedConfig())
    mac = computers.mac().session.computer
    simulated = computers.Computer(replace(computers.MAC, simulated=True), computers.MAC_TORCH, {}).session.computer
    content = hash_model_files(keyword_model)

    files = (content.weights, content.settings, content.tokenizer)
    here = ("float16", "mps", "Apple M2", "2.13.0", transformers.__version__)
    assert identify_model(spec, "float16", "mps", mac) == ModelIdentity(
        str(keyword_model), *files, *here, simulated=False
    )
    assert [identify_model(spec, "float16", device, simulated).simulated for device in ("mps", "cpu")] == [True, False]
