"""fastff.integrations.transformers and .lightning: the losses are in, the recipe goes along, resuming changes nothing.

Both are compared with a loop written out here, and with themselves, uninterrupted.
"""

import copy
import logging

import lightning
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import fastff
from fastff.integrations import lightning as with_lightning
from fastff.integrations import transformers as with_transformers
from fastff.integrations.transformers import FFFTrainer, FFFTrainerMixin

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
OPTIONS = {"balance": 0.5, "hardening": 0.3, "temperature": (1.0, 3.0), "noise": 0.0}
LR = 0.05


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face's Trainer


class Tiny(nn.Module):
    """As a model of transformers: it takes keywords and returns a loss."""

    def __init__(self, depth=2):
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.fff = fastff.FFF(8, 3, depth=depth, leaf_width=4)

    def forward(self, x, labels=None):
        logits = self.fff(self.up(x))
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Scaled(Tiny):
    """A model that averages over the whole accumulated batch, as language models do."""

    def forward(self, x, labels=None, num_items_in_batch=None, **kwargs):
        logits = self.fff(self.up(x))
        loss = F.cross_entropy(logits, labels, reduction="sum") / (num_items_in_batch or len(x))
        return {"loss": loss, "logits": logits}


def samples(n=24):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator)


def dataset():
    return [{"x": x, "labels": y} for x, y in zip(*samples(), strict=True)]


