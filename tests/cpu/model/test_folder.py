"""A model folder is read whole and sound, or refused by name."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layers import H100
from shared import closed

import confpred.models
from confpred.errors import ModelError, StorageError
from confpred.model.card import Card
from confpred.model.folder import (
    NewestModels,
    load_model,
    model_folders,
    publish,
    shipped_models,
)
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import Problem


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    """Return a copy to damage."""
    return Path(shutil.copytree(model_folder, tmp_path / "copy"))


def edit(folder: Path, change) -> None:
    card = json.loads((folder / "card.json").read_text())
    change(card)
    (folder / "card.json").write_text(json.dumps(card))


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of the models that ship with the package, which nobody may edit."""
    monkeypatch.setattr(confpred.models, "__path__", [str(tmp_path)])
    return tmp_path


def shipped_as(model_folder: Path, tmp_path: Path, **cards: dict) -> None:
    """Copies of a model as the package's: each by its name, with changes of its card."""
    for name, changes in cards.items():
        shutil.copytree(model_folder, tmp_path / name)
        edit(tmp_path / name, lambda card, changes=changes: card.update(changes))


def test_a_sound_folder_is_read(model_folder):
    model = load_model(model_folder)
    assert model.version == "made-up-1"
    assert model.device.key == "h100"
    assert model.stale == ()
    assert set(model.bounds.offsets) == {"grouped_fprop", "pytorch"}
    assert set(model.families) == {"grouped_fprop"}
    assert model.gate is None
    content = json.loads((model_folder / "card.json").read_text())
    assert Card.from_json(content).to_json() == content


@pytest.mark.parametrize(
    "name",
    ["card.json", "grouped_fprop.order.txt", "grouped_fprop.time.txt", "pytorch.txt",
     "measured.json"],
)  # fmt: skip
@pytest.mark.parametrize("damage", ["missing", "truncated", "one byte", "empty", "a folder"])
def test_a_damaged_file_is_named(folder, name, damage):
    path = folder / name
    content = path.read_bytes()
    path.unlink()
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "one byte":
        at = content.index(b'"format"') + 1 if name == "card.json" else len(content) // 2
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    elif damage == "empty":
        path.touch()
    elif damage == "a folder":
        path.mkdir()
    with pytest.raises(ModelError, match=name):
        load_model(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda card: card.update(format="confpred-model/4"),
            "is of confpred-model/4, and this version reads confpred-model/5",
        ),
        (
            lambda card: card["bounds"]["ranges"]["pytorch"]["least"].pop(),
            "the range of pytorch is not of 30 features",
        ),
        (lambda card: card.update(device="tpu"), "device='tpu' is not allowed"),
        (lambda card: card.pop("files"), "is damaged: .*files is missing"),
        (lambda card: card["files"].pop("measured.json"), "is damaged: KeyError"),
        (lambda card: card["files"].pop("grouped_fprop.order.txt"), "is damaged: KeyError"),
        (lambda card: card["pytorch"].clear(), "is damaged: .*pytorch.margins is missing"),
        (
            lambda card: card["families"]["grouped_fprop"].update(pool="grouped_dgrad"),
            "is damaged: .*pool 'grouped_dgrad' is of grouped_fprop",
        ),
        (
            lambda card: card["families"]["grouped_fprop"].update(configs="0" * 16),
            "trained for other configs of grouped_fprop",
        ),
        (
            lambda card: card["families"].update(winograd=card["families"]["grouped_fprop"]),
            "kernel family 'winograd', which is not installed",
        ),
        (lambda card: card["files"].update({"../card.json": "0"}), "no file beside it"),
        (lambda card: card["files"].update({"/dev/zero": "0"}), "no file beside it"),
    ],
)
def test_a_foreign_card_is_refused(folder, change, message):
    edit(folder, change)
    with pytest.raises(ModelError, match=message):
        load_model(folder)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("grouped_fprop.order.txt", "nonsense", r"order\.txt is damaged: not LightGBM's text form"),
        ("grouped_fprop.order.txt", "pytorch.txt", r"order\.txt was trained on other features"),
        (
            "measured.json",
            '[{"problem": "n=0", "provider": "pytorch", "config_id": 0}]',
            "is damaged",
        ),
        ("measured.json", "[" * 100_000, "is not JSON"),
        ("measured.json", '{"a": 1}', "is damaged"),
        *(
            (
                "measured.json",
                f'[{{"problem": "", "provider": "grouped_fprop", "config_id": {row}}}]',
                r"measured\.json is damaged: grouped_fprop has no config",
            )
            for row in (10**9, 10**30, -1, 1.5, "true", '"1"', "[1]")
        ),
    ],
)
def test_a_foreign_file_with_a_right_digest_is_refused(folder, name, text, message):
    if text.endswith(".txt"):  # another file of the folder
        text = (folder / text).read_text()
    (folder / name).write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    edit(folder, lambda card: card["files"].update({name: digest}))
    with pytest.raises(ModelError, match=message):
        load_model(folder)


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)
USED = ("device", "families", "pytorch", "bounds", "files")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.sampled_from(USED), junk)
def test_a_card_with_junk_in_a_field_is_refused_or_harmless(folder, model_folder, field, value):
    shutil.copy(model_folder / "card.json", folder / "card.json")
    edit(folder, lambda card: card.update({field: value}))
    try:
        load_model(folder)
    except ModelError:
        pass
    else:
        assert field == "families"


