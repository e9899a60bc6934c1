import pytest

from fastff import tree


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_levels_partition_the_nodes(depth):
    nodes = [i for m in range(depth) for i in range(*tree.level(m).indices(10**6))]
    assert nodes == list(range(tree.num_nodes(depth)))
    assert tree.depth_of(tree.num_leaves(depth)) == depth


@pytest.mark.parametrize("depth", [0, 1, 3, 4])
def test_following_a_path_by_child_numbers_ends_in_its_leaf(depth):
    for leaf in range(tree.num_leaves(depth)):
        node = 0
        for visited, right in tree.path(leaf, depth):
            assert visited == node
            node = 2 * node + (2 if right else 1)
        assert node - tree.num_nodes(depth) == leaf


def test_errors():
    with pytest.raises(ValueError, match="power of two of leaves; got 6"):
        tree.depth_of(6)
    with pytest.raises(ValueError, match="leaves 0 to 3; got 4"):
        tree.path(4, 2)
