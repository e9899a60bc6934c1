"""torch.compile of whole models whose feedforward blocks are trees, and generation with a static cache."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import fastff

transformers = pytest.importorskip("transformers")

LAYERS = 2
SIZE = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
SIZE |= {"intermediate_size": 128, "max_position_embeddings": 64}


def dense(family, device="cpu"):
    torch.manual_seed(0)
    if family == "llama":
        config = transformers.LlamaConfig(**SIZE, num_key_value_heads=4, pad_token_id=0, eos_token_id=None)
        return transformers.LlamaForCausalLM(config).eval().to(device)
    return transformers.BertModel(transformers.BertConfig(**SIZE)).eval().to(device)


def operated(family, device="cpu"):
    """Parameters that require gradients, as a user has them, and a tree whose leaves are all used."""
    model = dense(family, device)
    fastff.replace_(model, depth=4)
    fastff.initialize_tree_(model, ids(8, 32, device))
    return model


def ids(sequences, tokens, device="cpu"):
    return torch.randint(SIZE["vocab_size"], (sequences, tokens), device=device)


def compiled_with_counter(model):
    torch._dynamo.reset()
    counters.clear()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(model, backend=counter, fullgraph=True), counter


def readers(graph, name):
    """The operations of a graph that read parameters whose names have this part."""
    found = [node for node in graph.graph.nodes if node.op in ("placeholder", "get_attr") and name in node.name]
    assert found
    return {str(user.target) for node in found for user in node.users}


@pytest.mark.slow
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_compiled_model_has_one_operation_for_each_layer(family, context):
    """One graph, in which nothing but that operation reads a leaf or a node: no weights are copied for a sample."""
    model = operated(family)
    compiled, counter = compiled_with_counter(model)
    x = ids(2, 7)
    with context():
        torch.testing.assert_close(compiled(x)[0], model(x)[0])
    (graph,) = counter.graphs
    assert not counters["graph_break"]
    assert sum(str(node.target) == "fastff.hard.default" for node in graph.graph.nodes) == LAYERS
    for name in ("leaf_in_weight", "leaf_out_weight", "node_weight"):
        assert readers(graph, name) == {"fastff.hard.default"}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_new_lengths_compile_no_more_often_than_the_dense_model(family):
    counts = []
    for model in (dense(family), operated(family)):
        compiled, counter = compiled_with_counter(model)
        with torch.no_grad():
            for sequences, tokens in ((2, 7), (2, 9), (3, 11), (5, 13), (4, 21)):
                x = ids(sequences, tokens)
                torch.testing.assert_close(compiled(x)[0], model(x)[0])
        counts.append(counter.frame_count)
    assert counts[1] == counts[0] <= 3


@pytest.mark.slow
def test_inductor_calls_the_operation():
    """The code that inductor writes, and its output."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    model, x = operated("llama"), ids(2, 7)
    with torch.no_grad():
        output, code = run_and_get_code(torch.compile(model, fullgraph=True), x)
        torch.testing.assert_close(output.logits, model(x).logits)
    assert sum(part.count("torch.ops.fastff.hard.default(") for part in code) == LAYERS


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_finds_the_tokens_of_a_loop(cache):
    model, prompt = operated("llama"), ids(2, 5)
    expected = prompt
    with torch.no_grad():
        for _ in range(8):
            expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], 1)
    given = {"cache_implementation": "static"} if cache == "static" else {}
    assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False, **given), expected)


@pytest.mark.slow
def test_generate_compiles_with_a_static_cache():
    """transformers compiles by itself on a GPU; here it is told to."""
    from transformers.generation import CompileConfig

    model, prompt = operated("llama"), ids(2, 5)
    torch._dynamo.reset()
    graphs = []

    def keep(graph, inputs):  # a function: transformers copies the config
        graphs.append(graph)
        return graph

    config = CompileConfig(fullgraph=True, backend=keep, mode=None)
    config._compile_all_devices = True
    options = {"max_new_tokens": 8, "do_sample": False}
    tokens = model.generate(prompt, cache_implementation="static", compile_config=config, **options)
    assert torch.equal(tokens, model.generate(prompt, **options))
    (graph,) = graphs  # for all steps
    assert sum(str(node.target) == "fastff.hard.default" for node in graph.graph.nodes) == LAYERS


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_cuda_graphs_take_a_compiled_model(family):
    """No graph is skipped, nothing waits for the device, and every replay has the right output."""
    model = operated(family, "cuda")
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True, dynamic=False)
    for sequences, tokens in ((1, 1), (4, 1), (2, 33)):
        with torch.no_grad():
            for _ in range(3):  # compile, record, replay
                compiled(ids(sequences, tokens, "cuda"))
            x = ids(sequences, tokens, "cuda")
            expected = model(x)[0]
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                y = compiled(x)[0]
            finally:
                torch.cuda.set_sync_debug_mode("default")
            torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert counters["inductor"]["cudagraph_recorded_non_static_inputs"] > 0
    assert not counters["graph_break"]


@pytest.mark.gpu
def test_generate_with_a_static_cache_on_a_gpu():
    """transformers compiles each step then, with CUDA graphs."""
    model, prompt = operated("llama", "cuda"), ids(2, 5, "cuda")
    torch._dynamo.reset()
    counters.clear()
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(prompt, **options)
    for _ in range(2):
        assert torch.equal(model.generate(prompt, cache_implementation="static", **options), expected)
    assert counters["stats"]["unique_graphs"] >= 1
    assert counters["inductor"]["cudagraph_skips"] == 0
