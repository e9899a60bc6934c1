"""Programs that run without Python: an ONNX file for onnxruntime, an AOTInductor package for torch's C++ runtime.

    fastff.export.export_onnx(model, x, "model.onnx")
    fastff.export.export_aoti(model, x, "model.pt2")

Both compute the same as eval(): the hard pass, in plain operations, for any batch size. Before a function returns, it
runs the exported file at two batch sizes and compares the outputs with the model's.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .batches import evaluation_mode
from .extras import install

# A protocol buffer, and so an ONNX file, is limited to 2 GiB; larger weights go into a file beside it.
ONNX_LIMIT = 2**31 - 2**24

# Runs a file in another process. Arguments: sys.path, the file, a folder with the inputs, the number of inputs.
_TRY = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[2], providers=["CPUExecutionProvider"])
inputs = zip(session.get_inputs(), range(int(sys.argv[4])), strict=True)
feed = {entry.name: numpy.load(f"{sys.argv[3]}/in{i}.npy") for entry, i in inputs}
for i, y in enumerate(session.run(None, feed)):
    numpy.save(f"{sys.argv[3]}/out{i}.npy", y)
"""


def export_onnx(model: nn.Module, example: Any, path: str | Path, *, verify: bool = True) -> Path:
    """Write `model` in evaluation mode as an ONNX file with a dynamic batch, and return its path.

    Args:
        example: inputs of the model: a tensor, a tuple of positional arguments, or a mapping of keyword arguments. The
            first dimension of every tensor is the batch.
        path: of the file. Weights of 2 GiB or more go into a second file beside it, with ".data" added to the name.
        verify: compare onnxruntime's outputs with eval(), in a separate process, which onnxruntime may crash. A file
            that does not run, or gives other outputs, is removed. Without onnxruntime, nothing is compared.
    """
    for package in ("onnx", "onnxscript"):
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"export_onnx needs {package}: {install('onnx')}", name=package)
    path = _checked(model, path, ".onnx")
    args, kwargs = _arguments(example)
    if verify and any(t.dtype == torch.bfloat16 for t in model.parameters()):
        raise TypeError("onnxruntime cannot run bfloat16 models on a CPU. Call model.float(), or pass verify=False.")
    with evaluation_mode(model):
        shapes = _dynamic(args, kwargs)
        size = sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])
        program = torch.onnx.export(_program(model, args, kwargs), dynamo=True, dynamic_shapes=shapes, verbose=False)
        if program is None:
            raise RuntimeError("torch.onnx.export gave no program.")
        program.save(path, external_data=size > ONNX_LIMIT)
        if verify and find_spec("onnxruntime") is not None:
            try:
                _compare(model, _onnx_runner(path), args, kwargs, f"onnxruntime's outputs of {path}")
            except BaseException:
                for file in (path, path.with_name(f"{path.name}.data")):
                    file.unlink(missing_ok=True)
                raise
    return path


def export_aoti(model: nn.Module, example: Any, path: str | Path, *, verify: bool = True) -> Path:
    """Write `model` in evaluation mode as an AOTInductor package with a dynamic batch, and return its path.

    It is compiled for the model's device and for this kind of processor, and needs a C++ compiler.
    `torch._inductor.aoti_load_package(path)` loads it in Python, `AOTIModelPackageLoader` in C++. Arguments are as in
    export_onnx.
    """
    path = _checked(model, path, ".pt2")
    args, kwargs = _arguments(example)
    with evaluation_mode(model):
        program = _program(model, args, kwargs)
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
        if verify:
            run = torch._inductor.aoti_load_package(str(path))
            _compare(model, run, args, kwargs, f"the outputs of {path}")
    return path


