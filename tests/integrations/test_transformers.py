"""A converted transformers model in its library: Trainer, generate, pipeline, accelerate, gradient checkpointing."""

import copy
import shutil

import pytest
import torch

import fastff
from pretrained_models import TOKENS, operated, outputs

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
from transformers import Trainer, TrainingArguments, pipeline  # noqa: E402

from fastff.integrations.transformers import (  # noqa: E402
    FFFCallback,
    FFFTrainer,
    from_pretrained,
    save_pretrained,
)

IDS = torch.randint(3, 50, (16, 6), generator=torch.Generator().manual_seed(1))
DATA = [{"input_ids": ids, "labels": ids} for ids in IDS]


def trainer(path, model, plain=False, eval_dataset=None, **options):
    defaults = {"max_steps": 4, "per_device_train_batch_size": 4, "logging_steps": 1, "learning_rate": 1e-2}
    defaults |= {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 3}
    arguments = TrainingArguments(path, **defaults | options)
    if plain:
        return Trainer(model, arguments, train_dataset=DATA, eval_dataset=eval_dataset)
    callback = FFFCallback({"input_ids": IDS}, noise=0.8, rebalance_every=2, min_share=0.5)
    return FFFTrainer(model, arguments, train_dataset=DATA, callbacks=[callback])


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def zeroed(model):
    """What a checkpoint brings must not be there already."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    return model


# ---------------------------------------------------------------------------------------------------------------------
# Trainer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the library's own save_pretrained")
@pytest.mark.parametrize(
    ("family", "plain", "checkpointing"),
    [("llama", True, False), ("llama", False, False), ("gpt2", False, False), ("llama", False, True)],
)
def test_a_trainers_own_checkpoints_resume(family, plain, checkpointing, tmp_path):
    """resume_from_checkpoint=True finds the last one: the same losses, the same weights, bit for bit."""
    options = {"save_strategy": "steps", "save_steps": 2, "gradient_checkpointing": checkpointing}
    whole = trainer(tmp_path, operated(family), plain, **options)
    whole.train()
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = trainer(tmp_path, zeroed(operated(family)), plain, **options)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(whole)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the library's own save_pretrained")
def test_a_trainer_loads_its_best_checkpoint(tmp_path):
    """At a rate that makes the model worse, the best one is not the last."""
    options = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    options |= {"load_best_model_at_end": True, "learning_rate": 0.5, "lr_scheduler_type": "constant", "max_steps": 2}
    made = trainer(tmp_path, operated("llama"), plain=True, eval_dataset=DATA, **options)
    made.train()
    found = [entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry]
    assert min(found) < found[-1]
    assert made.evaluate()["eval_loss"] == min(found)


@pytest.mark.slow
def test_a_trainer_of_adapters_resumes(tmp_path):
    """LoRA beside FFF layers that train whole. Checkpoints hold both, and the trees that the recipe moved."""
    peft = pytest.importorskip("peft")
    options = {"save_strategy": "steps", "save_steps": 2}

    def adapted():
        torch.manual_seed(5)
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj"], modules_to_save=["mlp"])
        return peft.get_peft_model(operated("llama"), config)

    whole = trainer(tmp_path, adapted(), **options)
    whole.train()
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = trainer(tmp_path, zeroed(adapted()), **options)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(whole)
    assert torch.equal(outputs(whole.model.eval()), outputs(resumed.model.eval()))


@pytest.mark.slow
def test_a_recipe_beside_adapters_alone_is_refused(tmp_path):
    """The checkpoints had no trees, which the recipe had moved: resumed training went on with other ones."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(operated("llama"), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"must hold the trees that FFFCallback moves; got adapters alone for .*0.mlp"):
        trainer(tmp_path, model).train()


@pytest.mark.slow
def test_a_trainer_does_not_push_a_converted_model(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda *args, **options: None)
    with pytest.raises(ValueError, match=r"push_to_hub=True uploads what the Trainer saves.*push_to_hub\(model, "):
        trainer(tmp_path, operated("llama"), push_to_hub=True).train()


# ---------------------------------------------------------------------------------------------------------------------
# Gradient checkpointing


