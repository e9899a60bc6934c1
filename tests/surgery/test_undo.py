"""A call that fails leaves its models unchanged: whatever line of it raises, Ctrl-C included."""

import contextlib
import copy
import random
import signal
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import fastff
import fastff.surgery
from fastff import switches
from fastff.surgery import undo
from fastff.surgery.undo import unchanged_on_error
from surgery_models import FAMILIES, TOKENS, build

SURGERY = Path(fastff.surgery.__file__).parent
TRACED = {str(path) for path in SURGERY.glob("*.py")} | {str(SURGERY.parent / "batches.py")}


def fingerprint(model):
    """Everything about a model that surgery or distillation could change."""
    modules = []
    for name, module in model.named_modules(remove_duplicate=False):
        held = {key: list(value) for key, value in vars(module).items() if isinstance(value, dict)}
        modules.append((name, id(module), module.training, held, sorted(vars(module))))
    parameters = [(id(p), p.requires_grad, id(p.grad)) for p in model.parameters()]
    return modules, parameters, torch.is_grad_enabled(), torch.backends.mha.get_fastpath_enabled()


def values(model):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same(some, others):
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


class Tracer:
    """Counts the lines that run in the files of surgery, and raises at one of them."""

    def __init__(self, at=None, error=KeyboardInterrupt):
        self.at, self.error, self.lines = at, error, 0

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename not in TRACED:
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                raise self.error("stop")
        return self

    def run(self, call):
        """Whether the call ended well."""
        before, handler = sys.gettrace(), signal.getsignal(signal.SIGINT)
        sys.settrace(self)
        try:
            call()
        except (Exception, KeyboardInterrupt):  # the error, or another one that it led to
            return False
        finally:
            sys.settrace(before)
            # A line is traced between the end of a `with` block and its __exit__, where no Ctrl-C can come; an error
            # there leaves the handler of the block, or its lock.
            signal.signal(signal.SIGINT, handler)
            while switches.PROBING._is_owned():
                switches.PROBING.release()
        return True


def attack(make, call, tries, seed=0):
    """Run call(model) once as it is, then again with an error at random lines: the model stays, or all is done."""
    done = make()
    whole = Tracer()
    assert whole.run(lambda: call(done))
    finished, chosen = values(done), random.Random(seed)
    for trial in range(tries):
        model = make()
        before, old = fingerprint(model), values(model)
        tracer = Tracer(chosen.randint(1, whole.lines), (KeyboardInterrupt, RuntimeError)[trial % 2])
        # A RuntimeError in a forward that surgery only tries is a reason to skip a block, and no failure.
        if not tracer.run(lambda model=model: call(model)):
            unchanged = fingerprint(model) == before and same(values(model), old)
            assert unchanged or same(values(model), finished), f"line event {tracer.at} of {whole.lines}"


OPTIONS = [
    {"init": "dense"},
    {"init": "random", "node_width": 3},
    {"init": "data"},
    {"init": "dense", "leaf_width": 20},
]


