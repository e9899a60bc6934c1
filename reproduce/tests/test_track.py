"""What is kept of an ensemble, and when its members are done."""

import torch

import fastff
from fastff_reproduce.ensemble import Ensemble
from fastff_reproduce.track import Track


def test_the_best_is_kept_by_each_member():
    ensemble = Ensemble([fastff.FFF(2, 2, depth=1, leaf_width=1) for _ in range(2)])
    track = Track(2, ensemble)

    def see(scores, epoch):
        with torch.no_grad():
            ensemble.parameters["node_bias"].fill_(epoch)
        track.update(scores, epoch, ensemble, patience=2)

    see([50, 10], 1)
    see([50, 30], 2)  # as good as before: kept, but first seen in epoch 1
    see([40, 20], 3)
    assert track.state["node_bias"].flatten().tolist() == [2, 2]
    assert (track.best, track.epoch, track.done) == ([50, 30], [1, 2], [True, False])
    see([99, 40], 4)  # too late for the first
    assert (track.best, track.done) == ([50, 40], [True, False])
    see([99, 0], 6)
    assert track.done == [True, True]
