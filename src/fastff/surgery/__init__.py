"""Surgery: turn a trained model into one with FFF layers. Find its feedforward blocks, verify them, replace them.

Find:     find.py searches; inventory.py, linears.py, trace.py, match.py and dropouts.py help it; example.py makes a
          batch for the whole model; blocks.py describes a block.
Replace:  replace.py; choose.py filters, fit.py and leaves.py fill the layers, outputs.py checks the result, apply.py
          edits the model, undo.py restores it after an error.
Distil:   distill.py, layer by layer (distill_layer.py) or as a whole (distill_model.py); closeness.py measures.
Save:     checkpoint.py; specification.py and history.py say what was done, files.py and the modules it names write and
          read it, weights_check.py checks it against a model.
Quantise: quantize.py, int8 leaves; precision.py says which weights of a model are quantised.
Compare:  comparing.py; controls.py makes the models beside FFF, comparison_rows.py measures each, comparison.py shows
          the rows, comparison_file.py keeps them.
report.py has the results of all these.
"""

from .apply import apply_
from .blocks import Block
from .checkpoint import load_, save
from .comparing import compare
from .comparison import Compared, Comparison
from .distill import distill_
from .precision import Precision, precision_of
from .quantize import Quantization, quantize_
from .replace import replace_
from .report import Distillation, Distilled, Report

__all__ = [
    "Block",
    "Compared",
    "Comparison",
    "Distillation",
    "Distilled",
    "Precision",
    "Quantization",
    "Report",
    "apply_",
    "compare",
    "distill_",
    "load_",
    "precision_of",
    "quantize_",
    "replace_",
    "save",
]
