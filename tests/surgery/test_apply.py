"""apply_ repeats a surgery on a fresh model, or refuses."""

import pytest
import torch

import fastff
from surgery_models import VECTORS, Mlp, assert_untouched, snapshot, stack


def test_apply_refuses_what_does_not_fit():
    model = stack(Mlp(), Mlp())
    specification = fastff.replace_(model, depth=1).specification
    fresh = stack(Mlp())
    before = snapshot(fresh)
    with pytest.raises(ValueError, match=r"replaces '1.mlp', but this model has no '1.mlp'"):
        fastff.apply_(fresh, specification)
    with pytest.raises(ValueError, match="not an entry of a specification by replace_: depth"):
        fastff.apply_(fresh, [{k: v for k, v in specification[0].items() if k != "depth"}])
    with pytest.raises(ValueError, match=r"linear layers of \[\(16, 48\), \(48, 16\)\].*this model has \[\(16, 96\)"):
        fastff.apply_(stack(Mlp(packed=True)), specification[:1])
    with pytest.raises(ValueError, match="this model has"):
        fastff.apply_(model, specification)  # it was done already
    with pytest.raises(TypeError, match="must be a list of dicts"):
        fastff.apply_(fresh, "spec")
    assert_untouched(fresh, before)

    on_meta = stack(Mlp(), Mlp()).to("meta")
    fastff.apply_(on_meta, specification)
    on_meta.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(on_meta.eval()(VECTORS), model.eval()(VECTORS))
