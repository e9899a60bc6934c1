"""Check a config before transformers builds a model from it.

A config from an untrusted file can ask for code and weights from the Hub, a billion labels, 2**40 positions. So its
names and values are checked against what they may be, and every number against the size of the weights that came with
it. While the model is built, the Hub is switched off and modules are counted.
"""

import contextlib
import dataclasses
import functools
import inspect
import math
import re
import threading
from collections.abc import Iterator
from typing import Any

import huggingface_hub.constants
from torch import nn
from transformers import CONFIG_MAPPING, GenerationConfig

from ..surgery.files import Header
from ..switches import PROBING

DTYPES = ("float64", "float32", "float16", "bfloat16")
# Not needed to build a model: left out of a save, and refused in one.
_LEFT_OUT = ("auto_map", "custom_pipelines", "_name_or_path", "name_or_path", "transformers_weights")
# These make transformers or timm fetch code or weights, or build something else than the class.
_FOREIGN = {"quantization_config", "compression_config", "trust_remote_code", "model_args", "backbone_kwargs"}
_FOREIGN |= {"backbone", "use_timm_backbone", "use_pretrained_backbone", "backbone_checkpoint", "use_kernels"}
_FOREIGN_ENDS = ("_implementation", "_implementation_internal", "name_or_path", "kernel_config")
_COUNT = re.compile("layer|block|expert|depth|stage|head|group|label|class|repeat|codebook|level|branch|bottleneck")
_SIZE = re.compile("size|dim|width|channel|length|window|position|capacity|token|_id$|_ids$|ratio|stride")
_FREE = re.compile(r"theta$|(^|_)base$|seed$")  # numbers that set no size
_DEEPEST, _LONGEST = 12, 10_000  # levels of nesting, characters of a string
_PLAIN = re.compile(r"[\w .,+=<>()|-]*")  # no path, address or name on the Hub


def cleaned(config: dict[str, Any], kind: Any) -> dict[str, Any]:
    """A config to save, without the values that would be refused."""
    found = {}
    for key, value in config.items():
        if key in _LEFT_OUT or not _known(key, value, kind):
            continue
        inner = _inner(kind, key, value)
        found[key] = cleaned(value, inner) if isinstance(value, dict) and inner is not None else value
    return found


def check_config(config: dict[str, Any], kind: Any, header: Header) -> None:
    """Raise if a config has a forbidden value, or a number that is too large for its file of weights."""
    elements = sum(math.prod(shape) for _, shape in header.values())
    widest = max((size for _, shape in header.values() for size in shape), default=0)
    limits = _Limits(len(header), widest, elements)
    _check_names(config, 0)
    if config.get("dtype") not in DTYPES:
        raise ValueError(f"the config must have a floating-point dtype; got {config.get('dtype')!r:.80}.")
    for key, value in config.items():
        limits.check(key, value)
    _check_known(config, kind)


def check_generation(values: Any) -> None:
    """Raise unless this is a generation config with names that transformers knows and plain values."""
    if not isinstance(values, dict):
        raise ValueError(f"the generation config must be a JSON object; got a {type(values).__name__}.")
    fresh: Any = GenerationConfig
    known = {*vars(fresh()), "transformers_version", "_from_model_config"}
    for key, value in values.items():
        if key not in known or isinstance(value, dict):
            raise ValueError(f"the generation config has {key} = {value!r:.80}, which fastff does not load.")


@contextlib.contextmanager
def guarded(tensors: int | None) -> Iterator[None]:
    """While a model is built, the Hub is off for the whole process, and more modules and parameters than a file with
    that number of tensors can fill are an error, which ends loops that would run for hours."""
    thread, limit, count = threading.get_ident(), 1000 + 10 * (tensors or 0), 0

    def step(*_: Any) -> None:
        nonlocal count
        count += threading.get_ident() == thread
        if tensors is not None and count > limit:
            raise ValueError(f"it has more than {limit} modules and parameters, the file {tensors} tensors")

    constants: Any = huggingface_hub.constants
    with PROBING, contextlib.ExitStack() as stack:
        stack.callback(setattr, constants, "HF_HUB_OFFLINE", constants.HF_HUB_OFFLINE)
        constants.HF_HUB_OFFLINE = True
        for register in (
            nn.modules.module.register_module_module_registration_hook,
            nn.modules.module.register_module_parameter_registration_hook,
        ):
            stack.callback(register(step).remove)
        yield


