"""The trainings of each experiment, and their settings."""

import pytest

from fastff_reproduce import teacher
from fastff_reproduce.experiments import EXPERIMENTS
from fastff_reproduce.recipes import FASTFF, TABLE3, VIT
from fastff_reproduce.settings import Settings


def test_a_paper_training_measures_both_and_ours_has_two():
    made = EXPERIMENTS["table1"].cases(["usps"], [16], [8], ["paper", "fastff"], [3], {})
    assert [(case.model, case.recipe, case.goal) for case in made] == [
        (model, *rest) for model in ("FF", "FFF") for rest in (("paper", "both"), ("fastff", "G_A"), ("fastff", "M_A"))
    ]
    ours, memory = (dict(case.settings) for case in made[-2:])
    changed = {name for name in ours if ours[name] != memory[name]}
    assert changed <= {"weight_decay", "transposition"}


def test_a_part_that_is_left_out_stays_out_whatever_is_set():
    changes = {"noise": 0.5, "by_pixel": True}
    made = EXPERIMENTS["ablation"].cases(["digits"], [32], [8], seeds=[0], changes=changes)
    settings = {case.recipe: dict(case.settings) for case in made}
    assert settings["fastff"]["noise"] == settings["without weight decay"]["noise"] == 0.5
    assert settings["without noise"]["noise"] == 0
    assert settings["without noise"]["by_pixel"]
    without = settings["without standardised inputs"]
    assert (without["standardise"], without["by_pixel"]) == (False, False)


def test_the_ablation_is_of_our_recipe():
    made = EXPERIMENTS["ablation"].cases(["digits"], [32], [8], seeds=[0])
    assert [case.settings for case in made if case.recipe == "fastff"] == [FASTFF.items()]
    assert all(case.settings != FASTFF.items() for case in made if case.recipe != "fastff")
    with pytest.raises(ValueError, match="changes recipe fastff; got paper"):
        EXPERIMENTS["ablation"].cases(recipes=["paper"])


def test_experiments_have_the_settings_of_their_rows():
    """Settings of one experiment do not leak into another whose rows are by other ones."""
    names = ("schedule", "input_dropout", "averaging", "batch", "steps", "epochs")
    found = {
        (name, case.model): tuple(dict(case.settings)[setting] for setting in names)
        for name in ("table1", "inference_counterparts", "table2", "table3")
        for case in EXPERIMENTS[name].cases(recipes=["fastff"], seeds=[0])
    }
    table1, table2 = ("constant", 0.2, 0.998, 512, 16800, 0), ("cosine", 0, 0.995, 256, 0, 16)
    assert found == {
        ("table1", "FF"): table1,
        ("table1", "FFF"): table1,
        ("inference_counterparts", "FF"): table1,
        ("inference_counterparts", "FFF"): table1,
        ("table2", "FF"): table2,
        ("table2", "MoE"): table2,
        ("table2", "FFF"): ("cosine", 0, 0.995, 128, 0, 16),
        ("table3", "ViT-FF"): ("cosine", 0, 0, 512, 0, 600),
        ("table3", "ViT-FFF"): ("cosine", 0, 0, 512, 0, 200),
    }


def test_table2_treats_images_as_what_they_show():
    made = EXPERIMENTS["table2"].cases(["cifar10", "svhn", "mnist"], [64], recipes=["fastff", "paper"], seeds=[0])

    def with_setting(name):
        return {(case.dataset, case.recipe) for case in made if dict(case.settings)[name]}

    assert with_setting("mirror") == {("cifar10", "fastff")}  # digits are not mirrored
    assert with_setting("by_pixel") == {("cifar10", "fastff"), ("svhn", "fastff")}


def test_table3_treats_images_as_what_they_show():
    made = EXPERIMENTS["table3"].cases(["cifar10", "svhn"], leaf_widths=[8], recipes=["fastff"], seeds=[0])
    assert {(case.dataset, dict(case.settings)["mirror"]) for case in made} == {("cifar10", True), ("svhn", False)}


def test_teachers_see_the_images_that_their_students_see():
    """All settings of images are the same: a teacher of other images would know less of these."""
    dense, tree = EXPERIMENTS["table3"].cases(leaf_widths=[8], recipes=["fastff"], seeds=[0])
    names = ("augment", "mirror", "shift", "cutmix", "mixup", "smoothing", "warmup", "batch", "evaluate_every")
    first, second = ({name: dict(case.settings)[name] for name in names} for case in (dense, tree))
    assert first == second
    assert all(value for name, value in first.items() if name != "augment")


