"""`fastff reproduce` trains an experiment of the paper; `fastff report` writes all results into one page."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fastff.atomic import replacing
from fastff.cli.flags import FORMATS, Commit, Format, a_device, apart, bad_flags, numbers, one, words
from fastff.cli.printing import console, errors, records
from fastff.extras import install

from . import data as datasets
from . import engine as engines
from . import listing, summary
from .parts import SomeFailed
from .results_table import show
from .runs import MODELS
from .store import Store, about
from .workers import ENGINES

RECIPES = "paper,fastff"
CREATED_BY = "`fastff reproduce` creates a store, `fastff report --export` its rows, `fastff bench` rows of speed."
SEEDS = 2**40  # each epoch has its own generator, seeded by the seed and the epoch
KINDS = (".svg", ".png", ".pdf")

Data = Annotated[
    Path | None,
    typer.Option(
        "--data", help="directory of the data sets; default: fastff in the user's cache", envvar="FASTFF_DATA"
    ),
]
StoreFile = Annotated[Path, typer.Option("--store", help="file of all results", envvar="FASTFF_STORE")]


def reproduce(
    experiment: Annotated[str, typer.Argument(help="an experiment, or list: show all of them")],
    dataset: Annotated[
        str | None, typer.Option(help="comma-separated; default: the paper's, if on this machine")
    ] = None,
    widths: Annotated[str | None, typer.Option(help="training widths, comma-separated; default: the paper's")] = None,
    leaf_widths: Annotated[str | None, typer.Option(help="comma-separated; default: the paper's")] = None,
    models: Annotated[str | None, typer.Option(help=f"from {', '.join(MODELS)}, comma-separated; default: all")] = None,
    runs: Annotated[int, typer.Option(help="number of seeds", min=1)] = 10,
    seed: Annotated[int, typer.Option(help="first seed", min=0)] = 0,
    recipe: Annotated[str, typer.Option(help="paper: as published; fastff: our improved recipe")] = RECIPES,
    device: Annotated[str, typer.Option(help="cpu or cuda; default: cuda if there is a GPU")] = "",
    data: Data = None,
    store: StoreFile = Path("fastff.sqlite"),
    epochs: Annotated[int | None, typer.Option(help="epochs at most, instead of the recipe's length", min=1)] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="name=value: change a setting of the recipe; repeatable")
    ] = None,
    format: Format = "table",
    engine: Annotated[str, typer.Option(help="local, or ray: train on a Ray cluster")] = "local",
    ensemble: Annotated[int, typer.Option(help="number of seeds that train at once", min=1)] = 10,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print what is stored and what would be trained")] = False,
    output: Annotated[Path | None, typer.Option(help="file for the figure of regions; default: regions.svg")] = None,
    commit: Commit = "",
) -> None:
    """Train an experiment of the paper and print the results beside the paper's.

    Stored results are not trained again, and an interrupted training resumes from its checkpoint.
    """
    one("--format", format, FORMATS)
    if experiment == "list":
        listing.list_experiments(data, format)
        return
    from .experiments import EXPERIMENTS

    chosen = EXPERIMENTS[one("EXPERIMENT", experiment, ["list", *EXPERIMENTS])]
    one("--engine", engine, ENGINES)
    if output and (experiment != "regions" or output.suffix not in KINDS):
        raise typer.BadParameter(
            f"--output is the figure of regions, a file that ends in {', '.join(KINDS)}; got {output}."
        )
    apart({}, {"--output": output})
    parts = {"--dataset": dataset, "--widths": widths, "--leaf-widths": leaf_widths, "--models": models}
    for flag, text in (parts | {"--recipe": recipe}).items():
        if text is not None and not words(text):
            raise typer.BadParameter(f"{flag} must name at least one; got {text!r}. Leave it out for all.")
    if seed + runs > SEEDS:
        raise typer.BadParameter(f"--seed plus --runs must be at most {SEEDS}; got {seed} and {runs}.")
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
            raise typer.BadParameter(f"{experiment} is not a sweep of trainings: it takes no {', '.join(asked)}.")
        errors.print(escape(f"{chosen.title}: {chosen.about}."), soft_wrap=True)
        if experiment == "regions" and not dry_run:
            _regions(output or Path("regions.svg"), seed)
        if format != "table":
            records([], summary.ROW, format)
        return
    if dry_run:
        listing.dry_run(cases, store, data, ensemble, format)
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
        except SomeFailed as error:
            results, failed = error.results, True
            failures = "1 training" if error.count == 1 else f"{error.count} trainings"
            errors.print(f"{failures} failed (see above). All others are stored.", style="red", soft_wrap=True)
        except ModuleNotFoundError as error:
            raise typer.BadParameter(str(error)) from None
        except KeyboardInterrupt:
            errors.print("Stopped. Results and checkpoints are kept: run the same command to resume.", soft_wrap=True)
            raise
    if format != "table":
        records(summary.rows(results), summary.ROW, format)
    elif results:
        show(experiment, chosen.title, results)
    if failed:
        raise typer.Exit(1)


def report(
    store: StoreFile = Path("fastff.sqlite"),
    output: Annotated[Path, typer.Option(help="page to write")] = Path("report.html"),
    bench: Annotated[
        Path | None, typer.Option(help="rows of fastff bench; default: results/inference.csv if it exists")
    ] = None,
    rows: Annotated[
        list[Path] | None,
        typer.Option(help="CSV file of results to add to the store, such as results/learning.csv; repeatable"),
    ] = None,
    export: Annotated[Path | None, typer.Option(help="also write the stored results to this CSV file")] = None,
    history: Annotated[
        bool, typer.Option("--history", help="with --export: include the numbers of each epoch")
    ] = False,
) -> None:
    """Write all results into one HTML page: tables and figures beside the paper's."""
    from fastff.bench import rows as bench_rows

    try:
        from . import html_report as pages
    except ModuleNotFoundError as error:
        raise typer.BadParameter(f"the report needs {error.name}: {install('reproduce')}") from None
    if history and export is None:
        raise typer.BadParameter("--history needs --export FILE.")
    if export is not None and export.is_dir():
        raise typer.BadParameter(f"--export {export} is a directory. Add a file name.")
    usual = Path("results/inference.csv")
    file = bench or (usual if usual.exists() else None)
    for path in (None if rows else store, file, *(rows or [])):
        if path is not None and not path.exists():
            raise typer.BadParameter(f"{path} does not exist. {CREATED_BY}")
    read = {"--store": store, "--bench": file} | {f"--rows {path}": path for path in rows or []}
    log = {f"the {end[1:]} file of --store": store.with_name(store.name + end) for end in ("-wal", "-shm", "-journal")}
    apart(read | log, {"--output": output, "--export": export})
    was_there = store.exists()
    try:
        with Store(store, read_only=not rows) as opened, bad_flags():
            if rows:
                opened.include(*rows)
            if export is not None:
                opened.export(export, history)
            page = pages.page(opened.records(), bench_rows.read(file) if file else [])
    except BaseException:
        if not was_there:  # an empty store would make the next report an empty page
            store.unlink(missing_ok=True)
        raise
    with replacing(output) as written:
        written.write(page)
    console.print(str(output), soft_wrap=True)


def _changes(settings: Iterable[str], epochs: int | None) -> dict[str, Any]:
    """The settings of --set: numbers, true, false, null, inf or nan; any other value is a word."""
    changes: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise typer.BadParameter(f"--set takes name=value, such as --set batch=1024; got {text!r}.")
        if name in changes:
            raise typer.BadParameter(f"--set {name} is given twice; use one of them.")
        if value.lower().lstrip("+-") in ("inf", "infinity", "nan"):
            changes[name] = float(value)
            continue
        try:
            changes[name] = json.loads(value)
        except ValueError:
            changes[name] = value
    if epochs is not None:
        if "epochs" in changes:
            raise typer.BadParameter("--epochs and --set epochs set the same length; use one of them.")
        changes["epochs"] = epochs
    return changes


def _check_data(names: set[str], root: Path | None, asked: bool) -> set[str]:
    """Load all data sets before any training. Returns those to leave out: missing ones, unless asked for by name."""
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
        errors.print(f"Skipped: {', '.join(sorted(left_out))}.", style="yellow", soft_wrap=True)
    return left_out


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
