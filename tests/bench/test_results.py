from fastff import bench

SMALL = bench.Case(in_features=20, out_features=12, leaf_width=4, depth=3, batch=33)


def test_speedups_compare_with_the_same_leaf_kernel():
    """MoE of the same backend; against auto the fastest MoE."""
    times = {("FF", ""): 100, ("MoE", "a"): 40, ("MoE", "b"): 20, ("FFF", "a"): 10, ("FFF", "auto"): 5}
    results = [bench.Result(*name, times=bench.Times(t, t, t, 9)) for name, t in times.items()]
    found = bench.Measurement(SMALL, results)
    slow, auto = results[3], results[4]
    assert found.speedup(slow, "FF") == 10
    assert found.speedup(slow, "MoE") == 4
    assert found.speedup(auto, "MoE") == 4
    assert found.speedup(auto, "gather") is None
