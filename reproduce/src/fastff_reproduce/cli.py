"""`fastff reproduce` and `fastff report`: the paper's experiments on learning, trained here, beside its numbers."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fastff.atomic import replacing
from fastff.cli import printing
from fastff.cli.flags import Commit, a_device, apart, bad_flags, numbers, one, words
from fastff.extras import install

from . import data as datasets
from . import engine as engines
from . import summary
from .runs import MODELS, Case, Result
from .store import Store, about

RECIPES = "paper,fastff"
MADE = "`fastff reproduce` makes a store, `fastff report --export` the rows of one, `fastff bench` those of speed."
SEEDS = 2**40  # the generator of each epoch has a seed of its own, from this one and the epoch
KINDS = (".svg", ".png", ".pdf")
errors = Console(stderr=True)
console = Console()
if not console.is_terminal:
    console = Console(width=150)

Data = Annotated[
    Path | None,
    typer.Option("--data", help="the directory of the data sets; default: fastff in the cache", envvar="FASTFF_DATA"),
]
StoreFile = Annotated[Path, typer.Option("--store", help="the file of all results", envvar="FASTFF_STORE")]
Format = Annotated[str, typer.Option("--format", help="table or json")]


def reproduce(
    experiment: Annotated[str, typer.Argument(help="list: all experiments, and what they show; or one of them")],
    dataset: Annotated[str | None, typer.Option(help="a list; default: the paper's, as far as they are here")] = None,
    widths: Annotated[str | None, typer.Option(help="training widths: a list; default: the paper's")] = None,
    leaf_widths: Annotated[str | None, typer.Option(help="a list; default: the paper's")] = None,
    models: Annotated[str | None, typer.Option(help=f"a list of {', '.join(MODELS)}; default: all")] = None,
    runs: Annotated[int, typer.Option(help="seeds of each training", min=1)] = 10,
    seed: Annotated[int, typer.Option(help="the first seed", min=0)] = 0,
    recipe: Annotated[str, typer.Option(help="a list: paper as it is written there, fastff as it is better")] = RECIPES,
    device: Annotated[str, typer.Option(help="cpu or cuda; default: cuda if there is a GPU")] = "",
    data: Data = None,
    store: StoreFile = Path("fastff.sqlite"),
    epochs: Annotated[int | None, typer.Option(help="at most so many, however long the recipe is", min=1)] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="name=value: another value in the recipe; may be repeated")
    ] = None,
    format: Format = "table",
    engine: Annotated[str, typer.Option(help="local, or ray: on a Ray cluster")] = "local",
    ensemble: Annotated[int, typer.Option(help="seeds that train at once", min=1)] = 10,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what is stored and what would be trained")] = False,
    output: Annotated[Path | None, typer.Option(help="the figure of regions; default: regions.svg")] = None,
    commit: Commit = "",
) -> None:
    """Train an experiment of the paper and print the results beside the paper's.

    What the store has is not trained again; what was interrupted goes on where it was.
    """
    one("--format", format, ("table", "json"))
    if experiment == "list":
        _list(data, format)
        return
    from .experiments import EXPERIMENTS

    chosen = EXPERIMENTS[one("EXPERIMENT", experiment, ["list", *EXPERIMENTS])]
    one("--engine", engine, engines.ENGINES)
    if output and (experiment != "regions" or output.suffix not in KINDS):
        raise typer.BadParameter(f"--output is the figure of regions, a file that ends in {', '.join(KINDS)}.")
    apart({}, {"--output": output})
    parts = {"--dataset": dataset, "--widths": widths, "--leaf-widths": leaf_widths, "--models": models}
    for flag, text in (parts | {"--recipe": recipe}).items():
        if text is not None and not words(text):
            raise typer.BadParameter(f"{flag} is a list with something in it; got {text!r}. Leave it out for all.")
    if seed + runs > SEEDS:
        raise typer.BadParameter(f"--seed and --runs are at most {SEEDS} together; got {seed} and {runs}.")
    place = a_device(device)
    with bad_flags():
        cases = chosen.cases(
            datasets=words(dataset or "") or None,
            widths=numbers("--widths", widths or "", 1) or None,
            leaf_widths=numbers("--leaf-widths", leaf_widths or "", 1) or None,
            recipes=words(recipe),
            seeds=range(seed, seed + runs),
            changes=_changes(settings or [], epochs),
            models=words(models or "") or None,
        )
    if not cases:
        if asked := [flag for flag, value in (parts | {"--set": settings, "--epochs": epochs}).items() if value]:
            raise typer.BadParameter(f"{experiment} is no sweep of trainings, and has no {', '.join(asked)}.")
        errors.print(escape(f"{chosen.title}: {chosen.about}."), soft_wrap=True)
        if experiment == "regions" and not dry_run:
            _regions(output or Path("regions.svg"), seed)
        if format == "json":
            print("[]")
        return
    if dry_run:
        _dry_run(cases, store, data, ensemble, format)
        return
    with Store(store) as opened:
        stored = opened.keys()
        left_out = _check_data({case.dataset for case in cases if case.key not in stored}, data, asked=bool(dataset))
        cases = [case for case in cases if case.dataset not in left_out or case.key in stored]
        if not cases:
            raise typer.Exit(1)
        failed = False
        try:
            results = engines.run(
                cases, opened, device=place, root=data, about=about(place, commit), engine=engine, ensemble=ensemble
            )
        except engines.SomeFailed as error:
            results, failed = error.results, True
            failures = "1 training" if error.count == 1 else f"{error.count} trainings"
            told = f"{failures} failed, as told above. All others are stored."
            errors.print(told, style="red", soft_wrap=True)
        except ModuleNotFoundError as error:
            raise typer.BadParameter(str(error)) from None
        except KeyboardInterrupt:
            errors.print(
                "Stopped. Results and checkpoints are kept: the same command goes on from there.", soft_wrap=True
            )
            raise
    if format == "json":
        print(json.dumps(summary.rows(results), indent=2))
    elif results:
        show(experiment, chosen.title, results)
    if failed:
        raise typer.Exit(1)


def report(
    store: StoreFile = Path("fastff.sqlite"),
    output: Annotated[Path, typer.Option(help="the page to write")] = Path("report.html"),
    bench: Annotated[
        Path | None, typer.Option(help="rows of fastff bench; default: results/inference.csv if it is there")
    ] = None,
    rows: Annotated[
        list[Path] | None,
        typer.Option(
            help="results in a CSV file, such as results/learning.csv, to put into the store; may be repeated"
        ),
    ] = None,
    export: Annotated[Path | None, typer.Option(help="write the results of the store to this CSV file, too")] = None,
    history: Annotated[bool, typer.Option("--history", help="write what happened in each epoch into it, too")] = False,
) -> None:
    """Write all results into one HTML page: tables and figures beside the paper's."""
    from fastff.bench import rows as bench_rows

    try:
        from . import html_report as pages
    except ModuleNotFoundError as error:
        raise typer.BadParameter(f"the report needs {error.name}: {install('reproduce')}") from None
    if history and export is None:
        raise typer.BadParameter("--history is of the file to write: pass --export, too.")
    if export is not None and export.is_dir():
        raise typer.BadParameter(f"--export {export} is a directory. Add a file name.")
    usual = Path("results/inference.csv")
    file = bench or (usual if usual.exists() else None)
    for path in (None if rows else store, file, *(rows or [])):
        if path is not None and not path.exists():
            raise typer.BadParameter(f"{path} is not there. {MADE}")
    read = {"--store": store, "--bench": file} | {f"--rows {path}": path for path in rows or []}
    log = {f"the {end[1:]} file of --store": store.with_name(store.name + end) for end in ("-wal", "-shm", "-journal")}
    apart(read | log, {"--output": output, "--export": export})
    with Store(store, read_only=not rows) as opened, bad_flags():
        if rows:
            opened.include(*rows)
        if export is not None:
            opened.export(export, history)
        page = pages.page(opened.records(), bench_rows.read(file) if file else [])
    with replacing(output) as written:
        written.write(page)
    console.print(str(output), soft_wrap=True)


