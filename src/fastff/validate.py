"""Do these tensors make a layer? Compiled kernels trust sizes, so every way to a kernel comes through here first.

Each error names the constraint, the value and, where it helps, the remedy. Only `check_leaf` reads tensor values.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from . import tree as heap
from ._torch import in_eager, is_dtensor, is_watched
from .activations import Activation, is_gated
from .activations import check as check_activation
from .tensors import Leaves, Tree


def check_layer(x: Tensor, tree: Tree | None, leaves: Leaves | None, activation: Activation) -> None:
    """Raise unless x (batch, in) suits these nodes and leaves, and they suit each other; one of them may be missing."""
    check_activation(activation)
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor; got {type(x).__name__}. Convert it with torch.as_tensor.")
    if x.dim() != 2 or x.layout is not torch.strided:
        raise ValueError(f"x must be a dense tensor of shape (batch, in) here; got {tuple(x.shape)}, {x.layout}.")
    if tree is not None and leaves is not None:
        check_fit(tree, leaves, activation)
    elif leaves is not None:
        check_leaves(leaves, activation)
    elif tree is not None:
        check_tree(tree)
    weight = tree.weight if tree is not None else leaves.in_weight if leaves is not None else x
    dtype = leaves.dtype if leaves is not None else weight.dtype
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"x must have shape (batch, {weight.shape[-1]}) here; got {tuple(x.shape)}.")
    if x.dtype != dtype or x.device != weight.device:
        raise TypeError(f"x is {x.dtype} on {x.device}; the parameters are {dtype} on {weight.device}.")


def check_input(x: Tensor, weight: Tensor, layer: str, autocast: bool) -> None:
    """Raise unless x (..., in) suits a layer with this first weight. With autocast, any floating-point dtype does."""
    features = weight.shape[-1]
    if not isinstance(x, Tensor):
        raise TypeError(f"{layer} expects a tensor; got {type(x).__name__}. Convert it with torch.as_tensor.")
    if x.dim() == 0 or x.shape[-1] != features:
        raise ValueError(
            f"{layer} expects inputs of shape (..., {features}); got {tuple(x.shape)}. "
            + (f"Pass in_features={x.shape[-1]}, or project the input first." if x.dim() else "Add a last dimension.")
        )
    if x.layout is not torch.strided:
        raise TypeError(f"{layer} expects a dense tensor; got the layout {x.layout}. Convert it with x.to_dense().")
    if is_dtensor(weight) and not is_dtensor(x):
        raise TypeError(
            f"{layer} has DTensors, as fully_shard leaves them outside of a forward; got a plain input. Call the model "
            "that was sharded, or its unshard() first."
        )
    if x.device != weight.device:
        raise ValueError(
            f"{layer} has its parameters on {weight.device}; got an input on {x.device}. Move one of them."
        )
    if not x.is_floating_point() or (x.dtype != weight.dtype and not autocast):
        remedy = f"Convert it with x.to({weight.dtype}), convert the layer, or use torch.autocast"
        if x.dtype == torch.float64:  # which autocast leaves alone
            remedy = f"Convert it with x.to({weight.dtype}), or convert the layer"
        elif x.is_complex():
            remedy = "Pass its real and imaginary parts as features: torch.view_as_real(x).flatten(-2)"
        raise TypeError(f"{layer} has {weight.dtype} parameters; got a {x.dtype} input. {remedy}.")


def check_fit(tree: Tree, leaves: Leaves, activation: Activation) -> None:
    """Raise unless these nodes and leaves make a tree, and the leaves suit the activation."""
    check_activation(activation)
    check_tree(tree)
    check_leaves(leaves, activation)
    if len(tree.weight) + 1 != len(leaves.in_weight):
        raise ValueError(f"a tree of {len(tree.weight)} nodes has one leaf more; got {len(leaves.in_weight)} leaves.")
    features = tree.weight.shape[-1]
    if leaves.in_weight.shape[-1] != features:
        width, found = leaves.in_weight.shape[1], tuple(leaves.in_weight.shape)
        raise ValueError(
            f"leaves.in_weight must have shape {(len(leaves.in_weight), width, features)} here; got {found}."
        )
    if leaves.dtype != tree.weight.dtype:
        raise TypeError(f"the nodes have {tree.weight.dtype} parameters, the leaves {leaves.dtype} ones.")
    if leaves.in_weight.device != tree.weight.device:
        raise ValueError(f"the nodes are on {tree.weight.device}, the leaves on {leaves.in_weight.device}. Move one.")


def check_tree(tree: Tree) -> None:
    """Raise unless these are the nodes of a perfect binary tree."""
    _check_tensors("tree", tree, ("weight", "bias"))
    has_output = tree.out_weight is not None
    if (tree.out_bias is not None) != has_output or tree.weight.dim() != 2 + has_output:
        raise ValueError(
            "tree.weight must have shape (nodes, in), or (nodes, n, in) beside an out_weight and an out_bias; "
            f"got {tuple(tree.weight.shape)}, {'an' if has_output else 'no'} out_weight and "
            f"{'no' if tree.out_bias is None else 'an'} out_bias."
        )
    heap.depth_of(len(tree.weight) + 1)
    nodes = tree.weight.shape[:-1]
    _check_parts("tree", tree, {"bias": nodes, "out_weight": nodes, "out_bias": nodes[:1]}, tree.weight.dtype)


def check_leaves(leaves: Leaves, activation: Activation) -> None:
    """Raise unless these leaves fit each other, and suit the activation."""
    _check_tensors("leaves", leaves, ("in_weight", "out_weight"))
    if is_gated(activation) != (leaves.gate_weight is not None):
        needs = "a gate_weight" if is_gated(activation) else "no gate_weight"
        raise ValueError(f"activation {activation!r} needs leaves with {needs}.")
    if leaves.gate_bias is not None and leaves.gate_weight is None:
        raise ValueError("leaves.gate_bias needs a gate_weight.")
    _check_scales(leaves)
    for name, part, shape in (
        ("in_weight", leaves.in_weight, "(leaves, l, in)"),
        ("out_weight", leaves.out_weight, "(leaves, l, out)"),
    ):
        if part.dim() != 3:
            raise ValueError(f"leaves.{name} must have shape {shape}; got {tuple(part.shape)}.")
    count, width, features = leaves.in_weight.shape
    out = leaves.out_weight.shape[-1]
    weights = {"in_weight": (count, width, features), "gate_weight": (count, width, features)}
    weights |= {"out_weight": (count, width, out)}
    others = dict.fromkeys(("in_bias", "gate_bias", "in_scale", "out_scale", "gate_scale"), (count, width))
    _check_parts("leaves", leaves, weights, leaves.in_weight.dtype)
    _check_parts("leaves", leaves, others | {"out_bias": (count, out)}, leaves.dtype)


def _check_scales(leaves: Leaves) -> None:
    """Raise unless int8 leaves have a scale for each weight, and other leaves none."""
    weights = leaves.in_weight, leaves.out_weight, leaves.gate_weight
    scales = leaves.in_scale, leaves.out_scale, leaves.gate_scale
    is_int8 = leaves.in_weight.dtype == torch.int8
    if any(
        (scale is not None) != (is_int8 and weight is not None) for weight, scale in zip(weights, scales, strict=True)
    ):
        given = [name for name in ("in_scale", "out_scale", "gate_scale") if getattr(leaves, name) is not None]
        raise ValueError(
            "leaves of int8 weights need a scale for each of them (in_scale, out_scale and, with a gate, gate_scale), "
            f"and other leaves none; got {leaves.in_weight.dtype} weights and {', '.join(given) or 'no scale'}."
        )


def _check_tensors(name: str, tensors: Tree | Leaves, required: tuple[str, ...]) -> None:
    """Raise unless all parts are dense tensors, or None where that is allowed."""
    kind = {"tree": Tree, "leaves": Leaves}[name]
    if not isinstance(tensors, kind):
        wanted = f"fastff.functional.{kind.__name__}, such as layer.{name}"
        raise TypeError(f"{name} must be a {wanted}; got {type(tensors).__name__}.")
    for key, tensor in zip(tensors._fields, tensors, strict=True):
        if tensor is None and key not in required:
            continue
        if not isinstance(tensor, Tensor):
            zeros = " For none, pass zeros." if tensor is None and key == "bias" else ""
            raise TypeError(f"{name}.{key} must be a tensor; got {type(tensor).__name__}.{zeros}")
        if tensor.layout is not torch.strided:
            raise TypeError(f"{name}.{key} must be a dense tensor; got the layout {tensor.layout}.")
        if in_eager() and type(tensor).__module__.startswith("torchao."):
            raise TypeError(
                f"{name}.{key} must be a plain tensor; got torchao's {type(tensor).__name__}. Leave FFF layers out of "
                "its config, and call fastff.quantize_ for int8 leaves."
            )


def _check_parts(name: str, tensors: Tree | Leaves, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    """Raise unless the tensors that are given have these shapes, this dtype, and all of them one device."""
    first = tensors[0]
    for key, shape in shapes.items():
        tensor: Tensor | None = getattr(tensors, key)
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(f"{name}.{key} must have shape {tuple(shape)} here; got {tuple(tensor.shape)}.")
        if tensor.dtype != dtype:
            raise TypeError(f"{name} has parameters of several dtypes: {key} is {tensor.dtype}, not {dtype}.")
        if tensor.device != first.device:
            raise ValueError(f"{name} has parameters on several devices: {key} on {tensor.device}, not {first.device}.")


def check_leaf(leaf: Tensor, x: Tensor, leaves: Leaves) -> None:
    """Raise unless `leaf` names one of the leaves for each row of x.

    On a GPU the numbers are compared there, and a wrong one makes the GPU unusable for this process, as torch's own
    indexing does: bringing the answer here would make every call wait. A tracer and a torch.func transform cannot see
    numbers.
    """
    if not isinstance(leaf, Tensor):
        raise TypeError(f"leaf must be a tensor; got {type(leaf).__name__}. Convert it with torch.as_tensor.")
    if leaf.layout is not torch.strided:
        raise TypeError(f"leaf must be a dense tensor; got the layout {leaf.layout}. Convert it with leaf.to_dense().")
    if leaf.dtype != torch.int64:
        raise TypeError(f"leaf must be int64; got {leaf.dtype}. Convert it with leaf.long().")
    if leaf.shape != x.shape[:1]:
        raise ValueError(f"leaf must have shape ({len(x)},), one for each row of x; got {tuple(leaf.shape)}.")
    if leaf.device != x.device:
        raise ValueError(f"x is on {x.device}, leaf on {leaf.device}. Move one of them.")
    if leaf.is_meta or not in_eager() or is_watched() or not len(leaf):
        return
    count = len(leaves.in_weight)
    if leaf.device.type != "cpu":
        torch._assert_async(((leaf >= 0) & (leaf < count)).all())
        return
    lowest, highest = (int(bound) for bound in leaf.aminmax())
    if lowest < 0 or highest >= count:
        raise IndexError(f"leaf must be within 0..{count - 1}; got {lowest}..{highest}.")


def check_allocated(name: str, *tensors: Tensor | None) -> None:
    """Raise, as torch does, for a tensor whose memory was freed or cut by `untyped_storage().resize_`."""
    for tensor in tensors:
        if tensor is None or type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta or not tensor.numel():
            continue
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        needed = (tensor.storage_offset() + reach + 1) * tensor.element_size()
        found = tensor.untyped_storage().nbytes()
        if found < needed:
            raise RuntimeError(
                f"{name} of shape {tuple(tensor.shape)} needs a storage of {needed} bytes; got {found}: "
                "its memory was freed. Restore it before the call."
            )
