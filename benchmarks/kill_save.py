"""Kill saves at random moments, and let two processes save at once: the directory must always load.

Three models that differ in weights and in the depth of their trees are saved over each other. A forked process saves
while this one kills it with SIGKILL, after a delay drawn from the whole duration of a save; or two processes save into
one directory at the same time. After each trial the directory must load and be one of the models, bit for bit.

    python benchmarks/kill_save.py                                    # fastff.save
    python benchmarks/kill_save.py --pretrained --kills 500 --pairs 100   # save_pretrained

The exit code is 1 if a directory did not load, or held a mixture, or if temporary files stayed after a last save.
"""

import argparse
import copy
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from csv_rows import about, append
from torch import Tensor, nn

import fastff
from fastff.progress import progress

State = dict[str, Tensor]
Save, Load = Callable[[int, Path], None], Callable[[Path], State]


def plain() -> tuple[list[State], Save, Load]:
    """Three operated encoders, fastff.save, and fastff.load_ into a fresh one."""
    layer = nn.TransformerEncoderLayer(16, 2, 48, batch_first=True)
    fresh = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    models = _operated(fresh)

    def load(folder: Path) -> State:
        model = copy.deepcopy(fresh)
        fastff.load_(model, folder)
        return model.state_dict()

    return [m.state_dict() for m in models], lambda i, folder: fastff.save(models[i], folder), load


def pretrained() -> tuple[list[State], Save, Load]:
    """Three operated BERTs, save_pretrained and from_pretrained."""
    from transformers import BertConfig, BertForSequenceClassification

    from fastff.integrations.transformers import from_pretrained, save_pretrained

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    models = _operated(BertForSequenceClassification(BertConfig(vocab_size=50, max_position_embeddings=40, **sizes)))
    states = [m.state_dict() for m in models]
    return states, lambda i, folder: save_pretrained(models[i], folder), lambda f: from_pretrained(f).state_dict()


def _operated(fresh: nn.Module) -> list[Any]:
    models = [copy.deepcopy(fresh) for _ in range(3)]
    for depth, model in enumerate(models, 1):
        fastff.replace_(model, depth=depth, init="random")
        for tensor in model.parameters():
            nn.init.normal_(tensor)
    return models


def start(save: Save, number: int, folder: Path) -> tuple[int, int]:
    """A forked process that saves as soon as a byte is written to the pipe that is returned beside its id."""
    read, write = os.pipe()
    process = os.fork()
    if process:
        os.close(read)
        return process, write
    code = 1
    try:
        os.close(write)
        os.read(read, 1)
        save(number, folder)
        code = 0
    finally:
        os._exit(code)


def go(pipe: int) -> None:
    os.write(pipe, b"x")
    os.close(pipe)


def found(states: list[State], load: Load, folder: Path) -> int | None:
    """The number of the model in a directory; None if it does not load or holds a mixture."""
    try:
        state = load(folder)
    except (OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return None
    for number, other in enumerate(states):
        if state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state):
            return number
    return None


def kills(states: list[State], save: Save, load: Load, folder: Path, trials: Iterable[int]) -> tuple[Counter, float]:
    """Outcomes of killed saves, and the milliseconds of a complete save."""
    times = []
    for number in (0, 1, 2, 0, 1, 2, 0):
        process, pipe = start(save, number, folder)
        begin = time.perf_counter()
        go(pipe)
        os.waitpid(process, 0)
        times.append(time.perf_counter() - begin)
    duration, old, outcomes = statistics.median(times), 0, Counter()
    for _ in trials:
        new = (old + 1) % 3
        process, pipe = start(save, new, folder)
        go(pipe)
        time.sleep(random.uniform(0, 1.2 * duration))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        now = found(states, load, folder)
        outcomes["old" if now == old else "new" if now == new else "broken"] += 1
        if now not in (old, new):
            save(old, folder)
        else:
            old = now
    return outcomes, 1000 * duration


def pairs(states: list[State], save: Save, load: Load, folder: Path, trials: Iterable[int]) -> Counter:
    """Outcomes of two processes that save two models at once. Both end, so the old save is gone."""
    outcomes: Counter = Counter()
    for i in trials:
        save(i % 3, folder)
        new = [(i + 1) % 3, (i + 2) % 3]
        both = [start(save, number, folder) for number in new]
        for _, pipe in both:
            go(pipe)
        codes = [os.waitpid(process, 0)[1] for process, _ in both]
        outcomes["new" if not any(codes) and found(states, load, folder) in new else "broken"] += 1
    return outcomes


def counted(what: str, count: int) -> Iterator[int]:
    """range(count) with a progress bar."""
    with progress(what, count) as advance:
        for i in range(count):
            yield i
            advance()


def main() -> None:
    formats = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=formats)
    parser.add_argument("--pretrained", action="store_true", help="save_pretrained of the transformers integration")
    parser.add_argument("--kills", type=int, default=2000, help="saves that are killed")
    parser.add_argument("--pairs", type=int, default=500, help="trials with two processes that save at once")
    parser.add_argument("--seed", type=int, default=0, help="seed of the delays")
    parser.add_argument("--commit", default="", help="commit to store in the rows outside of a checkout")
    parser.add_argument("--output", type=Path, help="append the rows to this CSV file")
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
    random.seed(options.seed)
    states, save, load = pretrained() if options.pretrained else plain()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "save"
        save(0, folder)
        files = sorted(path.name for path in folder.iterdir())
        killed, duration = kills(states, save, load, folder, counted("kills", options.kills))
        paired = pairs(states, save, load, folder, counted("pairs", options.pairs))
        save(0, folder)
        left = sorted(path.name for path in folder.iterdir())
    what = "save_pretrained" if options.pretrained else "save"
    for trial, outcomes in (("kill", killed), ("pair", paired)):
        row = {"what": what, "trial": trial, "trials": outcomes.total()}
        row |= {name: outcomes[name] for name in ("old", "new", "broken")}
        row |= {"left_behind": len(left) - len(files), "save_ms": round(duration, 2)}
        rows.append(row | about("cpu", "python benchmarks/kill_save.py", options.commit))
        print(", ".join(f"{key} {value}" for key, value in row.items()))
    if options.output:
        append(options.output, rows)
    sys.exit(int(left != files or any(row["broken"] for row in rows)))


if __name__ == "__main__":
    main()
