"""The training loop of an experiment: all seeds of a case, from the first epoch to the results.

M_A is the best accuracy on the training data. G_A is the accuracy on the test data at the last epoch of best validation
accuracy, and ETT the first epoch with that validation accuracy. All of them are accuracies of the hard pass. Everything
random in an epoch follows from the seeds and the number of the epoch: a training resumed from a checkpoint reaches the
same numbers as one that was never stopped.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastff.baselines import MoE, importance_loss, load_loss
from fastff.regions import leaves_used, smallest_share

from . import scoring
from .augment import augment, shift
from .build import is_transformer
from .data import Dataset
from .divergence import Watch
from .ensemble import Ensemble, Measure, Optimizer, Recorded
from .members import make_members, make_recipe, rebalance
from .mixing import mix, own_shares, probabilities
from .resume import Damaged
from .runs import Case, Result
from .samples import Samples, generator
from .scoring import accuracy
from .settings import Settings
from .teacher import Teachers
from .track import Track

EVALUATION_STEPS = 100  # with shorter epochs, several of them pass between evaluations
TREE_SAMPLES = 2048  # validation samples for the entropies of nodes and the use of leaves in each epoch
IMPORTANCE, LOAD = 0.1, 0.1  # weights of the MoE's losses, as in the paper


class Training:
    """All seeds of a case, from the first epoch to the results."""

    def __init__(
        self, cases: Sequence[Case], device: torch.device, dataset: Dataset, teachers: Teachers | None = None
    ) -> None:
        self.cases, self.device, self.teachers = cases, device, teachers
        self.settings = settings = Settings(**dict(cases[0].settings))
        self.samples = samples = Samples(cases, settings, dataset, device)
        self.classes = dataset.classes
        models = make_members(cases, settings, samples, dataset.classes, teachers)
        self.inference_size = max(getattr(module, "inference_size", 0) for module in models[0].modules())

        self.batch = min(settings.batch, samples.training.shape[1])
        self.steps = samples.training.shape[1] // self.batch
        self.most_epochs = math.ceil(settings.steps / self.steps) if settings.steps else settings.epochs
        self.patience = settings.patience or math.ceil(settings.patience_steps / self.steps)
        self.every = settings.evaluate_every or max(1, round(EVALUATION_STEPS / self.steps))
        self.ensemble = Ensemble(models, large=is_transformer(cases[0]))
        self.optimizer = Optimizer(self.ensemble, settings.optimizer, weight_decay=settings.weight_decay)
        self.mean = self.ensemble.flat.clone() if settings.averaging else None
        self.rates = [settings.rate] * len(cases)
        self.recipe = make_recipe(self.ensemble.model, settings, self.most_epochs)
        members = len(cases)
        goal = cases[0].goal
        watched = settings.plateau_of if settings.plateau else None
        self.memorised = Track(members, None) if goal != "G_A" or watched == "training" else None
        self.generalised = Track(members, self.ensemble) if goal != "M_A" or watched == "validation" else None
        self.epoch, self.seconds = 0, 0.0
        self.history: list[dict[str, list[Any]]] = [{} for _ in cases]
        self.watch = Watch(members, device)

        self._order = torch.zeros(members, self.steps, self.batch, dtype=torch.int64, device=device)
        self._next: Tensor | None = None  # the next value of _order
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        before = {name: tensor.clone() for name, tensor in self.ensemble.state_dict().items()}
        self._step = Recorded(self._one_step, device, lambda: self._restore(before))

    def _restore(self, state: dict[str, Tensor]) -> None:
        self.ensemble.load_state_dict(state)
        self.optimizer.reset()
        if self.mean is not None:
            self.mean.copy_(self.ensemble.flat)
        self.watch.reset()
        self._at.zero_()

    def _one_step(self) -> None:
        index = self._order.index_select(1, self._at).squeeze(1)  # (members, batch)
        x, y = self.samples.x[index], self.samples.y[index]
        x, y = self._changed(x, y)
        if self.teachers is not None:
            y = self.teachers.answers(x)
        if self.settings.input_dropout:
            x = F.dropout(x, self.settings.input_dropout)
        losses = self.ensemble.losses(self._loss, x, y)
        self.optimizer.step(torch.autograd.grad(losses.sum(), self.optimizer.parameters))
        self.watch.note(losses, self.optimizer.count)
        if self.mean is not None:
            # At first a mean over fewer steps, so that it soon leaves the initial weights.
            kept = ((1 + self.optimizer.count) / (10 + self.optimizer.count)).clamp(max=self.settings.averaging)
            self.mean.lerp_(self.ensemble.flat, 1 - kept)
        self._at.add_(1).remainder_(self.steps)  # a recording calls steps, maybe more than an epoch has

    def _changed(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs (members, batch, ...) changed at random, and their labels: class probabilities if these are mixed or
        smoothed."""
        s, images = self.settings, x.reshape(-1, *self.samples.image)
        if s.augment or s.mirror:
            images = augment(images, strength=s.augment, vertical=not s.mirror)
        if s.shift:
            images = shift(images, s.shift)
        if s.cutmix or s.mixup or s.smoothing:
            y = probabilities(y, self.classes, s.smoothing)
        if s.cutmix or s.mixup:
            height, width = images.shape[2:]
            own = own_shares(x.shape[:2], (height, width), cutmix=s.cutmix, mixup=s.mixup, device=x.device)
            images, y = mix(images.view(*x.shape[:2], *self.samples.image), y, own)
        return images.view_as(x), y

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
            self._rebalance()  # these weights train on; their means are rebalanced when evaluated
        with self._averaged():
            self._evaluate()
            diverged = self.find_diverged()
        self._end(diverged)
        self.seconds += time.monotonic() - start

    def find_diverged(self, whole: bool = False) -> list[int]:
        """The members that diverged since the last call; `whole`: judged by all of their history, not its end."""
        tensors = {"a weight": [*self.ensemble.parameters.values()], "the optimizer's state": self.optimizer.moments}
        if self.mean is not None:
            tensors["a weight"].append(self.mean)
        if self.generalised is not None and self.generalised.state is not None:
            tensors["a weight"] += self.generalised.state.values()
        rows = [{name: values if whole else values[-1] for name, values in row.items()} for row in self.history]
        return self.watch.find(self.epoch, self.steps, {name: some for name, some in tensors.items() if some}, rows)

    @torch.no_grad()
    def _end(self, members: list[int]) -> None:
        """Stop members: their weights become 0, so that all numbers are finite again, and nothing waits for them."""
        means = [] if self.mean is None else [self.mean]
        for i in members:
            for tensor in (*self.ensemble.parameters.values(), *self.optimizer.moments, *means):
                tensor[i].zero_()
            self.rates[i] = 0.0
            for track in (self.memorised, self.generalised):
                if track is not None:
                    track.done[i] = True

    def _train_epoch(self) -> None:
        factor = rate_factor(self.epoch, self.most_epochs, self.settings)
        self.optimizer.rate.copy_(torch.tensor([factor * rate for rate in self.rates]))
        self._set_temperature(self.recipe.temperature if self.recipe is not None else 1.0)
        order = self._next if self._next is not None else self._draw()
        self._order.copy_(self.samples.training.gather(1, order.to(self.device)).view_as(self._order))
        torch.manual_seed(generator(self.samples.seeds[0], self.epoch).initial_seed())
        for _ in range(self.steps):
            self._step()
        self.epoch += 1
        if self.recipe is not None:
            self.recipe.step()
        self._next = self._draw() if self.device.type == "cuda" else None  # while the device runs these steps

    def _draw(self) -> Tensor:
        """The samples of the coming epoch, in order: (members, steps * batch)."""
        return self.samples.order(self.epoch, self.steps * self.batch)

    def _set_temperature(self, value: float) -> None:
        for name, buffer in self.ensemble.buffers.items():
            if name.endswith("temperature_tensor"):
                buffer.fill_(value)

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Within the block, the weights are their running means, if the recipe averages."""
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
        samples, training, validation = self.samples, list[float](), list[float]()
        entropies = self._measure_trees(scoring.entropies)  # at the training temperature
        # Evaluate the finished model: balanced, at its final temperature.
        self._set_temperature(self.settings.final_temperature if self.recipe is not None else 1.0)
        self._rebalance()
        for i in range(len(self.cases)):
            model, train, check = self.ensemble.member(i), samples.training[i], samples.validation[i]
            if self.memorised is not None:
                training.append(accuracy(model, samples.x[train], samples.y[train]))
            if self.generalised is not None:
                validation.append(accuracy(model, samples.x[check], samples.y[check]))
        self._remember(training, validation, entropies, self._measure_trees(scoring.visits))
        if self.memorised is not None:
            self.memorised.update(training, self.epoch, self.ensemble, self.patience)
        if self.generalised is not None:
            self.generalised.update(validation, self.epoch, self.ensemble, self.patience)
        self._halve()

    def _rebalance(self) -> None:
        rebalance(self.ensemble, self.samples, self.settings)

    def _measure_trees(self, measure: Measure) -> list[Tensor]:
        """A measure of every tree layer, for each member on its own validation samples: (members, ...) per layer."""
        if self.recipe is None:
            return []
        found = self.ensemble.map(measure, self.samples.x[self.samples.validation[:, :TREE_SAMPLES]])
        return [layer.cpu() for layer in found]

    def _remember(
        self, training: list[float], validation: list[float], entropies: list[Tensor], visits: list[Tensor]
    ) -> None:
        for i, history in enumerate(self.history):
            row: dict[str, Any] = {"epoch": self.epoch}
            if training:
                row["training"] = round(training[i], 3)
            if validation:
                row["validation"] = round(validation[i], 3)
            if entropies:  # the model has trees; a number per layer
                row["entropy"] = [round(layer[i].item(), 4) for layer in entropies]
                row["leaves_used"] = [leaves_used(layer[i]) for layer in visits]
                row["smallest_share"] = [round(smallest_share(layer[i]), 3) for layer in visits]
            for name, value in row.items():
                history.setdefault(name, []).append(value)

    def _halve(self) -> None:
        """Halve the rate of members whose accuracy has not improved for `plateau` epochs."""
        track = self.memorised if self.settings.plateau_of == "training" else self.generalised
        if not self.settings.plateau or track is None:
            return
        for i, seen in enumerate(track.seen):
            if self.epoch - seen >= self.settings.plateau:
                self.rates[i] /= 2
                track.seen[i] = self.epoch

    def describe(self) -> str:
        """The mean accuracies so far, for a progress bar."""
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
                self._rebalance()  # as in the evaluations
            return [self._result(i) for i in range(len(self.cases)) if i not in self.watch.reasons]

    def _result(self, i: int) -> Result:
        case, samples = self.cases[i], self.samples
        result = Result(case, inference_size=self.inference_size, epochs=self.epoch, history=self.history[i])
        result.seconds = self.seconds / len(self.cases)
        own = samples.training[i]
        if self.memorised is not None and case.goal != "G_A":
            result.M_A, result.ETT_M = self.memorised.best[i], self.memorised.epoch[i]
        if self.generalised is not None and case.goal != "M_A":
            model, (x, y) = self.ensemble.member(i, self.generalised.state), samples.test
            result.G_A, result.ETT = accuracy(model, x, y), self.generalised.epoch[i]
        else:
            model, (x, y) = self.ensemble.member(i), (samples.x[own], samples.y[own])
        if self.recipe is not None:
            result.soft_hard_gap = accuracy(scoring.soft(model), x, y) - accuracy(model, x, y)
        if visits := scoring.visits(model, samples.x[own]):  # with several layers, the least even one counts
            result.leaves_used = min(map(leaves_used, visits))
            result.smallest_share = min(map(smallest_share, visits))
        return result

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
            raise Damaged("the checkpoint belongs to another training. Remove it.")
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


def rate_factor(epoch: int, epochs: int, settings: Settings) -> float:
    """The factor on the learning rate in an epoch, counted from 0: a linear warm-up, then the schedule.

    The rate is constant within an epoch. In the warm-up it is the epoch's mean of a rate that rises in every step.
    """
    if epoch < settings.warmup:
        return (epoch + 0.5) / settings.warmup
    share = (epoch - settings.warmup) / (epochs - settings.warmup)
    return (1 + math.cos(math.pi * share)) / 2 if settings.schedule == "cosine" else 1.0