def test_a_part_by_model():
    table1 = EXPERIMENTS["table1"].cases
    some = table1(seeds=[0], models=["FF"], datasets=["digits"], widths=[100])  # which no tree has
    assert {(case.model, case.width, case.depth) for case in some} == {("FF", 100, 0)}
    whole = table1(seeds=[0])
    assert table1(seeds=[0], models=["FFF"]) == [case for case in whole if case.model == "FFF"]
    with pytest.raises(ValueError, match="the experiment has no model 'MoE'; choose from FF, FFF"):
        table1(seeds=[0], models=["FF", "MoE"])


def test_experiment_of_table3():
    cases = EXPERIMENTS["table3"].cases(seeds=range(2))
    assert len(cases) == len({case.key for case in cases}) == 2 * (1 + 1 + 6 * (3 + 1))
    assert {case.goal for case in cases} == {"G_A"}
    assert {case.width for case in cases} == {128}
    sizes = {(case.leaf_width, case.depth) for case in cases if case.model == "ViT-FFF"}
    assert sizes == {(32, 2), (16, 3), (8, 4), (4, 5), (2, 6), (1, 7)}
    ours = [case for case in cases if case.recipe == "fastff"]
    assert {case.settings for case in ours if case.model == "ViT-FFF"} == {VIT.items()}
    own = {
        "rate": VIT.teacher_rate,
        "weight_decay": VIT.teacher_decay,
        "epochs": 600,
        "teacher_share": 0.0,
        "noise": Settings().noise,
        "fit_images": Settings().fit_images,
    }
    assert {case.settings for case in ours if case.model == "ViT-FF"} == {VIT.changed(own).items()}
    twins = {teacher.teacher_of(case) for case in ours if case.model == "ViT-FFF"}
    assert twins == {case for case in ours if case.model == "ViT-FF"}
    paper = [dict(case.settings) for case in cases if case.recipe == "paper" and case.leaf_width == 8]
    assert (
        sorted((s["hardening"], s["frozen"]) for s in paper) == [(0, True)] * 2 + [(5, False)] * 2 + [(10, False)] * 2
    )
    for settings in paper:
        assert settings["augment"]
        assert (settings["optimizer"], settings["rate"], settings["schedule"]) == ("adam", 4e-4, "constant")
        assert (settings["plateau"], settings["plateau_of"]) == (50, "validation")


def test_experiments_in_part():
    table3, entropy = EXPERIMENTS["table3"], EXPERIMENTS["entropy_vit"]
    some = table3.cases(widths=[64], leaf_widths=[8], recipes=["fastff"], seeds=[7], changes={"epochs": 5})
    assert [(case.model, case.width, case.leaf_width, case.depth) for case in some] == [
        ("ViT-FF", 64, 64, 0),
        ("ViT-FFF", 64, 8, 3),
    ]
    assert [(case.seed, dict(case.settings)["epochs"]) for case in some] == [(7, 15), (7, 5)]
    steps = table3.cases(leaf_widths=[8], recipes=["fastff"], seeds=[0], changes={"steps": 1000, "teacher_share": 0.1})
    assert [dict(case.settings)["steps"] for case in steps] == [100, 1000]
    alone = table3.cases(leaf_widths=[8], recipes=["fastff"], seeds=[0], changes={"teacher_share": 0.0})
    for name in ("teacher_rate", "teacher_decay"):  # which would change nothing
        assert {dict(case.settings)[name] for case in alone} == {0.0}
    # By the paper's recipe, too, one dense transformer teaches all, and it is that of the table.
    paper = table3.cases(leaf_widths=[8], recipes=["paper"], seeds=[0], changes={"teacher_share": 1.0})
    assert {teacher.teacher_of(case) for case in paper[1:]} == {paper[0]}
    with pytest.raises(ValueError, match="FF is their teacher"):
        table3.cases(recipes=["fastff"], models=["ViT-FF"], changes={"weight_decay": 0.5})
    with pytest.raises(ValueError, match=r"rate is for the trees here.* Set teacher_rate instead"):
        table3.cases(recipes=["fastff"], models=["ViT-FF"], changes={"rate": 0.5})
    with pytest.raises(ValueError, match="derives widths from its leaf widths"):
        entropy.cases(widths=[64])
    with pytest.raises(ValueError, match="teacher_share is for transformers"):
        EXPERIMENTS["table1"].cases(changes={"teacher_share": 1.0})
    # Two of the three levels of hardening are now one, and are trained once.
    assert len(table3.cases(leaf_widths=[8], recipes=["paper"], seeds=[0], changes={"hardening": 7.0})) == 1 + 2
    (case,) = entropy.cases(recipes=["paper"], seeds=[0])
    assert (case.model, case.width, case.leaf_width, case.depth) == ("ViT-FFF", 128, 32, 2)
    settings = dict(case.settings)
    assert settings["hardening"] == 0.1
    assert settings | {"hardening": 0.0} == dict(TABLE3.items())
    # What Table 3 has trained, the figure of ours takes.
    assert set(entropy.cases(recipes=["fastff"])) <= set(table3.cases(recipes=["fastff"]))