def _changes(settings: Iterable[str], epochs: int | None) -> dict[str, Any]:
    """Settings as they are typed: numbers, true, false, null, inf or nan; anything else is a word."""
    changes: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise typer.BadParameter(f"--set is name=value, such as --set batch=1024; got {text!r}.")
        if name in changes:
            raise typer.BadParameter(f"--set {name} is there twice; use one of them.")
        if value.lower().lstrip("+-") in ("inf", "infinity", "nan"):
            changes[name] = float(value)
            continue
        try:
            changes[name] = json.loads(value)
        except ValueError:
            changes[name] = value
    if epochs is not None:
        if "epochs" in changes:
            raise typer.BadParameter("--epochs and --set epochs are the same; use one of them.")
        changes["epochs"] = epochs
    return changes


def _check_data(names: set[str], root: Path | None, asked: bool) -> set[str]:
    """The data sets to do without, which may be missing unless they were asked for by name.

    Whatever is wrong with the data is said before any training.
    """
    left_out = set()
    for name in sorted(names.intersection(datasets.NAMES)):
        try:
            datasets.load(name, root)
        except (OSError, ValueError, ImportError) as error:
            missing = isinstance(error, FileNotFoundError) and not asked
            errors.print(escape(str(error)), style="yellow" if missing else "red", soft_wrap=True)
            if not missing:
                raise typer.Exit(1) from None
            left_out.add(name)
    if left_out:
        errors.print(f"Left out: {', '.join(sorted(left_out))}.", style="yellow", soft_wrap=True)
    return left_out