@pytest.mark.parametrize(
    "value", [-0.5, float("nan"), float("inf"), pytest.param(10**400, id="huge"), "1.2", None, True]
)
@pytest.mark.parametrize("name", ["margin", "offset"])
def test_an_impossible_bound_is_refused(folder, name, value):
    if (name, value) == ("offset", -0.5):
        return  # trees may well predict too much

    def change(card: dict) -> None:
        if name == "margin":
            card["pytorch"]["margins"]["depthwise"] = value
        else:
            card["bounds"]["offsets"]["pytorch"] = value

    edit(folder, change)
    with pytest.raises(ModelError, match=rf"card\.json is damaged: .*{name}s.\w+ is"):
        load_model(folder)


def test_a_changed_kernel_is_a_warning(folder, caplog):
    edit(
        folder,
        lambda card: card["families"]["grouped_fprop"].update(source_digests=["0" * 16]),
    )
    with caplog.at_level(logging.WARNING, "confpred"):
        model = load_model(folder)
    (note,) = model.stale
    assert synthetic.SOURCE in note
    assert note in caplog.text


def test_the_newest_model_of_a_device_is_the_default(model_folder, shipped):
    assert dict(NewestModels()) == {}
    created = {"a": "2025-01-01", "b": "2025-03-01", "c": "2025-02-01"}
    shipped_as(model_folder, shipped, **{n: {"created": when} for n, when in created.items()})
    assert {key: model.version for key, model in NewestModels().items()} == {"h100": "b"}


def test_a_half_written_model_is_none_and_hides_no_other(model_folder, shipped):
    """Whoever made it was ended, or is at it: `write_folder` under a name of its own, others file
    by file, as `pip` and `cp` do."""
    whole, begun = {"created": "2025-01-01"}, {"created": "2025-02-01"}
    shipped_as(model_folder, shipped, **{"a": whole, ".b.x1y2.tmp": begun})
    (shipped / "c").mkdir()
    (shipped / "c" / "measured.json").write_text("[]")
    assert model_folders(shipped) == {"h100": shipped / "a"}
    assert NewestModels(shipped)["h100"].version == "a"


