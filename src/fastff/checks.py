"""Checks of arguments: each error names the constraint, the value and the remedy."""

import math
import operator
import os
import sys
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import SupportsIndex

import torch
from torch import Tensor


def check_int(name: str, value: SupportsIndex, minimum: int) -> int:
    """The value as an int, if it is an integer (numpy's too) and at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} must be an integer; got {value!r} of type {type(value).__name__}.")
    number = operator.index(value)
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}; got {number}.")
    return number


def check_number(
    name: str, value: float, minimum: float, maximum: float = sys.float_info.max, *, above: bool = False
) -> float:
    """The value as a float, if it is a finite number (numpy's too) from `minimum`, or above it, to `maximum`."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number; got {value!r} of type {type(value).__name__}.")
    try:
        number = float(value)
    except OverflowError:  # an int past the largest float
        number = math.inf
    if not math.isfinite(number) or number < minimum or number > maximum or (above and number == minimum):
        low = "" if minimum == -sys.float_info.max else f", and {minimum:g} or more"
        low = f" and {'positive' if minimum == 0 else f'above {minimum:g}'}" if above else low
        high = f", and at most {maximum:.4g}" if maximum < number < math.inf else ""
        raise ValueError(f"{name} must be finite{low}{high}; got {value}.")
    return number


def check_probability(name: str, value: float) -> float:
    """The value as a float, if it is in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is a probability, a number; got {value!r} of type {type(value).__name__}.")
    if not 0 <= value < 1:
        raise ValueError(f"{name} is a probability and must be in [0, 1); got {value}.")
    return float(value)


def check_share(name: str, value: float) -> float:
    """The value as a float, if it is from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number from 0 to 1; got {value!r} of type {type(value).__name__}.")
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be from 0 to 1; got {value}.")
    return float(value)


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise unless the value is one of the choices."""
    if value not in choices:
        *others, last = (repr(choice) for choice in choices)
        raise ValueError(f"{name} must be {', '.join(others)} or {last}; got {value!r}.")


def allocate(
    shapes: Mapping[str, tuple[int, ...] | None],
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    what: str,
) -> dict[str, Tensor | None]:
    """Uninitialised tensors of these shapes, or an error that says how many bytes they need."""
    dtype = dtype or torch.get_default_dtype()
    if dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"{what} needs float64, float32, float16 or bfloat16, a floating-point dtype; got {dtype}.")
    place = torch.empty((), device=device).device
    total = sum(math.prod(shape) for shape in shapes.values() if shape is not None) * dtype.itemsize
    limit = _memory_of(place)
    if total <= limit:
        try:
            return {n: None if s is None else torch.empty(s, device=device, dtype=dtype) for n, s in shapes.items()}
        except (RuntimeError, MemoryError) as error:
            reason = str(error).splitlines()[0]
    else:
        reason = f"{place} can hold {readable(limit)}"
    exact = f" ({total} bytes)" if total < 2**80 else ""
    raise MemoryError(
        f"{what} takes {readable(total)}{exact} of {dtype} parameters on {place}, which cannot be allocated: "
        f"{reason}. Choose a smaller depth or leaf_width: every level doubles the leaves."
    )


def _memory_of(device: torch.device) -> int:
    """The memory of a device in bytes. Linux grants more than it has, and kills the process that uses it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 2**62


def readable(size: int) -> str:
    """A number of bytes, for people."""
    if size >= 2**80:
        return f"2**{size.bit_length() - 1} B"
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    power = min(max(size.bit_length() - 1, 0) // 10, len(units) - 1)
    return f"{size / 2 ** (10 * power):.4g} {units[power]}"
