"""Certificates: stored and found again, expired in words, and unharmed by whatever else is in their folder."""

import json
from dataclasses import replace
from itertools import combinations

import pytest
import transformers

from openmed_nb.errors import ConfigurationError
from openmed_nb.models.certificates import (
    FORMAT,
    Certificate,
    CertificateEvidence,
    CertificateStore,
    Identity,
    certificate_store,
    identity_of,
)
from openmed_nb.models.config import OpenMedConfig
from openmed_nb.models.files import content_of
from openmed_nb.models.loading import LoadSpec
from openmed_nb.models.registry import ModelReference

HERE = Identity("mine", "w1", "s1", "t1", "bfloat16", "mps", "Apple M2 Pro", "2.13.0", "5.17.0", simulated=False)
EVIDENCE = CertificateEvidence(50, "09b4", 900, 0, 60, 0, 0, 0, 0, 12, None, 0.85, 1.4)
CERTIFICATE = Certificate(HERE, EVIDENCE, "2026-03-01", {"span_agreement": 0.99})

CHANGED = {
    "weights": ("w2", "the weights changed"),
    "settings": ("s2", "its config.json changed"),
    "tokenizer": ("t2", "the tokenizer changed"),
    "torch": ("2.14.0", "torch was 2.13.0 and is 2.14.0"),
    "transformers": ("5.18.0", "transformers was 5.17.0 and is 5.18.0"),
}
OTHER_DEVICES = {
    "device": ("cpu", "it was validated on mps only"),
    "device_name": ("Apple M4", "it was validated on Apple M2 Pro only"),
    "simulated": (True, "it was validated on mps only"),
}


@pytest.fixture
def store(tmp_path):
    """A store whose folder is not there yet."""
    return CertificateStore(tmp_path / "data" / "certificates")


def test_stored_is_found(store):
    """A certificate that was stored is found for its identity, the same in every part; the name of the model does not count."""
    file = store.store(CERTIFICATE)

    for identity in (HERE, replace(HERE, model="other name")):
        assert (store.find(identity), store.explain(identity)) == (CERTIFICATE, "")
    assert [one.name for one in store.folder.iterdir()] == [file.name]
    assert json.loads(file.read_text("utf-8"))["format"] == FORMAT


def test_name_of_a_file(store):
    """The file of an identity keeps the name that earlier releases gave it, which all but the model's name decide."""
    assert store.file(HERE).name == "ba1a376e6a051f7998af8665.json"
    assert len({replace(HERE, **{name: "x"}).key for name in vars(HERE) if name != "model"}) == len(vars(HERE)) - 1
    assert replace(HERE, model="other name").key == HERE.key


def test_every_change_expires(store):
    """Any set of changes of files and versions expires a certificate, and the reason names each of them once, in order."""
    store.store(CERTIFICATE)
    for count in range(1, len(CHANGED) + 1):
        for names in combinations(CHANGED, count):
            now = replace(HERE, **{name: CHANGED[name][0] for name in names})
            *first, last = (CHANGED[name][1] for name in names)
            words = f"{', '.join(first)}, and {last}" if first else last
            assert store.find(now) is None, names
            assert store.explain(now) == f"its certificate expired: {words}", names


def test_another_device_is_told(store):
    """A certificate of another device has not expired: it counts there, and that is told in words."""
    store.store(CERTIFICATE)
    for name, (value, words) in OTHER_DEVICES.items():
        now = replace(HERE, **{name: value})
        assert store.find(now) is None, name
        assert store.explain(now) == words, name
        assert store.explain(replace(now, torch="2.14.0")) == words, name
        assert store.explain(replace(now, weights="w2")) == "there is no certificate", name


def test_all_other_devices_are_told(store):
    """Of several other devices each is told once; a certificate of this one that expired is told first."""
    elsewhere = {"device": "cuda", "device_name": "NVIDIA T4"}
    store.store(CERTIFICATE)
    store.store(replace(CERTIFICATE, identity=replace(HERE, transformers="5.16.0")))
    store.store(replace(CERTIFICATE, identity=replace(HERE, **elsewhere)))

    assert store.explain(replace(HERE, device="cpu", device_name="AMD EPYC")) == "it was validated on cuda and mps only"
    assert (
        store.explain(replace(HERE, torch="3.0", **elsewhere)) == "its certificate expired: torch was 2.13.0 and is 3.0"
    )


