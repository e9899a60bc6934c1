"""The settings of each experiment: the paper's recipe, as published, and ours.

To memorise (M_A), our recipe trains without weight decay and transposition.
"""

import dataclasses
from typing import Any

from .settings import Settings

# Ours, the same for every size and data set of Table 1.
FASTFF = Settings(schedule="constant", weight_decay=0.1, averaging=0.998, batch=512, steps=16800, input_dropout=0.2)
# The paper's, where it gives values; the rest is our choice. It does not say when a training "stops improving" in
# Table 1 (3000 steps are 15 epochs of MNIST and 120 of USPS), how inputs are scaled, or over what the hardening loss is
# averaged: h = 3 is far too much for the published sum, and the authors' code takes the mean over samples and nodes.
PAPER = Settings(
    optimizer="sgd",
    rate=0.2,
    schedule="constant",
    steps=21000,
    patience_steps=3000,
    standardise=False,
    balanced=False,
    decision="soft",
    noise=0.0,
    balance=0.0,
    hardening=3.0,
    reduction="mean",
    final_temperature=1.0,
    min_share=0.0,
)

# The paper's recipe for Table 2.
TABLE2 = PAPER.changed(
    {
        "optimizer": "adam",
        "rate": 1e-3,
        "batch": 4096,
        "precision": "high",
        "epochs": 7000,
        "patience": 350,
        "plateau": 250,
    }
)

# Ours for Table 2, whose leaves have a hundred thousand weights each. Sharing allows a higher rate than FF and MoE do.
WIDE = Settings(
    rate=5e-3, weight_decay=0.2, averaging=0.995, batch=128, precision="high", epochs=16, noise=0.4, sharing=0.95
)
DENSE = dataclasses.replace(WIDE, rate=1e-3, weight_decay=0.1, batch=256)
# The paper's recipe for Table 3. It gives neither batch size nor training length: ours leaves time for a halved rate to
# help.
TABLE3 = PAPER.changed(
    {
        "optimizer": "adam",
        "rate": 4e-4,
        "batch": 512,
        "precision": "high",
        "epochs": 500,
        "patience": 100,
        "plateau": 50,
        "plateau_of": "validation",
        "augment": 1.0,
        "hardening": 0.0,
    }
)
# Its three levels of hardening. At h = infinity the tree does not train. The leaf that evaluation uses trains alone, as
# in the authors' "hardened" training, so that soft and hard pass agree.
LEVELS = (
    dataclasses.replace(TABLE3, hardening=5.0),
    dataclasses.replace(TABLE3, hardening=10.0),
    dataclasses.replace(TABLE3, frozen=True, decision="straight_through", final_temperature=100.0),
)
# Ours for Table 3. A dense transformer trains first, on mixed images: it takes long to overfit them. Trees fitted to
# its blocks then learn its answers to images that are mixed in the same way (first trials: docs/research/ablations.md).
VIT = Settings(
    rate=2e-3,
    warmup=5,
    weight_decay=0.05,
    batch=512,
    precision="high",
    epochs=200,
    evaluate_every=20,
    mirror=True,
    shift=0.125,
    cutmix=0.5,
    mixup=0.5,
    smoothing=0.1,
    teacher_share=3.0,
    teacher_rate=2e-3,
    teacher_decay=0.1,
    noise=0.0,
    fit_images=16384,
)

# The ablation: our recipe with one part changed.
CHANGES: dict[str, dict[str, Any]] = {
    "without noise": {"noise": 0.0},
    "without a balanced start": {"balanced": False},  # this turns rebalancing off, too
    "without rebalancing": {"min_share": 0.0},
    "without the balance loss": {"balance": 0.0},
    "without weight decay": {"weight_decay": 0.0},
    "without means of weights": {"averaging": 0.0},
    "without input dropout": {"input_dropout": 0.0},
    "without standardised inputs": {"standardise": False},
    "with soft decisions, temperature 1 to 100": {"decision": "soft", "training_temperature": 100.0},
    "with transposition 0.05": {"transposition": 0.05},
    "with the hardening loss, h = 0.3": {"hardening": 0.3},
    "with a falling rate": {"schedule": "cosine"},
    "with SGD at a rate of 1": {"optimizer": "sgd", "rate": 1.0, "weight_decay": 3e-4},  # the same decay per step
}
