"""From the model you have to one with FFF layers: find its feedforward blocks, verify them, replace them.

find.py and trace.py find and verify, blocks.py says what a block is, carry.py and leaves.py carry weights over,
replace.py changes the model, distill.py and teach.py train it further, undo.py takes back what a failed call did,
report.py tells what was done, specification.py, checkpoint.py and files.py write it down and check it when it is read.
"""

from .blocks import Block
from .checkpoint import load_, save
from .distill import distill_
from .replace import apply_, replace_
from .report import Distillation, Distilled, Report

__all__ = ["Block", "Distillation", "Distilled", "Report", "apply_", "distill_", "load_", "replace_", "save"]
