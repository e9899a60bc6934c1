"""Mixed images and labels, against a loop over images and pixels."""

import math

import pytest
import torch

from fastff_reproduce.mixing import mix, own_shares, probabilities


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def shares_by_loop(drawn, size, cutmix, mixup):
    """The share of each pixel that one image keeps, as the docstring of mixing.py says it."""
    cut, blended, u, row, column = drawn
    height, width = size
    kept = [[1.0] * width for _ in range(height)]
    for i in range(height):
        for j in range(width):
            if cut < cutmix:
                side = math.sqrt(1 - u)
                down, right = abs((i + 0.5) / height - row), abs((j + 0.5) / width - column)
                kept[i][j] = 0.0 if down < side / 2 and right < side / 2 else 1.0
            elif blended < mixup:
                kept[i][j] = u
    return kept


@pytest.mark.parametrize(
    ("members", "batch", "size"), [(1, 63, (8, 8)), (3, 7, (5, 13)), (2, 1, (1, 3)), (2, 0, (4, 4))]
)
@pytest.mark.parametrize(("cutmix", "mixup"), [(0.5, 0.5), (1.0, 0.0), (0.0, 1.0), (0.3, 0.2), (0.0, 0.0)])
def test_each_image_is_mixed_as_by_a_loop(members, batch, size, cutmix, mixup):
    images = torch.randn(members, batch, 3, *size, generator=seeded(1))
    labels = torch.rand(members, batch, 4, generator=seeded(2)).softmax(-1)
    own = own_shares((members, batch), size, seeded(), cutmix=cutmix, mixup=mixup)
    x, y = mix(images, labels, own)
    drawn = torch.rand(5, members, batch, generator=seeded()).double()
    for m in range(members):
        for i in range(batch):
            other = batch - 1 - i
            kept = torch.tensor(shares_by_loop(drawn[:, m, i].tolist(), size, cutmix, mixup), dtype=torch.float64)
            expected = kept * images[m, i].double() + (1 - kept) * images[m, other].double()
            torch.testing.assert_close(x[m, i].double(), expected, rtol=1e-6, atol=1e-6)
            share = kept.mean()
            told = share * labels[m, i].double() + (1 - share) * labels[m, other].double()
            torch.testing.assert_close(y[m, i].double(), told, rtol=1e-6, atol=1e-6)


def test_as_many_are_mixed_as_the_settings_say():
    """Half of the images are cut, half of the others blended; a blend keeps u, a cut loses the box inside the image."""
    n = 20000
    own = own_shares((1, n), (16, 16), seeded(), cutmix=0.5, mixup=0.5).flatten(2)[0]  # (n, pixels)
    whole, binary = (own == 1).all(1), ((own == 0) | (own == 1)).all(1)
    blended = ~binary
    bound = 4 * math.sqrt(0.25 * 0.75 / n)  # four standard errors
    assert blended.float().mean().item() == pytest.approx(0.25, abs=bound)
    assert 0.25 < whole.float().mean().item() < 0.26  # and the few whose box covers no pixel
    assert torch.equal(own[blended].amin(1), own[blended].amax(1))
    assert own[blended].mean().item() == pytest.approx(0.5, abs=4 * math.sqrt(1 / 12 / (n / 4)))


def test_cut_pixels_are_the_others_to_the_bit():
    images, labels = torch.randn(2, 5, 3, 8, 8), torch.eye(5).expand(2, 5, 5)
    x, y = mix(images, labels, own_shares((2, 5), (8, 8), cutmix=1.0, mixup=0.0))
    assert ((x == images) | (x == images.flip(1))).all()
    torch.testing.assert_close(y.sum(-1), torch.ones(2, 5))


def test_members_are_not_mixed_with_each_other():
    images = torch.stack([torch.zeros(6, 1, 4, 4), torch.ones(6, 1, 4, 4)])
    x, _ = mix(images, torch.zeros(2, 6, 3), own_shares((2, 6), (4, 4), cutmix=0.5, mixup=1.0))
    assert torch.equal(x, images)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.75])
def test_labels_are_smoothed_as_torch_does(smoothing):
    y, logits = torch.tensor([[3, 0, 6], [2, 2, 5]]), torch.randn(2, 3, 7)
    made = probabilities(y, 7, smoothing)
    torch.testing.assert_close(made.sum(-1), torch.ones(2, 3))
    ours = torch.nn.functional.cross_entropy(logits.flatten(0, 1), made.flatten(0, 1))
    theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), label_smoothing=smoothing)
    torch.testing.assert_close(ours, theirs)


def test_one_seed_one_mixture():
    def made(seed):
        torch.manual_seed(seed)
        return own_shares((2, 9), (5, 5), cutmix=0.5, mixup=0.5)  # the default generator, which a CUDA graph can replay

    assert torch.equal(made(1), made(1))
    assert not torch.equal(made(1), made(2))


@pytest.mark.gpu
def test_a_cuda_graph_holds_it():
    """No wait for the device in it, and each replay draws anew."""
    images, labels = torch.randn(2, 64, 3, 32, 32, device="cuda"), torch.randint(10, (2, 64), device="cuda")

    def change():
        own = own_shares((2, 64), (32, 32), cutmix=0.5, mixup=0.5, device="cuda")
        return mix(images, probabilities(labels, 10, 0.1), own)

    change()  # what is set up once may wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        change()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = change()
    torch.cuda.manual_seed(3)
    graph.replay()
    first = [tensor.clone() for tensor in out]
    graph.replay()
    assert not torch.equal(first[0], out[0])
    torch.cuda.manual_seed(3)
    for ours, theirs in zip(change(), first, strict=True):
        torch.testing.assert_close(ours, theirs)