@dataclasses.dataclass(frozen=True)
class _Limits:
    """How large the numbers of a config may be for a file with this number of tensors and elements."""

    tensors: int
    widest: int
    elements: int

    def check(self, key: str, value: Any) -> None:
        if isinstance(value, dict):
            self._need(key, len(value), 1000 + max(self.tensors, self.widest), "entries")
            for inner, other in value.items():
                self.check(f"{key}.{inner}", other)
        elif isinstance(value, list):
            self._need(key, len(value), 1000 + max(self.tensors, self.widest), "entries")
            for other in value:
                self.check(key, other)
        elif isinstance(value, str):
            self._need(key, len(value), _LONGEST, "characters")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            self._check_number(key, value)

    def _check_number(self, key: str, value: float) -> None:
        name = key.rpartition(".")[2] if not key.rpartition(".")[2].isdigit() else key
        if _FREE.search(name) and abs(value) < 2**53:
            return
        if name in ("num_labels", "num_classes"):
            self._need(key, value, 1000 + self.widest, "")
        elif _COUNT.search(name) and not _SIZE.search(name):
            self._need(key, value, 1000 + max(self.tensors, self.widest if "label" in name else 0), "")
        elif isinstance(value, int):
            self._need(key, value, max(2**20, self.elements), "")

    def _need(self, key: str, value: float, most: int, unit: str) -> None:
        if not abs(value) <= most:
            raise ValueError(
                f"the config has {key} {f'of {value} {unit}' if unit else f'= {value}'}; with a file of {self.tensors} "
                f"tensors and {self.elements} elements it may be at most {most}."
            )


def _check_names(value: Any, level: int) -> None:
    """Raise for a name, at any level, that could load or build something other than the config's class."""
    if level > _DEEPEST:
        raise ValueError(f"the config is nested deeper than {_DEEPEST} levels.")
    timm = isinstance(value, dict) and str(value.get("model_type")).startswith("timm_")
    for key, other in value.items() if isinstance(value, dict) else ():
        foreign = key in _LEFT_OUT or key in _FOREIGN or key.endswith(_FOREIGN_ENDS)
        if timm and key in ("backbone", "architecture", "use_timm_backbone"):
            # timm's own names are fine; "hf-hub:..." and "local-dir:..." load from elsewhere.
            foreign = not (isinstance(other, bool) or (isinstance(other, str) and re.fullmatch(r"\w[\w.]*", other)))
        if foreign and other:
            raise ValueError(
                f"the config has {key} = {other!r:.80}, which may fetch code or weights, or change what the model "
                "consists of; fastff neither saves nor loads such models."
            )
        if key in ("dtype", "torch_dtype") and other is not None and other not in DTYPES:
            raise ValueError(f"the config must have a floating-point {key}; got {other!r:.80}.")
    for other in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        if isinstance(other, dict | list):
            _check_names(other, level + 1)


def _check_known(config: dict[str, Any], kind: Any) -> None:
    """Raise for a name that the config's class does not have, unless its value is plain."""
    for key, value in config.items():
        if not _known(key, value, kind):
            raise ValueError(
                f"the config has {key} = {value!r:.80}, which {kind.__name__} does not have. Extra attributes may only "
                "be plain words and numbers."
            )
        inner = _inner(kind, key, value)
        if inner is not None and isinstance(value, dict):
            _check_known(value, inner)


@functools.cache
def _fields(kind: Any) -> frozenset[str]:
    """The names that a config class and its bases take."""
    names = {name for above in kind.__mro__ for name in inspect.signature(above.__init__).parameters}
    names |= {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    return frozenset(names - {"self", "args", "kwargs"} | {*kind.sub_configs, *kind.attribute_map, "model_type"})


def _known(key: str, value: Any, kind: Any) -> bool:
    """Whether a config class has this field, or the value is plain and the name is free in the class."""
    if key in _fields(kind):
        return True
    own = getattr(kind, key, None)
    if key.startswith("__") or (own is not None and not isinstance(own, property | str | int | float)):
        return False
    return all(
        other is None
        or isinstance(other, bool | float)
        or (isinstance(other, int) and abs(other) < 2**53)
        or (isinstance(other, str) and _PLAIN.fullmatch(other) is not None)
        for other in (value if isinstance(value, list) else [value])
    )


def _inner(kind: Any, key: str, value: Any) -> Any:
    """The class of a config within a config; None if there is none."""
    if key not in kind.sub_configs or not isinstance(value, dict):
        return None
    inner = kind.sub_configs[key]
    if hasattr(inner, "sub_configs"):
        return inner
    written = value.get("model_type")
    return CONFIG_MAPPING[written] if isinstance(written, str) and written in CONFIG_MAPPING else None
