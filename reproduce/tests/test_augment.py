"""Augmentation: what it does to known images, and that it is random in the way it says."""

import math

import pytest
import torch

from fastff_reproduce.augment import augment, shift, warp

STILL = {"horizontal": False, "vertical": False, "translate": 0.0, "rotate": 0.0, "scale": 0.0}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def images(n=64, c=3, h=32, w=32, dtype=torch.float32):
    return torch.randn(n, c, h, w, generator=seeded(1)).to(dtype)


def still(n):
    """The angle, factor and shift that change nothing."""
    return torch.zeros(n), torch.ones(n), torch.zeros(2, n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_without_strength_it_is_the_identity(dtype):
    x = images(h=7, w=13, dtype=dtype)
    out = augment(x, seeded(), **STILL)
    assert out.dtype == dtype
    assert torch.equal(out, x)


def test_strength_is_a_multiple_of_what_is_usual():
    x = images()
    assert torch.equal(augment(x, seeded(), strength=1.0), augment(x, seeded()))
    flips = augment(x, seeded(), strength=0.0)
    assert torch.equal(flips, augment(x, seeded(), translate=0.0, rotate=0.0, scale=0.0))
    once, twice = (augment(x, seeded(), strength=times) for times in (1.0, 2.0))
    lost = [(out == 0).float().mean() for out in (flips, once, twice)]  # to what lies beyond the edge
    assert lost[0] == 0
    assert lost[2] > 1.5 * lost[1] > 0


@pytest.mark.parametrize("size", [(28, 28), (5, 8)])
@pytest.mark.parametrize("horizontal", [False, True])
@pytest.mark.parametrize("vertical", [False, True])
def test_flips_move_pixels_and_nothing_else(size, horizontal, vertical):
    """Each image is one of the flips that are allowed, to the bit, and about as many are flipped as not."""
    x = images(400, 2, *size)
    out = augment(x, seeded(), **{**STILL, "horizontal": horizontal, "vertical": vertical})
    dims = [()] + [(3,)] * horizontal + [(2,)] * vertical + [(2, 3)] * (horizontal and vertical)
    matches = torch.stack([(out == x.flip(d)).flatten(1).all(1) for d in dims])  # (kinds, n)
    assert torch.equal(matches.sum(0), torch.ones(400, dtype=torch.long))
    fair = 400 / len(dims)
    assert ((matches.sum(1) - fair).abs() <= 4 * math.sqrt(fair)).all()


@pytest.mark.parametrize(("right", "down"), [(3, 0), (0, -2), (-4, 5)])
def test_a_shift_by_whole_pixels_is_a_roll_with_zeros(right, down):
    x = images(4, 3, 20, 30)
    angle, factor, _ = still(4)
    out = warp(x, angle, factor, torch.tensor([[right / 30] * 4, [down / 20] * 4]))
    rows, columns = torch.arange(20) - down, torch.arange(30) - right  # where a pixel comes from
    inside = ((rows >= 0) & (rows < 20))[:, None] & ((columns >= 0) & (columns < 30))
    expected = torch.where(inside, x.roll((down, right), (2, 3)), 0.0)
    # Coordinates up to 1 in float32, times half the width of 30: pixels are met to 2e-6 of their distance.
    torch.testing.assert_close(out, expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("quarters", [1, 2, 3])
def test_quarter_turns_are_clockwise(quarters):
    x = images(3, 2, 17, 17)
    _, factor, shift = still(3)
    out = warp(x, torch.full((3,), quarters * math.pi / 2), factor, shift)
    torch.testing.assert_close(out, x.rot90(-quarters, (2, 3)), rtol=0, atol=5e-5)


def test_images_are_turned_first_and_shifted_then():
    x = images(3, 2, 17, 17)
    x[:, :, [0, 1, 2, -3, -2, -1]] = 0  # what leaves over an edge is 0
    x[:, :, :, [0, 1, 2, -3, -2, -1]] = 0
    _, factor, _ = still(3)
    out = warp(x, torch.full((3,), math.pi / 2), factor, torch.tensor([[3 / 17] * 3, [-2 / 17] * 3]))
    torch.testing.assert_close(out, x.rot90(-1, (2, 3)).roll((-2, 3), (2, 3)), rtol=0, atol=5e-5)


def test_a_quarter_turn_of_an_oblong_image_does_not_stretch_it():
    """The turn is one of pixels, not of coordinates that run from -1 to 1 in both directions."""
    x = torch.zeros(1, 1, 9, 21)
    x[:, :, 4, 7:14] = 1  # seven pixels across
    _, factor, shift = still(1)
    expected = torch.zeros_like(x)
    expected[:, :, 1:8, 10] = 1  # seven pixels down
    torch.testing.assert_close(warp(x, torch.tensor([math.pi / 2]), factor, shift), expected, rtol=0, atol=1e-5)


def test_the_factor_makes_images_larger():
    """A square of 8 x 8 pixels, three times as large, is 24 x 24."""
    x = torch.zeros(1, 1, 40, 40)
    x[..., 16:24, 16:24] = 1
    angle, factor, shift = still(1)
    assert warp(x, angle, 3 * factor, shift).sum() == pytest.approx(24 * 24, rel=0.02)


def test_strengths_are_the_largest_changes():
    """A dot away from the centre stays in the ring that the shift allows, and goes near its limit."""
    n, size = 2000, 41
    x = torch.zeros(n, 1, size, size)
    x[:, :, 20, 20] = 1
    out = augment(x, seeded(), **{**STILL, "translate": 0.25})
    mass = out.sum((1, 2, 3))
    torch.testing.assert_close(mass, torch.ones(n), rtol=0, atol=1e-5)
    place = torch.arange(size) - 20.0
    right, down = (out.sum((1, 2)) * place).sum(1), (out.sum((1, 3)) * place).sum(1)
    for moved in (right, down):
        assert moved.abs().max() <= 0.25 * size + 1e-3
        assert moved.max() > 0.24 * size
        assert moved.min() < -0.24 * size
    assert abs(torch.corrcoef(torch.stack([right, down]))[0, 1]) < 0.1


def test_the_angle_is_in_degrees_and_within_its_limit():
    n, size = 500, 41
    x = torch.zeros(n, 1, size, size)
    x[:, :, 20, 35] = 1  # fifteen pixels to the right of the centre
    out = augment(x, seeded(), **{**STILL, "rotate": 30.0})
    place = torch.arange(size) - 20.0
    right, down = (out.sum((1, 2)) * place).sum(1), (out.sum((1, 3)) * place).sum(1)
    degrees = torch.rad2deg(torch.atan2(down, right))
    assert 29 < degrees.max() < 30.5
    assert -30.5 < degrees.min() < -29


def test_one_generator_one_result():
    x = images()
    first = augment(x, seeded(7))
    assert torch.equal(first, augment(x, seeded(7)))
    assert not torch.equal(first, augment(x, seeded(8)))
    torch.manual_seed(7)
    assert torch.equal(first, augment(x))  # the default generator, which a CUDA graph can replay


def test_an_option_leaves_the_draws_of_the_others_alone():
    """One after the other, each with the same draws, is all at once."""
    x = images(h=28, w=28)
    apart = x
    for option in ({"horizontal": True}, {"vertical": True}, {"translate": 0.1, "rotate": 15.0, "scale": 0.1}):
        apart = augment(apart, seeded(), **{**STILL, **option})
    assert torch.equal(apart, augment(x, seeded()))


def test_every_image_goes_its_own_way():
    x = images(1).expand(50, -1, -1, -1)
    out = augment(x, seeded()).flatten(1)
    distance = torch.cdist(out, out) + torch.eye(50) * 1e9
    assert distance.min() > 1


def test_half_precision_is_sampled_in_float32():
    """In bfloat16 the coordinates of the 97 columns would fall together."""
    x = images(8, 1, 97, 97).bfloat16()
    out, wide = augment(x, seeded()), augment(x.float(), seeded())
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, wide.bfloat16())


def test_an_empty_batch_stays_empty():
    assert augment(images(0), seeded()).shape == (0, 3, 32, 32)


@pytest.mark.parametrize("x", [torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(3, 4, 4)])
def test_what_it_cannot_take_is_refused(x):
    with pytest.raises(ValueError, match=r"float batch of shape \(n, c, h, w\); got"):
        augment(x)


def test_a_factor_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"\[0, 1\).*got 1"):
        augment(images(), scale=1.0)


