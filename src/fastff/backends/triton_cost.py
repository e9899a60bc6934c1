"""What a hard pass costs on a GPU, way by way."""

from .triton_choice import Size, launches


def fastest(size: Size) -> str:
    ways = launches(size)
    saved = (size.batch - size.used_leaves) * size.leaf_bytes
    if saved >= {2: 2**25, 4: 2**27}[size.bytes]:
        return "tiles" if "tiles" in ways and (size.features < 2048 or size.per_leaf >= 12) else "spread tiles"
    return "alone" if "alone" in ways and size.leaf_bytes <= 2**18 else "spread"