def test_simulated_device_is_never_told_for_a_real_one(store):
    """A certificate of a simulated device is not mentioned for a real device, whatever else changed."""
    store.store(replace(CERTIFICATE, identity=replace(HERE, simulated=True)))
    for device in ("mps", "cpu"):
        for torch in (HERE.torch, "2.14.0"):
            assert store.explain(replace(HERE, device=device, torch=torch)) == "there is no certificate", device


REJUDGED = {
    "nothing kept": ({"exact": 0, "missing": 60}, "only 0 of 60 entities are the same"),
    "no entity": ({"exact": 0}, "too little to tell: 0 of the 50 entities that are needed"),
    "too much moved": ({"exact": 58, "moved": 2}, "only 58 of 60 entities are the same"),
    "too few": ({"exact": 49}, "too little to tell: 49 of the 50 entities that are needed"),
    "recall": ({"recall_reference": 0.9, "recall": 0.8}, "it finds 80.0 % of the gold entities, float32 90.0 %"),
    "NaN": ({"not_numbers": 3}, "3 tokens became NaN or infinity"),
    "several": (
        {"exact": 20, "extra": 5},
        "only 20 of 25 entities are the same, and too little to tell: 20 of the 50 entities that are needed",
    ),
}


def test_stored_counts_are_judged_again(store):
    """A certificate whose counts are not enough today does not count, whatever gate it says it passed, and tells why."""
    weak = {"span_agreement": 0.0, "recall_loss": 1.0, "minimum_entities": 0}
    for name, (counts, words) in REJUDGED.items():
        store.store(replace(CERTIFICATE, evidence=replace(EVIDENCE, **counts), gate=weak))
        assert store.find(HERE) is None, name
        assert store.explain(HERE) == f"its certificate does not count: {words}", name
        assert store.explain(replace(HERE, torch="2.14.0")) == "there is no certificate", name


def test_gate_of_another_release_does_not_matter(store):
    """A certificate counts by its counts, whatever was asked for when it was made."""
    for gate in ({}, {"span_agreement": 0.0}, {"span_agreement": 1.0, "other": 3.0}):
        store.store(replace(CERTIFICATE, gate=gate))
        assert store.find(HERE) is not None


def test_other_types_and_models_are_no_reason(store):
    """The certificate of another type, or of another model, is not mentioned."""
    store.store(CERTIFICATE)
    for others in ({"dtype": "float16"}, {"model": "yours", "weights": "w9"}):
        assert store.explain(replace(HERE, **others)) == "there is no certificate", others


def test_nearest_certificate_is_explained(store):
    """Of several that expired, the reason names the changes of the one with the fewest."""
    store.store(replace(CERTIFICATE, identity=replace(HERE, torch="2.6.0", weights="w0")))
    store.store(replace(CERTIFICATE, identity=replace(HERE, torch="2.12.0")))
    assert store.explain(HERE) == "its certificate expired: torch was 2.12.0 and is 2.13.0"


def test_removed_is_gone(store):
    """A certificate is removed by its identity; where there is none, nothing happens."""
    store.remove(HERE)
    store.store(CERTIFICATE)
    store.remove(HERE)
    assert store.find(HERE) is None
    assert store.explain(HERE) == "there is no certificate"


def damaged(**changes):
    """Return the file of a certificate in which some fields, or some of its evidence, hold something else."""
    content = CERTIFICATE.to_dict()
    evidence = {**content["evidence"], **changes.pop("evidence", {})}
    return json.dumps({**content, "evidence": evidence, **changes})