def arguments(path, **options):
    defaults = {
        "output_dir": str(path),
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "optim": "sgd",
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(**defaults | options)


def by_hand(model, batches, accumulate=1, **options):
    """Plain SGD on the sum of the losses; what callbacks must do too. Returns the loss of every step."""
    steps = -(-len(batches) // accumulate)
    recipe = fastff.Recipe(model, **{"steps": steps} | OPTIONS | options)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=LR), []
    for start in range(0, len(batches), accumulate):
        total, group = 0.0, batches[start : start + accumulate]
        for x, y in group:
            h, b = OPTIONS["hardening"], OPTIONS["balance"]
            task = F.cross_entropy(model.train()(x), y)
            loss = task + b * fastff.balance_loss(model) + h * fastff.hardening_loss(model, "path")
            (loss / len(group)).backward()
            total += loss.item() / len(group)
        optimizer.step()
        optimizer.zero_grad()
        recipe.step()
        seen.append(total)
    return seen


class Logits(nn.Module):
    """A Tiny as a plain function of x, with the same parameters."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model.fff(self.model.up(x))


class Ordered(FFFTrainer):
    """Samples in their order, so that a loop can follow."""

    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kind", [Tiny, Scaled])
def test_trainer_does_what_a_loop_does(tmp_path, kind, accumulate):
    """With gradient accumulation too, whether the Trainer divides the loss or the model did: 24 samples, 2 epochs."""
    model = kind()
    expected = copy.deepcopy(model)
    callback = with_transformers.FFFCallback(**OPTIONS)
    args = arguments(tmp_path, gradient_accumulation_steps=accumulate)
    trainer = Ordered(model, args, train_dataset=dataset(), callbacks=[callback])
    trainer.train()

    x, y = samples()
    losses = by_hand(Logits(expected), 2 * list(zip(x.split(4), y.split(4), strict=True)), accumulate)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    torch.testing.assert_close(logged, losses, rtol=1e-3, atol=1e-4)  # the Trainer's logs have four digits or so
    for name, parameter in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], parameter, msg=name)
    assert model.fff.temperature == 1000  # the recipe has come to its end


@pytest.mark.slow
def test_trainer_logs_entropies_and_usage(tmp_path):
    model = Tiny()
    callback = with_transformers.FFFCallback(samples()[0], **OPTIONS)
    trainer = FFFTrainer(model, arguments(tmp_path), train_dataset=dataset(), callbacks=[callback])
    seen = []
    trainer.add_callback(_Watch(lambda: seen.append(float(fastff.training.entropies(model)["fff"].mean()))))
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["fff/fff/entropy"] for entry in logged] == pytest.approx(seen)
    assert all(1 <= entry["fff/fff/leaves_used"] <= 4 for entry in logged)
    assert all(0 <= entry["fff/fff/smallest_share"] <= 1 for entry in logged)
    # What is added is a part of the whole.
    assert all(0 < entry["fff/loss"] < entry["loss"] for entry in logged)
    assert logged[0]["fff/temperature"] == pytest.approx(3 ** (1 / 12))


class _Watch(with_transformers.TrainerCallback):
    def __init__(self, see):
        self.see = see

    def on_step_end(self, *args, **kwargs):
        self.see()


def test_trainer_starts_balanced_and_ends_without_noise(tmp_path):
    model = Tiny()
    with torch.no_grad():
        model.fff.node_bias[0] += 50  # all to the right
    data = {"x": samples()[0]}
    callback = with_transformers.FFFCallback(data, min_share=0.5)
    args = arguments(tmp_path, max_steps=3)
    FFFTrainer(model, args, train_dataset=dataset(), callbacks=[callback]).train()
    assert fastff.usage(model, data)["fff"].smallest_share >= 0.5
    assert not model.fff._forward_pre_hooks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "sharing", "decision", "depth"),
    [(0.0, 0.0, "straight_through", 2), (0.8, 0.5, "straight_through", 2), (0.0, 0.0, "sampled", 5)],
)
def test_trainer_resumes_exactly(tmp_path, noise, sharing, decision, depth):
    """Twelve steps at once, and six, a new process's objects, and six more: bit-equal, noise and rebalancing in.

    A checkpoint of a Trainer is JSON; the running shares of a sampled tree are a tensor, and once broke its saving.
    """
    data = {"x": samples()[0]}
    options = OPTIONS | {"noise": noise, "sharing": sharing, "rebalance_every": 4, "min_share": 0.5}
    options["decision"] = decision

    def train(path, resume=None, **more):
        torch.manual_seed(5)
        model = Tiny(depth)
        if resume:
            nn.init.zeros_(model.fff.node_weight)  # what the checkpoint brings must not be drawn anew
        callback = with_transformers.FFFCallback(data, **options)
        args = arguments(path, save_strategy="steps", save_steps=6, optim="adamw_torch", **more)
        trainer = FFFTrainer(model, args, train_dataset=dataset(), callbacks=[callback])
        trainer.train(resume_from_checkpoint=resume)
        return model, trainer.state.log_history

    whole, log = train(tmp_path)
    resumed, log_again = train(tmp_path / "again", resume=str(tmp_path / "checkpoint-6"))
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    if decision == "sampled":
        assert torch.equal(whole.fff.running_shares, resumed.fff.running_shares)
    last = [[entry["loss"] for entry in entries if "loss" in entry] for entries in (log, log_again)]
    assert last[0] == last[1]


@pytest.mark.slow
def test_trainer_without_the_mixin_is_an_error(tmp_path):
    """The losses would be missing, and nothing would show it."""
    callback = with_transformers.FFFCallback(**OPTIONS)
    trainer = Trainer(Tiny(), arguments(tmp_path), train_dataset=dataset(), callbacks=[callback])
    with pytest.raises(RuntimeError, match=r"without the losses of the FFF layers\. Train with FFFTrainer"):
        trainer.train()
    with pytest.raises(ValueError, match=r"needs one FFFCallback; got 0\. Pass callbacks="):
        FFFTrainer(Tiny(), arguments(tmp_path), train_dataset=dataset()).train()
    with pytest.raises(TypeError, match="unexpected keyword argument 'balence'"):
        with_transformers.FFFCallback(balence=0.1)


@pytest.mark.slow
def test_a_trainer_class_and_a_model_of_transformers(tmp_path):
    """The mixin on another class, a Bert with an FFF in it, an evaluation on the way: its loss is the task's alone."""
    config = BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=3
    )
    model = BertForSequenceClassification(config)
    layer = model.bert.encoder.layer[0]
    layer.intermediate, layer.output.dense = nn.Identity(), fastff.FFF(8, 8, depth=2, leaf_width=4, activation="gelu")
    tokens = torch.randint(20, (16, 6))
    data = [{"input_ids": ids, "labels": int(ids[0]) % 3} for ids in tokens]

    class Mine(FFFTrainerMixin, Trainer):
        pass

    callback = with_transformers.FFFCallback({"input_ids": tokens}, balance=10.0, decision="soft", noise=0.0)
    args = arguments(tmp_path, eval_strategy="epoch")
    trainer = Mine(model, args, train_dataset=data, eval_dataset=data, callbacks=[callback])
    trainer.train()
    logs = trainer.state.log_history
    losses = [entry["loss"] for entry in logs if "loss" in entry]
    assert min(losses) > 10 * 2 * 0.69  # depth * log 2 at the least
    with torch.no_grad():
        task = model.eval()(tokens, labels=torch.tensor([row["labels"] for row in data])).loss
    assert [e for e in logs if "eval_loss" in e][-1]["eval_loss"] == pytest.approx(task.item(), rel=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# Lightning


class Module(lightning.LightningModule):
    def __init__(self, form="tensor", optimizer=torch.optim.SGD):
        super().__init__()
        self.up, self.fff, self.form = nn.Linear(4, 8), fastff.FFF(8, 3, depth=2, leaf_width=4), form
        self.optimizer = optimizer

    def forward(self, x):
        return self.fff(self.up(x))

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("task", loss)
        if self.form == "own":
            return loss + self.trainer.callbacks[0].loss()
        return {"loss": loss} if self.form == "dict" else loss

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=LR)

    def on_train_batch_start(self, batch, index):
        torch.manual_seed(self.global_step)  # Lightning's checkpoints hold no state of the generators