@pytest.mark.parametrize("transposition", [0.0, 0.3])
def test_gradient_checkpointing(transposition):
    """Recomputed forwards draw the same random numbers: losses and gradients are those without checkpointing."""
    found = []
    for enabled in (False, True):
        model = operated("llama").train()
        for module in model.modules():
            if isinstance(module, fastff.FFF):
                module.transposition, module.dropout = transposition, transposition
        if enabled:
            model.gradient_checkpointing_enable()
            assert model.is_gradient_checkpointing
        torch.manual_seed(2)
        loss = model(input_ids=TOKENS, labels=TOKENS).loss + fastff.balance_loss(model) + fastff.hardening_loss(model)
        loss.backward()
        found.append((loss.detach(), [parameter.grad for parameter in model.parameters()]))
    (loss, gradients), (again, others) = found
    assert torch.equal(loss, again)
    assert all(torch.equal(one, other) for one, other in zip(gradients, others, strict=True))


def test_reentrant_checkpointing_is_refused_with_the_losses():
    model = operated("llama").train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    model(input_ids=TOKENS, labels=TOKENS)
    with pytest.raises(RuntimeError, match=r"checkpoint with use_reentrant=False"):
        fastff.balance_loss(model)


# ---------------------------------------------------------------------------------------------------------------------
# Generation


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_generate(family):
    """Greedy, with a growing cache and with a static one: the tokens that whole forwards choose, one by one."""
    model, expected = operated(family), TOKENS
    with torch.no_grad():
        for _ in range(8):
            expected = torch.cat([expected, model(expected).logits[:, -1].argmax(-1, keepdim=True)], 1)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    options |= {"eos_token_id": None, "attention_mask": torch.ones_like(TOKENS)}
    assert torch.equal(model.generate(TOKENS, **options), expected)
    assert torch.equal(model.generate(TOKENS, cache_implementation="static", **options), expected)
    assert model.generate(TOKENS, num_beams=3, **options).shape == expected.shape


@pytest.mark.slow
def test_pipeline(tmp_path):
    """A loaded model and a tokenizer from the same directory."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(50)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w2")
    model = operated("llama")
    save_pretrained(model, tmp_path)
    fast.save_pretrained(tmp_path)
    loaded, fast = from_pretrained(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    speak = pipeline("text-generation", model=loaded, tokenizer=fast, device="cpu")
    text = speak("w3 w4 w5", max_new_tokens=5, do_sample=False, return_full_text=False)[0]["generated_text"]
    tokens = model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=5, do_sample=False)
    assert text == fast.decode(tokens[0, 3:], skip_special_tokens=True)
    classify = pipeline("text-classification", model=operated("bert"), tokenizer=fast, device="cpu")
    assert 0 < classify("w7 w8")[0]["score"] <= 1


# ---------------------------------------------------------------------------------------------------------------------
# device_map and offloading

PARTS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")


def offloaded(how, path):
    model = operated("llama")
    if how == "dispatch":
        places = dict.fromkeys(PARTS, "cpu") | {"model.layers.0": "disk", "lm_head": "disk"}
        return accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=path, force_hooks=True)
    if how == "cpu":
        return accelerate.cpu_offload(model, torch.device("cpu"))
    return accelerate.disk_offload(model, path, torch.device("cpu"))


@pytest.mark.parametrize("how", ["dispatch", "cpu", "disk"])
def test_offloaded_weights(how, tmp_path):
    """Weights come for one forward, and go again: a plan of an earlier forward must not read where they were."""
    expected, model = outputs(operated("llama")), offloaded(how, tmp_path)
    assert model.model.layers[0].mlp.leaf_in_weight.is_meta
    for _ in range(3):
        assert torch.equal(outputs(model), expected)
    accelerate.hooks.remove_hook_from_submodules(model)


def test_what_offloaded_models_do_not_do(tmp_path):
    model = offloaded("disk", tmp_path / "weights")
    with pytest.raises(ValueError, match=r"layers.0.mlp is offloaded \(accelerate\).*Call fastff.quantize_ first"):
        fastff.quantize_(model)
    for data in (None, {"input_ids": TOKENS}):
        with pytest.raises(ValueError, match=r"offloaded layers do not train: model.layers.0.mlp"):
            fastff.Recipe(model, data, steps=2)
    with pytest.raises(ValueError, match=r"cannot save .* on the meta device, which holds no values"):
        save_pretrained(model, tmp_path / "save")
    int8 = operated("llama")
    fastff.quantize_(int8)
    expected = outputs(copy.deepcopy(int8))
    assert torch.equal(outputs(accelerate.disk_offload(int8, tmp_path / "int8", torch.device("cpu"))), expected)
