"""Press Ctrl-C at a random time in each call that hooks or changes a model, and count what it leaves behind.

    python benchmarks/interrupt.py --trials 700 --output results/interrupt.csv

A timer calls the SIGINT handler at a time drawn evenly over the length of the call. The model must then equal the model
before the call or after a complete one: hooks, modes, requires_grad, attributes, parameters, torch.compile's stance.
The traceback stays alive meanwhile, as at a prompt, so that no garbage collection cleans up.
"""

import argparse
import random
import signal
import time
from pathlib import Path

import torch
import torch._dynamo.eval_frame as dynamo
from csv_rows import append
from torch import nn

import fastff

X = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))


def dense():
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(2)])


def trees():
    return nn.Sequential(*[fastff.FFF(8, 8, depth=3, leaf_width=2) for _ in range(2)])


def last_step(model):
    """A recipe whose next step is its last: it rebalances, hardens the trees and removes the noise."""
    recipe = fastff.Recipe(model, X, steps=1, min_share=0.8)
    return model, lambda model: recipe.step()


def operated(**options):
    """A model after surgery, ready to be distilled."""
    teacher, model = dense(), dense()
    report = fastff.replace_(model, depth=2, init="data", data=X)
    if "teacher" in options:
        options["teacher"] = teacher
    return model, lambda model: fastff.distill_(model, report, X, steps=2, progress=False, **options)


CALLS = {  # a model, and the call to interrupt
    "usage": lambda: (trees(), lambda m: fastff.usage(m, X)),
    "initialize_tree_": lambda: (trees(), lambda m: fastff.initialize_tree_(m, X)),
    "rebalance_": lambda: (trees(), lambda m: fastff.rebalance_(m, X, min_share=0.8)),
    "Recipe": lambda: (trees(), lambda m: fastff.Recipe(m, X, steps=9, sharing=0.5, temperature=(2.0, 3.0))),
    "Recipe.step": lambda: last_step(trees()),
    "replace_": lambda: (dense(), lambda m: fastff.replace_(m, depth=2, init="data", data=X)),
    "distill_": operated,
    "distill_, teacher": lambda: operated(teacher=True),
}


def state(model):
    """Everything a call may leave behind, by name."""
    found = {"stance": dynamo._stance.stance, "gradients": torch.is_grad_enabled()}
    found |= {"handler": signal.getsignal(signal.SIGINT), "fast path": torch.backends.mha.get_fastpath_enabled()}
    for name, m in model.named_modules():
        found[f"{name}: mode"] = type(m), m.training, "forward" in vars(m)
        found[f"{name}: hooks"] = len(m._forward_pre_hooks), len(m._forward_hooks)
        found[f"{name}: settings"] = [getattr(m, key, None) for key in ("decision", "transposition", "sharing")]
    found |= {f"{name}: requires_grad": p.requires_grad for name, p in model.named_parameters()}
    return found | {f"{name}: value": value.tolist() for name, value in model.state_dict().items()}


def trial(make, after):
    """Interrupt a call, `after` seconds from its start if given; returns the state before and after."""
    torch.manual_seed(0)
    torch.set_grad_enabled(True)  # leftovers of one trial do not count in the next
    model, call = make()
    model.train()
    for p in list(model.parameters())[::3]:
        p.requires_grad_(False)
    before, raised = state(model), None
    try:
        signal.setitimer(signal.ITIMER_REAL, after)
        call(model)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt as error:
        raised = error  # and with it every frame
    return before, state(model), raised is not None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=700, help="trials of each call")
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=list(CALLS))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    signal.signal(signal.SIGALRM, lambda _, frame: signal.getsignal(signal.SIGINT)(signal.SIGINT, frame))
    rows = []
    for name in options.calls:
        make, times = CALLS[name], []
        for _ in range(5):
            torch.manual_seed(0)
            model, call = make()
            start = time.perf_counter()
            call(model)
            times.append(time.perf_counter() - start)
        _, whole, _ = trial(make, 0)
        row = {"call": name, "milliseconds": round(1e3 * sorted(times)[2], 2), "interrupted": 0, "left": 0, "what": ""}
        for _ in range(options.trials):
            before, after, interrupted = trial(make, random.uniform(1e-6, sorted(times)[2]))
            row["interrupted"] += interrupted
            if after not in (before, whole):
                kinds = {key.split(": ")[-1] for key in after if after[key] != before.get(key)}
                row["left"] += 1
                row["what"] = " ".join(sorted({*row["what"].split(), *kinds}))
        print(row)
        rows.append(row)
    print(f"{sum(r['left'] for r in rows)} of {sum(r['interrupted'] for r in rows)} left something behind")
    if options.output:
        options.output.unlink(missing_ok=True)  # the rows of one run belong together
        append(options.output, rows)


if __name__ == "__main__":
    main()
