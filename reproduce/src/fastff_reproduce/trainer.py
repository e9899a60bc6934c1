"""Train all seeds of a case at once, and measure M_A, G_A and ETT by the hard pass.

M_A is the best accuracy on the training data, G_A that on the test data at the last epoch of best validation accuracy,
ETT the epochs until that validation accuracy was first seen. Nine tenths of the training file train and one tenth
validates, drawn anew for each seed. Everything that is random in an epoch follows from the seeds and the epoch's
number: a training that goes on from a checkpoint comes to the same numbers as one that was never stopped.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastff.baselines import MoE, importance_loss, load_loss
from fastff.layer import FFF
from fastff.training.boundaries import shift_biases_
from fastff.training.initialize import copy_first_leaf_, initialize_tree_
from fastff.training.recipe import Recipe

from . import data, inputs, scoring, teacher
from .augment import augment
from .build import build, is_transformer
from .divergence import Diverged, Watch, remedy
from .ensemble import Ensemble, Measure, Optimizer, Recorded
from .resume import Damaged, resume, save
from .runs import Case, Result, name_of
from .scoring import accuracy
from .settings import Settings
from .teacher import Teachers
from .threads import one_thread
from .track import Track

EVALUATION_STEPS = 100  # epochs shorter than this are evaluated every few
CHECKPOINT_SECONDS = 30.0
TREE_SAMPLES = 2048  # of the validation part, for the entropies of nodes and the use of leaves in each epoch
LOGITS = 1 << 27  # of nodes at once, for rebalancing: half a gigabyte
FIT_IMAGES = 2048  # to fit the trees of a transformer to its dense twin
IMPORTANCE, LOAD = 0.1, 0.1  # of the MoE, as in the paper

Report = Callable[[int, int, str], None]
_load = functools.lru_cache(maxsize=1)(data.load)  # the groups of a data set follow each other


def train(
    cases: Sequence[Case],
    *,
    device: str,
    root: Path | None,
    checkpoint: Path | None = None,
    report: Report | None = None,
) -> list[Result]:
    """The results of cases that differ in the seed alone, trained together.

    If `checkpoint` exists the training goes on from there; it is written now and then, and left for the caller to
    remove. report(epoch, most, text) is called after every evaluation. `Diverged` is raised at the end if some did; it
    has the results of the others.
    """
    if len({case.group for case in cases}) != 1:
        raise ValueError("cases that train together must differ in the seed alone.")
    with ExitStack() as stack:
        stack.enter_context(
            torch.random.fork_rng(range(torch.cuda.device_count()) if device.startswith("cuda") else [])
        )
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision(Settings(**dict(cases[0].settings)).precision)
        if device.startswith("cuda"):
            stack.enter_context(one_thread())
        dataset = _load(cases[0].dataset, root)
        teachers = _teachers(cases, device, root, checkpoint, report) if teacher.is_taught(cases[0]) else None
        training = Training(cases, torch.device(device), dataset, teachers)
        if checkpoint is not None and checkpoint.exists():
            resume(training, checkpoint)
        saved = time.monotonic()
        while not training.finished:
            training.advance()
            if report is not None:
                report(training.epoch, training.most_epochs, training.describe())
            if checkpoint is not None and time.monotonic() - saved > CHECKPOINT_SECONDS:
                save(training.state_dict(), checkpoint)
                saved = time.monotonic()
        if checkpoint is not None and training.generalised is not None and cases[0].model == "ViT-FF":
            for i, case in enumerate(cases):
                path = teacher.path_of(checkpoint.parent, case)
                if i not in training.watch.reasons and not path.exists():  # or it has taught already
                    save(training.ensemble.member(i, training.generalised.state).state_dict(), path)
        results = training.results()
        if training.watch.reasons:
            reasons = {cases[i]: f"{reason}. {remedy(cases[i])}" for i, reason in training.watch.reasons.items()}
            raise Diverged(reasons, results)
        return results


def _teachers(
    cases: Sequence[Case], device: str, root: Path | None, checkpoint: Path | None, report: Report | None
) -> Teachers:
    """The dense transformers of these cases: from their files beside the checkpoint, or trained here and now."""
    twins = [teacher.dense(case) for case in cases]
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) if checkpoint is None else checkpoint.parent
        if missing := [twin for twin in twins if not teacher.path_of(folder, twin).exists()]:
            own = folder / f"{name_of(missing)}.pt"
            try:
                train(missing, device=device, root=root, checkpoint=own, report=report)
            except Diverged as error:
                own.unlink(missing_ok=True)
                raise Diverged(teacher.blamed(cases, error.reasons)) from None
            own.unlink(missing_ok=True)
        dataset = _load(cases[0].dataset, root)
        image = tuple(dataset.train.x.shape[1:])
        return Teachers([teacher.load(folder, twin, image, dataset.classes, device) for twin in twins])


class Training:
    """All seeds of a case, from the first epoch to the results."""

    def __init__(
        self, cases: Sequence[Case], device: torch.device, dataset: data.Dataset, teachers: Teachers | None = None
    ) -> None:
        self.cases, self.device, self.teachers = cases, device, teachers
        self.settings = settings = Settings(**dict(cases[0].settings))
        self.seeds = [case.seed for case in cases]
        self.image = dataset.train.x.shape[1:]
        self.x, self.y = inputs.prepare(dataset.train, dataset, device, cases[0])
        self.test = inputs.prepare(dataset.test, dataset, device, cases[0])
        if settings.standardise:
            inputs.standardise(self.x, self.test[0], by_pixel=settings.by_pixel)
        orders = [torch.randperm(len(self.x), generator=_generator(seed)) for seed in self.seeds]
        validation = len(self.x) // 10
        self.validation = torch.stack([order[:validation] for order in orders]).to(device)
        self.training = torch.stack([order[validation:] for order in orders]).to(device)
        models = [self._model(i, dataset.classes) for i in range(len(cases))]
        self.inference_size = max(getattr(module, "inference_size", 0) for module in models[0].modules())

        self.batch = min(settings.batch, self.training.shape[1])
        self.steps = self.training.shape[1] // self.batch
        self.most_epochs = math.ceil(settings.steps / self.steps) if settings.steps else settings.epochs
        self.patience = settings.patience or math.ceil(settings.patience_steps / self.steps)
        self.every = max(1, round(EVALUATION_STEPS / self.steps))
        self.ensemble = Ensemble(models, large=is_transformer(cases[0]))
        self.optimizer = Optimizer(self.ensemble, settings.optimizer, weight_decay=settings.weight_decay)
        self.mean = self.ensemble.flat.clone() if settings.averaging else None
        self.rates = [settings.rate] * len(cases)
        self.recipe = _recipe(self.ensemble.model, settings, self.most_epochs)
        members = len(cases)
        goal = cases[0].goal
        watched = settings.plateau_of if settings.plateau else None
        self.memorised = Track(members, None) if goal != "G_A" or watched == "training" else None
        self.generalised = Track(members, self.ensemble) if goal != "M_A" or watched == "validation" else None
        self.epoch, self.seconds = 0, 0.0
        self.history: list[dict[str, list[Any]]] = [{} for _ in cases]
        self.watch = Watch(members, device)

        self._order = torch.zeros(members, self.steps, self.batch, dtype=torch.int64, device=device)
        self._next: Tensor | None = None  # what _order will be
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        before = {name: tensor.clone() for name, tensor in self.ensemble.state_dict().items()}
        self._step = Recorded(self._one_step, device, lambda: self._restore(before))

    def _model(self, i: int, classes: int) -> nn.Module:
        case, settings = self.cases[i], self.settings
        torch.manual_seed(case.seed)
        if self.teachers is not None:
            model = self.teachers.student(i, case, self.x[self.training[i][:FIT_IMAGES]])
        else:
            model = build(case, tuple(self.x.shape[1:]), classes).to(self.device)
        trees = [module for module in model.modules() if isinstance(module, FFF)]
        if self.teachers is None:
            for layer in trees if settings.sharing else ():
                copy_first_leaf_(layer)
            if trees and settings.balanced:
                initialize_tree_(model, list(self.x[self.training[i]].split(256)), logit_std=settings.logit_std)
        for layer in trees if settings.frozen else ():
            layer.freeze_tree_()
        return model

    def _restore(self, state: dict[str, Tensor]) -> None:
        self.ensemble.load_state_dict(state)
        self.optimizer.reset()
        if self.mean is not None:
            self.mean.copy_(self.ensemble.flat)
        self.watch.reset()
        self._at.zero_()

    def _one_step(self) -> None:
        index = self._order.index_select(1, self._at).squeeze(1)  # (members, batch)
        x, y = self.x[index], self.y[index]
        if self.settings.augment or self.settings.mirror:
            images = x.reshape(-1, *self.image)
            x = augment(images, strength=self.settings.augment, vertical=not self.settings.mirror).view_as(x)
        if self.teachers is not None:
            y = self.teachers.answers(x)
        if self.settings.input_dropout:
            x = F.dropout(x, self.settings.input_dropout)
        losses = self.ensemble.losses(self._loss, x, y)
        self.optimizer.step(torch.autograd.grad(losses.sum(), self.optimizer.parameters))
        self.watch.note(losses, self.optimizer.count)
        if self.mean is not None:
            # At first a mean of fewer steps, so that it soon leaves the start.
            kept = ((1 + self.optimizer.count) / (10 + self.optimizer.count)).clamp(max=self.settings.averaging)
            self.mean.lerp_(self.ensemble.flat, 1 - kept)
        self._at.add_(1).remainder_(self.steps)  # an epoch may have fewer steps than are called before a recording

    def _loss(self, model: nn.Module, output: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(output, target)
        if self.recipe is not None:
            loss = loss + self.recipe.loss()
        if isinstance(model, MoE):
            loss = loss + IMPORTANCE * importance_loss(model) + LOAD * load_loss(model)
        return loss

    @property
    def finished(self) -> bool:
        goal = self.cases[0].goal
        tracks = [self.memorised if goal != "G_A" else None, self.generalised if goal != "M_A" else None]
        return self.epoch >= self.most_epochs or all(all(track.done) for track in tracks if track is not None)

    def advance(self) -> None:
        """Train to the next evaluation, and evaluate."""
        start = time.monotonic()
        for _ in range(min(self.every, self.most_epochs - self.epoch)):
            self._train_epoch()
        self._end(self.find_diverged())
        if self.mean is not None:
            self._rebalance()  # what trains on; the means are, where they are evaluated
        with self._averaged():
            self._evaluate()
            diverged = self.find_diverged()
        self._end(diverged)
        self.seconds += time.monotonic() - start

    def find_diverged(self, whole: bool = False) -> list[int]:
        """The members that have diverged since this was last asked; `whole`: by all of their history, not its end."""
        tensors = {"a weight": [*self.ensemble.parameters.values()], "the optimizer's state": self.optimizer.moments}
        if self.mean is not None:
            tensors["a weight"].append(self.mean)
        if self.generalised is not None and self.generalised.state is not None:
            tensors["a weight"] += self.generalised.state.values()
        rows = [{name: values if whole else values[-1] for name, values in row.items()} for row in self.history]
        return self.watch.find(self.epoch, self.steps, {name: some for name, some in tensors.items() if some}, rows)

    @torch.no_grad()
    def _end(self, members: list[int]) -> None:
        """Let members rest at 0: what is not finite is gone, and nothing waits for them."""
        means = [] if self.mean is None else [self.mean]
        for i in members:
            for tensor in (*self.ensemble.parameters.values(), *self.optimizer.moments, *means):
                tensor[i].zero_()
            self.rates[i] = 0.0
            for track in (self.memorised, self.generalised):
                if track is not None:
                    track.done[i] = True

    def _train_epoch(self) -> None:
        share = self.epoch / self.most_epochs
        factor = (1 + math.cos(math.pi * share)) / 2 if self.settings.schedule == "cosine" else 1.0
        self.optimizer.rate.copy_(torch.tensor([factor * rate for rate in self.rates]))
        self._set_temperature(self.recipe.temperature if self.recipe is not None else 1.0)
        order = self._next if self._next is not None else self._draw()
        self._order.copy_(self.training.gather(1, order.to(self.device)).view_as(self._order))
        torch.manual_seed(_generator(self.seeds[0], self.epoch).initial_seed())
        for _ in range(self.steps):
            self._step()
        self.epoch += 1
        if self.recipe is not None:
            self.recipe.step()
        self._next = self._draw() if self.device.type == "cuda" else None  # while the device works on these steps

    def _draw(self) -> Tensor:
        """The samples of the coming epoch, in order: (members, steps * batch)."""
        count = self.steps * self.batch
        orders = [torch.randperm(self.training.shape[1], generator=_generator(s, self.epoch)) for s in self.seeds]
        return torch.stack([order[:count] for order in orders])

    def _set_temperature(self, value: float) -> None:
        for name, buffer in self.ensemble.buffers.items():
            if name.endswith("temperature_tensor"):
                buffer.fill_(value)

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Within the block, members are as the running means of their weights, if there are some."""
        if self.mean is None:
            yield
            return
        weights = self.ensemble.flat.clone()
        self.ensemble.flat.copy_(self.mean)
        try:
            yield
        finally:
            self.ensemble.flat.copy_(weights)

    @torch.no_grad()
    def _evaluate(self) -> None:
        training, validation = [], []
        entropies = self._measure_trees(scoring.entropies)  # at the temperature of the training
        # What is kept is a finished model: balanced, and as hard as it will be.
        self._set_temperature(self.settings.final_temperature if self.recipe is not None else 1.0)
        self._rebalance()
        for i in range(len(self.cases)):
            model, train, check = self.ensemble.member(i), self.training[i], self.validation[i]
            if self.memorised is not None:
                training.append(accuracy(model, self.x[train], self.y[train]))
            if self.generalised is not None:
                validation.append(accuracy(model, self.x[check], self.y[check]))
        self._remember(training, validation, entropies, self._measure_trees(scoring.visits))
        if self.memorised is not None:
            self.memorised.update(training, self.epoch, self.ensemble, self.patience)
        if self.generalised is not None:
            self.generalised.update(validation, self.epoch, self.ensemble, self.patience)
        self._halve()

    def _rebalance(self) -> None:
        """Of trees that are the whole model; deeper in one, the balance loss must do."""
        model = self.ensemble.model
        if (
            self.recipe is None
            or not isinstance(model, FFF)
            or not self.settings.balanced
            or not self.settings.min_share
        ):
            return
        size = max(1, LOGITS // (len(self.x) * model.num_nodes))
        for first in range(0, len(self.cases), size):
            part = slice(first, first + size)
            (logits,) = self.ensemble.map(lambda model, x: [model.node_logits(x)], self.x, own=False, part=part)
            own = logits.gather(1, self.training[part].unsqueeze(2).expand(-1, -1, model.num_nodes))
            shift_biases_(self.ensemble.parameters["node_bias"][part], own, self.settings.min_share)

    def _measure_trees(self, measure: Measure) -> list[Any]:
        """Of every layer of trees, for each member on samples of its own: lists of members."""
        if self.recipe is None:
            return []
        found = self.ensemble.map(measure, self.x[self.validation[:, :TREE_SAMPLES]])
        return [layer.tolist() for layer in found]

    def _remember(
        self, training: list[float], validation: list[float], entropies: list[Any], visits: list[Any]
    ) -> None:
        for i, history in enumerate(self.history):
            row: dict[str, Any] = {"epoch": self.epoch}
            if training:
                row["training"] = round(training[i], 3)
            if validation:
                row["validation"] = round(validation[i], 3)
            if entropies:  # there are trees; a number for each layer
                row["entropy"] = [round(layer[i], 4) for layer in entropies]
                row["leaves_used"] = [scoring.leaves_used(layer[i]) for layer in visits]
                row["smallest_share"] = [round(scoring.smallest_share(layer[i]), 3) for layer in visits]
            for name, value in row.items():
                history.setdefault(name, []).append(value)

    def _halve(self) -> None:
        """Halve the rate of members whose accuracy has not improved for long."""
        track = self.memorised if self.settings.plateau_of == "training" else self.generalised
        if not self.settings.plateau or track is None:
            return
        for i, seen in enumerate(track.seen):
            if self.epoch - seen >= self.settings.plateau:
                self.rates[i] /= 2
                track.seen[i] = self.epoch

    def describe(self) -> str:
        """The accuracies so far, for a progress bar."""
        parts = []
        for name, track in (("training", self.memorised), ("validation", self.generalised)):
            if track is not None:
                best = [score for i, score in enumerate(track.best) if i not in self.watch.reasons]
                parts.append(f"{name} {sum(best) / len(best):.1f}%" if best else "diverged")
        return ", ".join(parts)

    @torch.no_grad()
    def results(self) -> list[Result]:
        with self._averaged():
            if self.mean is not None:
                self._rebalance()  # as it was when evaluated
            return [self._result(i) for i in range(len(self.cases)) if i not in self.watch.reasons]

    def _result(self, i: int) -> Result:
        case = self.cases[i]
        result = Result(case, inference_size=self.inference_size, epochs=self.epoch, history=self.history[i])
        result.seconds = self.seconds / len(self.cases)
        if self.memorised is not None and case.goal != "G_A":
            result.M_A, result.ETT_M = self.memorised.best[i], self.memorised.epoch[i]
        if self.generalised is not None and case.goal != "M_A":
            model, samples = self.ensemble.member(i, self.generalised.state), self.test
            result.G_A, result.ETT = accuracy(model, *self.test), self.generalised.epoch[i]
        else:
            model, samples = self.ensemble.member(i), (self.x[self.training[i]], self.y[self.training[i]])
        if self.recipe is not None:
            result.soft_hard_gap = accuracy(scoring.soft(model), *samples) - accuracy(model, *samples)
        self._count_leaves(model, i, result)
        return result

    def _count_leaves(self, model: nn.Module, i: int, result: Result) -> None:
        """How evenly training data uses the leaves; of several layers, in that which does so least."""
        if found := [layer.tolist() for layer in scoring.visits(model, self.x[self.training[i]])]:
            result.leaves_used = min(map(scoring.leaves_used, found))
            result.smallest_share = min(map(scoring.smallest_share, found))

    def state_dict(self) -> dict[str, Any]:
        tracks = {"memorised": self.memorised, "generalised": self.generalised}
        return {
            "ensemble": self.ensemble.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "mean": self.mean,
            "rates": self.rates,
            "epoch": self.epoch,
            "seconds": self.seconds,
            "history": self.history,
            "diverged": self.watch.reasons,
            "keys": [case.key for case in self.cases],
        } | {name: None if track is None else track.state_dict() for name, track in tracks.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["keys"] != [case.key for case in self.cases]:
            raise Damaged("the checkpoint is of another training. Remove it.")
        self.ensemble.load_state_dict(state["ensemble"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.mean is not None:
            self.mean.copy_(state["mean"])
        self.rates, self.epoch, self.seconds, self.history = (
            state[name] for name in ("rates", "epoch", "seconds", "history")
        )
        self.watch.reasons = dict(state["diverged"])
        self._next = None
        for name, track in (("memorised", self.memorised), ("generalised", self.generalised)):
            if track is not None:
                track.load_state_dict(state[name])
        if self.recipe is not None:
            self.recipe.load_state_dict({"count": self.epoch})


def _recipe(model: nn.Module, s: Settings, epochs: int) -> Recipe | None:
    if not any(isinstance(module, FFF) and module.depth for module in model.modules()):
        return None
    return Recipe(
        model,
        steps=epochs,
        decision=s.decision,
        transposition=s.transposition,
        noise=s.noise,
        sharing=s.sharing,
        balance=s.balance,
        hardening=0.0 if s.frozen else s.hardening,
        reduction=s.reduction,
        temperature=(1.0, s.last_temperature),
        final_temperature=s.final_temperature,
        reset_trees=False,  # the members have been made
    )


def _generator(seed: int, epoch: int = -1) -> torch.Generator:
    """The same numbers for the same seed and epoch, on every device."""
    return torch.Generator().manual_seed(1_000_003 * (seed + 1) + epoch)
