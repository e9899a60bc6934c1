"""The page in a real browser: Debian's chromium, headless. Expected values come from Python, not from the page."""

import pytest
import torch
import torch.nn.functional as F

import fastff
from browser import Browser, find
from fastff.regions import explore, statistics
from helpers import make

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find() is None, reason="no browser: apt-get install chromium, or set FASTFF_BROWSER"),
]
DEPTH, NODES = 3, 7


@pytest.fixture(scope="module")
def browser():
    with Browser() as opened:
        yield opened


def losses(output, target):
    return F.cross_entropy(output, target, reduction="none")


@pytest.fixture(scope="module")
def layer_and_data():
    torch.manual_seed(3)
    layer = fastff.FFF(16, 4, depth=DEPTH, leaf_width=2)
    x, y = torch.randn(300, 16), torch.randint(4, (300,))
    fastff.initialize_tree_(layer, x)
    with torch.no_grad():
        layer.node_bias[:3] += torch.tensor([0.6, -0.5, 0.4])  # blocks of different widths
        layer.node_bias[6] = 1e3  # leaf 6 is dead
    return layer.eval(), (x, y)


@pytest.fixture(scope="module")
def found(layer_and_data):
    return statistics(*layer_and_data, loss=losses)


@pytest.fixture(scope="module")
def path(layer_and_data, tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / "page.html"
    names = ["cat", "<b>dog</b>", "</script><img src=x onerror=document.hacked=1>", "emu"]
    return explore(*layer_and_data, path, loss=losses, class_names=names, image_shape=(4, 4), title="A & <i>B</i>")


def facts(page):
    """The numbers that the page shows of the selected region, by name."""
    code = "[...document.querySelectorAll('#numbers dt')].map(dt => [dt.innerText, dt.nextSibling.innerText])"
    return dict(page.evaluate(code))


def shown(page, kind):
    """The indices of the examples of one kind."""
    code = f"""[...document.querySelectorAll('#examples h3')].filter(h => h.innerText.startsWith('{kind}'))
        .flatMap(h => [...h.nextSibling.querySelectorAll('button')].map(b => Number(/#(\\d+)/.exec(b.innerText)[1])))"""
    return page.evaluate(code)


def click_block(page, centre, level):
    """Click the tree: `centre` from 0 to 1 across, in the row of this level."""
    left, top, width, height = page.box("#canvas")
    page.click(left + centre * width, top + (level + 0.5) * height / (DEPTH + 1))


def percent(share):
    return f"{100 * share:.0f} %" if share in (0, 1) else f"{100 * share:.1f} %"


def check_region(page, found, region):
    assert page.text("#name").lower() == region.name.replace("node 0", "root")
    given = facts(page)
    assert given["inputs"].startswith(f"{region.count} of 300 ({percent(region.share)}, ")
    assert given["accuracy"] == ("-" if region.accuracy is None else percent(region.accuracy))
    assert given["loss"] == "-" if region.loss is None else float(given["loss"]) == pytest.approx(region.loss, rel=1e-2)
    for kind, examples in region.examples.items():
        assert shown(page, kind.capitalize()) == [one.index for one in examples]
    counts = page.evaluate("[...document.querySelectorAll('#bars tr')].map(tr => Number(tr.children[2].innerText))")
    assert counts == list(region.labels.values())


def test_clicking_a_block_shows_its_count_and_examples(browser, path, found):
    page = browser.open(path)
    start = 0
    for leaf, count in enumerate(found.leaf_count.tolist()):
        for part in (0.1, 0.9) if count else ():
            click_block(page, (start + part * count) / 300, DEPTH)
            check_region(page, found, found.leaf(leaf))
        start += count
    click_block(page, 0.01, 1)
    check_region(page, found, found.node(1))
    page.wait("location.hash === '#node-1'")
    assert page.errors() == []


def test_arrow_keys_walk_the_tree(browser, path, found):
    page = browser.open(path)
    page.evaluate("document.getElementById('tree').focus()")
    count, at = found.count, 0
    for key in ("ArrowDown", "ArrowRight", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowLeft", "ArrowUp"):
        page.press(key)
        first = 2 ** (at + 1).bit_length() // 2 - 1
        if key == "ArrowDown" and at < NODES:
            at = 2 * at + 1 + int(count[2 * at + 2] > count[2 * at + 1])
        elif key in ("ArrowLeft", "ArrowRight"):
            at = min(max(at + (1 if key == "ArrowRight" else -1), first), 2 * first)
        elif key == "ArrowUp":
            at = (at - 1) // 2
        region = found.leaf(at - NODES) if at >= NODES else found.node(at)
        check_region(page, found, region)
        spoken = page.text("#announce")
        assert spoken.lower().startswith(f"{region.name}, {region.count} of 300 inputs")
    page.press("Home")
    assert page.text("#name") == "Root"


def test_zoom_by_key_and_click(browser, path, found):
    page = browser.open(path)
    page.evaluate("document.getElementById('tree').focus()")
    page.press("ArrowDown")
    zoomed = 1 + int(found.count[2] > found.count[1])
    page.press("Enter")
    assert page.text("#zoom") == "Whole tree"
    leaves = range(4) if zoomed == 1 else range(4, 8)
    start = 0
    for leaf in leaves:
        count = int(found.leaf_count[leaf])
        if count:
            click_block(page, (start + count / 2) / int(found.count[zoomed]), DEPTH)
            check_region(page, found, found.leaf(leaf))
        start += count
    click_block(page, 0.5, 0)
    assert page.text("#name") == "Root"
    assert page.text("#zoom") == "Zoom in"


def search(page, text):
    page.evaluate("document.getElementById('query').value = ''; document.getElementById('query').focus()")
    page.type(text)
    page.press("Enter")


def test_search(browser, path, found):
    page = browser.open(path)
    search(page, "leaf 4")
    check_region(page, found, found.leaf(4))
    search(page, "5")
    assert page.text("#name") == "Leaf 5"
    search(page, "node 2")
    check_region(page, found, found.node(2))
    one = found.leaf(1).examples["boundary"][0]
    search(page, f"input {one.index}")
    assert page.text("#name") == "Leaf 1"
    assert page.text("#follow-title") == f"Input #{one.index}"
    for text, answer in (
        ("leaf 8", "no leaf 8: leaves are 0 to 7"),
        ("node 7", "nodes are 0 to 6"),
        ("?", "Type leaf 5"),
    ):
        search(page, text)
        assert answer in page.text("#answer")
    assert page.text("#name") == "Leaf 1"


def test_following_an_input_shows_its_margins(browser, path, found, layer_and_data):
    page = browser.open(path)
    search(page, "leaf 1")
    one = found.leaf(1).examples["boundary"][0]
    page.click(
        *page.middle(
            f"#examples button[data-input='{page.evaluate(f'data.inputs.findIndex(i => i[0] === {one.index})')}']"
        )
    )
    steps = page.evaluate(
        "[...document.querySelectorAll('#path tbody tr')].map(tr => [...tr.children].map(td => td.innerText))"
    )
    expected = fastff.tree.path(1, DEPTH)
    assert [step[0] for step in steps] == ["root", *(f"node {node}" for node, _ in expected[1:])]
    assert [step[1] for step in steps] == ["right" if right else "left" for _, right in expected]
    assert [float(step[3]) for step in steps] == pytest.approx(one.margins.tolist(), rel=1e-2)
    x = layer_and_data[1][0][one.index]
    distance = fastff.regions.margin(layer_and_data[0], x).distance.item()
    assert min(float(step[3]) for step in steps) == pytest.approx(distance, rel=1e-2)
    near = page.evaluate("document.querySelectorAll('#path tr.near').length")
    assert near == 1
    assert page.text("#path p:last-child") == "Ends in leaf 1."


def test_a_given_input_is_followed(browser, tmp_path, layer_and_data):
    layer, data = layer_and_data
    x = torch.randn(3, 16)
    page = browser.open(explore(layer, data, tmp_path / "page.html", follow=x))
    assert page.evaluate("[...document.querySelectorAll('#given button')].map(b => b.innerText)") == [
        "given #0",
        "given #1",
        "given #2",
    ]
    page.click(*page.middle("#given button:nth-child(2)"))
    assert page.text("#follow-title") == "Input given #1"
    assert page.text("#path p:last-child") == f"Ends in leaf {int(layer.route(x)[1])}."
    search(page, "given 2")
    assert page.text("#name") == f"Leaf {int(layer.route(x)[2])}"
    assert page.errors() == []


def test_dead_leaves_are_listed_and_lead_there(browser, path, found):
    page = browser.open(path)
    assert found.dead_leaves() == [6]
    page.click(*page.middle("#leaves .chips button"))
    assert page.text("#name") == "Leaf 6"
    assert page.text("#line") == "Dead: no input arrives."
    assert "No input arrives here" in page.text("#examples")


def test_text_of_the_data_stays_text(browser, path):
    page = browser.open(path)
    assert page.evaluate("document.hacked") is None
    assert page.evaluate("document.querySelectorAll('img, #bars b, h1 i').length") == 0
    assert page.text("h1") == "A & <i>B</i>"
    assert "</script><img src=x onerror=document.hacked=1>" in page.text("#bars")
    assert page.errors() == []


@pytest.mark.parametrize(("width", "dark"), [(1280, True), (390, False), (390, True)])
def test_narrow_and_dark(browser, path, width, dark):
    page = browser.open(path, width=width, dark=dark)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(21, 24, 27)" if dark else "rgb(255, 255, 255)"
    )
    overflowing = "[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, .hidden, .skip') "
    overflowing += "&& e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML.slice(0, 80))"
    assert page.evaluate(overflowing) == []
    assert page.errors() == []


def test_assistive_technology_finds_names_and_roles(browser, path, found):
    page = browser.open(path)
    page.evaluate("document.getElementById('tree').focus()")
    page.press("ArrowDown")
    tree = page.send("Accessibility.getFullAXTree")["nodes"]
    named = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if not node["ignored"]]
    fuller = 1 + int(found.count[2] > found.count[1])
    assert ("tree", "Tree of nodes and leaves") in named
    assert any(
        role == "treeitem" and name.startswith(f"Node {fuller}, {int(found.count[fuller])} of 300")
        for role, name in named
    )
    assert ("heading", "A & <i>B</i>") in named
    for role, name in named:
        if role in ("button", "combobox", "textbox", "searchbox", "region", "navigation", "image"):
            assert name, f"a {role} has no name"


