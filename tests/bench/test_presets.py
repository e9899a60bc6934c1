from fastff.bench import presets


def test_cases_of_the_paper():
    blocks = presets.blocks()
    assert [case.depth for case in blocks] == list(range(1, 16))
    assert {(c.in_features, c.out_features, c.leaf_width, c.batch) for c in blocks} == {(768, 768, 32, 256)}
    table1 = presets.table1()
    assert len(table1) == 2 * 4 * 4
    assert {case.training_width for case in table1} == {16, 32, 64, 128}
    assert {(case.in_features, case.out_features, case.batch) for case in table1} == {(256, 10, 2048), (784, 10, 2048)}
    table3 = presets.table3()
    assert [(case.leaf_width, case.depth) for case in table3] == [(32, 2), (16, 3), (8, 4), (4, 5), (2, 6), (1, 7)]
    assert {case.training_width for case in table3} == {128}
    regimes = [(case.depth, case.batch) for case in presets.regimes()]
    assert len(regimes) == 14
    assert (13, 2048) not in regimes