DAMAGED = {
    "nothing": ("", "Expecting value"),
    "half of it": ('{"format": "openmed_nb certif', "Unterminated string"),
    "no mapping": ("[]", f"it does not say {FORMAT}"),
    "another format": ('{"format": "something else"}', f"it does not say {FORMAT}"),
    "no identity": (damaged(identity=None), "its identity cannot be NoneType"),
    "a field less": (damaged().replace('"missing": 0, ', ""), "its evidence has no missing"),
    "a field more": (damaged(evidence={"x": 1}), "its evidence has fields of another kind"),
    "a text for a number": (damaged(evidence={"speed_up": "fast"}), "its evidence.speed_up cannot be str"),
    "yes for a number": (damaged(evidence={"texts": True}), "its evidence.texts cannot be bool"),
    "fewer than none": (damaged(evidence={"extra": -5}), "its evidence.extra does not look as it must"),
    "no number": (damaged(evidence={"recall": float("nan")}), "its evidence.recall is no finite number"),
    "more than all": (damaged(evidence={"recall": float("inf")}), "its evidence.recall is no finite number"),
    "no date": (damaged(date=5), "its date cannot be int"),
    "deep": ("[" * 100_000, ""),
}


def test_damaged_file_counts_for_nothing(store):
    """A damaged file does not count; the reason says what is wrong with it, and the next certificate takes its place."""
    for name, (content, words) in DAMAGED.items():
        store.store(CERTIFICATE).write_text(content, "utf-8")
        assert store.find(HERE) is None, name
        assert store.explain(HERE).startswith("its certificate is damaged ("), name
        assert words in store.explain(HERE), name
        store.store(CERTIFICATE)
        assert store.find(HERE) == CERTIFICATE, name


def test_foreign_files_are_left_alone(store):
    """Other files in the folder are left as they are, and only counted where nothing else explains."""
    store.folder.mkdir(parents=True)
    (store.folder / "notes.json").write_bytes(b"\xff\xfe\x00")
    (store.folder / "folder.json").mkdir()
    (store.folder / "notes.txt").write_text("no certificate")

    assert store.explain(HERE) == "there is no certificate, and 2 files in its folder cannot be read"
    store.store(CERTIFICATE)
    assert store.explain(replace(HERE, torch="2.14.0")).startswith("its certificate expired: torch")
    assert {one.name for one in store.folder.iterdir()} > {"notes.json", "folder.json", "notes.txt"}


def test_renamed_certificate(store):
    """A certificate under another name counts for nothing: neither for that name nor as one that expired."""
    file = store.store(CERTIFICATE)
    other = replace(HERE, weights="w2")
    file.rename(store.file(other))
    assert store.find(other) is None
    assert store.explain(other) == "its certificate expired: the weights changed"

    store.file(other).rename(file.with_name("copy.json"))
    assert store.find(HERE) is None
    assert store.explain(HERE) == "there is no certificate"


def test_certificate_of_another_type_in_its_place(store):
    """A certificate whose type was changed in its file counts for neither type."""
    other = replace(HERE, dtype="float16")
    store.store(CERTIFICATE).write_text(json.dumps(replace(CERTIFICATE, identity=other).to_dict()), "utf-8")

    assert (store.find(HERE), store.find(other)) == (None, None)
    assert store.explain(HERE) == "there is no certificate"


def test_home_of_an_unknown_user():
    """A folder in the home of an unknown user is an error with the variable that names another."""
    said = "OPENMED_NB_DATA is '~nobody at all/data', and that home is not known"
    with pytest.raises(ConfigurationError, match=said):
        certificate_store({"OPENMED_NB_DATA": "~nobody at all/data"})


def test_folder_that_cannot_be_written(tmp_path):
    """A folder that cannot be written is an error with the variable that names another; reading it finds nothing."""
    (tmp_path / "file").write_text("no folder")
    store = certificate_store({"OPENMED_NB_DATA": str(tmp_path / "file")})

    assert store.find(HERE) is None
    assert store.explain(HERE) == "there is no certificate"
    with pytest.raises(ConfigurationError, match="OPENMED_NB_DATA") as caught:
        store.store(CERTIFICATE)
    assert f"cannot be kept in {str(store.folder)!r}: " in caught.value.what
    assert caught.value.__cause__.strerror in caught.value.what