def test_tabbing_reaches_the_tree_and_the_examples(browser, path):
    page = browser.open(path)
    reached = []
    for _ in range(16):
        page.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.dataset.input && 'example'"))
    controls = ["query", "colour", "width", "zoom", "tree"]
    assert [name for name in reached if name in controls] == controls
    assert "example" in reached


def test_rows_and_text(browser, tmp_path):
    torch.manual_seed(0)
    layer = make(3, 2, depth=1)
    x = torch.randn(40, 3, dtype=torch.float64)
    page = browser.open(explore(layer, x, tmp_path / "rows.html", feature_names=["age", "<b>", "height"]))
    head = page.evaluate("[...document.querySelectorAll('#examples thead')][0].innerText.trim().split('\\t').slice(-3)")
    assert head == ["age", "<b>", "height"]
    model = torch.nn.Sequential(torch.nn.Embedding(6, 3, dtype=torch.float64), layer)
    tokens = torch.randint(6, (5, 7))
    words = ["the ", "cat ", "<sat> ", "on ", "a ", "mat "]
    page = browser.open(explore(model, tokens, tmp_path / "text.html", decode=words))
    found = statistics(model, tokens)
    one = found.node(0).examples["boundary"][0]
    quote = page.evaluate(
        "[...document.querySelectorAll('#examples h3')][1].nextSibling.querySelector('q').textContent"
    )
    assert quote == "".join(words[token] for token in one.content)
    marked = page.evaluate(
        "[...document.querySelectorAll('#examples h3')][1].nextSibling.querySelector('mark').textContent"
    )
    assert marked == words[tokens[one.index, one.position]]
    assert page.errors() == []


