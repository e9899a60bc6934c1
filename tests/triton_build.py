"""Compiles Triton kernels for a GPU that is not there, with the launch parameters that would be used on it.

For a process without the interpreter: see `without_interpreter` in helpers.py.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastff.backends.triton_size import HOPPER_SHARED

_TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8", torch.uint8: "u8",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1", torch.float64: "fp64",
}  # fmt: skip


class Build:
    """Stands for a kernel of a module, and compiles it for what it is called with: tensors on the meta device."""

    def __init__(self, module, name):
        self.kernel, self.built = getattr(module, name), {}
        setattr(module, name, self)

    def __getitem__(self, grid):
        assert 0 < grid[0] < 2**31, grid
        assert all(0 < n < 2**16 for n in grid[1:]), grid
        return self.build

    def build(self, *arguments, num_warps=4, launch_pdl=False, **options):
        names = self.kernel.arg_names
        signature, constants, attributes = {}, {}, {}
        for i, (name, a) in enumerate(zip(names, arguments, strict=False)):
            if isinstance(a, torch.Tensor):
                signature[name] = "*" + _TYPES[a.dtype]
                is_aligned = a.storage_offset() * a.element_size() % 16 == 0  # memory is; views may not be
            elif isinstance(a, float):
                signature[name], is_aligned = "fp32", False
            elif a == 1:
                signature[name], constants[i,], is_aligned = "constexpr", 1, False
            else:
                signature[name], is_aligned = "i32", a % 16 == 0
            if is_aligned:
                attributes[i,] = [["tt.divisibility", 16]]
        for name, value in options.items():
            signature[name], constants[names.index(name),] = "constexpr", value
        key = (*signature.items(), *constants.items(), *attributes, num_warps)
        if key not in self.built:
            signature = {name: signature[name] for name in names}
            source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants, attrs=attributes)
            chosen = {"num_warps": num_warps, "launch_pdl": launch_pdl}
            self.built[key] = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=chosen)
            self.check(options, self.built[key])

    def check(self, options, built):
        assert len(built.asm["cubin"]) > 0
        assert built.metadata.shared <= HOPPER_SHARED, (self.kernel.fn.__name__, options, built.metadata.shared)
        if options.get("CLEARED"):  # what is read before the wait must not come from a first-level cache
            early = built.asm["ptx"].split("griddepcontrol.wait")[0]
            assert not re.search(r"cp\.async\.ca|ld\.global(?!\.cg)", early), (self.kernel.fn.__name__, options)
        assert ("griddepcontrol.wait" in built.asm["ptx"]) == options.get("PDL", False), self.kernel.fn.__name__


_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class WithoutSpills(Build):
    """Also fails where a kernel keeps registers in memory."""

    def check(self, options, built):
        super().check(options, built)
        if _CUOBJDUMP.exists():
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(built.asm["cubin"])
                file.flush()
                command = [_CUOBJDUMP, "-res-usage", file.name]
                usage = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            assert re.search(r"STACK:0 ", usage), (self.kernel.fn.__name__, options, usage)