@pytest.mark.parametrize("family", FAMILIES)
def test_replace_interrupted_at_any_line_leaves_the_model_unchanged(family):
    """Ctrl-C in a clean-up window left hooks, eval mode or half of the blocks."""
    chosen = random.Random(family)
    options = dict(chosen.choice(OPTIONS), depth=chosen.randint(0, 3))
    dtype = chosen.choice([torch.float32, torch.bfloat16])
    start, batch = build(family)
    start = start.to(dtype).train()
    batch = (
        {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
        if isinstance(batch, dict)
        else batch.to(dtype)
    )
    options |= {"data": [batch]} if options["init"] == "data" else chosen.choice([{}, {"example": batch}])

    def make():
        model = copy.deepcopy(start)
        next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
        next(model.children()).eval()
        return model

    def call(model):
        torch.manual_seed(0)
        fastff.replace_(model, **options)

    attack(make, call, tries=6)


@pytest.mark.slow
@pytest.mark.parametrize("taught", [True, False])
@pytest.mark.parametrize("family", ["encoder", "bert", "llama", "timm"])
def test_distill_interrupted_at_any_line_leaves_the_model_unchanged(family, taught):
    """An exception or Ctrl-C left half-trained leaves: an error of 0.001 became 31.5."""
    dense, batch = build(family)
    data = [{k: (v + i) % 50 for k, v in TOKENS.items()} if isinstance(batch, dict) else batch + i for i in range(12)]
    operated = copy.deepcopy(dense)
    report = fastff.replace_(operated, depth=1, leaf_width=12, init="data", data=data)

    def make():
        model = copy.deepcopy(operated).train()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        next(model.parameters()).requires_grad_(False)
        return model

    def call(model):
        torch.manual_seed(0)
        teacher = {"teacher": dense} if taught else {}
        fastff.distill_(model, report, data, **teacher, steps=6, batch=32, rate=1e-2, progress=False)

    teacher = fingerprint(dense), values(dense)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        attack(make, call, tries=12)
    assert fingerprint(dense) == teacher[0]
    assert same(values(dense), teacher[1])


def test_apply_interrupted_at_any_line_leaves_the_model_unchanged():
    specification = fastff.replace_(build("encoder")[0], depth=1).specification

    def call(model):
        torch.manual_seed(0)
        fastff.apply_(model, specification)

    attack(lambda: build("encoder")[0], call, tries=40)


@pytest.mark.slow
def test_load_interrupted_at_any_line_leaves_the_model_unchanged(tmp_path, monkeypatch):
    """After the last tensor was set, Ctrl-C put the modules back, and left the new weights in the others."""
    pytest.importorskip("safetensors")
    torch.manual_seed(5)
    saved = build("encoder")[0]
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.add_(1)
    fastff.replace_(saved, depth=1)
    fastff.save(saved, tmp_path)
    attack(lambda: build("encoder")[0], lambda model: fastff.load_(model, tmp_path), tries=60)

    def late(_):
        raise KeyboardInterrupt

    model = build("encoder")[0]
    before, old = fingerprint(model), values(model)
    monkeypatch.setattr("fastff.surgery.checkpoint.mark_fitted", late)
    with pytest.raises(KeyboardInterrupt):
        fastff.load_(model, tmp_path)
    assert fingerprint(model) == before
    assert same(values(model), old)


FREED = {
    "a weight of another layer": lambda model: model[1].weight,
    "a leaf": lambda model: model[0].leaf_in_weight,
    "a node": lambda model: model[0].node_bias,
    "a temperature": lambda model: model[0].temperature_tensor,
    "a buffer": lambda model: model[2].running_mean,
}


@pytest.mark.parametrize(
    ("call", "freed"),
    [(call, freed) for call in ("save", "distill_") for freed in FREED]
    + [(call, "a buffer") for call in ("replace_", "apply_", "load_")],
)
def test_a_tensor_whose_memory_was_freed_is_named(call, freed, tmp_path):
    """torch copies such a tensor from memory that is not there: save and distill_ ended the process by a segfault."""

    def fresh():
        return nn.Sequential(fastff.baselines.FF(256, 256, width=512), nn.Linear(256, 256), nn.BatchNorm1d(256))

    model, other = fresh(), fresh()
    report = fastff.replace_(other, depth=1)
    if call in ("save", "distill_"):
        report = fastff.replace_(model, depth=1)
    if call == "load_":
        pytest.importorskip("safetensors")
        fastff.save(other, tmp_path)
    tensor = FREED[freed](model)
    tensor.untyped_storage().resize_(0)
    calls = {
        "save": lambda: fastff.save(model, tmp_path),
        "distill_": lambda: fastff.distill_(model, report, torch.randn(64, 256), steps=2, progress=False),
        "replace_": lambda: fastff.replace_(model, depth=1),
        "apply_": lambda: fastff.apply_(model, report.specification),
        "load_": lambda: fastff.load_(model, tmp_path),
    }
    name = next(n for n, t in [*model.named_parameters(), *model.named_buffers()] if t is tensor)
    before = fingerprint(model)
    with pytest.raises(RuntimeError, match=rf"^{name} of shape .* got 0: its memory was freed"):
        calls[call]()
    assert fingerprint(model) == before


def test_a_dense_block_of_a_report_whose_memory_was_freed():
    model = nn.Sequential(fastff.baselines.FF(256, 256, width=512))
    dense = model[0]
    report = fastff.replace_(model, depth=1)
    dense.up.weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"a weight of the dense block 0 of shape \(512, 256\) .* was freed"):
        fastff.distill_(model, report, torch.randn(64, 256), steps=2, progress=False)


