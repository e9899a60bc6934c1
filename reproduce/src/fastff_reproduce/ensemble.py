"""Train models of one shape at once: their parameters are stacked, and one step updates them all.

A step of a small layer is dominated by the launch of many small operations; a stack of layers launches them once. Large
models run one after the other within the step: each fills the device, and its fast kernels do not take stacked weights.
On a GPU large models are compiled and train under bfloat16 autocast, and every step is a CUDA graph, recorded once.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

Measure = Callable[[Any, Tensor], list[Tensor]]  # of a model in evaluation mode and its input
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]  # of a model that has just run, its output and the target


class Ensemble:
    """Stacked models: parameters and buffers (members, ...) by name.

    Trainable parameters are views of one matrix `flat` (members, numbers), so that an optimizer sees one tensor.
    large: run the models one after the other.
    """

    def __init__(self, models: Sequence[nn.Module], *, large: bool = False) -> None:
        self.large = large
        if large:
            torch.compiler.reset()  # torch limits the compilations of one function
        self.parameters, self.buffers = stack_module_state(list(models))
        names = [name for name, parameter in models[0].named_parameters() if parameter.requires_grad]
        sizes = [self.parameters[name][0].numel() for name in names]
        self.flat = torch.cat([self.parameters[name].detach().flatten(1) for name in names], 1)
        for name, part in zip(names, self.flat.split(sizes, 1), strict=True):
            self.parameters[name] = part.view_as(self.parameters[name]).detach().requires_grad_()
        self.model = copy.deepcopy(models[0]).train()
        self._member = copy.deepcopy(models[0]).eval().requires_grad_(False)

    @property
    def trained(self) -> dict[str, Tensor]:
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    def losses(self, loss: Loss, x: Tensor, y: Tensor) -> Tensor:
        """The training loss of every member on its own samples x (members, batch, ...): (members,)."""

        def of_one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            # A layer remembers its last forward for this member alone; after vmap it is gone.
            with torch.autocast("cuda", torch.bfloat16, enabled=fast):
                output = functional_call(self.model, (parameters, buffers), (x,))
            return loss(self.model, output, y)

        fast = self.large and x.is_cuda
        if not self.large:
            return vmap(of_one, randomness="different")(self.parameters, self.buffers, x, y)
        names, stacked = zip(*(self.parameters | self.buffers).items(), strict=True)
        members = zip(*(tensor.unbind() for tensor in stacked), strict=True)
        one = torch.compile(of_one) if fast else of_one
        return torch.stack(
            [one(dict(zip(names, m, strict=True)), {}, *xy) for m, *xy in zip(members, x, y, strict=True)]
        )

    @torch.no_grad()
    def map(self, measure: Measure, x: Tensor, *, own: bool = True, part: slice = slice(None)) -> list[Tensor]:
        """The tensors measure(model, x) of all members, or of a part of them, stacked: (members, ...).

        x is (members, ...); without `own`, all members get the same x. Small models run at once, by vmap.
        """
        if self.large:
            found = [measure(self.member(i), x[i] if own else x) for i in range(len(self.flat))[part]]
            return [torch.stack(tensors) for tensors in zip(*found, strict=True)]
        called = _Called(self._member, measure)
        state = {f"model.{name}": tensor[part] for name, tensor in (self.parameters | self.buffers).items()}
        of_one: Callable[..., list[Tensor]] = vmap(partial(functional_call, called), (0, 0 if own else None))
        return of_one(state, x)

    @torch.no_grad()
    def member(self, i: int, state: dict[str, Tensor] | None = None) -> nn.Module:
        """Member i in evaluation mode, from these parameters or from `state`. It is valid until the next call."""
        state = self.parameters | self.buffers if state is None else state
        for name, tensor in self._member.state_dict(keep_vars=True).items():
            tensor.copy_(state[name][i])
        return self._member

    def state_dict(self) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in (self.parameters | self.buffers).items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, tensor in (self.parameters | self.buffers).items():
            tensor.copy_(state[name])


class _Called(nn.Module):
    """A measure of a model as a module, for functional_call."""

    def __init__(self, model: nn.Module, measure: Measure) -> None:
        super().__init__()
        self.model, self.measure = model, measure

    def forward(self, x: Tensor) -> list[Tensor]:
        return self.measure(self.model, x)


class Optimizer:
    """SGD, or Adam with decoupled weight decay, on an ensemble; each member has its own rate: (members,)."""

    def __init__(self, ensemble: Ensemble, kind: str = "adam", *, weight_decay: float = 0.0, eps: float = 1e-8) -> None:
        if kind not in ("sgd", "adam"):
            raise ValueError(f"optimizer must be 'sgd' or 'adam'; got {kind!r}.")
        self.parameters, self.flat = list(ensemble.trained.values()), ensemble.flat
        self.kind, self.weight_decay, self.eps, self.betas = kind, weight_decay, eps, (0.9, 0.999)
        self.rate = self.flat.new_zeros(len(self.flat))
        self.count = self.flat.new_zeros(())  # steps; on the device, so that a recorded step counts
        self.moments = [torch.zeros_like(self.flat) for _ in range(0 if kind == "sgd" else 2)]

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor]) -> None:
        """One step with the gradients of `parameters`."""
        grad, rate = torch.cat([g.flatten(1) for g in grads], 1), self.rate.unsqueeze(1)
        if self.weight_decay:
            self.flat.mul_(1 - self.weight_decay * rate)
        self.count += 1
        if self.kind == "sgd":
            self.flat.sub_(rate * grad)
            return
        (mean, square), (b1, b2) = self.moments, self.betas
        mean.lerp_(grad, 1 - b1)
        square.lerp_(grad * grad, 1 - b2)
        scale = square.sqrt().div_((1 - b2**self.count).sqrt()).add_(self.eps)
        self.flat.sub_((mean / scale).mul_(rate / (1 - b1**self.count)))

    @torch.no_grad()
    def reset(self) -> None:
        """Back to the state before the first step."""
        self.count.zero_()
        for moment in self.moments:
            moment.zero_()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "rate": self.rate, "moments": self.moments}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count.copy_(state["count"])
        self.rate.copy_(state["rate"])
        for ours, theirs in zip(self.moments, state["moments"], strict=True):
            ours.copy_(theirs)


class Recorded:
    """A function without arguments or result that is called many times: on a GPU, one CUDA graph.

    Calls before the recording choose kernels and allocate memory; `restore` then undoes their effects.
    """

    def __init__(self, function: Callable[[], None], device: torch.device, restore: Callable[[], None]) -> None:
        self.call: Callable[[], None] = function
        if device.type != "cuda":
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        restore()
        self.call = graph.replay

    def __call__(self) -> None:
        self.call()
