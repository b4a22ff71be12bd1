"""What folders in sentence-transformers' layout say of pooling, and which cannot be followed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import ModelError
from common.messages.control import Matryoshka
from common.model_folder import revision_of
from common.pooling_folder import Pooling, read_matryoshka, read_pooling

KIND = "sentence_transformers.models."


def write(folder: Path, config: dict[str, Any], *kinds: str) -> Path:
    """A folder whose modules are a transformer and these."""
    modules = [{"idx": 0, "path": "", "type": KIND + "Transformer"}]
    modules += [
        {"idx": n, "path": f"{n}_{kind}", "type": KIND + kind} for n, kind in enumerate(kinds, 1)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return folder


def test_a_model_for_text_does_not_pool(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"is_matryoshka": False}, None),
        ({"is_matryoshka": True}, Matryoshka((), True)),
        ({"matryoshka_dimensions": [64, 32, 64]}, Matryoshka((32, 64), True)),
    ],
)
def test_a_folder_says_whether_embeddings_may_be_cut_short(
    tmp_path: Path, config: dict[str, Any], expected: Matryoshka | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_matryoshka(tmp_path) is None  # not a model for embeddings
    write(tmp_path, {"pooling_mode": "mean"}, "Pooling", "Normalize")
    assert read_matryoshka(tmp_path) == expected


@pytest.mark.parametrize("sizes", [5, [0], ["64"], [True]])
def test_sizes_that_are_none_are_refused(tmp_path: Path, sizes: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"matryoshka_dimensions": sizes}))
    with pytest.raises(ModelError, match="matryoshka_dimensions"):
        read_matryoshka(write(tmp_path, {"pooling_mode": "mean"}, "Pooling"))


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True, "include_prompt": True}, "cls"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_the_kind_is_read_and_whether_lengths_become_one(
    tmp_path: Path, config: dict[str, Any], kind: Any
) -> None:
    assert read_pooling(write(tmp_path, config, "Pooling")) == Pooling(kind, False)
    both = read_pooling(write(tmp_path, config, "Pooling", "Normalize"))
    assert both == Pooling(kind, True)
    assert both.needs_every_position is (kind != "last")


@pytest.mark.parametrize(
    ("config", "kinds", "match"),
    [
        ({"pooling_mode_max_tokens": True}, ("Pooling",), "pooling max is not supported"),
        ({"pooling_mode_weightedmean_tokens": True}, ("Pooling",), "weightedmean"),
        (
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            ("Pooling",),
            "pooling mean and cls",
        ),
        ({}, ("Pooling",), "of no kind"),
        ({"pooling_mode_cls_token": True}, ("Pooling", "Dense"), "Dense"),
        ({"pooling_mode_cls_token": True}, ("Pooling", "Pooling"), "Pooling"),
        ({"pooling_mode_cls_token": True}, (), "names no Pooling"),
        ({"pooling_mode_cls_token": True}, ("Normalize",), "Normalize"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    tmp_path: Path, config: dict[str, Any], kinds: tuple[str, ...], match: str
) -> None:
    with pytest.raises(ModelError, match=match):
        read_pooling(write(tmp_path, config, *kinds))


@pytest.mark.parametrize("name", ["", "../1_Pooling", "/etc"])
def test_a_pooling_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    modules = [{"path": name, "type": KIND + "Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match="outside the folder"):
        read_pooling(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", "[1]"])
def test_modules_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ModelError, match=r"modules\.json"):
        read_pooling(tmp_path)


def test_another_pooling_is_another_revision(tmp_path: Path) -> None:
    seen = {revision_of(tmp_path)}
    for mode in ("mean", "cls"):
        seen.add(revision_of(write(tmp_path, {"pooling_mode": mode}, "Pooling")))
    seen.add(revision_of(write(tmp_path, {"pooling_mode": mode}, "Pooling", "Normalize")))
    assert len(seen) == 4