def _checked(model: nn.Module, path: str | Path, suffix: str) -> Path:
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a model, an nn.Module; got {type(model).__name__}. Pass the model itself.")
    path = Path(path)
    if path.suffix != suffix:
        raise ValueError(f"the path must end in {suffix!r}; got {str(path)!r}.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {str(path.parent)!r} for {path.name!r} does not exist. Create it first.")
    return path


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments, with a batch of at least two: torch treats a batch of 1 as constant."""
    args, kwargs = example if isinstance(example, tuple) else (example,), {}
    if isinstance(example, Mapping):
        args, kwargs = (), dict(example)
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    sizes = {len(t) if t.dim() else 0 for t in tensors}
    if len(sizes) != 1 or sizes == {0}:
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors) or f"no tensor in {type(example).__name__}"
        raise ValueError(
            f"the tensors of an example must share a first dimension, the batch, of 1 or more; got {shapes}."
        )
    return _rows((args, kwargs), max(2, *sizes))


def _rows(tree: Any, count: int) -> Any:
    """The same arguments with `count` samples in each tensor, repeated from the start if there are fewer."""
    return pytree.tree_map_only(Tensor, lambda t: t[torch.arange(count, device=t.device) % len(t)], tree)


def _dynamic(args: Any, kwargs: Any) -> dict[str, Any] | tuple[Any, ...]:
    batch = torch.export.Dim("batch")
    shapes = pytree.tree_map(lambda t: {0: batch} if isinstance(t, Tensor) else None, (args, kwargs))
    return shapes[1] or shapes[0]


def _program(model: nn.Module, args: Any, kwargs: Any) -> torch.export.ExportedProgram:
    return torch.export.export(model, args, kwargs, dynamic_shapes=_dynamic(args, kwargs))


def _onnx_runner(path: Path) -> Callable[..., list[Tensor]]:
    """Runs a file in onnxruntime, in another process: some files crash it, mostly in half precision."""
    import numpy as np

    def run(*args: Any, **kwargs: Any) -> list[Tensor]:
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        with TemporaryDirectory() as folder:
            for i, tensor in enumerate(tensors):
                np.save(f"{folder}/in{i}.npy", tensor.cpu().numpy())
            command = [sys.executable, "-c", _TRY, json.dumps(sys.path), str(path), folder, str(len(tensors))]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
            if done.returncode:
                raise RuntimeError(_why(done, path))
            count = len(list(Path(folder).glob("out*.npy")))
            return [torch.from_numpy(np.load(f"{folder}/out{i}.npy")) for i in range(count)]

    return run


def _why(done: subprocess.CompletedProcess[str], path: Path) -> str:
    """Why onnxruntime failed on a file."""
    if done.returncode > 0 and done.stderr.strip():
        how = f"cannot run it: {done.stderr.strip().splitlines()[-1]}"
    else:
        names = {-number: number.name for number in signal.Signals}
        how = f"crashes on it ({names.get(done.returncode, done.returncode)})"
    return (
        f"{path} was written and removed again: onnxruntime {how}. If the model is in half precision, try "
        "model.float(). verify=False keeps the file."
    )


def _compare(model: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any, what: str) -> None:
    """Raise unless run() gives the model's outputs, at the example's batch size and at one more."""
    count = next(len(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor))
    for size in (count, count + 1):
        positional, keyword = _rows((args, kwargs), size)
        theirs = [t for t in pytree.tree_leaves(run(*positional, **keyword)) if isinstance(t, Tensor)]
        ours = [t for t in pytree.tree_leaves(model(*positional, **keyword)) if isinstance(t, Tensor)]
        for a, b in zip(theirs, ours, strict=True):
            _compare_outputs(a.to(b.device), b, size, what)


def _compare_outputs(a: Tensor, b: Tensor, size: int, what: str) -> None:
    if a.shape != b.shape:
        raise RuntimeError(f"{what} have shape {tuple(a.shape)} where eval() gives {tuple(b.shape)}.")
    # Accumulated rounding stays far below this; another leaf is far above.
    limit = 1000 * torch.finfo(b.dtype).eps * float(b.nan_to_num().abs().max()) if b.is_floating_point() else 0.0
    off = ~torch.isclose(a, b, rtol=0, atol=limit, equal_nan=True)
    off = off.flatten(1).any(1) if off.dim() > 1 else off
    if off.any():
        raise RuntimeError(
            f"{what} differ from eval() in {int(off.sum())} of {size} samples, by up to {(a - b).abs().max():.2g}. A "
            "few samples may lie on a boundary of a tree, where rounding decides: try other samples, or pass "
            "verify=False."
        )
