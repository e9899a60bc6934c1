"""A whole Llama, its feedforward blocks replaced by trees, beside the dense one: eager, as a CUDA graph, and compiled.

The tree is even (built on random tokens), or sends all tokens to one leaf. Outputs are checked against the model in
float64: the error may be twice that of plain torch operations, called one by one.
"""

import argparse
import copy
import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from large_cells import Cell, Row, finish, lines, number, row
from torch import Tensor, nn

import fastff
from fastff.backends import backend
from fastff.bench import EagerRunner, Result
from fastff.bench.measuring import own_stream
from fastff.bench.runners import GraphRunner, QueueRunner, Runner

TOKENS = {(1, 1): 1.3, (16, 1): 1.3, (1, 512): 1.3, (16, 512): 1.9}  # sequences, tokens each: the speed-up to reach
MODES = ("eager", "graph", "compile", "reduce-overhead")
MODELS = ("FF", "FFF even", "FFF one leaf")
_CHECKED, _LEAST_INPUTS = 64, 4  # tokens whose outputs are checked, at least; inputs that take turns
_VOCABULARY = 32000


def cells(options: argparse.Namespace) -> list[Cell]:
    found = []
    for tokens, target in TOKENS.items():
        for mode in MODES:
            if mode == "graph" and options.device != "cuda":
                continue
            title = f"Llama, {tokens[0]} x {tokens[1]} tokens, {mode}"
            found.append(Cell(title, partial(measure, title, tokens, mode, target, options)))
    return found


class Models:
    """The dense model, the one with trees, and the trees that it can have."""

    def __init__(self, device: str, tiny: bool) -> None:
        from transformers import LlamaConfig, LlamaModel

        torch.manual_seed(0)
        sizes = (64, 128, 2, 4, 2) if tiny else (2048, 8192, 8, 16, 5)
        hidden, intermediate, layers, heads, self.depth = sizes
        config = LlamaConfig(
            vocab_size=_VOCABULARY // (100 if tiny else 1),
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
        )
        self.vocabulary, self.device, self.hidden = config.vocab_size, device, hidden
        self.dense = LlamaModel(config).to(device, torch.bfloat16).eval().requires_grad_(False)
        self.trees = copy.deepcopy(self.dense)
        fastff.replace_(self.trees, depth=self.depth)
        self.layers = [module for module in self.trees.modules() if isinstance(module, fastff.FFF)]
        self.leaf_width = self.layers[0].leaf_width
        self.answers: dict[tuple[Any, ...], tuple[Tensor, float]] = {}  # right outputs, and the errors allowed
        self.nodes: dict[str, list[tuple[Tensor, Tensor]]] = {}
        fastff.initialize_tree_(self.trees, self.ids(16, 64 if tiny else 512, 0))
        self.nodes["even"] = self._nodes()
        for layer in self.layers:
            layer.node_weight.data.zero_()
            layer.node_bias.data.fill_(-1)
        self.nodes["one leaf"] = self._nodes()

    def _nodes(self) -> list[tuple[Tensor, Tensor]]:
        return [(layer.node_weight.detach().clone(), layer.node_bias.detach().clone()) for layer in self.layers]

    def ids(self, sequences: int, tokens: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.vocabulary, (sequences, tokens), generator=generator).to(self.device)

    def set(self, spread: str) -> None:
        """Give all layers these nodes, in place: graphs and compiled code read them where they are."""
        for layer, (weight, bias) in zip(self.layers, self.nodes[spread], strict=True):
            layer.node_weight.data.copy_(weight)
            layer.node_bias.data.copy_(bias)


@functools.cache
def models_on(device: str, tiny: bool) -> Models:
    with torch.inference_mode(False):
        return Models(device, tiny)


class Spread:
    """A runner of the model with trees, which gets its nodes before each sample."""

    def __init__(self, runner: Runner, set_nodes: Callable[[], None]) -> None:
        self.runner, self.set_nodes = runner, set_nodes

    def __len__(self) -> int:
        return len(self.runner)

    def output(self, i: int) -> Tensor:
        self.set_nodes()
        return self.runner.output(i)

    def sample(self, calls: int) -> float:
        self.set_nodes()
        return self.runner.sample(calls)


