import json
import re

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
import numpy as np
import torch
from torch import nn

import fastff
from cli_helpers import fastff_


def read(path):
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"), re.S)[1])


@pytest.fixture
def files(tmp_path):
    """A layer's state dict and a data set for it."""
    torch.manual_seed(0)
    layer = fastff.FFF(6, 3, depth=2, leaf_width=4, activation="gelu").eval()
    x, y = torch.randn(50, 6), torch.randint(3, (50,))
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    np.savez(tmp_path / "data.npz", x=x.numpy(), y=y.numpy())
    return tmp_path, layer, x, y


def run(folder, model, data, *options):
    output = folder / "page.html"
    done = fastff_(["explore", str(folder / model), "--data", str(folder / data), "--output", str(output), *options])
    return done, output


def test_a_layer_and_arrays(files):
    folder, layer, x, y = files
    options = ["--activation", "gelu", "--image", "2x3", "--class-names", "a,b,c", "--title", "T"]
    done, output = run(folder, "layer.pt", "data.npz", *options)
    assert done.exit_code == 0, done.output
    assert f"wrote {output}" in done.output.replace("\n", "")
    page = read(output)
    assert page["count"][3:] == torch.bincount(layer.route(x), minlength=4).tolist()
    assert page["accuracy"][0] == pytest.approx((layer(x).argmax(1) == y).float().mean().item(), rel=1e-4)
    assert page["loss"][0] == pytest.approx(nn.functional.cross_entropy(layer(x), y).item(), rel=1e-4)
    assert (page["content"], page["title"], page["classes"]["2"]) == ("image", "T", "c")


def test_csv_with_names(files):
    folder, layer, x, y = files
    names = ["ant", "bee", "cow"]
    lines = ["f0,f1,kind,f2,f3,f4,f5"]
    for row, label in zip(x.tolist(), y.tolist(), strict=True):
        lines.append(",".join(map(repr, row[:2])) + f",{names[label]}," + ",".join(map(repr, row[2:])))
    (folder / "data.csv").write_text("\n".join(lines))
    done, output = run(folder, "layer.pt", "data.csv", "--activation", "gelu", "--target", "kind")
    assert done.exit_code == 0, done.output
    page = read(output)
    assert page["features"] == [f"f{i}" for i in range(6)]
    assert page["classes"] == {"0": "ant", "1": "bee", "2": "cow"}
    assert page["accuracy"][0] == pytest.approx((layer(x).argmax(1) == y).float().mean().item(), rel=1e-4)


def test_targets_of_a_csv_may_be_real(files):
    folder, *_ = files
    rows = [f"{i},1,2,3,4,5,{i / 4}" for i in range(10)]
    (folder / "data.csv").write_text("\n".join(["a,b,c,d,e,f,t", *rows]))
    done, output = run(folder, "layer.pt", "data.csv", "--target", "t")
    assert done.exit_code == 0, done.output
    assert read(output)["target"][0] == pytest.approx(4.5 / 4)


def test_a_saved_surgery_needs_its_code(files, monkeypatch):
    folder, *_ = files
    block = "nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 6))"
    code = f"from torch import nn\ndef make():\n    return nn.Sequential({block})\n"
    (folder / "own_model.py").write_text(code)
    monkeypatch.chdir(folder)
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 6)))
    fastff.replace_(model, depth=2, leaf_width=8)
    fastff.save(model, folder / "saved")
    done, output = run(folder, "saved", "data.npz")
    assert done.exit_code == 2
    assert "--factory" in done.output
    done, output = run(folder, "saved", "data.npz", "--factory", "own_model:make")
    assert done.exit_code == 0, done.output
    assert read(output)["depth"] == 2


def test_pickles_need_trust(files):
    pytest.importorskip("sklearn")
    import joblib

    from fastff.integrations.sklearn import FFFClassifier

    folder, layer, x, y = files
    model = FFFClassifier(depth=1, leaf_width=2, epochs=1, random_state=0).fit(x.numpy(), y.numpy())
    joblib.dump(model, folder / "model.joblib")
    torch.save(nn.Sequential(layer), folder / "whole.pt")
    for name in ("model.joblib", "whole.pt"):
        done, output = run(folder, name, "data.npz")
        assert done.exit_code == 2
        assert "--trust" in done.output
        assert not output.exists()
    done, output = run(folder, "model.joblib", "data.npz", "--trust")
    assert done.exit_code == 0, done.output
    assert read(output)["count"][1:] == np.bincount(model.apply(x.numpy()), minlength=2).tolist()
    done, output = run(folder, "whole.pt", "data.npz", "--trust")
    assert done.exit_code == 0, done.output
    assert read(output)["title"] == "Regions of 0"


@pytest.mark.parametrize(
    ("model", "data", "options", "message"),
    [
        ("none.pt", "data.npz", [], "MODEL must be a file"),
        ("layer.pt", "none.npz", [], "--data must be a file"),
        ("layer.pt", "layer.pt", ["--target", "q"], "inputs called x"),
        ("layer.pt", "data.npz", ["--target", "q"], "--target must be one of"),
        ("layer.pt", "data.npz", ["--image", "2by3"], "--image is a size"),
        ("layer.pt", "data.npz", ["--image", "5x5"], "of 6 numbers"),
        ("layer.pt", "bad.csv", [], "line 3: 1 fields"),
        ("layer.pt", "words.csv", [], "Name the column of labels by --target"),
        ("data.npz", "data.npz", [], "no state dict"),
        ("nested.pt", "data.npz", [], "--factory"),
        ("layer.pt", "data.npz", ["--factory", "nowhere:make"], "package.module:function"),
        ("layer.pt", "data.npz", ["--layer", "mlp"], "layer must be one of"),
    ],
)
def test_errors_name_the_remedy_and_write_nothing(files, model, data, options, message):
    folder, layer, *_ = files
    (folder / "bad.csv").write_text("a,b\n1,2\n3\n")
    (folder / "words.csv").write_text("a,b\n1,x\n")
    torch.save(nn.Sequential(layer).state_dict(), folder / "nested.pt")
    if message == "no state dict":
        options = ["--title", "x"]
    done, output = run(folder, model, data, *options)
    assert done.exit_code == 2, done.output
    flat = re.sub(r"[\s│]+", " ", done.output)
    assert message in flat
    assert not output.exists()