def test_folder_of_the_person(tmp_path, monkeypatch):
    """Without the variable, or with an empty one, certificates are in the system's place for data of a program."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    for environ in ({}, {"OPENMED_NB_DATA": ""}):
        folder = certificate_store(environ).folder
        assert folder.name == "certificates"
        assert "openmed_nb" in folder.parts
        assert tmp_path in folder.parents
    assert list(tmp_path.iterdir()) == []


def test_what_is_shown():
    """The text has the model, its type, the device and the counts; all that is known stands among the figures of the HTML."""
    assert str(CERTIFICATE).splitlines() == [
        "Certificate: mine in bfloat16 on mps",
        "  On 50 texts it kept 60 of 60 entities.",
    ]
    single = replace(EVIDENCE, texts=1, exact=0, missing=1)
    assert replace(CERTIFICATE, evidence=single).summary == "On 1 text it kept 0 of 1 entity."

    measured, rest = CERTIFICATE.report().figures
    known = {**vars(HERE), **vars(EVIDENCE), "date": "2026-03-01", **CERTIFICATE.gate}
    shown = [value for _, value in (*measured.rows, *rest.rows)]
    assert sorted(shown) == sorted(str(value) for value in known.values() if value is not None)
    assert (measured.rows[3], rest.folded) == (("entities that are the same", "60"), True)
    assert "mine is validated in bfloat16 on mps since 2026-03-01" in CERTIFICATE._repr_html_()


def test_certificate_of_a_simulated_device_says_so():
    """A certificate of a simulated device says that it is none of MPS."""
    simulated = replace(CERTIFICATE, identity=replace(HERE, simulated=True))

    assert str(simulated).splitlines()[0] == "Certificate: mine in bfloat16 on mps (SIMULATED)"
    assert ("device", "mps (SIMULATED)") in simulated.report().figures[1].rows
    assert "SIMULATED MPS: no figure here is one of MPS." in str(simulated)


def test_number_of_a_device_does_not_count(computers, keyword_model):
    """A certificate is of a kind of device and its name: which number a GPU has does not count."""
    spec = LoadSpec.of(str(keyword_model), OpenMedConfig())
    for computer, device, identified in (
        (computers.box(), "cuda", ("cuda", "NVIDIA A100")),
        (computers.box(), "cuda:0", ("cuda", "NVIDIA A100")),
        (computers.box(), "cuda:1", ("cuda", "NVIDIA T4")),
        (computers.mac(), "mps:0", ("mps", "Apple M2")),
    ):
        here = computer.session.computer
        here.load_torch()
        identity = identity_of(spec, "bfloat16", device, here)
        assert (identity.device, identity.device_name, identity.simulated) == (*identified, False), device


def test_path_whose_bytes_are_not_text(store, computers, keyword_model):
    """A model in a folder whose name cannot be decoded has a certificate that is found again."""
    spec = LoadSpec.of(str(keyword_model), OpenMedConfig())
    spec = replace(spec, reference=ModelReference("mine \udcff", str(keyword_model)))
    identity = identity_of(spec, "bfloat16", "mps", computers.mac().session.computer)
    store.store(replace(CERTIFICATE, identity=identity))

    assert (store.find(identity).identity, store.explain(identity)) == (identity, "")


def test_identity_of_a_model_on_this_device(computers, keyword_model):
    """An identity has the fingerprints of the model's files, the versions, and whether the device is simulated."""
    spec = LoadSpec.of(str(keyword_model), OpenMedConfig())
    mac = computers.mac().session.computer
    simulated = computers.Computer(replace(computers.MAC, simulated=True), computers.MAC_TORCH, {}).session.computer
    content = content_of(keyword_model)

    files = (content.weights, content.settings, content.tokenizer)
    here = ("float16", "mps", "Apple M2", "2.13.0", transformers.__version__)
    assert identity_of(spec, "float16", "mps", mac) == Identity(str(keyword_model), *files, *here, simulated=False)
    assert [identity_of(spec, "float16", device, simulated).simulated for device in ("mps", "cpu")] == [True, False]