@pytest.mark.slow
def test_threads_leave_the_switches_of_the_process_alone():
    """Each noted what another thread had turned: the fused encoder layer and the compiler stayed off for the whole
    process, and the random generator went on from the seed of a probe."""
    import torch._dynamo.eval_frame as compiler  # so that the compiler is there to be switched off

    torch.manual_seed(1234)
    state, stance, fused = torch.get_rng_state(), compiler._stance, torch.backends.mha.get_fastpath_enabled()
    errors = []

    def work():
        try:
            for _ in range(8):
                # The weights are copied, so that nothing is drawn but by the probes.
                fastff.replace_(copy.deepcopy(start), depth=1, init=lambda *_: "unchanged")
        except BaseException as error:
            errors.append(error)

    start = build("encoder")[0]
    torch.manual_seed(1234)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fastff.FFF, "reset_parameters", lambda *_: None)
        threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)
    assert torch.backends.mha.get_fastpath_enabled() is fused is True
    assert compiler._stance == stance
    assert torch.equal(torch.get_rng_state(), state)


def test_everything_goes_back_and_nothing_else_is_touched():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[1].weight.requires_grad_(False)
    model[1].bias.grad = torch.ones(3)
    untrained = model[1].weight.detach().clone()
    before, old = fingerprint(model), values(model)

    def spoil():
        model(torch.randn(8, 3))  # counts in a buffer
        model.eval().note = "here"
        model[1].register_forward_hook(lambda *_: None)
        model[1].forward = None
        model[1].weight.requires_grad_(True)
        model[1].bias.data.zero_()
        model[1].bias.grad = None
        model[0] = nn.Identity()
        torch.set_grad_enabled(False)
        raise KeyError("no")

    with pytest.raises(KeyError), unchanged_on_error(model, values=[model[1].bias]):
        spoil()
    assert fingerprint(model) == before
    assert same(values(model), old)
    assert torch.equal(model[1].weight, untrained)
    with unchanged_on_error(model, values=[model[1].bias]), torch.no_grad():
        model[1].bias.zero_()
    assert not model[1].bias.any()


def test_a_second_interruption_while_it_goes_back(monkeypatch):
    """Ctrl-C is often pressed twice."""
    model = nn.Linear(2, 2)
    real = undo._Snapshot.restore

    def restore(snapshot):
        signal.raise_signal(signal.SIGINT)
        real(snapshot)

    def interrupted():
        model.eval()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(undo._Snapshot, "restore", restore)
    with pytest.raises(KeyboardInterrupt), unchanged_on_error(model):
        interrupted()
    assert model.training
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(("taught", "source"), [(1, "data"), (1, "loss"), (1, "bar"), (0, "data"), (0, "bar")])
def test_whatever_raises_in_a_distillation_the_leaves_go_back(taught, source, monkeypatch):
    """Data, loss and progress bar are other people's code, and may raise in the middle."""
    torch.manual_seed(0)
    dense = nn.Sequential(*(fastff.baselines.FF(8, 8, width=32) for _ in range(2)))
    model, x = copy.deepcopy(dense), torch.randn(400, 8)
    report = fastff.replace_(model, depth=1, leaf_width=16, init="data", data=x)
    seen = []

    def tick(*_, **__):
        seen.append(1)
        if len(seen) == 15:
            raise OSError("no")

    class Data:
        """Without a teacher it is read once for every layer."""

        def __iter__(self):
            for part in x.split(40):
                tick()
                yield part

    options = {"teacher": dense, "steps": 20} if taught else {"steps": 10}
    if source == "loss":
        options["loss"] = lambda a, b, batch: (tick(), (a - b).square().mean())[1]
    if source == "bar":
        monkeypatch.setattr("fastff.surgery.distill.progress_bar", lambda *_, **__: contextlib.nullcontext(tick))
    if source == "data" and taught:
        seen += [1] * 8  # it is read once, before all
    before, old = fingerprint(model), values(model)
    data = Data() if source == "data" else list(x.split(40))
    with pytest.raises(OSError, match="no"):
        fastff.distill_(model, report, data, rate=3e-3, **options)
    assert fingerprint(model) == before
    assert same(values(model), old)
