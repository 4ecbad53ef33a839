"""The command that times this installation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toeplens.cli.options import Device, Json, path
from toeplens.ground.places import entered

CONTESTS = ("training", "ablation", "profile", "audit")
SCALES = ("laptop", "desk", "paper", "language")


def bench(
    out: Annotated[
        Path | None, typer.Option(help="Directory of the page and record; none unless given.", parser=path)
    ] = None,
    contest: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(CONTESTS)}; all unless given, may be repeated.")
    ] = None,
    scale: Annotated[
        list[str] | None, typer.Option(help=f"Shape of the models: {', '.join(SCALES)}; all unless given.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds of each contest, at most.")] = 20,
    seconds: Annotated[float, typer.Option(help="Begin no further round of a contest after so many.")] = 30.0,
    threads: Annotated[int | None, typer.Option(help="Threads on a CPU; torch's own choice unless given.")] = None,
    price_per_hour: Annotated[float | None, typer.Option(help="Of this machine, for what the paper's grid costs.")] = (
        None
    ),
    precision: Annotated[
        str, typer.Option(help="Of matrix products, for all programs: auto (bf16 on a GPU), float32 or bf16.")
    ] = "auto",
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Time training, ablation, profiles and audits here, against others' programs; say what the papers' grid takes."""
    import torch

    from toeplens.cli import console, tables
    from toeplens.ground.machine import cores, within
    from toeplens.report import write_bench
    from toeplens.studies import audit, benching

    benching.not_negative("seconds", seconds)
    benching.not_negative("price_per_hour", price_per_hour)
    if threads is not None:
        within("threads", threads, 1, 4 * cores())
        torch.set_num_threads(threads)

    def told(found: benching.Contest) -> None:
        console.say(f"{found.kind}, {found.work.split(':')[0]}: done", aside=True)

    def timed() -> benching.BenchRecord:
        return benching.bench(
            audit,
            device=device,
            precision=precision,
            contests=contest or CONTESTS,
            scales=scale or SCALES,
            rounds=rounds,
            seconds=seconds,
            on_contest=told,
        )

    if out is None:
        record, page = timed(), None
    else:
        with entered(out, "bench", (benching.RECORD,)):
            record = timed()
            benching.save_bench(record, out)
            page = write_bench(record, out)
    hours = record.table_1_hours(price_per_hour)
    if as_json:
        console.print_json({**record.to_dict(), "table_1": hours, "page": None if page is None else str(page)})
        return
    for table in tables.bench_tables(record):
        console.out.print(table)
    for each in record.contests:
        ratios = each.beside_best()
        if ratios is not None:
            console.say(f"{ratios}.")
    if hours is not None:
        cost = "" if hours[1] is None else f", at {price_per_hour:g} an hour {hours[1]:,.0f}"
        console.say(f"the 80 models of the papers' Table 1, with their dropout, take {hours[0]:,.1f} hours here{cost}.")
    if page is not None:
        console.say(f"page: {page}")
