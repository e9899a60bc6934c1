"""Tables of the model families that surgery was tried on: families.csv."""

from rows import Row, read, table

MEANINGS = {
    "replaced": "replaced, and the outputs stay",
    "mixture": "refused: its blocks are mixtures of experts",
    "refused": "refused for another reason",
    "none": "no feedforward block",
    "not built": "not tried: no tiny model can be built here",
}
# What a row's reason starts with, and what the page says.
SHORT = {
    "it is a mixture of experts": "mixture of experts",
    "it is one expert of a mixture": "one of several networks beside a router",
    "recomputed from its weights": "more happens between or after its linear layers",
    "at large inputs": "its activation is clipped",
    "it could not be run": "does not run alone, and no example was found",
    "its weights are tied": "tied weights",
    "its activation is written inside": "its activation cannot be taken out",
    "in training its output is random": "dropout that FFF does not have",
    "the dropout on its hidden layer": "its dropout is used twice",
    "it takes more than one input": "takes more than one input",
    "one of its linear layers": "a part is used twice",
    "it has hooks": "has hooks",
    "no form that FFF replaces": "none of the forms, in",
}


def counts() -> dict[str, int]:
    """The number of families with each outcome."""
    return {outcome: sum(row["outcome"] == outcome for row in read("families")) for outcome in MEANINGS}


def summary() -> str:
    rows = read("families")
    whole = sum(row["outcome"] == "replaced" and not row["reason"] for row in rows)
    checked = sum(row["checked"] == "model" for row in rows)
    count = counts()
    body = [
        [MEANINGS["replaced"], str(count["replaced"])],
        ["- every block that was found", str(whole)],
        ["- compared by the outputs of the whole model, the rest block by block", str(checked)],
        *([meaning, str(count[outcome])] for outcome, meaning in MEANINGS.items() if outcome != "replaced"),
        ["all", str(len(rows))],
    ]
    return table(["families", "number"], body)


def families() -> str:
    header = ["family", "model type", "blocks", "form", "activation", "not replaced, and why"]
    body = []
    for row in read("families"):
        blocks = row["blocks"] if row["outcome"] == "replaced" else row["outcome"]
        body.append([row["family"], row["kind"], blocks, row["forms"], row["activations"], why(row)])
    return table(header, body)


def why(row: Row) -> str:
    reasons = []
    for reason in filter(None, row["reason"].split(" / ")):
        known = next((said for start, said in SHORT.items() if reason.startswith(start)), "")
        reasons.append(f"{known} {reason.split(' replaces in ')[1]}" if known.endswith(" in") else known or reason)
    return "; ".join(dict.fromkeys(reasons))


TABLES = {"families": summary, "families-all": families}