def measure(title: str, tokens: tuple[int, int], mode: str, target: float, options: argparse.Namespace) -> list[Row]:
    sequences, each = (min(n, 2 if i == 0 else 5) for i, n in enumerate(tokens)) if options.tiny else tokens
    models = models_on(options.device, options.tiny)
    inputs = max(_LEAST_INPUTS, -(-_CHECKED // (sequences * each)))
    ids = [models.ids(sequences, each, 1 + i) for i in range(inputs)]
    results, runners = [], {}
    with own_stream(options.device), torch.no_grad():
        torch.compiler.reset()
        made = {name: runner_of(model, ids, mode, options.device) for name, model in _models(models)}
        for name in MODELS:
            result = Result(name, "")
            results.append(result)
            runner = made["FF"] if name == "FF" else made["FFF"]
            if name != "FF":
                runner = Spread(runner, partial(models.set, name.removeprefix("FFF ")))
            check(result, runner, models, ids)
            if result.status == "ok":
                runners[name] = runner
        finish(results, runners, options)
    us = {result.model: result.times.median for result in results if result.times}
    size = {"in": models.hidden, "out": models.hidden, "leaf_width": models.leaf_width, "depth": models.depth}
    size |= {"activation": "swiglu", "batch": sequences, "tokens": each, "dtype": "bfloat16"}
    rows = []
    for result in results:
        own, dense = us.get(result.model), us.get("FF")
        more = {"mode": mode, "speedup_dense": own and dense and dense / own}
        more |= {"spread": result.model.removeprefix("FFF "), "target_speedup": target} if result.model != "FF" else {}
        rows.append(row("llama", title, size, result, **more) | {"model": result.model.split()[0]})
    return rows


def _models(models: Models) -> list[tuple[str, nn.Module]]:
    models.set("even")
    return [("FF", models.dense), ("FFF", models.trees)]


def runner_of(model: nn.Module, ids: Sequence[Tensor], mode: str, device: str) -> Runner:
    if mode in ("compile", "reduce-overhead"):
        model = torch.compile(model, mode="default" if mode == "compile" else mode, dynamic=False)

    def call(x: Tensor) -> Tensor:
        y: Tensor = model(x).last_hidden_state
        return y

    if device != "cuda":
        return EagerRunner(call, ids, "auto")
    if mode == "graph":
        size = max(2**28, 4 * torch.cuda.get_device_properties().L2_cache_size)
        return GraphRunner(call, ids, "auto", torch.empty(size, dtype=torch.uint8, device="cuda"))
    for x in ids[:3]:  # compile, and record the graphs
        call(x)
    return QueueRunner(call, ids, "auto")


def check(result: Result, runner: Runner, models: Models, ids: Sequence[Tensor]) -> None:
    """Whether the output is right; the result says so."""
    checked = ids[: max(1, -(-_CHECKED // ids[0].numel()))]
    key = result.model, *ids[0].shape
    if key not in models.answers:
        models.answers[key] = _answer(result.model, models, checked)
    right, result.allowed = models.answers[key]
    result.error = _error(torch.cat([runner.output(i).clone() for i in range(len(checked))]), right)
    if not result.error <= result.allowed:
        result.status, result.note = "wrong", f"relative error {result.error:.2g}, allowed {result.allowed:.2g}"


def _answer(name: str, models: Models, ids: Sequence[Tensor]) -> tuple[Tensor, float]:
    """The output in float64, and the error that is allowed: twice that of plain torch operations."""
    model: Any = models.dense if name == "FF" else models.trees
    if name != "FF":
        models.set(name.removeprefix("FFF "))
    with backend("aten"):
        plain = torch.cat([model(x).last_hidden_state for x in ids])
        exact = copy.deepcopy(model).double()
        right = torch.cat([exact(x).last_hidden_state for x in ids])
    return right, 2 * _error(plain, right)


def _error(value: Tensor, right: Tensor) -> float:
    return ((value.double() - right).norm() / right.norm()).item()


def summary(rows: Sequence[Row]) -> str:
    shown, misses = [], []
    for cell in dict.fromkeys(each["cell"] for each in rows):
        by = {each["spread"]: each for each in rows if each["cell"] == cell}
        ms = [
            by[name]["median_us"] and f"{float(by[name]['median_us']) / 1e3:.3f}" for name in ("", "even", "one leaf")
        ]
        ratios = [by[name]["speedup_dense"] for name in ("even", "one leaf")]
        shown.append([cell, *ms, *map(number, ratios), number(by["even"]["target_speedup"])])
        if not ratios[0] or float(ratios[0]) < float(by["even"]["target_speedup"]):
            misses.append(cell)
        misses += [f"{cell}, {name}: {each['status']} {each['note']}" for name, each in by.items() if _failed(each)]
    table = lines(shown, ["milliseconds", "dense", "even", "one leaf", "over dense", "one leaf's", "target"])
    return "\n".join([table, f"{len(misses)} misses", *misses])


def _failed(each: Row) -> bool:
    return each["status"] != "ok"
