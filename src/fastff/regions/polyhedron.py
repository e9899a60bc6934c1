"""Small questions about polyhedra {p : normals @ p + offsets >= 0}, answered in float64.

`project` finds the nearest point of a polyhedron by the dual active-set method of Goldfarb and Idnani (1983). It starts
at the given point and adds the violated half-spaces one by one, each time moving to the nearest point of the planes
that hold so far. For the `depth` half-spaces of a region, it ends after a few small systems of equations, either at the
nearest point or with proof that there is none: a positive combination of half-spaces that contradicts itself.

Normals have length 1, so all tolerances are distances. `inside_box` is a linear program over a box, solved by scipy.
"""

import math

import torch
from torch import Tensor

from ..extras import install

_PARALLEL = 1e-9  # sine of the angle below which a normal lies in the span of others
_ROUNDING = 64 * torch.finfo(torch.float64).eps


def project(normals: Tensor, offsets: Tensor, x: Tensor) -> Tensor | None:
    """The point nearest to x (in,) of the polyhedron with normals (rows, in) and offsets (rows,); None if empty."""
    if not len(normals):
        return x.clone()
    # The way there is a combination of normals, so a system with one number per row describes it.
    span, small = torch.linalg.qr(normals.mT)  # (in, k), (k, rows)
    gap = normals @ x + offsets
    rounding = _ROUNDING * (offsets.abs().max() + torch.linalg.vector_norm(x)).item()
    way = _shortest(small.mT, gap, rounding)
    return None if way is None else x + span @ way


def _shortest(normals: Tensor, gap: Tensor, rounding: float) -> Tensor | None:
    """The shortest vector v with normals @ v + gap >= 0; None if there is none."""
    way, active = torch.zeros_like(normals[0]), list[int]()
    force = gap.new_zeros(0)  # the multipliers of the active half-spaces
    for _ in range(16 * (len(normals) + 1) ** 2):
        now = normals @ way + gap
        now[active] = 0
        if now.min().item() >= -rounding - _ROUNDING * torch.linalg.vector_norm(way).item():
            return _polished(normals[active], gap[active], way)
        found = _add(normals, gap, way, active, force, int(now.argmin()))
        if found is None:
            return None
        way, active, force = found
    raise ArithmeticError("the active set of a projection did not settle; scale the inputs to about 1.")


def _add(
    normals: Tensor, gap: Tensor, way: Tensor, active: list[int], force: Tensor, new: int
) -> tuple[Tensor, list[int], Tensor] | None:
    """Make a violated half-space hold, dropping others that are in the way; None if they contradict each other."""
    normal, push = normals[new], 0.0
    while True:
        basis = normals[active]  # (active, in)
        share = torch.linalg.lstsq(basis.mT, normal.unsqueeze(1)).solution[:, 0] if active else force
        direction = normal - basis.mT @ share
        sine = torch.linalg.vector_norm(direction).item()
        # How far the multipliers allow, and how far it is to the plane.
        ratio = torch.where(share > _ROUNDING, force / share, math.inf)
        allowed = ratio.min().item() if active else math.inf
        needed = -(normal @ way + gap[new]).item() / sine**2 if sine > _PARALLEL else math.inf
        step = min(allowed, needed)
        if step == math.inf:
            return None
        if needed < math.inf:
            way = way + step * direction
        force, push = (force - step * share).clamp(min=0), push + step
        if needed <= allowed:
            return way, [*active, new], torch.cat([force, force.new_tensor([push])])
        dropped = int(ratio.argmin())
        active = [row for i, row in enumerate(active) if i != dropped]
        force = torch.cat([force[:dropped], force[dropped + 1 :]])


def _polished(normals: Tensor, gap: Tensor, way: Tensor) -> Tensor:
    """The shortest vector to all active planes, without the rounding of the steps that led there."""
    return torch.linalg.lstsq(normals, -gap.unsqueeze(1), driver="gelsd").solution[:, 0] if len(gap) else way


def irredundant(normals: Tensor, offsets: Tensor, tolerance: float) -> list[int]:
    """The rows that the polyhedron needs: without one of them, it grows by more than the tolerance.

    For an empty polyhedron: a few rows that contradict each other.
    """
    kept = list(range(len(normals)))
    for row in range(len(normals)):
        others = [i for i in kept if i != row]
        # Is there a point that satisfies the others and not this row?
        flipped = torch.cat([normals[others], -normals[row : row + 1]])
        beyond = torch.cat([offsets[others], -offsets[row : row + 1] - tolerance])
        if project(flipped, beyond, torch.zeros_like(normals[0])) is None:
            kept = others
    return kept


def inside_box(normals: Tensor, offsets: Tensor, low: Tensor, high: Tensor) -> Tensor | None:
    """A point of the polyhedron within low <= p <= high, (in,) each; None if there is none."""
    try:
        from scipy.optimize import linprog
    except ImportError as error:
        raise ImportError(f"linear programs need scipy: {install('regions')}.") from error
    # The largest t such that normals @ p + offsets >= t: a point as far inside as possible, within 1.
    size = normals.shape[1]
    rows = torch.cat([-normals, torch.ones_like(normals[:, :1])], 1)
    limits = [*zip(low.tolist(), high.tolist(), strict=True), (None, 1.0)]
    options = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    objective = [0.0] * size + [-1.0]
    found = linprog(objective, rows.numpy(), offsets.numpy(), bounds=limits, method="highs", options=options)
    if not found.success:
        raise ArithmeticError(f"the linear program of a region failed: {found.message}")
    return normals.new_tensor(found.x[:size]) if found.x[size] >= 0 else None
