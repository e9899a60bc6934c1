"""The two questions that torch answers only through private functions, asked in one place."""

import torch


def in_backward() -> bool:
    """Whether autograd is running: a forward inside it is a recomputation by gradient checkpointing."""
    return bool(torch._C._current_graph_task_id() != -1)


def in_transform() -> bool:
    """Whether a torch.func transform (vmap, grad) is active: values cannot then steer Python, nor outlive it."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def in_eager() -> bool:
    """Whether operations run as they are called: no compiler or exporter traces them, no torch.func transform is
    active."""
    return not torch.compiler.is_compiling() and not in_transform()