def _list(root: Path | None, format: str) -> None:
    """All experiments: what they show, how many trainings they are, and whether their data is here."""
    from .experiments import EXPERIMENTS

    there: dict[str, str] = {}
    made: list[dict[str, Any]] = []
    for experiment in EXPERIMENTS.values():
        cases = experiment.cases(
            datasets=None, widths=None, leaf_widths=None, recipes=words(RECIPES), seeds=range(10), changes={}
        )
        names = list(dict.fromkeys(case.dataset for case in cases))
        with errors.status("reading the data sets"):
            there |= {name: _state(name, root) for name in names if name not in there}
        found = {name: there[name] for name in names}
        names_ = {"experiment": experiment.name, "title": experiment.title, "about": experiment.about}
        made.append({**names_, "trainings": len(cases), "data": found})
    if format == "json":
        print(json.dumps(made, indent=2))
        return
    table = Table(title="The paper's experiments, with both recipes and ten seeds", show_lines=True)
    table.add_column("experiment", no_wrap=True)
    table.add_column("what it shows", ratio=1)
    table.add_column("trainings", justify="right")
    table.add_column("data", no_wrap=True)
    for row in made:
        lines = (name if state == "here" else f"{name}: {state}" for name, state in row["data"].items())
        told = escape(f"{row['title']}\n{row['about']}")
        table.add_row(row["experiment"], told, str(row["trainings"] or ""), escape("\n".join(lines)))
    console.print(table)
    console.print(f"Data in {escape(str(root or datasets.directory()))}; digits comes with scikit-learn.", style="dim")


def _state(name: str, root: Path | None) -> str:
    if name not in datasets.NAMES:
        return "here"  # made as it is needed
    try:
        datasets.load(name, root, download=False)
    except FileNotFoundError:
        return "not here"
    except ValueError:
        return "damaged"
    except ImportError as error:
        return str(error)
    return "here"