def test_a_damaged_model_of_the_user_hides_no_other(model_folder, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("CONFPRED_MODELS_DIR", str(tmp_path))
    shipped_as(model_folder, tmp_path, a={"created": "2099-01-01"}, b={"created": "2099-02-01"})
    (tmp_path / "b" / "card.json").write_text('{"format": "confpred-mo')
    assert NewestModels()["h100"].version == "a"
    (warning,) = caplog.messages
    assert warning.startswith(f"{tmp_path / 'b' / 'card.json'} is not JSON")


def test_models_that_nobody_may_see_are_refused_or_done_without(
    model_folder, tmp_path, monkeypatch, caplog
):
    models, lost = tmp_path / "models", tmp_path / "models" / "lost+found"
    shipped_as(model_folder, models, a={})
    lost.mkdir()
    with closed(lost):
        assert model_folders(models) == {"h100": models / "a"}
    monkeypatch.setenv("CONFPRED_MODELS_DIR", str(models))
    with closed(models):
        with pytest.raises(ModelError, match=f"cannot read {models}: Permission denied"):
            Predictor.load(models)
        with pytest.raises(StorageError, match="Permission denied"):
            publish(model_folder, models)
        assert NewestModels()["h100"].version.startswith("h100-")  # the package's
    assert caplog.messages == [f"cannot read {models}: Permission denied: not used"]


def test_only_the_models_that_are_asked_for_are_loaded(model_folder, shipped):
    shipped_as(model_folder, shipped, a={"device": "h100"}, b={"device": "h200"})
    models = NewestModels()
    assert list(models) == ["h100", "h200"]
    assert models["h100"] is models["h100"]
    with pytest.raises(ModelError, match="the features of"):  # it is of an H100
        models["h200"]


def test_a_shipped_model_is_read_as_far_as_it_is_asked(repository, shipped):
    shutil.copytree(model_folders(repository / "models")["h100"], shipped / "a")
    for name in ("grouped_wgrad.order.txt", "measured.json"):
        (shipped / "a" / name).write_text("damaged")
    model = NewestModels()["h100"]
    layer = Problem(8, 64, 28, 28, 64, 3, 3, padding=1, groups=8)
    assert set(model.families_for([layer])) == {"grouped_fprop"}
    for asked in (
        lambda: model.families_for([replace(layer, direction="wgrad")]),
        lambda: model.measured.get(str(layer)),
        lambda: load_model(shipped / "a"),
    ):
        with pytest.raises(ModelError, match="is damaged: its SHA-256"):
            asked()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"families": ["no_such"]}, "the gate is for families that the model"),
        ({"families": None}, "gate.families is None, not a list"),
        ({"features": {"examples": [], "digest": "0"}}, "the features of conv2d are computed"),
        ({}, r"card\.json is damaged: .*gate.families is missing"),
    ],
)
def test_a_gate_for_something_else_is_refused(tmp_path, change, message):
    folder = Path(shutil.copytree(model_folders(shipped_models())["h100"], tmp_path / "copy"))
    assert load_model(folder, in_parts=True).gate is not None
    edit(folder, lambda card: card.update(gate=change and card["gate"] | change))
    with pytest.raises(ModelError, match=message):
        load_model(folder)


@pytest.mark.parametrize("device", ["../../x", "", "a/b", ".", "h" * 200])
def test_a_device_that_is_no_key_is_refused(folder, device):
    edit(folder, lambda card: card.update(device=device))
    with pytest.raises(ModelError, match="is no key of a device"):
        load_model(folder)


def test_a_family_that_was_taught_is_chosen_where_it_was_before(model_folder, folder):
    """Its configs are in another order, and its time is still that of the first one before."""
    (name,) = load_model(folder).families
    digest = hashlib.sha256((folder / f"{name}.time.txt").read_bytes()).hexdigest()
    edit(folder, lambda card: card["files"].update({f"{name}.taught.txt": digest}))
    shutil.copy(folder / f"{name}.time.txt", folder / f"{name}.taught.txt")
    taught = load_model(folder)
    old, new = load_model(model_folder).families[name], taught.families[name]
    problem = Problem(8, 64, 28, 28, 64, 3, 3, padding=1, groups=4)
    rows = old.legal(problem, H100)
    (first, seconds), (second, same) = (
        each.rank(problem, H100, rows, len(rows)) for each in (old, new)
    )
    assert seconds[0] == same[0]
    assert first.tolist() != second.tolist()
    assert new.ordering is not new.order
    assert new.ordering in taught.ensembles()
