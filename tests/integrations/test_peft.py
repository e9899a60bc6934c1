"""Adapters beside FFF layers, on their leaves, and the layers trained whole: each is saved, loaded and merged."""

import copy

import pytest
import torch

import fastff
from pretrained_models import TOKENS, make, operated, outputs

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.slow  # PEFT takes seconds to import

from fastff.integrations.peft import check_targets, get_peft_model  # noqa: E402
from fastff.integrations.transformers import from_pretrained, save_pretrained  # noqa: E402

LEAVES = ["mlp.leaf_in_weight", "mlp.leaf_gate_weight", "mlp.leaf_out_weight"]
CONFIGS = {
    "beside": {"target_modules": ["q_proj", "v_proj"]},
    "all-linear": {"target_modules": "all-linear"},
    "on the leaves": {"target_modules": ["q_proj"], "target_parameters": LEAVES},
    "on the nodes": {"target_modules": ["q_proj"], "target_parameters": ["mlp.node_weight"]},
    "whole": {"target_modules": ["q_proj"], "modules_to_save": ["mlp"]},
}


def config(**options):
    return peft.LoraConfig(task_type="CAUSAL_LM", r=3, **options)


def trained(model, steps=3):
    """A few steps of Adam on the next token, and the losses."""
    torch.manual_seed(1)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model.train()(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


@pytest.mark.parametrize("kind", CONFIGS)
def test_adapters_train_and_load_again(kind, tmp_path):
    base = operated("llama")
    save_pretrained(base, tmp_path / "base")
    before = {name: value.clone() for name, value in base.state_dict().items()}
    plain = outputs(base)
    model = get_peft_model(base, config(**CONFIGS[kind]))
    assert torch.equal(outputs(model.eval()), plain)  # adapters start at zero
    losses = trained(model)
    assert losses[-1] < losses[0]
    result = outputs(model)
    assert not torch.equal(result, plain)

    model.save_pretrained(tmp_path / "adapter")
    fresh = from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()
    assert torch.equal(outputs(loaded), result)
    with loaded.disable_adapter():
        assert torch.equal(outputs(loaded), plain)

    wide = outputs(copy.deepcopy(loaded).double())
    merged = loaded.merge_and_unload()
    layers = [module for module in merged.modules() if isinstance(module, fastff.FFF)]
    assert len(layers) == 2
    assert (outputs(merged) - wide).abs().max() <= 2 * (result - wide).abs().max()
    save_pretrained(merged, tmp_path / "merged")
    assert torch.equal(outputs(from_pretrained(tmp_path / "merged")), outputs(merged))
    assert set(merged.state_dict()) == set(before)


def test_adapters_on_leaves_are_what_merging_adds():
    """Without gradients a layer runs by its plan, which must not read the weights below the adapter."""
    model = get_peft_model(operated("llama"), config(**CONFIGS["on the leaves"])).eval()
    expected = outputs(model)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    by_hand = operated("llama")
    for layer, plain in zip(model.base_model.model.model.layers, by_hand.model.layers, strict=True):
        wrapper = layer.mlp
        with torch.no_grad():
            plain.self_attn.q_proj.weight += layer.self_attn.q_proj.get_delta_weight("default")
            while not isinstance(wrapper, fastff.FFF):
                getattr(plain.mlp, wrapper.parameter_name).add_(wrapper.get_delta_weight("default"))
                wrapper = wrapper.base_layer
    with torch.no_grad():
        found = model(input_ids=TOKENS)[0]
    assert not torch.allclose(found, expected)
    wide = outputs(copy.deepcopy(by_hand).double())
    assert (found - wide).abs().max() <= 2 * (outputs(by_hand) - wide).abs().max()
    assert torch.equal(model(input_ids=TOKENS)[0], found)  # with gradients


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"target_modules": ["mlp"]}, r"got model.layers.0.mlp, an FFF.*target_parameters=\['mlp.leaf_in_weight'"),
        ({"target_modules": r".*\.mlp"}, r"got model.layers.0.mlp, an FFF.*modules_to_save=\['mlp'\]"),
        ({"target_modules": ["q_proj", "up_proj"]}, r"got up_proj, which surgery replaced by an FFF \(model.layers.0"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["up_proj"]}, r"modules_to_save must name .* got up_proj"),
        (
            {"target_modules": ["q_proj"], "target_parameters": [*LEAVES, "mlp.leaf_weight"]},
            r"target_parameters must name .*; got mlp.leaf_weight\. The leaves",
        ),
        ({"target_modules": r".*(q|down)_proj"}, r"got down_proj, which surgery replaced.*Leave the name out"),
    ],
)
def test_targets_that_are_not_there(options, told):
    """PEFT takes q_proj, and no word about up_proj."""
    model = operated("llama")
    names = [name for name, _ in model.named_modules()]
    with pytest.raises(ValueError, match=told):
        get_peft_model(model, config(**options))
    assert [name for name, _ in model.named_modules()] == names