def _dry_run(cases: Sequence[Case], path: Path, root: Path | None, ensemble: int, format: str) -> None:
    stored: set[str] = set()
    if path.exists():
        with Store(path, read_only=True) as opened:
            stored = opened.keys()
    made: list[dict[str, Any]] = []
    cases = engines.with_teachers(cases, stored)
    name = summary.naming(cases)
    for dataset in sorted({case.dataset for case in cases if case.key not in stored}):
        if (state := _state(dataset, root)) != "here":
            told = f"{dataset}: {state}, in {root or datasets.directory()}. Training downloads what it can."
            errors.print(escape(told), style="yellow", soft_wrap=True)
    for part in engines.parts(cases, len(cases)):
        case = part[0]
        made.append({column: getattr(case, column) for column in ("dataset", "model", "width", "leaf_width", "depth")})
        made[-1] |= {"recipe": name(case), "goal": case.goal}
        made[-1] |= {"stored": [case.seed for case in part if case.key in stored]}
        made[-1] |= {"to_train": [case.seed for case in part if case.key not in stored]}
    if format == "json":
        print(json.dumps(made, indent=2))
        return
    table = Table(title=f"How many trainings are stored in {escape(str(path))}, and how many are to do")
    for column, value in made[0].items():
        table.add_column(column.replace("_", " "), justify="left" if isinstance(value, str) else "right")
    for row in made:
        table.add_row(*(str(len(value) if isinstance(value, list) else value) for value in row.values()))
    printing.show(console, table)
    left = sum(len(row["to_train"]) for row in made)
    console.print(f"{len(cases) - left} trainings are stored, {left} are to do, {ensemble} seeds at once.")


def _regions(path: Path, seed: int) -> None:
    try:
        from .sketch import sketch

        with errors.status("training three layers on a plane"):
            figure = sketch(seed)
    except ModuleNotFoundError as error:
        raise typer.BadParameter(f"the figure needs {error.name}: {install('reproduce')}") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    errors.print(f"written to {escape(str(path))}", soft_wrap=True)


def show(experiment: str, title: str, results: Sequence[Result]) -> None:
    """Our mean, deviation and best beside the paper's number, a table for each data set."""
    cells = summary.cells(results, experiment)
    for name in dict.fromkeys(cell.dataset for cell in cells):
        some = [cell for cell in cells if cell.dataset == name]
        known = any(number is not None for cell in some for number in cell.paper)
        table = Table(title=escape(f"{title}: {name}"), padding=(0, 1) if console.width >= 100 else 0)
        beside = ["paper", ""] if known else []
        columns = ("model", "w", "l", "neurons", "recipe", "seeds", "M_A", *beside, "G_A", *beside, "ETT", "gap")
        for column in (*columns, "least share"):  # where there is little room, accuracies take several lines
            wrap, left = column in ("M_A", "G_A", "least share"), column in ("model", "recipe")
            table.add_column(column, justify="left" if left else "right", no_wrap=not wrap)
        for i, cell in enumerate(some):
            if i and (cell.model, cell.width) != (some[i - 1].model, some[i - 1].width):
                table.add_section()
            size = [cell.model, *map(str, (cell.width, cell.leaf_width, cell.inference_size))]
            size += [escape(cell.recipe), str(cell.seeds)]
            table.add_row(*size, *_beside(cell, "M_A", known), *_beside(cell, "G_A", known), *_rest(cell))
        console.print(table)
    theirs = "; then the paper's, which is the best of its runs, and our mean minus it"
    compared = any(number is not None for cell in cells for number in cell.paper)
    console.print(
        "w, l: neurons in training, and in a leaf or an expert; neurons: those that answer. M_A: accuracy on training "
        "data, G_A: on test data, both in percent by the hard pass, mean ± deviation (best) over seeds"
        f"{theirs if compared else ''}. ETT: epochs until G_A was seen. gap: the largest difference of soft and hard "
        "accuracy. least share: samples of the least used leaf over its fair number.",
        style="dim",
    )


def _beside(cell: summary.Cell, name: str, known: bool) -> list[str]:
    stat, theirs, difference = getattr(cell, name), getattr(cell.paper, name), cell.difference(name)
    ours = "" if stat is None else f"{stat.mean:.1f}"
    if stat is not None and stat.deviation is not None:
        ours += f" ± {stat.deviation:.1f} ({stat.best:.1f})"
    colour = "" if difference is None else "green" if difference >= 0 else "red"
    marked = "" if difference is None else f"[{colour}]{difference:+.1f}[/]"
    return [ours, *(["" if theirs is None else f"{theirs:.1f}", marked] if known else [])]


def _rest(cell: summary.Cell) -> list[str]:
    return [
        "" if cell.ETT is None else f"{cell.ETT:.0f}",
        "" if cell.soft_hard_gap is None else f"{cell.soft_hard_gap:+.2f}",
        "" if cell.smallest_share is None else f"{cell.smallest_share:.2f}",
    ]