@pytest.mark.parametrize("size", [(8, 8), (5, 24), (1, 3)])
def test_shifts_move_each_image_by_whole_pixels(size):
    """Against a loop over images and pixels, with the same draws."""
    x = images(200, 2, *size)
    out = shift(x, 0.125, seeded(3))
    drawn = torch.rand(2, 200, 1, generator=seeded(3))
    most = [round(0.125 * n) for n in size]
    steps = [[int(d * (2 * m + 1)) - m for d in some] for m, some in zip(most, drawn.flatten(1).tolist(), strict=True)]
    for i, (down, right) in enumerate(zip(*steps, strict=True)):
        expected = torch.zeros_like(x[i])
        for row in range(size[0]):
            for column in range(size[1]):
                if 0 <= row - down < size[0] and 0 <= column - right < size[1]:
                    expected[:, row, column] = x[i, :, row - down, column - right]
        assert torch.equal(out[i], expected)
    for m, some in zip(most, steps, strict=True):
        assert set(some) == set(range(-m, m + 1))  # all of them happen


def test_a_shift_by_nothing_and_an_empty_batch():
    x = images(7, 3, 9, 9).bfloat16()
    assert torch.equal(shift(x, 0.0), x)
    assert torch.equal(shift(x, 0.05), x)  # less than half a pixel
    assert shift(images(0), 0.1).shape == (0, 3, 32, 32)


@pytest.mark.gpu
def test_a_cuda_graph_holds_it():
    """No wait for the device in it, and each replay draws anew."""
    x = images().cuda()

    def change():
        return shift(augment(x), 0.2)

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
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)
    torch.cuda.manual_seed(3)
    torch.testing.assert_close(change(), first)