class Manual(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.add = True

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self(x), y) + (self.trainer.callbacks[0].loss() if self.add else 0)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def fit(module, path, callback, *more, checkpoint=None, **options):
    defaults = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "devices": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "enable_checkpointing": bool(more),
        "default_root_dir": path,
        "logger": False,
    }
    trainer = lightning.Trainer(callbacks=[callback, *more], **defaults | options)
    trainer.fit(module, DataLoader(TensorDataset(*samples()), batch_size=4), ckpt_path=checkpoint)
    return trainer


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize(("form", "accumulate"), [("tensor", 1), ("dict", 3), ("own", 1), ("manual", 1)])
def test_lightning_does_what_a_loop_does(tmp_path, form, accumulate):
    module = Manual() if form == "manual" else Module(form)
    expected = copy.deepcopy(module)
    options = {} if form == "manual" else {"accumulate_grad_batches": accumulate}
    fit(module, tmp_path, with_lightning.FFFCallback(**OPTIONS), **options)
    x, y = samples()
    by_hand(expected, 2 * list(zip(x.split(4), y.split(4), strict=True)), accumulate)
    for name, parameter in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], parameter, msg=name)
    assert module.fff.temperature == 1000
    assert "training_step" not in vars(module)


def test_lightning_logs_entropies_and_usage(tmp_path):
    module, callback = Module(), with_lightning.FFFCallback(samples()[0], **OPTIONS)
    logger = CSVLogger(tmp_path)
    trainer = fit(module, tmp_path, callback, logger=logger, log_every_n_steps=3)
    assert trainer.callback_metrics["fff/fff/entropy"] == fastff.training.entropies(module)["fff"].mean()
    logger.save()
    table = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    names = table[0].split(",")
    assert {"fff/fff/leaves_used", "fff/fff/smallest_share", "fff/loss", "fff/temperature", "task"} <= set(names)
    assert len(table) == 1 + 4  # 12 steps, every third


@pytest.mark.parametrize("noise", [0.0, 0.8])
def test_lightning_resumes_exactly(tmp_path, noise):
    options = OPTIONS | {"noise": noise, "rebalance_every": 4, "min_share": 0.5}

    def train(path, checkpoint=None):
        torch.manual_seed(5)
        module = Module(optimizer=torch.optim.AdamW)
        if checkpoint:
            nn.init.zeros_(module.fff.node_weight)
        keep = ModelCheckpoint(path, filename="{epoch}", save_top_k=-1)
        fit(module, path, with_lightning.FFFCallback(samples()[0], **options), keep, checkpoint=checkpoint)
        return module

    whole = train(tmp_path)
    resumed = train(tmp_path / "again", checkpoint=tmp_path / "epoch=0.ckpt")
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_lightning_errors(tmp_path):
    module = Manual()
    module.add = False
    with pytest.raises(RuntimeError, match=r"without the losses of the FFF layers\. In manual optimisation"):
        fit(module, tmp_path, with_lightning.FFFCallback())
    assert not module.fff._forward_pre_hooks
    with pytest.raises(ValueError, match=r"the number of training steps is not known. Pass FFFCallback\(data, steps="):
        fit(Module(), tmp_path, with_lightning.FFFCallback(), max_epochs=-1)
    module = Module()
    module.fff = nn.Linear(8, 3)
    with pytest.raises(ValueError, match="has no FFF layer"):
        fit(module, tmp_path, with_lightning.FFFCallback())
    assert "training_step" not in vars(module)


@pytest.mark.parametrize("fresh", [None, True, False])
@pytest.mark.parametrize("library", [with_transformers, with_lightning])
def test_callbacks_take_fresh(library, fresh):
    """FFFCallback(data, reset_trees=False) raised a TypeError: it passed fresh itself."""
    model = Tiny()
    tree = model.fff.node_weight.detach().clone()
    driver = library.FFFCallback({"x": samples()[0]}, reset_trees=fresh).driver
    driver.begin(model, 4)
    assert torch.equal(tree, model.fff.node_weight) == (fresh is False)
    tree = model.fff.node_weight.detach().clone()
    driver.begin(model, 4, done=2)  # resumed: whatever was asked for at the start, it has happened
    assert torch.equal(tree, model.fff.node_weight)
    driver.end()