def test_a_model_that_was_converted_in_part():
    """The blocks that are left get adapters under the name that the others lost."""
    model = make("llama")
    fastff.replace_(model, depth=1, filter="*.0.mlp")
    adapted = get_peft_model(model, config(target_modules=["up_proj"]))
    found = {name for name, _ in adapted.named_parameters() if "lora_A" in name}
    assert found == {"base_model.model.model.layers.1.mlp.up_proj.lora_A.default.weight"}
    check_targets(make("llama"), config(target_modules=["up_proj"]))  # no surgery, nothing to say


@pytest.mark.parametrize("kind", ["on the leaves", "whole"])
def test_int8_leaves_take_no_adapter(kind):
    """PEFT adds to the int8 weights, and rounds what it adds: the adapter trained, and changed nothing."""
    model = operated("llama")
    fastff.quantize_(model)
    with pytest.raises(ValueError, match=r"int8 leaves do not train; got .* of model.layers.0.mlp as a target"):
        get_peft_model(model, config(**CONFIGS[kind]))
    expected = outputs(model)
    beside = get_peft_model(model, config(**CONFIGS["beside"])).eval()
    assert torch.equal(outputs(beside), expected)

    unchecked = operated("llama")
    fastff.quantize_(unchecked)
    unchecked = peft.get_peft_model(unchecked, config(**CONFIGS["on the leaves"])).eval()
    with pytest.raises(TypeError, match=r"int8 leaves must be plain parameters; got a parametrization.*leaf_in_weight"):
        outputs(unchecked)
    adapted = get_peft_model(operated("llama"), config(**CONFIGS["on the leaves"]))
    with pytest.raises(ValueError, match=r"has an adapter \(PEFT\), which int8 would round. Call merge_and_unload"):
        fastff.quantize_(adapted)


def test_saving_a_model_with_adapters_names_the_way(tmp_path):
    model = get_peft_model(operated("llama"), config(**CONFIGS["on the leaves"]))
    with pytest.raises(TypeError, match=r"for a PEFT model pass model.merge_and_unload\(\), or save the adapters"):
        save_pretrained(model, tmp_path)
    with pytest.raises(ValueError, match=r"If PEFT adapters wrap it, call merge_and_unload\(\) first"):
        fastff.save(model, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_adapters_do_not_name_the_dense_model(tmp_path):
    """AutoPeftModel would load the adapters onto the dense model of that name, whose blocks they never saw."""
    make("llama").save_pretrained(tmp_path / "dense")
    model = type(make("llama")).from_pretrained(tmp_path / "dense")
    assert model.name_or_path == str(tmp_path / "dense")
    fastff.replace_(model, depth=2)
    save_pretrained(model, tmp_path / "base")
    adapted = get_peft_model(model, config(**CONFIGS["beside"]))
    assert adapted.peft_config["default"].base_model_name_or_path is None

    adapted = get_peft_model(from_pretrained(tmp_path / "base"), config(**CONFIGS["beside"]))
    adapted.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"load it with fastff.integrations.transformers.from_pretrained"):
        peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")


def test_a_recipe_sees_the_layer_that_trains():
    """modules_to_save keeps the original layer in the model, unused: losses and recipe asked for its forward."""
    model = get_peft_model(operated("llama"), config(**CONFIGS["whole"]))
    recipe = fastff.Recipe(model, {"input_ids": TOKENS}, steps=2, noise=0.0)
    loss = model.train()(input_ids=TOKENS, labels=TOKENS).loss + recipe.loss()
    loss.backward()
    recipe.step()
    names = list(fastff.usage(model, {"input_ids": TOKENS}))
    assert names == [f"base_model.model.model.layers.{i}.mlp.modules_to_save.default" for i in (0, 1)]
    adapted = get_peft_model(operated("llama"), config(**CONFIGS["beside"]))
    with pytest.warns(UserWarning, match=r"recipe moves the trees of .* checkpoints leave them out. Name the"):
        fastff.Recipe(adapted, steps=2)