def test_a_single_leaf(browser, tmp_path):
    layer = make(3, 2, depth=0)
    page = browser.open(explore(layer, torch.randn(9, 3, dtype=torch.float64), tmp_path / "page.html"))
    assert page.text("#name") == "Leaf 0"
    assert facts(page)["inputs"].startswith("9 of 9 (100 %")
    page.click(*page.middle("#examples button"))
    assert page.text("#path p:last-child") == "Ends in leaf 0."
    assert page.errors() == []


def test_a_move_in_a_large_tree_draws_no_block_again(browser, tmp_path):
    """1,024 leaves: only the outline moves, so that arrow keys do not stutter."""
    torch.manual_seed(0)
    layer = fastff.FFF(6, 3, depth=10, leaf_width=1)
    x, y = torch.randn(3000, 6), torch.randint(3, (3000,))
    fastff.initialize_tree_(layer, x)
    page = browser.open(explore(layer, (x, y), tmp_path / "page.html", examples=1))
    page.evaluate(
        "document.getElementById('tree').focus(); drawn = 0; { const old = draw; draw = (c) => { drawn++; old(c); }; }"
    )
    for key in ["ArrowDown"] * 10 + ["ArrowRight"] * 10:
        page.press(key)
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.evaluate("drawn") == 0
    leaf = int(page.text("#name").split()[1])
    assert facts(page)["inputs"].startswith(f"{int((layer.route(x) == leaf).sum())} of 3,000")
