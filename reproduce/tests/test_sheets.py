"""CIFAR as WebP tile sheets: the pixels of the published files, or an error."""

import hashlib
import io

import numpy as np
import pytest
import torch
from published import equal, put

from fastff_reproduce import catalogue
from fastff_reproduce.data import load
from fastff_reproduce.sheets import NAMES, read_sheets, sheet, tiles

pytest.importorskip("PIL.Image")


def images(n=6):
    return torch.randint(256, (n, 3, 32, 32), dtype=torch.uint8)


@pytest.mark.parametrize(("n", "columns"), [(6, 3), (6, 2), (5, 1), (4, 4)])
def test_a_sheet_holds_its_images_row_by_row(n, columns):
    from PIL import Image

    x = images(n)
    data = sheet(x, columns)
    assert torch.equal(tiles(data), x)
    picture = np.asarray(Image.open(io.BytesIO(data)))
    row, column = divmod(n - 1, columns)
    tile = picture[32 * row : 32 * row + 32, 32 * column : 32 * column + 32]
    assert np.array_equal(tile, x[-1].permute(1, 2, 0).numpy())


def test_images_that_fill_no_sheet_are_refused():
    with pytest.raises(ValueError, match=r"\(a multiple of 4, 3, 32, 32\); got \(6, 3, 32, 32\)\. Choose"):
        sheet(images(6), 4)


def md5(tensor):
    return hashlib.md5(tensor.numpy().tobytes()).hexdigest()


def published(monkeypatch, root, name):
    """60 sheets of two images each, and what is in them."""
    x, files = {"train": images(100), "test": images(20)}, {}
    y = {part: torch.randint(10, (len(some),), dtype=torch.uint8) for part, some in x.items()}
    for file in NAMES:
        part = file.partition("_")[0]
        if file.endswith(".npy"):
            out = io.BytesIO()
            np.save(out, y[part].numpy())
            files[file] = out.getvalue()
        else:
            i = int(file[-7:-5])
            files[file] = sheet(x[part][2 * i : 2 * i + 2], 2)
    reader = read_sheets(*(md5(some[part]) for part in ("train", "test") for some in (x, y)))
    forms = [form._replace(read=reader) if form.files[0].name in files else form for form in catalogue.FORMS[name]]
    monkeypatch.setitem(catalogue.FORMS, name, tuple(forms))
    put(root, name, files)
    return x, y


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_sheets_are_a_form_of_the_data_set(tmp_path, monkeypatch, name):
    x, y = published(monkeypatch, tmp_path, name)
    loaded = load(name, tmp_path, download=False)
    equal(loaded.train, x["train"].numpy(), y["train"].tolist())
    equal(loaded.test, x["test"].numpy(), y["test"].tolist())


@pytest.mark.parametrize("file", ["train_07.webp", "test_labels.npy"])
def test_other_pixels_and_labels_are_refused(tmp_path, monkeypatch, file):
    published(monkeypatch, tmp_path, "cifar10")
    path = tmp_path / "cifar10" / file
    if path.suffix == ".webp":
        path.write_bytes(sheet(images(2), 2))
    else:
        np.save(path, np.zeros(20, dtype=np.uint8))
    with pytest.raises(ValueError, match=rf"{file[:4]}.* have md5 \w+, expected \w+\. Replace these files"):
        load("cifar10", tmp_path, download=False)


def test_labels_are_never_unpickled(tmp_path, monkeypatch):
    published(monkeypatch, tmp_path, "cifar10")
    np.save(tmp_path / "cifar10" / "train_labels.npy", np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle"):
        load("cifar10", tmp_path, download=False)
